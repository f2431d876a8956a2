"""Does this rank change gradients before a step, or parameters and optimizer state between steps?

Only this rank's own tensors before and after are compared, so that a difference between ranks can
be blamed on the rank that made it, and on the line. The first steps are always looked at, later
ones as far as the doctor's budget allows.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import defaultdict
from functools import partial
from typing import Any

from msgspec.structs import replace

from ....events import Clipped, Edited
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.torch_compat import compiled
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...source.call_resolver import state_edit_in_frames
from ...source.division import divided_by_world_size
from ...source.inplace_writes import inplace_statements
from ...source.line_tracer import Tracer
from ...tensors.digests import ABSENT, digests
from ...tensors.tensor_watch import TensorWatch, marks, spread, state_mark
from ...training import lifecycle
from ...training.records import Backward, OptimizerModel, Step
from ...training.tracked_model import Model
from .edits_after_wrap import Line, running
from .gradient_clears import CLEARED, clearing_site
from .gradient_edits import BEFORE, NOW, GradientEdits
from .gradient_sync import GradientSync
from .limits import (
    BUDGET_SHARE,
    EDITS_EMITTED,
    EDITS_ON_DEMAND,
    LEAST_SHARE,
    LOOKED_AT,
    SNAPSHOTS_ALWAYS,
    STATE_SEARCHES,
    STEPS_APART,
    STEPS_OPEN,
    STEPS_OVERDUE,
    TRACED_AT_MOST,
)
from .watched_parameters import Named, named_where_written, only_place, to_watch


class ModelEdits:
    """What is watched of one model, and what was recorded of each kind of edit.

    The kinds are `gradients`, `parameters` and `state`.

    Attributes:
        gradients: since the last backward; `parameters` and `states` by optimizer, since its last
            step; `lines` the running lines of the program's then, outermost first.
        named: parameters that the source names where it writes to tensors in place.
        emitted: by kind and optimizer, what was recorded last, see `_without_step`.
        sites: lines that edit, by kind and whether values changed or were only written anew; one
            that divides by the world size comes first, and is in `divisors` as written.
        searched: searches for a line that edits optimizer state, see `STATE_SEARCHES`.
        clears: lines that clear gradients, None until they were searched for.
        traced: traces so far, by kind.
        trace_position: by kind, the parameter to trace until its line is found.
        changed_at, expected: by kind, the step of the last edit and that of the next one if they
            come at regular intervals.
        whole: one optimizer holds all gradients, as far as is known.
        count: edits recorded.
        moments: times at which a snapshot was possible.
        next_at: time from which the budget allows the next snapshot.
        look_from: step from which to look beyond the budget, at everything not in `looked`
            (optimizers by number, None for the gradients).
        followed_up: looks beyond the budget because an edit was seen just before.
    """

    def __init__(self) -> None:
        self.gradients: GradientEdits | None = None
        self.parameters: dict[int, TensorWatch] = {}
        self.states: dict[int, TensorWatch] = {}
        self.lines: dict[int, list[Line]] = {}
        self.named: Named = {}
        self.emitted: dict[tuple[str, int], Edited] = {}
        self.sites: dict[tuple[str, bool], tuple[int, ...]] = {}
        self.divisors: dict[tuple[str, bool], str] = {}
        self.searched = 0
        self.backward_site = -1
        self.clears: tuple[int, ...] | None = None
        self.traced: dict[str, int] = {}
        self.trace_position: dict[str, int] = {}
        self.changed_at: dict[str, int] = {}
        self.expected: dict[str, int] = {}
        self.tracer: Tracer | None = None
        self.whole = True
        self.count = 0
        self.moments = 0
        self.next_at = 0.0
        self.look_from = -STEPS_OPEN
        self.looked: set[int | None] = set()
        self.followed_up = 0

    def look_at(self, step: int) -> None:
        """Look from that step on, even beyond the budget."""
        self.look_from = step
        self.looked.clear()

    def still_due(self, step: int, what: int | None = None) -> bool:
        """Whether a look beyond the budget is still open for an optimizer's parameters (`what`: its
        number) or for the gradients (None)."""
        return step < self.look_from + STEPS_OPEN and what not in self.looked

    def idle(self, step: int) -> bool:
        """Whether there is no snapshot, and none may be taken at this step."""
        return bool(self.next_at) and not (
            self.parameters or self.gradients or self.still_due(step)
        )


class ManualEdits(Watcher):
    lost = "edits of gradients and parameters by hand"  # a key of `analysis.replicas.causes`
    after = (GradientSync,)  # decides whether gradients were synchronised

    def __init__(self) -> None:
        self.models: defaultdict[Model, ModelEdits] = defaultdict(ModelEdits)
        self.calls: dict[int, int] = {}
        self.depth = 0
        self.spent_ns = 0
        # Enabled while there is a snapshot, or one may be taken.
        self._looking = Subscriptions()

    def install(self) -> None:
        import torch.amp
        import torch.nn.utils as utils
        from torch.nn.utils import clip_grad

        for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
            if hasattr(clip_grad, name):
                owners = (clip_grad, utils)
                lost = "clipping of gradients"
                self.around(
                    owners, name, before=self._clipping(name), after=self._function_ends, lost=lost
                )
        self.around(
            torch.amp.GradScaler, "unscale_", before=self._unscaling, after=self._function_ends
        )

    def _clipping(self, name: str) -> Any:
        def before(recorder: Recorder, args: Args, kwargs: Kwargs) -> tuple[str, int]:
            self._function_begins()
            site = recorder.site()
            call = self.calls.get(site, 0)
            self.calls[site] = call + 1
            if call < 20 or call & (call - 1) == 0:
                at = time.monotonic()
                recorder.emit(
                    Clipped(at=at, function=name, step=recorder.step, call=call, site=site)
                )
            return name, site

        return before

    def _unscaling(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> tuple[str, int]:
        self._function_begins()
        return "unscale_", -1

    def _function_begins(self) -> None:
        """A function of torch is about to change gradients: note what was done to them before
        it."""
        self.depth += 1
        if self.depth > 1:
            return
        began = time.perf_counter_ns()
        for edits in self.models.values():
            if edits.gradients is not None:
                edits.gradients.function_begins()
        self.spent_ns += time.perf_counter_ns() - began

    def _function_ends(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        self.depth = max(0, self.depth - 1)
        if self.depth or token is None:
            return
        name, site = token
        began = time.perf_counter_ns()
        for edits in self.models.values():
            if edits.gradients is None:
                continue
            edits.gradients.function_ends(name, site)
            if edits.tracer is not None and edits.tracer.kind == "gradients":
                edits.tracer.pass_over()
        self.spent_ns += time.perf_counter_ns() - began

    def look_now(self, model: Model) -> None:
        """Take snapshots from the next backward on, for as many steps as at the start of the run.

        For watchers that have seen something happen to the gradients.
        """
        edits = self.models[model]
        edits.moments, edits.next_at = 0, 0.0
        edits.count = min(edits.count, EDITS_EMITTED - EDITS_ON_DEMAND)
        self._looking.enable()

    @on(lifecycle.wrapped)
    def _wrapped(self, recorder: Recorder, model: Model) -> None:
        self.models[model].named = named_where_written(model, running(recorder))
        self._looking.enable()

    @on(lifecycle.pulse)
    def _pulse(self, recorder: Recorder, step: Step) -> None:
        if any(step.began >= edits.next_at for edits in self.models.values()):
            self._looking.enable()
        self._step_due(recorder, step, STEPS_OVERDUE)

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step, apart: int = STEPS_APART) -> None:
        """Look now and then beyond the budget, or edits that begin late would never be seen.

        Steps that are due are multiples of some number, and so may be those in which a program
        edits: look a varying number of steps later."""
        for edits in self.models.values():
            if edits.next_at and recorder.step - edits.look_from >= apart:
                edits.look_at(recorder.step + 1 + recorder.step // apart % 7)
                self._looking.enable()

    def _affordable(self, recorder: Recorder, edits: ModelEdits, what: int | None = None) -> bool:
        """Whether to take a snapshot now. Ranks need not agree: snapshots are not compared across
        ranks."""
        edits.moments += 1
        if edits.moments <= 2 * SNAPSHOTS_ALWAYS:
            return True
        if recorder.every:
            return recorder.step % recorder.every == 0
        if recorder.step >= edits.look_from and edits.still_due(recorder.step, what):
            edits.looked.add(what)
            return True
        now = time.monotonic()
        if now < edits.next_at:
            return False
        share = BUDGET_SHARE if recorder.affordable() else LEAST_SHARE
        part = max(1e-9, recorder.budget_percent / 100 * share)
        edits.next_at = recorder.started + self.spent_ns / 1e9 / part
        return now >= edits.next_at

    @on(lifecycle.backward_ends, during="_looking", enabled=True)
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        self.depth = 0
        if backward.error is not None:
            return
        for model in backward.models:
            edits = self.models[model]
            edits.gradients = None
            if not GradientSync.current.averaged(model) or not self._affordable(recorder, edits):
                continue
            began = time.perf_counter_ns()
            positions = (
                _positions_to_look_at(recorder, model.expected, edits.named)
                if edits.whole
                else spread(model.expected, LOOKED_AT)
            )
            edits.gradients = GradientEdits(model, positions)
            edits.backward_site = backward.site
            _trace(recorder, edits, "gradients", model, edits.gradients.looked_at)
            self.spent_ns += time.perf_counter_ns() - began

    @on(lifecycle.step_begins, during="_looking", enabled=True)
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        for holding in step.holdings:
            edits = self.models[holding.model]
            if holding.optimizer not in edits.parameters and edits.gradients is None:
                continue
            began = time.perf_counter_ns()
            self.emit_parameters(recorder, step.number, holding)
            if (state := edits.states.pop(holding.optimizer, None)) is not None:
                state.keep(NOW)
                if state.changed(BEFORE, until=NOW):
                    _find_line_of_state_edit(recorder, edits, step)
                self._emit(recorder, step.number, holding, "state", state)
            whole, edits.gradients = edits.gradients, None
            if whole is not None:
                mine = whole.only(holding.held)
                if mine.looked_at.positions and not step.closure:
                    mine.step_begins()
                    self._emit(recorder, step.number, holding, "gradients", mine.looked_at, mine)
                if rest := set(whole.looked_at.positions) - holding.held:
                    edits.whole, edits.gradients = False, whole.only(rest)
            self.spent_ns += time.perf_counter_ns() - began

    def emit_parameters(self, recorder: Recorder, step: int, holding: OptimizerModel) -> None:
        """Compare an optimizer's parameters with their snapshot, before its step or at the end."""
        parameters = self.models[holding.model].parameters.pop(holding.optimizer, None)
        if parameters is not None:
            parameters.keep(NOW)
            self._emit(recorder, step, holding, "parameters", parameters)

    @on(lifecycle.step_ends, during="_looking", enabled=True)
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        for holding in step.holdings:
            edits = self.models[holding.model]
            if not self._affordable(recorder, edits, holding.optimizer):
                continue
            began = time.perf_counter_ns()
            edits.lines[holding.optimizer] = lines = running(recorder)
            edits.named = named_where_written(holding.model, lines)
            positions = _positions_to_look_at(recorder, holding.positions, edits.named)
            state_marks = partial(_state_marks, step.optimizer)
            for kind, watches, columns in (
                ("parameters", edits.parameters, (digests, marks)),
                ("state", edits.states, (state_marks,)),
            ):
                watch = TensorWatch(positions, holding.parameters, *columns)
                watches[holding.optimizer] = watch
                watch.keep(BEFORE)
                _trace(recorder, edits, kind, holding.model, watch)
            self.spent_ns += time.perf_counter_ns() - began
        if not recorder.every and all(f.idle(recorder.step) for f in self.models.values()):
            self._looking.disable()

    def _emit(
        self,
        recorder: Recorder,
        step: int,
        holding: OptimizerModel,
        kind: str,
        watch: TensorWatch,
        gradients: GradientEdits | None = None,
    ) -> None:
        """Record an edit between `BEFORE` and `NOW`, unless it equals the last one recorded."""
        edits = self.models[holding.model]
        differing = watch.changed(BEFORE, until=NOW)
        counted = [] if gradients is None else gradients.counted(holding.held)
        undone: list[int] = []
        if kind == "parameters" and not differing:  # written to, and put back
            read = {p for p, found in watch.noted(NOW).items() if found != ABSENT}
            undone = [p for p in watch.changed(BEFORE, until=NOW, column=1) if p in read]
        nothing = Edited(
            at=time.monotonic(),
            model=holding.model.number,
            optimizer=holding.optimizer,
            kind=kind,
            step=step,
            changed=False,
        )
        event = replace(
            nothing,
            changed=bool(differing or counted),
            undone=bool(undone),
            counted=bool(counted),
        )
        if gradients is not None and differing:
            event = gradients.described(event)
        _end_trace(recorder, edits, event)
        after = watch.noted(NOW)
        by_torch = event.functions and not event.beside
        own = [] if by_torch else sorted(differing, key=lambda p: after[p] != ABSENT)
        _follow_up(recorder, edits, event, undone or counted or own)
        sites: tuple[int, ...] = ()
        if event.changed or event.undone:
            sites = edits.sites.get((kind, event.changed), ())
        cleared = gradients is not None and differing and {after[p] for p in differing} <= CLEARED
        if cleared and not sites:
            sites = _clearing_sites(recorder, edits)
        if kind == "parameters" and event.changed and not sites and not by_torch:
            lines = inplace_statements(edits.lines.get(holding.optimizer, []), running(recorder))
            if lines:
                event = replace(event, searched=recorder.sites.number(*lines[0]))
            elif (place := only_place(edits.named, differing)) is not None:
                event = replace(event, searched=recorder.sites.place(*place))
        if sites:
            event = replace(event, site=sites[0], more=sites[1:])
        key, told = (kind, holding.optimizer), _without_step(event)
        if edits.emitted.get(key, _without_step(nothing)) == told or edits.count >= EDITS_EMITTED:
            return
        edits.count += 1
        edits.emitted[key] = told
        divisor = edits.divisors.get((kind, True), "") if event.changed else ""
        recorder.emit(replace(event, divisor=divisor))


