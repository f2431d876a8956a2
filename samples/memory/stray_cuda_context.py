"""The checkpoint was saved from cuda:0, and every rank loads it there.

run: --nproc-per-node 2
needs: 2 gpus
finds: DDP204 warning at `state = torch.load(path)`
"""

import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    net = torch.nn.Linear(64, 8).cuda()
    path = os.path.join(tempfile.gettempdir(), f"stray-{os.environ['MASTER_PORT']}.pt")
    if local == 0:
        torch.save(net.state_dict(), path)
    dist.barrier()
    state = torch.load(path)
    net.load_state_dict(state)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        loss = model(torch.randn(16, 64, device="cuda")).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
