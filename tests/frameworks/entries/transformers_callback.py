"""Transformers with the doctor as a callback; `faulty`: a layer that is never used."""

import sys

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import ddpdoctor
from ddpdoctor.integrations.transformers import DoctorCallback


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 1)
        if "faulty" in sys.argv:
            self.spare = nn.Linear(8, 8)

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.body(x), labels)}


class Rows(Dataset):
    def __init__(self):
        self.x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index].sum(0, keepdim=True)}


doctor = DoctorCallback(raise_on="error", out="run")
arguments = TrainingArguments(
    output_dir="trained",
    per_device_train_batch_size=8,
    num_train_epochs=2,
    use_cpu=True,
    ddp_find_unused_parameters=False,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
)
trainer = Trainer(Net(), arguments, train_dataset=Rows(), callbacks=[doctor])
rank = torch.distributed.get_rank()
try:
    trainer.train()
except ddpdoctor.FaultFound as fault:
    print(f"rank {rank} stopped: {fault.findings[0].code}", flush=True)
    sys.exit(5)
print(f"rank {rank} took {trainer.state.global_step} steps", flush=True)
torch.distributed.destroy_process_group()