def _without_step(event: Edited) -> Edited:
    return replace(event, at=0.0, step=0)


def _end_trace(recorder: Recorder, edits: ModelEdits, event: Edited) -> None:
    """Stop tracing lines for a kind of edit, and keep those that were found."""
    if edits.tracer is None or edits.tracer.kind != event.kind:
        return
    found = edits.tracer.stop()
    edits.tracer = None
    if not (found and (event.changed or event.undone)):
        return
    edits.trace_position.pop(event.kind, None)
    divisors = {at: _world_size(at[0].co_filename, at[1]) for at in found}
    found.sort(key=lambda at: not divisors[at])  # stable: a dividing line comes first
    key = event.kind, event.changed
    edits.sites[key] = tuple(recorder.sites.number(*place) for place in found)
    edits.divisors[key] = divisors[found[0]]


def _world_size(file: str, line: int) -> str:
    """The world size as written, if a line divides by it, or by a product with it."""
    return divided_by_world_size(file, line) or divided_by_world_size(file, line, product=True)


def _follow_up(recorder: Recorder, edits: ModelEdits, event: Edited, by_program: list[int]) -> None:
    """Choose a parameter to trace, of those that the program edited, if the line is not known."""
    kind = event.kind
    if by_program and (kind, event.changed) not in edits.sites:
        edits.trace_position[kind] = by_program[0]
        edits.expected[kind] = 2 * recorder.step - edits.changed_at.get(kind, recorder.step)
        edits.changed_at[kind] = recorder.step
    late = edits.next_at and edits.followed_up < TRACED_AT_MOST
    if late and kind in edits.trace_position and recorder.step - edits.changed_at[kind] <= 1:
        edits.followed_up += 1  # edits may come in every step now: trace the next ones
        edits.look_at(recorder.step + 1)


