"""What does `torch.nn.DataParallel` gather on its output device, and how full are the devices?

Looked at in forwards of the wrapper, and in pulses for memory. Such a program has no process group:
the wrapper's constructor makes the process a rank.
"""

from __future__ import annotations

import importlib
import time
import weakref
from collections.abc import Iterator
from typing import Any

from ....events import DataParallelMade, DeviceMemory, Gathered, GatheredTensor
from ...recording import hooks
from ...recording.frames import disguise, unframe
from ...recording.patching import replace
from ...recording.recorder import Recorder, current_recorder, write_probe_error
from ...recording.watcher import Activate, Args, Error, Kwargs, Watcher, on
from ...recording.weak_references import WeakIdentityMap
from ...training import lifecycle
from ...training.records import Step
from .limits import MEMORY_EVERY_S, TENSORS_AT_MOST


class WrapperState:
    """One `DataParallel` wrapper.

    Attributes:
        emitted_bytes: size of the gathered output when it was last recorded.
        site: line of the last forward.
    """

    def __init__(self, number: int, devices: tuple[int, ...]) -> None:
        self.number = number
        self.devices = devices
        self.forwards = 0
        self.emitted_bytes = 0
        self.site = -1


class DataParallelWrappers(Watcher):
    lost = "what DataParallel gathers"

    def __init__(self) -> None:
        self.known: WeakIdentityMap[WrapperState] = WeakIdentityMap()
        self.made = 0
        self.devices: tuple[int, ...] = ()
        self.looked = 0.0

    def install(self) -> None:
        wrapper = _wrapper()
        self.around(wrapper, "__init__", before=_making, after=self._made)
        self.around(wrapper, "forward", before=self._forward)
        self.around(wrapper, "gather", before=self._gathering, after=self._gathered)

    def activate_with(self, activate: Activate) -> None:
        """Let the wrapper's constructor make this process a rank, the only one."""
        wrapper = _wrapper()
        watched = vars(wrapper)["__init__"]

        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
            if current_recorder() is None:
                try:
                    activate(0, 1, None)
                except Exception as error:  # training goes on, unobserved
                    write_probe_error(error)
            try:
                watched(made, *args, **kwargs)
            except BaseException as error:
                unframe(error)
                raise

        replace(wrapper, "__init__", disguise(__init__, watched))

    def _made(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if token is None or error is not None:
            return
        reference, site = token
        wrapper = reference()
        if wrapper is None:
            return
        devices = tuple(int(d) for d in wrapper.device_ids)
        self.devices = max(self.devices, devices, key=len)
        known = self.known[wrapper] = WrapperState(self.made, devices)
        self.made += 1
        inner = wrapper.module
        recorder.emit(
            DataParallelMade(
                at=time.monotonic(),
                model=known.number,
                kind=type(inner).__name__,
                site=site,
                devices=devices,
                output_device=int(getattr(wrapper, "output_device", -1)) if devices else -1,
                parameter_bytes=sum(p.numel() * p.element_size() for p in inner.parameters()),
            ),
            vital=True,
        )

    def _forward(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        known = self.known.get(args[0])
        if known is not None:
            known.forwards += 1
            known.site = recorder.site()

    def _gathering(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        known = self.known.get(args[0])
        where = args[2] if len(args) > 2 else kwargs.get("output_device", -1)
        return None if known is None else (known, int(where))

    def _gathered(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if token is None or error is not None:
            return
        known, where = token
        tensors = tuple(_tensors(result, ""))[:TENSORS_AT_MOST]
        size = sum(t.size_bytes for t in tensors)
        # Record growth only: the largest output decides whether the device runs out of memory.
        if known.emitted_bytes and size < 1.25 * known.emitted_bytes:
            return
        known.emitted_bytes = size
        recorder.emit(
            Gathered(
                at=time.monotonic(),
                model=known.number,
                forward=known.forwards - 1,
                step=recorder.step,
                site=known.site,
                output_device=where,
                size_bytes=size,
                tensors=tensors,
            )
        )

    @on(lifecycle.pulse)
    def _pulse(self, recorder: Recorder, step: Step) -> None:
        if len(self.devices) < 2:
            return
        now = time.monotonic()
        if recorder.step <= 3 or now - self.looked >= MEMORY_EVERY_S:
            self._emit_memory(recorder, now)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        if len(self.devices) > 1:
            self._emit_memory(recorder, time.monotonic())

    def _emit_memory(self, recorder: Recorder, now: float) -> None:
        """Record the allocator's statistics, which are kept on the host: nothing waits for a
        device."""
        import torch

        self.looked = now
        stats = [torch.cuda.memory_stats(device) for device in self.devices]
        recorder.emit(
            DeviceMemory(
                at=now,
                step=recorder.step,
                devices=self.devices,
                allocated_bytes=tuple(int(s.get("allocated_bytes.all.current", 0)) for s in stats),
                peak_bytes=tuple(int(s.get("allocated_bytes.all.peak", 0)) for s in stats),
            )
        )


def _wrapper() -> Any:
    # By name: torch.nn.parallel re-exports a function that hides the module of the same name.
    return importlib.import_module("torch.nn.parallel.data_parallel").DataParallel


def _making(recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
    return weakref.ref(args[0]), recorder.site()


def _tensors(value: Any, name: str) -> Iterator[GatheredTensor]:
    """The tensors of an output, named by the path to each (`output.logits[0]`)."""
    import torch

    if isinstance(value, torch.Tensor):
        yield GatheredTensor(
            name=name or "output",
            shape=tuple(int(n) for n in value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            size_bytes=value.numel() * value.element_size(),
        )
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(part, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        for index, part in enumerate(value):
            yield from _tensors(part, f"{name}.{fields[index]}" if fields else f"{name}[{index}]")
