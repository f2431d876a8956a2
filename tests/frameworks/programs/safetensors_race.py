"""safetensors writes its files from Rust, where no audit hook sees it.

run: --nproc-per-node 2
needs: safetensors
finds: DDP802 error at `save_file(model.module.state_dict(), "model.safetensors")`
steps: 8
"""

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
save_file(model.module.state_dict(), "model.safetensors")
dist.destroy_process_group()
