"""Runs a script on a backend whose hosts run ahead of their devices, as they do with NCCL.

    python late_backend.py SCRIPT [ARGUMENT ...]

`init_process_group("gloo")` makes groups of a backend `hccl` for the CPU: it works on gloo, but
waiting for a work returns after `PATIENCE_S` at most, whether its values have arrived or not.
Reading a value (`Tensor.item`, `tolist`, `cpu`, `numpy`) stands for every read of a device: it
blocks until all that was issued before has arrived. Barriers block, as NCCL's do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

PATIENCE_S = float(os.environ.get("LATE_BACKEND_PATIENCE_S") or 0.5)
"""After how long a wait returns without the values. It has to be long enough for them where all
ranks come: the CPU has no streams that would keep later work behind them."""

UNNUMBERED = "LATE_BACKEND_UNNUMBERED"
"""The variable by which its groups do not count their collectives, as those of MPI do not."""

BLOCKING: list[bool] = []
"""Not empty while calls block: DDP compares the ranks' models when it is made."""

ISSUED: list[LateWork] = []
"""What has not arrived yet, as far as is known."""


class LateWork(dist._Work):
    """A collective that is issued; `out` are the tensors that it fills."""

    def __init__(self, inner: Any, out: Any) -> None:
        super().__init__()
        self.inner, self.out = inner, out
        self.future: Any = Future()
        self.arrived = threading.Event()
        ISSUED.append(self)
        threading.Thread(target=self._run, daemon=True).start()
        timer = threading.Timer(PATIENCE_S, self._answer)
        timer.daemon = True
        timer.start()

    def _run(self) -> None:
        try:
            self.inner.wait()
        except RuntimeError:  # the group is gone: a device would stand still
            return
        self.arrived.set()
        self._answer()

    def _answer(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has answered before
            self.future.set_result(self.out)

    def wait(self, timeout: Any = None) -> bool:
        self.arrived.wait(None if BLOCKING else PATIENCE_S)
        return True

    def is_completed(self) -> bool:
        return self.arrived.is_set()

    def get_future(self) -> Any:
        return self.future


class LateGroup(dist.ProcessGroup):
    """A process group over gloo whose works are late."""

    def __init__(self, inner: Any, asked: Any) -> None:
        super().__init__(asked.group_rank, asked.group_size)
        self.inner, self.name, self.issued = inner, asked.group_id, 0

    def getGroupName(self) -> str:
        return str(self.name)

    def _get_sequence_number_for_group(self) -> int:
        if os.environ.get(UNNUMBERED):
            raise RuntimeError("this backend does not count")
        return self.issued

    def _late(self, inner: Any, out: Any) -> LateWork:
        self.issued += 1
        return LateWork(inner, out)

    def getBackendName(self) -> str:
        return "hccl"

    def allreduce(self, tensors: Any, opts: Any = None) -> LateWork:
        return self._late(self.inner.allreduce(tensors, opts or dist.AllreduceOptions()), tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> LateWork:
        return self._late(self.inner.broadcast(tensors, opts or dist.BroadcastOptions()), tensors)

    def reduce(self, tensors: Any, opts: Any = None) -> LateWork:
        return self._late(self.inner.reduce(tensors, opts or dist.ReduceOptions()), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> LateWork:
        work = self.inner.allgather(outputs, inputs, opts or dist.AllgatherOptions())
        return self._late(work, outputs)

    def _allgather_base(self, output: Any, source: Any, opts: Any = None) -> LateWork:
        work = self.inner._allgather_base(output, source, opts or dist.AllgatherOptions())
        return self._late(work, output)

    def _reduce_scatter_base(self, output: Any, source: Any, opts: Any = None) -> LateWork:
        work = self.inner._reduce_scatter_base(output, source, opts or dist.ReduceScatterOptions())
        return self._late(work, output)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> LateWork:
        return self._late(self.inner.gather(outputs, inputs, opts), outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> LateWork:
        return self._late(self.inner.scatter(outputs, inputs, opts), outputs)

    def send(self, tensors: Any, to: int, tag: int) -> LateWork:
        return self._late(self.inner.send(tensors, to, tag), tensors)

    def recv(self, tensors: Any, source: int, tag: int) -> LateWork:
        return self._late(self.inner.recv(tensors, source, tag), tensors)

    def barrier(self, opts: Any = None) -> Any:
        self.issued += 1
        return self.inner.barrier(opts or dist.BarrierOptions())


def as_torch(function: Any) -> Any:
    """The function, with its frames counted as torch's own: the program's line is the one above."""
    function.__code__ = function.__code__.replace(co_filename=torch.overrides.__file__)
    return function


@as_torch
def wait_for_all() -> None:
    """What every read of a device does: it waits for all that was issued before."""
    for work in list(ISSUED):
        work.arrived.wait()
    ISSUED.clear()


def reads(read: Callable[..., Any]) -> Callable[..., Any]:
    """A method of tensors that waits for all that was issued before."""

    @functools.wraps(read)
    def wait_and_read(*args: Any, **kwargs: Any) -> Any:
        wait_for_all()
        return read(*args, **kwargs)

    return as_torch(wait_and_read)


def blocks(make: Callable[..., None]) -> Callable[..., None]:
    """A constructor in which calls block."""

    @functools.wraps(make)
    def blocking(*args: Any, **kwargs: Any) -> None:
        BLOCKING.append(True)
        try:
            make(*args, **kwargs)
        finally:
            BLOCKING.pop()

    return as_torch(blocking)


def over_gloo(asked: Any) -> Any:
    """The group on which a late one works; `asked` are torch's options for it."""
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, asked.timeout)


def create(asked: Any, options: Any) -> LateGroup:
    return LateGroup(over_gloo(asked), asked)


def main() -> None:
    dist.Backend.register_backend("hccl", create, extended_api=True, devices=["cpu"])
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__"):
        setattr(torch.Tensor, name, reads(getattr(torch.Tensor, name)))
    wrapper = torch.nn.parallel.DistributedDataParallel
    wrapper.__init__ = blocks(wrapper.__init__)  # type: ignore[method-assign]
    init = dist.init_process_group

    @functools.wraps(init)
    def init_late(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        init("hccl", *args, **kwargs)

    dist.init_process_group = as_torch(init_late)
    script, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
