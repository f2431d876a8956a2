"""Which memory do tensors share with other processes?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def shared_memory(tensors: Iterable[Any]) -> str:
    """The device and inode of the mapping that holds the first of some CPU tensors that is in
    shared memory; empty where none is. Equal in the processes of a node that share it."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout is _strided() and tensor.is_shared():
            return _mapping(tensor.data_ptr())
    return ""


def _strided() -> Any:
    import torch

    return torch.strided


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
