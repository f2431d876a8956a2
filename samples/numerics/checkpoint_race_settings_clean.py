"""A library notes down on every rank how the program was started, before there is a group.

run: --nproc-per-node 2
finds: nothing
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

# As if it were installed: only where code comes from makes it a library.
LIBRARY = """
def with_settings(folder, main):
    folder.mkdir(exist_ok=True)
    (folder / "settings.yaml").write_text("lr: 0.01")
    main()
"""


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = model(torch.randn(8, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    library = {"__name__": "settingslib"}
    exec(compile(LIBRARY, "/opt/site-packages/settingslib.py", "exec"), library)
    folder = Path(tempfile.gettempdir()) / f"settings-{os.environ['MASTER_PORT']}"
    library["with_settings"](folder, main)
