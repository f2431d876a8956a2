"""Do the ranks hold equal gradients, parameters, buffers and optimizer states?

Replicated tensors are digested at moments when all ranks must agree: before optimizer steps, before
forwards for buffers that DDP does not broadcast, and at the end. Replicas that may rightly differ
(local SGD, `Join`) are marked as left out.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

from ....events import Digests, Replica, Sketch
from ....events.drift import EARLY, UNEVEN_STEPS, UNHELD, chosen, full
from ....events.pack import pack
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording import hooks
from ...recording.devices import hands_off, out_of_patience, readable_later
from ...recording.hooks import Subscriptions
from ...recording.limits import FIRST_STEPS
from ...recording.recorder import Recorder
from ...recording.sampling import Cost, Pace
from ...recording.torch_compat import averages, comm_hook, group_ranks, ignored_by_ddp, joins
from ...recording.watcher import Args, Kwargs, Watcher, on
from ...tensors.device_sketches import LaterSketch
from ...tensors.digests import ABSENT, Sketcher, scattered, sums
from ...tensors.pending_digests import Row, Rows, Waiting
from ...tensors.tensor_watch import grad_of
from ...training import lifecycle, optimizer_models, write_counts
from ...training.optimizers import Optimizers
from ...training.records import Backward, Forward, OptimizerModel, Step
from ...training.tracked_model import Model
from ..manual_sync.exchanges import Exchanges
from ..manual_sync.parameter_averaging import WriteBack
from .gradient_sync import GradientSync
from .limits import (
    ENOUGH_UNCHANGED,
    SKETCHED_AT_EASE,
    SKETCHED_AT_MOST,
    SKETCHED_ON_A_DEVICE,
    STATES_AT_MOST,
)
from .manual_edits import ManualEdits

COMPARED = "gradient-drift", "parameter-drift", "buffer-drift", "optimizer-state-drift"
"""Checks that compare digests."""


class Watch:
    """The replicated tensors of one model in one optimizer.

    Attributes:
        rows: by kind, digests that wait to be written.
        pace: says at which steps to digest, and every how manieth tensor.
        writes: counts writes to the parameters.
        write_back: tells whether exchanges change the parameters.
        size: elements of the parameters.
        whole_next: digest every tensor at the next step.
        buffers_next: stride at which to digest buffers before the next forward; 0 for not at all.
        broadcast: DDP broadcasts the buffers.
        left_out: why the replicas are not to be compared; empty if they are.
    """

    def __init__(self, recorder: Recorder, holding: OptimizerModel) -> None:
        self.holding = holding
        self.rows: dict[str, Rows] = {}
        self.pace = Pace(recorder, len(holding.positions))
        self.writes = write_counts.WriteCounts()
        self.write_back = WriteBack()
        self.size = sum(p.numel() for p in _parameters(self) if p is not None)
        self.whole_next = False
        self.buffers_next = 0
        self.broadcast = True
        self.left_out = ""
        self.sketches: list[tuple[str, int, LaterSketch]] = []


class ReplicaDigests(Watcher):
    lost = "drift of gradients, parameters and buffers"
    # Digests of a step are taken before the watchers that compare with them run.
    before = (GradientSync, ManualEdits)

    def __init__(self) -> None:
        self.watches: dict[tuple[int, int], Watch] = {}
        self.sketcher: Sketcher | None = None
        self.forwards = Subscriptions()

    def install(self) -> None:
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        self.around(
            (c10d, dist), "destroy_process_group", before=self._destroying, lost="drift at the end"
        )

    def look_whole(self, model: Model) -> None:
        """Digest every tensor of the model at its next step."""
        for watch in self.watches.values():
            if watch.holding.model is model:
                watch.whole_next = True
                for known in Optimizers.current.known():
                    known.due_at = 0

    def _watch(self, recorder: Recorder, holding: OptimizerModel) -> Watch:
        key = (holding.optimizer, holding.model.number)
        watch = self.watches.get(key)
        if watch is None or watch.holding is not holding:
            watch = self.watches[key] = Watch(recorder, holding)
            _emit_replica(recorder, watch)
        return watch

    @on(lifecycle.step_begins, fast_path=False)
    @on(lifecycle.fast_step_due)
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        due = []
        for holding in step.holdings:
            watch = self._watch(recorder, holding)
            if step.number:
                _detect_local_sgd(recorder, watch)
            due.append(watch.pace)
            if watch.pace.skips(step.number) and not watch.whole_next:
                continue
            kinds = 1 + (not step.closure) + (not watch.broadcast)
            stride = watch.pace.stride_at(step.number, kinds, len(step.holdings))
            if stride or watch.whole_next:
                self._record_due(recorder, watch, step, 1 if watch.whole_next else stride)
        known = step.known
        known.due_at = min([known.due_at, *(pace.next_after(step.number) for pace in due)])

    def _record_due(self, recorder: Recorder, watch: Watch, step: Step, stride: int) -> None:
        """Digest every `stride`-th tensor before a step; at full steps sketch and digest states
        too."""
        _detect_join(recorder, watch)
        gradients = [] if step.closure else [_kind_of_gradients(watch.holding)]
        kinds = ["parameters", *gradients]
        watch.whole_next = False
        if not watch.broadcast:
            watch.buffers_next = stride
            self.forwards.enable()
        cost = Cost(recorder)
        looked = sum(_record(recorder, watch, kind, step.number, stride) for kind in kinds)
        if not step.closure:
            write_counts.record_writes(recorder, watch.holding, watch.writes, step.number)
        watch.pace.spent(cost.ns(looked), looked)
        if stride == 1 and full(step.number // max(1, recorder.every)):
            self._record_full_step(
                recorder, watch, step, kinds if watch.broadcast else [*kinds, "buffers"]
            )
        _flush(recorder, watch, soon=step.number < 10)

    @on(lifecycle.forward_begins, during="forwards")
    def _forward_begins(self, recorder: Recorder, forward: Forward) -> None:
        """Digest buffers that DDP does not broadcast. The program may load or average them after
        the step, so they are final only at the next forward."""
        for watch in self.watches.values():
            if watch.buffers_next and forward.grad_enabled and watch.holding.model is forward.model:
                cost, stride, watch.buffers_next = Cost(recorder), watch.buffers_next, 0
                looked = _record(recorder, watch, "buffers", forward.model.forwards - 1, stride)
                watch.pace.spent(cost.ns(looked), looked)

    @on(call_hooks.called, lost="averages of parameters (local SGD)")
    def _called(self, recorder: Recorder, call: Call) -> None:
        # A communication hook may pass all parameters at once: digest them before its first call.
        hooked = Exchanges.current.in_comm_hook()
        for watch in self.watches.values():
            if not watch.left_out:
                size = 0 if hooked else watch.size
                watch.write_back.called(partial(_digest_whole, recorder, watch), size)

    @on(lifecycle.closure_ends)
    def _closure_ends(self, recorder: Recorder, step: Step) -> None:
        for holding in step.holdings:
            watch = self._watch(recorder, holding)
            stride = watch.pace.stride
            kind = _kind_of_gradients(holding)
            _record(recorder, watch, kind, step.number, 1 if step.number in EARLY else stride)
            _flush(recorder, watch, soon=step.number < 10)

    @on(lifecycle.backward_ends, fast_path=False)
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        """Digest models that are in no optimizer: they are trained manually or through copies of
        their parameters (master weights)."""
        for model in backward.models:
            number = model.synced_backwards - 1
            if model.number not in backward.synced or not full(number) or _in_an_optimizer(model):
                continue
            watch = self.watches.get((UNHELD, model.number))
            if watch is None:
                positions = [p for p in range(len(model.parameters)) if p not in model.ignored]
                watch = self._watch(recorder, OptimizerModel(model, UNHELD, positions))
            _detect_join(recorder, watch)
            if number:
                _detect_local_sgd(recorder, watch)
            _record(recorder, watch, "parameters", number, 1)
            _flush(recorder, watch, soon=True)

    def _record_full_step(
        self, recorder: Recorder, watch: Watch, step: Step, kinds: list[str]
    ) -> None:
        """Digest optimizer states and sketch the tensors, within the budget but in the first
        steps."""
        early = step.number < FIRST_STEPS
        if step.number and (early or recorder.affordable()):
            _record_state(recorder, watch, step)
        size = _size_to_sketch(watch)
        cheap = step.number == 0 or (early and size <= SKETCHED_AT_EASE) or recorder.affordable()
        if cheap and size <= SKETCHED_AT_MOST:
            for kind in kinds:
                self._sketch(recorder, watch, kind, step.number)

    def _sketch(self, recorder: Recorder, watch: Watch, kind: str, step: int) -> None:
        if self.sketcher is None:
            self.sketcher = Sketcher()
        tensors = _tensors(watch.holding, kind, step, 1)
        device = next((t.device for t in tensors if t is not None), None)
        if device is None or device.type == "cpu":
            _emit_sketch(recorder, watch, kind, step, *self.sketcher.sketch(tensors))
        elif not hands_off():
            later = LaterSketch(tensors, self.sketcher.signs_on(device))
            watch.sketches.append((kind, step, later))

    def _destroying(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        if not (args or kwargs.get("group")):
            self._finish(recorder)

    @on(hooks.leaving, lost="drift at the end")
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self._finish(recorder)

    def _finish(self, recorder: Recorder) -> None:
        """Write what is pending and digest parameters and buffers a last time."""
        for watch in list(self.watches.values()):
            holding = watch.holding
            alive = holding.model.wrapper is not None and holding.model.wrapper() is not None
            _flush(recorder, watch, soon=True, wait=True)
            _detect_local_sgd(recorder, watch, last=True)
            if not alive or out_of_patience():
                continue
            if (steps := optimizer_models.steps_taken(holding)) > 0:
                ManualEdits.current.emit_parameters(recorder, steps, holding)
                write_counts.record_writes(recorder, holding, watch.writes, steps, last=True)
                if _size_to_sketch(watch) <= SKETCHED_AT_EASE:
                    self._sketch(recorder, watch, "parameters", steps)
            for kind in ("parameters", "buffers"):
                tensors = _tensors(holding, kind, 0, 1)
                waiting = digest(recorder, tensors)
                if waiting is not None and waiting.ready(wait=True):
                    model = holding.model
                    rows = [Row(model.forwards, 1, model.synced_backwards, waiting)]
                    write(recorder, rows, holding.model.number, holding.optimizer, kind, "end")
            _emit_sketches(recorder, watch, wait=True)
        self.watches.clear()


def _emit_sketch(
    recorder: Recorder, watch: Watch, kind: str, step: int, norm: float, bins: list[float]
) -> None:
    # NaN and infinity have no distance, and JSON has no number for them.
    if not all(map(math.isfinite, (norm, *bins))):
        return
    recorder.emit(
        Sketch(
            at=time.monotonic(),
            model=watch.holding.model.number,
            optimizer=watch.holding.optimizer,
            kind=kind,
            step=step,
            norm=norm,
            bins=tuple(float(f"{b:.8g}") for b in bins),
        )
    )


def _emit_sketches(recorder: Recorder, watch: Watch, *, wait: bool = False) -> None:
    """Record the sketches that have come from a device."""
    while watch.sketches and watch.sketches[0][2].ready(wait=wait):
        kind, step, later = watch.sketches.pop(0)
        _emit_sketch(recorder, watch, kind, step, later.norm, later.bins)


def _emit_replica(recorder: Recorder, watch: Watch) -> None:
    holding = watch.holding
    wrapper = holding.model.ddp()
    if wrapper is None:
        return
    hook, average = comm_hook(wrapper), averages(wrapper)
    if hook:
        Exchanges.current.hook_seen(average)
    if "localsgd" in hook.lower():
        watch.left_out = "its communication hook is local SGD"
    watch.broadcast = bool(getattr(wrapper, "broadcast_buffers", True))
    recorder.emit(
        Replica(
            at=time.monotonic(),
            model=holding.model.number,
            optimizer=holding.optimizer,
            ranks=group_ranks(wrapper.process_group),
            parameters=pack(holding.positions),
            broadcast=watch.broadcast,
            hook=hook,
            averages=average,
            left_out=watch.left_out,
        )
    )


def _detect_join(recorder: Recorder, watch: Watch) -> None:
    """Leave the replicas out if the ranks may take different numbers of steps (`Join`)."""
    if not watch.left_out and joins(watch.holding.model.ddp()):
        watch.left_out = UNEVEN_STEPS
        _emit_replica(recorder, watch)


def _digest_whole(recorder: Recorder, watch: Watch) -> Waiting | None:
    return digest(recorder, _parameters(watch))


def _parameters(watch: Watch) -> list[Any]:
    return watch.holding.parameters(watch.holding.positions)


def _detect_local_sgd(recorder: Recorder, watch: Watch, *, last: bool = False) -> None:
    """Leave the replicas out if the program averages parameters between steps (local SGD)."""
    if watch.left_out:
        return
    averaged = watch.write_back.changed(wait=last)
    if not last and Exchanges.current.before_backward():
        parameters = [p for p in _parameters(watch) if p is not None]
        if Exchanges.current.parameters_exchanged(parameters):
            averaged |= watch.write_back.exchanged(partial(_digest_whole, recorder, watch))
            averaged |= watch.write_back.changed()
        if not averaged and Exchanges.current.only_in_hooks():
            _detect_local_hooks(recorder, watch)
    if averaged:
        watch.left_out = "the program exchanges the parameters themselves between steps"
        _emit_replica(recorder, watch)


def _detect_local_hooks(recorder: Recorder, watch: Watch) -> None:
    """Leave the replicas out if DDP's hooks exchange in subgroups only; trust the hooks if they
    leave the parameters unchanged, for then they exchange gradients."""
    wrapper = watch.holding.model.ddp()
    ranks = () if wrapper is None else group_ranks(wrapper.process_group)
    if Exchanges.current.in_smaller_groups(ranks):
        watch.left_out = "its communication hook exchanges within smaller groups"
        _emit_replica(recorder, watch)
    elif watch.write_back.unchanged >= ENOUGH_UNCHANGED:
        Exchanges.current.hooks_spare_parameters()


def _in_an_optimizer(model: Model) -> bool:
    held = Optimizers.current.parameters()
    return any(id(p) in held for ref in model.parameters if (p := ref()) is not None)


def _kind_of_gradients(holding: OptimizerModel) -> str:
    return (
        "gradients" if GradientSync.current.averaged(holding.model, holding.optimizer) else "local"
    )


def _record(recorder: Recorder, watch: Watch, kind: str, key: int, stride: int) -> int:
    """Digest the tensors of one kind; returns their number."""
    tensors = _tensors(watch.holding, kind, key, stride)
    waiting = digest(recorder, tensors)
    if waiting is not None:
        made = watch.holding.model.synced_backwards
        watch.rows.setdefault(kind, Rows()).add(Row(key, stride, made, waiting))
    return len(tensors)


def _tensors(holding: OptimizerModel, kind: str, key: int, stride: int) -> list[Any]:
    if kind == "buffers":
        every = buffers(holding.model)
        return [every[i] for i in chosen(key, stride, len(every))]
    positions = holding.positions
    picked = holding.parameters([positions[i] for i in chosen(key, stride, len(positions))])
    if kind == "parameters":
        return picked
    return [grad_of(p) for p in picked]


def buffers(model: Model) -> list[Any]:
    """The buffers of a model in the order of `Wrapped.buffers`; None for those DDP ignores."""
    inner = model.inner()
    if inner is None:
        return []
    ignored = ignored_by_ddp(inner)
    return [None if name in ignored else b for name, b in inner.named_buffers()]


def digest(recorder: Recorder, tensors: list[Any]) -> Waiting | None:
    """Digests of tensors; None while a CUDA graph is being recorded."""
    if hands_off():
        return None
    totals, reasons = sums(tensors)
    for reason in reasons:
        for check in COMPARED:
            recorder.not_observed(check, f"some tensors: {reason}", partly=True)
    return Waiting(totals)


def _size_to_sketch(watch: Watch) -> float:
    """Elements of the parameters; infinite, so that it exceeds all limits, where they are on
    several devices, or on one that is not read later, or would take too long there."""
    held = watch.holding.parameters(watch.holding.positions)
    parameters = [p for p in held if p is not None]
    size = sum(p.numel() for p in parameters)
    devices = {p.device for p in parameters}
    if all(device.type == "cpu" for device in devices):
        return size
    readable = len(devices) == 1 and readable_later(*devices)
    return size if readable and size <= SKETCHED_ON_A_DEVICE else math.inf


def _record_state(recorder: Recorder, watch: Watch, step: Step) -> None:
    optimizer = step.optimizer()
    holding = watch.holding
    if optimizer is None or "ZeroRedundancy" in type(optimizer).__name__:
        return
    count = len(holding.positions)
    stride = 1 << max(0, (count - 1) // STATES_AT_MOST).bit_length()
    picked = holding.parameters([holding.positions[i] for i in chosen(step.number, stride, count)])
    states = [optimizer.state.get(p, {}) if p is not None else {} for p in picked]
    for key in sorted({str(k) for state in states for k in state}):
        values = [state.get(key) for state in states]
        if any(hasattr(v, "untyped_storage") for v in values):
            waiting = digest(
                recorder, [v if hasattr(v, "untyped_storage") else None for v in values]
            )
        elif all(v is None or isinstance(v, int) for v in values):
            waiting = Waiting([])
            waiting.values = [ABSENT if v is None else scattered(hash(v)) for v in values]
        else:
            continue
        if waiting is not None:
            row = Row(step.number, stride, holding.model.synced_backwards, waiting)
            watch.rows.setdefault(f"state:{key}", Rows()).add(row)


def _flush(recorder: Recorder, watch: Watch, *, soon: bool = False, wait: bool = False) -> None:
    _emit_sketches(recorder, watch, wait=wait)
    for kind, rows in watch.rows.items():
        if not (soon or rows.due()):
            continue
        if ready := rows.take(wait=wait):
            model = watch.holding.model.number
            point = "kept" if kind == "buffers" else "step"
            write(recorder, ready, model, watch.holding.optimizer, kind, point)


def write(
    recorder: Recorder,
    rows: list[Row],
    model: int,
    optimizer: int,
    kind: str,
    point: str,
    step: int = -1,
    site: int = -1,
) -> None:
    """Record rows of digests of one kind; `step` defaults to the current step."""
    recorder.emit(
        Digests(
            at=time.monotonic(),
            model=model,
            optimizer=optimizer,
            kind=kind,
            point=point,
            keys=tuple(row.key for row in rows),
            strides=tuple(row.stride for row in rows),
            counts=tuple(len(row.waiting.values) for row in rows),
            values=pack(v for row in rows for v in row.waiting.values),
            backwards=tuple(row.backwards for row in rows),
            step=recorder.step if step < 0 else step,
            site=site,
        )
    )
