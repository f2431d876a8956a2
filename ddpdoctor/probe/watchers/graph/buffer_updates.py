"""Do training forwards update buffers from this rank's data, which DDP then overwrites with those
of rank 0?

Sketches of such buffers are taken before forwards, just before DDP broadcasts: what they hold then
is what is lost on all ranks but rank 0. Only buffers that the module's `forward` uses are followed.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from ....events import BufferUpdates
from ...recording import hooks
from ...recording.devices import HostCopy, hands_off
from ...recording.recorder import Recorder
from ...recording.torch_compat import ignored_by_ddp
from ...recording.watcher import Watcher, on
from ...source.attribute_use import used, written
from ...tensors.digests import Sketcher
from ...training import lifecycle
from ...training.records import Forward
from ...training.tracked_model import Model
from .limits import UPDATED_BUFFERS, UPDATED_ELEMENTS, UPDATES_AT


@dataclass(slots=True)
class _Followed:
    """One buffer; `read_site`: the line that uses it, -1 if only others of its module are used."""

    name: str
    module: weakref.ref[Any]
    leaf: str
    read_site: int
    write_site: int


class BufferUpdateWatch(Watcher):
    """
    Attributes:
        followed: by model, the buffers that are sketched.
        waiting: records whose sketches are on their way from a device.
    """

    lost = "buffers that every rank updates itself"

    def __init__(self) -> None:
        self.followed: WeakKeyDictionary[Model, list[_Followed]] = WeakKeyDictionary()
        self.waiting: list[tuple[BufferUpdates, HostCopy]] = []
        self.sketcher: Sketcher | None = None

    @on(lifecycle.forward_due)
    def _forward_due(self, recorder: Recorder, forward: Forward) -> None:
        self._write(recorder)
        model, number = forward.model, forward.model.forwards - 1
        inner = model.inner()
        if number not in UPDATES_AT or inner is None or hands_off():
            return
        if not forward.wrapper.will_sync_module_buffers() or hasattr(
            forward.wrapper, "buffer_hook"
        ):
            return
        followed = self.followed.get(model)
        if followed is None:
            followed = self.followed[model] = _to_follow(recorder, inner)
        if not followed:
            return
        if self.sketcher is None:
            self.sketcher = Sketcher()
        tensors = [
            None if (module := one.module()) is None else module._buffers.get(one.leaf)
            for one in followed
        ]
        bins = [b for t in tensors if t is not None and (b := self.sketcher.bins(t)) is not None]
        if len(bins) < len(followed):
            return
        event = BufferUpdates(
            at=time.monotonic(),
            model=model.number,
            forward=number,
            names=tuple(one.name for one in followed),
            sketches=(),
            read_sites=tuple(one.read_site for one in followed),
            write_sites=tuple(one.write_site for one in followed),
        )
        import torch

        values = torch.stack([b.to(bins[0].device) for b in bins])
        if values.is_cpu:
            _emit(recorder, event, values)
        else:
            self.waiting.append((event, HostCopy(values)))

    def _write(self, recorder: Recorder, *, wait: bool = False) -> None:
        while self.waiting and self.waiting[0][1].arrived(wait=wait):
            event, copy = self.waiting.pop(0)
            _emit(recorder, event, copy.host)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self._write(recorder, wait=True)


def _emit(recorder: Recorder, event: BufferUpdates, values: Any) -> None:
    if bool(values.isfinite().all()):
        rows = tuple(tuple(float(f"{v:.8g}") for v in row) for row in values.tolist())
        recorder.emit(replace(event, sketches=rows))


def _to_follow(recorder: Recorder, inner: Any) -> list[_Followed]:
    """The buffers of modules whose forward uses one of them, but for torch's own modules and
    normalisation layers: their statistics are meant to be those of one rank."""
    ignored = ignored_by_ddp(inner)
    found: list[_Followed] = []
    elements = 0
    for path, module in inner.named_modules():
        leaves = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None
            and buffer.is_floating_point()
            and buffer.numel() > 1
            and name not in module._non_persistent_buffers_set
            and (f"{path}.{name}" if path else name) not in ignored
        }
        if not leaves or _is_norm(module):
            continue
        kind, every = type(module), set(module._buffers)
        reads = {name: used(kind, name, every) for name in leaves}
        size = sum(b.numel() for b in leaves.values())
        if not any(reads.values()) or elements + size > UPDATED_ELEMENTS:
            continue
        elements += size
        writes = {name: found_at for name in leaves if (found_at := written(kind, name))}
        if any(goes_on for _, goes_on in writes.values()):
            writes = {name: (place, True) for name, (place, goes_on) in writes.items() if goes_on}
        for name in leaves:
            read, write = reads[name], writes.get(name)
            found.append(
                _Followed(
                    name=f"{path}.{name}" if path else name,
                    module=weakref.ref(module),
                    leaf=name,
                    read_site=recorder.sites.number(*read) if read else -1,
                    write_site=recorder.sites.number(*write[0]) if write else -1,
                )
            )
    return found if len(found) <= UPDATED_BUFFERS else []


def _is_norm(module: Any) -> bool:
    """Whether a module is torch's own, is derived from its normalisation layers, or keeps
    statistics as these do."""
    from torch.nn.modules.batchnorm import _NormBase

    own = type(module).__module__.partition(".")[0] == "torch"
    return own or isinstance(module, _NormBase) or "running_var" in module._buffers
