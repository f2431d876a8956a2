"""Trainer with re-entrant checkpoints in a model whose unused parameters DDP searches.

run: --nproc-per-node 2
finds: DDP310 error at `trainer.train()`
steps: 0
status: 1
needs: transformers
"""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 16) % 50
        return {"input_ids": tokens, "labels": tokens}


model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=32))
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=4,
    max_steps=6,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": True},
    ddp_find_unused_parameters=True,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=Tokens())
trainer.train()
