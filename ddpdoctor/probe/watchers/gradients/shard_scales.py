"""What does this rank multiply its shards of gradients by, before a step of a sharded model?

`fully_shard` and `FullyShardedDataParallel` leave each rank its part of every gradient, averaged
over the ranks. A few values of some of these parts are read when a backward ends, and again before
the next backward or the step.
"""

from __future__ import annotations

import time
from functools import partial
from math import isfinite
from typing import Any

from msgspec.structs import replace

from ....events import ShardScales
from ....events.amp import told_at
from ...recording import hooks
from ...recording.devices import HostCopy, hands_off, out_of_patience
from ...recording.hooks import Subscriptions
from ...recording.import_hooks import when_imported
from ...recording.recorder import Recorder
from ...recording.torch_compat import FULLY_SHARDED, group_ranks, placements, shard
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...recording.weak_references import Reference
from ...source.inplace_writes import inplace_statements
from ...source.line_tracer import Tracer
from ...tensors.digests import Unsuited, check_suited, digests
from ...tensors.limits import VALUES_SAMPLED
from ...tensors.tensor_watch import grad_of, spread
from ...training import lifecycle
from ...training.optimizers import Optimizers
from ...training.records import Backward, Step
from .edits_after_wrap import Line, running
from .limits import (
    LEAST_VALUES,
    LOOKED_AT,
    SHARDS_LOOKED_AT,
    SPANS_AT_MOST,
    TRACED_AT_MOST,
)


class _Shards:
    """The shards of one optimizer's gradients.

    Attributes:
        parameters: a few of them, the same on every rank of `ranks`; `parts`: each is looked at in
            so many parts, as there are too few of them.
        rounding: of their type.
        before: their values after the last backward, None if nothing was kept.
        spans: such values, and those at the end of the time without a backward that followed.
        lines, backward_site: what was running at the end of the last backward; `end`: at the step.
        last: the event recorded last.
        sites: the lines that scale them, once found; `tracer` looks for them, the `traced`-th time,
            by the parameter at `position`.
    """

    def __init__(
        self, parameters: list[Any], ranks: tuple[int, ...], *, flat: bool = False, parts: int = 1
    ) -> None:
        import torch

        kinds = [p.dtype for p in parameters if p.dtype.is_floating_point]
        self.rounding = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
        self.parameters = [Reference(p) for p in parameters for _ in range(parts)]
        self.ranks, self.flat, self.parts = ranks, flat, parts
        self.before: Any = None
        self.spans: list[tuple[Any, Any]] = []
        self.lines: list[Line] = []
        self.end: list[Line] = []
        self.backward_site = -1
        self.last: ShardScales | None = None
        self.sites: tuple[int, ...] = ()
        self.tracer: Tracer | None = None
        self.traced, self.position = 0, -1

    def gradient(self, position: int) -> Any:
        gradient = grad_of(self.parameters[position]())
        if gradient is None or self.parts == 1:
            return None if gradient is None else shard(gradient)
        length = gradient.numel() // self.parts
        return gradient.view(-1).narrow(0, position % self.parts * length, length)

    def read(self) -> Any:
        """A few values of each gradient, zeros for those that cannot be read; None for nothing."""
        import torch

        with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            rows = [_values(self.gradient(n)) for n in range(len(self.parameters))]
            devices = {row.device for row in rows if row is not None}
            if len(devices) > 1:
                return None
            device = devices.pop() if devices else torch.device("cpu")
            nothing = torch.zeros(VALUES_SAMPLED, device=device, dtype=torch.float32)
            return torch.stack([nothing if row is None else row for row in rows])

    def ends(self) -> None:
        """The time since the last backward is over."""
        before, self.before = self.before, None
        if before is not None and (now := self.read()) is not None:
            self.spans.append((before, now))

    def stop_tracing(self) -> list[Line]:
        tracer, self.tracer = self.tracer, None
        return tracer.stop() if tracer is not None else []


