"""Runs a sample on another device, without a change to it.

    ddpdoctor run samples/_on_device.py --device cuda samples/drift/parameter_drift.py

Parameters are moved when an optimizer or a wrapper gets them, and operations move tensors to where
the others are. Groups get the backend of the device beside gloo; with fewer devices than ranks gloo
alone, or with `--share` NCCL, which takes ranks for ranks of different hosts. With `--factories`
tensors that the sample itself makes are made on the device. With `--device cpu` nothing is changed.
`--watch-syncs` prints a line for every call of the doctor's that waits for the device, which must
not happen.
"""

import argparse
import datetime
import functools
import os
import runpy
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
FACTORIES = {torch.arange, torch.empty, torch.full, torch.ones, torch.tensor, torch.zeros}
FACTORIES |= {torch.rand, torch.randint, torch.randn}
ASKED = ("_has_compatible_shallow_copy_type",)  # about tensors as they are


class OnDevice(TorchFunctionMode):
    """Operations on tensors of several devices happen on `device`; in-place ones where their first
    tensor is."""

    def __init__(self, device, made_in=""):
        super().__init__()
        self.device, self.made_in = torch.device(device), made_in

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ASKED:
            return function(*args, **kwargs)
        if function in FACTORIES and sys._getframe(1).f_code.co_filename == self.made_in:
            if not {"device", "generator"} & set(kwargs):
                kwargs["device"] = self.device
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if len({t.device for t in tensors}) > 1 and name not in ("copy_", "__set__", "set_"):
            in_place = name.endswith("_") and not name.endswith("__")
            goal = tensors[0].device if in_place or name.startswith("__i") else self.device
            args, kwargs = tree_map(functools.partial(to, goal), (args, kwargs))
        return function(*args, **kwargs)


def to(device, thing):
    """A tensor on a device; anything else as it is."""
    moves = isinstance(thing, torch.Tensor) and thing.device != device
    return thing.to(device) if moves else thing


def as_torch(function):
    """The function, with its frames counted as torch's own: the program's line is the one above."""
    function.__code__ = function.__code__.replace(co_filename=torch.overrides.__file__)
    return function


OnDevice.__torch_function__ = as_torch(OnDevice.__torch_function__)


def before(kind, name, move):
    """Have `move` see the second argument of a method before it is called."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def moved(self, given, *args, **kwargs):
        return original(self, move(given), *args, **kwargs)

    setattr(kind, name, as_torch(moved))


def move_parameters(given, device):
    """What an optimizer is given (tensors, pairs with names, or groups), moved to a device."""
    given = list(given)
    for group in given:
        if isinstance(group, dict):
            inside = [group["params"]] if torch.is_tensor(group["params"]) else group["params"]
            group["params"] = move_parameters(inside, device)
        else:
            parameter = group[1] if isinstance(group, tuple) else group
            parameter.data = parameter.data.to(device)
    return given


def use(device, *, timeout_s=0.0, share=False, made_in=""):
    """Have the program that follows use a device; calls time out after so many seconds; ranks may
    share a GPU; what is made in a file is made there."""
    asked = torch.device(device)
    kind = asked.type
    module = torch.get_device_module(kind)
    enough = asked.index is not None or module.device_count() >= LOCAL_RANKS or share
    if share:
        os.environ["NCCL_HOSTID"] = f"rank-{LOCAL_RANK}"
    number = LOCAL_RANK % max(1, module.device_count()) if asked.index is None else asked.index
    here = torch.device(kind, number)
    module.set_device(here)
    own = dist.get_default_backend_for_device(kind) if enough else "gloo"
    before(torch.optim.Optimizer, "__init__", lambda given: move_parameters(given, here))
    before(torch.nn.parallel.DistributedDataParallel, "__init__", lambda model: model.to(here))
    init = dist.init_process_group

    @functools.wraps(init)
    def on_both(backend=None, *args, **kwargs):
        if timeout_s:
            kwargs.setdefault("timeout", datetime.timedelta(seconds=timeout_s))
        init(f"cpu:gloo,{kind}:{own}" if backend == "gloo" else backend, *args, **kwargs)

    dist.init_process_group = as_torch(on_both)
    OnDevice(here, made_in).__enter__()


def watch_syncs():
    """Print where the doctor waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    warnings.simplefilter("always")

    def told(message, category, filename, lineno, file=None, line=None):
        inside = [f for f in traceback.extract_stack() if "/ddpdoctor/probe/" in f.filename]
        if "synchroniz" in str(message) and inside:
            where = f"{inside[-1].filename}:{inside[-1].lineno}"
            print(f"the doctor waits for the device: {where}", flush=True)

    warnings.showwarning = told


def main():
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--device", default="cpu")
    options.add_argument("--watch-syncs", action="store_true")
    options.add_argument("--share", action="store_true")
    options.add_argument("--factories", action="store_true")
    options.add_argument("--timeout-s", type=float, default=0.0)
    options.add_argument("sample")
    options.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = options.parse_args()
    if asked.device != "cpu":
        made_in = asked.sample if asked.factories else ""
        use(asked.device, timeout_s=asked.timeout_s, share=asked.share, made_in=made_in)
    if asked.watch_syncs:
        watch_syncs()
    sys.argv = [asked.sample, *asked.arguments]
    runpy.run_path(asked.sample, run_name="__main__")


if __name__ == "__main__":
    main()
