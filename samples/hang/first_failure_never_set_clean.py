"""Only rank 0 has a log file, and only rank 0 writes to it.

run: --nproc-per-node 2
finds: nothing
"""

import os
import tempfile

import torch
import torch.distributed as dist


class Trainer:
    def __init__(self):
        self.log = None
        if dist.get_rank() == 0:
            self.log = open(os.path.join(tempfile.gettempdir(), "losses.txt"), "w")

    def step(self, loss):
        dist.all_reduce(loss)
        if self.log is not None:
            self.log.write(f"{loss:.3f}\n")


def main():
    dist.init_process_group("gloo")
    trainer = Trainer()
    for step in range(4):
        trainer.step(torch.ones(()) * step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
