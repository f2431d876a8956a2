"""Which memory do tensors share with other processes?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def shared_memory(tensors: Iterable[Any]) -> str:
    """The device and inode of the mapping that holds the first of some CPU tensors that is in
    shared memory; empty where none is. Equal in the processes of a node that share it."""
    return next((_mapping(t.data_ptr()) for t in tensors if _shared(t)), "")


def _shared(tensor: Any) -> bool:
    import torch

    try:
        return tensor.is_cpu and tensor.layout is torch.strided and bool(tensor.is_shared())
    except Exception:  # a class without memory: a lazy parameter, one of the user's
        return False


def _mapping(address: int) -> str:
    """`device:inode` of the file mapped at an address of this process; empty where none is."""
    try:
        with open("/proc/self/maps") as file:
            for line in file:
                place, _, _, device, inode, *_ = line.split()
                begin, end = (int(a, 16) for a in place.split("-"))
                if begin <= address < end:
                    return f"{device}:{inode}" if inode != "0" else ""
    except OSError:  # another system than Linux
        pass
    return ""