class ShardScaling(Watcher):
    """
    Attributes:
        known: by number of the optimizer, its shards; None where it holds none.
        flat: by the ranks of their group, the tensors of `FullyShardedDataParallel`.
        waiting: events to be written once the values have come from a device.
    """

    lost = "factors of sharded gradients"

    def __init__(self) -> None:
        self.known: dict[int, _Shards | None] = {}
        self.waiting: list[tuple[_Shards, ShardScales, Any, HostCopy | None]] = []
        self._looking = Subscriptions()
        self.flat: dict[tuple[int, ...], list[Reference]] = {}

    def install(self) -> None:
        when_imported(FULLY_SHARDED, self._watch, lost=self.lost)

    def _watch(self, module: Any) -> None:
        self.around(
            module.FullyShardedDataParallel, "__init__", before=_itself, after=self._sharded
        )

    def _sharded(self, recorder: Recorder, wrapper: Any, result: Any, error: Error) -> None:
        flat = None if error is not None else wrapper._flat_param
        if flat is not None:
            ranks = group_ranks(wrapper.process_group)
            self.flat.setdefault(ranks, []).append(Reference(flat))

    @on(lifecycle.backward_begins, during="_looking")
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        for mine in self.known.values():
            if mine is not None and mine.before is not None:
                self._found(recorder, mine, mine.stop_tracing())
                mine.ends()

    @on(lifecycle.backward_ends, during="_looking")
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        if backward.error is not None or hands_off() or out_of_patience():
            return
        for known in Optimizers.current.known():
            mine = self.known.get(known.number)
            if mine is None or len(mine.spans) >= SPANS_AT_MOST:
                continue
            if known.steps >= SHARDS_LOOKED_AT and not told_at(known.steps):
                continue
            mine.before, mine.backward_site = mine.read(), backward.site
            if mine.sites or mine.before is None:
                continue
            mine.lines = running(recorder)
            due = mine.position >= 0 and mine.traced < TRACED_AT_MOST
            if due and mine.tracer is None and mine.before.is_cpu:
                mine.traced += 1
                digest = partial(_digest, mine, mine.position)
                mine.tracer = Tracer.start(recorder, "shards", digest)

    @on(lifecycle.step_begins, fast_path=False)
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        number = step.known.number
        if number not in self.known:
            self.known[number] = self._shards(step.optimizer())
            if self.known[number] is not None:
                self._looking.enable()
            return
        if (mine := self.known[number]) is None:
            return
        self._found(recorder, mine, mine.stop_tracing())
        full = len(mine.spans) >= SPANS_AT_MOST
        mine.ends()
        spans, mine.spans = mine.spans, []
        if not spans or full or step.closure or hands_off():
            return
        self._write(recorder)
        if not mine.sites:
            mine.end = running(recorder)
        import torch

        with torch.inference_mode():
            values = torch.stack([torch.stack(span) for span in spans])
        copy = None if values.is_cpu else HostCopy(values)
        event = ShardScales(
            at=time.monotonic(),
            optimizer=number,
            step=step.number,
            ranks=mine.ranks,
            factors=(),
            rounding=mine.rounding,
            backward_site=mine.backward_site,
            step_site=step.site,
            flat=mine.flat,
        )
        self.waiting.append((mine, event, values, copy))
        self._write(recorder)

    def _shards(self, optimizer: Any) -> _Shards | None:
        groups = optimizer.param_groups if optimizer is not None else ()
        return _of_mesh(groups) or (_flat(groups, self.flat) if self.flat else None)

    def _found(self, recorder: Recorder, mine: _Shards, lines: list[Line]) -> None:
        if lines and not mine.sites:
            mine.sites = tuple(recorder.sites.number(*line) for line in lines)

    def _write(self, recorder: Recorder, *, wait: bool = False) -> None:
        while self.waiting:
            mine, event, values, copy = self.waiting[0]
            if copy is not None and not copy.arrived(wait=wait):
                return
            del self.waiting[0]
            spans = (values if copy is None else copy.host).tolist()
            factors = _product(spans, max(1e-5, 4 * mine.rounding))
            scaled = [n for n, factor in enumerate(factors) if factor not in (0.0, 1.0)]
            if scaled and not mine.sites:
                mine.position = scaled[0]
                if mine.traced or copy is not None:
                    places = inplace_statements(mine.lines, mine.end)
                    self._found(recorder, mine, places if len(places) == 1 else [])
            site, more = (mine.sites[0], mine.sites[1:]) if scaled and mine.sites else (-1, ())
            event = replace(event, factors=factors, site=site, more=more)
            if mine.last is None or _told(mine.last) != _told(event):
                mine.last = event
                recorder.emit(event)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self._write(recorder, wait=True)


