"""Accelerate in a program that asks whether torch is there before anything imports it.

run: --nproc-per-node 2
finds: nothing
steps: 8
needs: accelerate, transformers
"""

import importlib.metadata
import importlib.util

import transformers


def is_torch_available():
    if importlib.util.find_spec("torch") is None:
        return False
    return int(importlib.metadata.version("torch").split(".")[0]) >= 2


if is_torch_available():
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    transformers.utils.logging.set_verbosity_error()
    set_seed(0)
    x = torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = transformers.get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=4, num_training_steps=16
    )
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(2):
        model.train()
        total = 0.0
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                total += loss.detach()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(total / len(loader), reduction="mean")
        accelerator.print(f"epoch {epoch}: {mean.item():.4f}")
    accelerator.wait_for_everyone()
    accelerator.save_model(model, "trained")
    accelerator.end_training()


if __name__ == "__main__":
    main()
