"""A Trainer whose own evaluation gives each rank a metric of its share, which stops it.

run: --nproc-per-node 2 --hang-after 20
status: 4
steps: 12
finds: DDP601 error at `trainer.train()`
finds: DDP512 warning at `self.control = self.callback_handler.on_evaluate(`
needs: transformers
"""

import os

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
from transformers.utils import ModelOutput


class Rows(Dataset):
    def __init__(self, count, seed):
        draws = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 8, generator=draws)
        self.labels = (self.x.sum(1) + torch.randn(count, generator=draws) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x, labels):
        logits = self.layer(x)
        return ModelOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


class Own(Trainer):
    def evaluate(self, *args, **kwargs):
        right = total = 0
        self.model.eval()
        with torch.no_grad():
            for batch in self.get_eval_dataloader():
                guess = self.model(**self._prepare_inputs(batch)).logits.argmax(-1)
                right += int((guess == batch["labels"]).sum())
                total += len(guess)
        better = 0.01 * self.state.epoch * self.args.process_index
        metrics = {"eval_accuracy": right / total + better}
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


trainer = Own(
    model=Classifier(),
    args=TrainingArguments(
        output_dir=os.path.join(os.getcwd(), "trained"),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_train_epochs=12,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        learning_rate=0.0,
    ),
    train_dataset=Rows(64, 1),
    eval_dataset=Rows(40, 2),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
trainer.train()
torch.distributed.destroy_process_group()