def _positions_to_look_at(recorder: Recorder, positions: list[int], named: Named) -> list[int]:
    """All positions if the user asked for this step (`--every`), else a sample."""
    asked = recorder.every and recorder.step % recorder.every == 0
    return list(positions) if asked else to_watch(positions, named)


def _state_marks(optimizer: weakref.ref[Any], parameters: list[Any]) -> list[int]:
    held = optimizer()
    return [state_mark(held, parameter) for parameter in parameters]


def _find_line_of_state_edit(recorder: Recorder, edits: ModelEdits, step: Step) -> None:
    """Search the source of the running functions for a line that edits optimizer state: it may run
    only once, so tracing comes too late."""
    optimizer = step.optimizer()
    if optimizer is None or ("state", True) in edits.sites or edits.searched == STATE_SEARCHES:
        return
    edits.searched += 1
    found = state_edit_in_frames(
        sys._getframe(1), lambda code: recorder.sites.kind(code) == "user", optimizer
    )
    if found is not None:
        edits.sites["state", True] = (recorder.sites.number(found.code, found.line),)


def _clearing_sites(recorder: Recorder, edits: ModelEdits) -> tuple[int, ...]:
    """Lines that clear gradients between the last backward and here; searched once per model."""
    if edits.clears is None:
        edits.clears = clearing_site(recorder, sys._getframe(1), edits.backward_site)
    return edits.clears


def _trace(
    recorder: Recorder, edits: ModelEdits, kind: str, model: Model, watch: TensorWatch
) -> None:
    """Trace lines up to the next comparison, if the last one found an edit but no line."""
    position = edits.trace_position.get(kind, -1)
    traced = edits.traced.get(kind, 0)
    if position < 0 or edits.tracer is not None:
        return
    if traced >= TRACED_AT_MOST and edits.expected.get(kind) != recorder.step:
        return
    inner = model.inner()
    if inner is None or compiled(inner.modules()):
        return
    edits.traced[kind] = traced + 1
    edits.tracer = Tracer.start(recorder, kind, partial(watch.now, position))
