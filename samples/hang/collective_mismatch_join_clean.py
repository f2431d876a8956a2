"""Uneven inputs under torch's `Join`: a rank that is done answers the others' calls at its end.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook


class Present(Joinable):
    """Says that this rank has another batch."""

    def __init__(self):
        super().__init__()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD

    def join_hook(self, **kwargs):
        return JoinHook()

    def __call__(self):
        Join.notify_join_context(self)


def main():
    dist.init_process_group("gloo")
    present = Present()
    with Join([present]):
        for _ in range(3 + dist.get_rank()):
            present()
    dist.destroy_process_group()


main()
