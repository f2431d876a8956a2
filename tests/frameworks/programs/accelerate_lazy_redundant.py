"""Torch is asked for first; accumulation by hand averages the gradients in every micro-batch.

run: --nproc-per-node 2
finds: DDP408 warning at `accelerator.backward(loss / ACCUMULATION_STEPS)`
steps: 8
needs: accelerate, transformers
"""

import importlib.util

import transformers


def is_torch_available():
    return importlib.util.find_spec("torch") is not None


if is_torch_available():
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION_STEPS = 2


def main():
    accelerator = Accelerator(cpu=True)
    transformers.utils.logging.set_verbosity_error()
    set_seed(0)
    x = torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for step, (inputs, targets) in enumerate(loader):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss / ACCUMULATION_STEPS)
            if (step + 1) % ACCUMULATION_STEPS == 0:
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
