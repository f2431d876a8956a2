"""Hugging Face Trainer on a GPT-2 with a second head that takes no part in the loss.

run: --nproc-per-node 2
finds: DDP301 error at `self.value_head = nn.Linear(config.n_embd, 1)`
steps: 1
needs: transformers
status: 1
"""

import os

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class GPT2WithValueHead(GPT2LMHeadModel):
    def __init__(self, config):
        super().__init__(config)
        self.value_head = nn.Linear(config.n_embd, 1)
        self.post_init()


class Tokens(Dataset):
    def __init__(self):
        self.rows = torch.randint(0, 50, (48, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


config = GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=1, n_head=2)
trainer = Trainer(
    model=GPT2WithValueHead(config),
    args=TrainingArguments(
        output_dir=os.path.join(os.getcwd(), "trained"),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        ddp_find_unused_parameters=False,
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
