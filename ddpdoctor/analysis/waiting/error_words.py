"""What the messages of torch and its backends mean in a distributed run, and what to do about them
where that is clear."""

from __future__ import annotations

import re
from typing import NamedTuple

PORT_IN_USE = re.compile(r"[Aa]ddress already in use|EADDRINUSE")


class Message(NamedTuple):
    """
    Attributes:
        pattern: searched in the message.
        fix: empty where it depends.
    """

    pattern: str
    meaning: str
    fix: str = ""


MESSAGES = tuple(Message(*row) for row in (
    (r"Connection (?:closed|reset)|Broken pipe", "another rank's process ended, or destroyed its "
     "process group: look at that rank; this one only lost the connection"),
    (r"inconsistent 0 params", "another rank is dead or late, so nothing arrived from it: the "
     "models need not differ"),
    (r"Timed out waiting|Watchdog caught|wait timeout", "another rank did not arrive in time: see "
     "where that rank is"),
    (r"failed to pass monitoredBarrier", "the ranks named in the message did not reach the "
     "barrier"),
    (r"finished reduction in the prior iteration", "some parameters got no gradient in the step "
     "before"),
    (PORT_IN_USE.pattern, "another process on this machine has that port"),
    (r"invalid device ordinal", "there are fewer GPUs than ranks on this node, or the global rank "
     "was used as a device index"),
    (r"Default process group has not been initialized", "a collective was called before "
     "init_process_group"),
    (r"device-side assert", "a kernel failed before this line: run with CUDA_LAUNCH_BLOCKING=1 to "
     "see where"),
    (r"DataLoader worker .* (?:exited|is killed)", "a DataLoader worker died: out of memory, out "
     "of /dev/shm, or a crash in the code of the data set"),
    (r"inLengthPerRank", "all_to_all split sizes disagree: the input split that the rank sends to "
     "itself differs from its own output split", "make output splits match what the other ranks "
     "send: exchange the sizes first with `dist.all_to_all_single(output_sizes, input_sizes)`, one "
     "number for each rank"),
    (r"Duplicate GPU detected", "two ranks use one GPU, which NCCL refuses: each has to call "
     "torch.cuda.set_device(local_rank) first"),
    (r"illegal memory access|misaligned address", "a kernel failed before this line: run with "
     "CUDA_LAUNCH_BLOCKING=1 to see where"),
    (r"ncclInvalidUsage", "NCCL was given what it cannot use, such as one GPU for two ranks: "
     "NCCL_DEBUG=INFO says what"),
    (r"ncclUnhandledCudaError", "a CUDA call inside NCCL failed: NCCL_DEBUG=INFO says which"),
    (r"ncclRemoteError", "another rank's process ended: look at that rank"),
    (r"out of memory|OutOfMemory", "the memory of this rank's device is full"),
    (r"(?:Missing|Unexpected) key\(s\) in state_dict: .*\"module\.", "the state was taken from a "
     "wrapped model, whose names begin with `module.`, and is loaded into one that is not, or the "
     "reverse", "save and load the inner model's state: `model.module.state_dict()`, "
     "`model.module.load_state_dict(state)`"),
    (r"'(?:DistributedDataParallel|DataParallel|FullyShardedDataParallel)' object has no attribute",
     "the wrapper does not hand on the attributes and methods of the model in it",
     "ask the model in it, `model.module`; but call the wrapper itself to train"),
    (r"initialize the default process group twice", "init_process_group was called before, by the "
     "program or by a framework", "call it once: `if not dist.is_initialized():`"),
    (r"have any parameters? that requires? a gradient", "all parameters of the wrapped module are "
     "frozen when it is wrapped", "leave the wrapper out for a module that is not trained, or set "
     "`requires_grad` before the wrap"),
    (r"is not part of group|Invalid process group specified", "`src` and `dst` are ranks of the "
     "whole job, also in a smaller group: this one is not in the group, or this rank is not",
     "pass `dist.get_global_rank(group, n)`, or `group_src=n`, for the n-th rank of the group, and "
     "make the call on the ranks of the group only"),
    (r"gather_list.* must (?:NOT )?be specified", "only the destination takes a list in `gather`",
     "`gather_list=tensors if rank == dst else None`"),
    (r"scatter_list.* must (?:NOT )?be specified", "only the source gives a list in `scatter`",
     "`scatter_list=tensors if rank == src else None`"),
    (r"sampler option is mutually exclusive with shuffle", "a loader with a sampler gets its order "
     "from that", "`shuffle=False` in the `DataLoader`, and `shuffle=True` in the "
     "`DistributedSampler`"),
    (r"Tensors must be contiguous", "collectives take contiguous tensors only, and a transposed or "
     "sliced one is none", "pass `tensor.contiguous()`; where the call writes to it, copy the "
     "result back"),
    (r"No backend type associated with device type", "the process group has no backend for tensors "
     "on this device (NCCL takes tensors on a GPU only), or was destroyed before the call", "move "
     "the tensor to a device of the group; or give the group a backend for each: "
     "`init_process_group(\"cpu:gloo,cuda:nccl\")`"),
    (r"Cannot re-initialize CUDA in forked subprocess", "the parent used a GPU before it forked "
     "this process", "start processes and workers by `spawn`, or use no GPU before"),
))  # fmt: skip


def translate(message: str) -> str:
    """What a misleading message means; empty where it needs no explanation."""
    return next((m.meaning for m in MESSAGES if re.search(m.pattern, message)), "")


def remedy(message: str) -> str:
    """What to do about a message of torch; empty where that depends on the program."""
    return next((m.fix for m in MESSAGES if re.search(m.pattern, message)), "")
