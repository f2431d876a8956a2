"""Hugging Face Trainer on a tiny GPT-2 with random weights.

run: --nproc-per-node 2
finds: nothing
steps: 12
needs: transformers
"""

import os

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __init__(self):
        self.rows = torch.randint(0, 50, (48, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


config = GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=1, n_head=2)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir=os.path.join(os.getcwd(), "trained"),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    ),
    train_dataset=Tokens(),
)
trainer.train()
torch.distributed.destroy_process_group()