def _told(event: ShardScales) -> ShardScales:
    return replace(event, at=0.0, step=0)


def _digest(mine: _Shards, position: int) -> int:
    return digests([mine.gradient(position)])[0]


def _itself(recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
    return args[0]


def _flat(groups: Any, known: dict[tuple[int, ...], list[Reference]]) -> _Shards | None:
    """The tensors of `FullyShardedDataParallel`, if one optimizer holds what is in all of them, and
    all are sharded over the same ranks."""
    alive = {ranks: [p for r in flat if (p := r()) is not None] for ranks, flat in known.items()}
    ((ranks, flat), *others) = [(r, f) for r, f in alive.items() if f] or [((), [])]
    within = {id(p) for f in flat for p in (f, *(getattr(f, "_params", None) or ()))}
    held = {id(p) for group in groups for p in group["params"]}
    enough = [f for f in flat if f.numel() >= 2 * VALUES_SAMPLED]
    if others or len(ranks) < 2 or not enough or not held or not held <= within:
        return None
    return _Shards(spread(enough, LOOKED_AT // 2), ranks, flat=True, parts=2)


def _of_mesh(groups: Any) -> _Shards | None:
    """A few parameters of an optimizer that are sharded over one mesh, chosen by what is the same
    on all of its ranks."""
    by_mesh: dict[tuple[int, ...], list[Any]] = {}
    for group in groups:
        for parameter in group["params"]:
            mesh, places = placements(parameter)
            if mesh is not None and parameter.requires_grad and any(p.is_shard() for p in places):
                by_mesh.setdefault(tuple(mesh.mesh.flatten().tolist()), []).append(parameter)
    if not by_mesh:
        return None
    ranks, every = max(by_mesh.items(), key=lambda one: len(one[1]))
    # Of matrices a shard should have several rows: a row may have a factor of its own.
    enough = [p for p in every if p.shape and p.shape[0] >= LEAST_VALUES * len(ranks)]
    if len(ranks) < 2 or not enough:
        return None
    return _Shards(spread(enough, LOOKED_AT), ranks)


def _values(gradient: Any) -> Any:
    """`VALUES_SAMPLED` values of a shard, evenly spread; None where they cannot be read."""
    import torch

    if gradient is None or not gradient.is_floating_point() or not gradient.is_contiguous():
        return None
    try:
        check_suited(gradient)
    except Unsuited:
        return None
    count = gradient.numel()
    if count < VALUES_SAMPLED:
        return None
    some = gradient.as_strided((VALUES_SAMPLED,), (count // VALUES_SAMPLED,))
    return some.to(torch.float32, copy=True)


def _product(spans: list[list[list[list[float]]]], tolerance: float) -> tuple[float, ...]:
    """The factor of each parameter over all spans since its gradient was cleared last."""
    factors = [1.0] * len(spans[0][0])
    for before, now in spans:
        if any(map(any, before)) and not any(map(any, now)):
            factors = [1.0] * len(factors)
            continue
        for n, (old, new) in enumerate(zip(before, now, strict=True)):
            factors[n] *= _factor(old, new, tolerance)
    return tuple(float(f"{factor:.5g}") for factor in factors)


def _factor(before: list[float], now: list[float], tolerance: float) -> float:
    """What all values were multiplied by; 0 if there is no such factor, or too few values."""
    ratios = sorted(b / a for a, b in zip(before, now, strict=True) if a)
    if len(ratios) < LEAST_VALUES or not all(map(isfinite, ratios)):
        return 0.0
    middle = ratios[len(ratios) // 2]
    if middle <= 0 or any(abs(r / middle - 1) > tolerance for r in ratios):
        return 0.0
    return 1.0 if abs(middle - 1) <= tolerance else middle
