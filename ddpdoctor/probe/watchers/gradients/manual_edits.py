"""What this rank changes by hand: gradients before a step, parameters and the optimizer's state
between steps.

Only this rank's own tensors before and after are compared, so that a difference between ranks can
be blamed on the rank that made it, and on the line.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ....events import Clipped, Edited
from ...recording.hooks import Subscriptions
from ...recording.patching import around
from ...recording.recorder import Recorder
from ...source.call_resolver import state_edit_in_frames
from ...source.division import divided_by_world_size
from ...source.line_tracer import Tracer
from ...tensors.digests import ABSENT, digests
from ...training import lifecycle
from ...training.records import Backward, OptimizerModel, Step
from ...training.snapshot import Taken, ratio, rewritten, state_of
from ...training.tracked_model import Model
from ...training.written_gradients import WrittenGradients
from . import gradient_sync
from .gradient_clears import CLEARED, clearing_site

LOST = "edits of gradients and parameters by hand"

LOOKED_AT = 6
ALWAYS = 64
"""Steps in which tensors are taken whatever it costs."""

SHARE, LEAST = 0.15, 0.05
"""Part of the doctor's budget for this, while it is within the budget and where it is not."""

APART, OVERDUE, WITHIN = 100, 400, 16
"""Steps between looks whatever they cost, where a step is due and else; and how long one stands."""

EMITTED_AT_MOST = 300
EMITTED_ON_DEMAND = 20
TRACED_AT_MOST = 6
"""Times that the lines between two moments are followed to find the one that edits; after that
only where the next edit is due, if they come as regularly as the last two."""

SEARCHES = 3
"""Through the running functions' source for what edits an optimizer's state, per model."""

NOTHING: tuple[Any, ...] = (False, 0.0, 0.0, (), (False, False, False), (), {})
"""Told of what was not edited."""


class Followed:
    """What is known of one model: tensors taken, and what was told of each kind.

    Attributes:
        whole: one optimizer holds all gradients, as far as is known.
        look_from: step from which to look whatever it costs, at each of what is not in `looked`.
        sites: by kind, and whether they were changed or put back; a line that divides by the world
            size is the first of them.
    """

    def __init__(self) -> None:
        self.gradients: Taken | None = None
        self.parameters: dict[int, Taken] = {}
        self.states: dict[int, Taken] = {}
        self.emitted: dict[tuple[str, int], tuple[Any, ...]] = {}
        self.sites: dict[tuple[str, bool], tuple[int, ...]] = {}
        self.divisors: dict[tuple[str, bool], str] = {}
        self.searched = 0
        self.backward_site = -1
        self.clears: tuple[int, ...] | None = None
        self.traced: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
        self.changed_at: dict[str, int] = {}
        self.expected: dict[str, int] = {}
        self.tracer: Tracer | None = None
        self.whole = True
        self.count = 0
        self.moments = 0
        self.next_at = 0.0
        self.look_from = -WITHIN
        self.looked: set[int | None] = set()
        self.followed_up = 0

    def look_at(self, step: int) -> None:
        """Whatever it costs, from that step on."""
        self.look_from = step
        self.looked.clear()

    def owes(self, step: int, what: int | None = None) -> bool:
        """Whether an optimizer's parameters are still to be looked at then, or the gradients."""
        return step < self.look_from + WITHIN and what not in self.looked

    def waits(self, step: int) -> bool:
        """Nothing is taken, and it is too early to take anything."""
        return bool(self.next_at) and not (self.parameters or self.gradients or self.owes(step))


class _Edits:
    def __init__(self) -> None:
        self.models: dict[Model, Followed] = {}
        self.calls: dict[int, int] = {}
        self.depth = 0
        self.spent_ns = 0


_edits = _Edits()
_looking = Subscriptions()
"""While there is something taken, or something may be."""


def install() -> None:
    import torch.amp
    import torch.nn.utils as utils
    from torch.nn.utils import clip_grad

    _edits.__init__()  # type: ignore[misc]
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        if hasattr(clip_grad, name):
            owners = (clip_grad, utils)
            lost = "clipping of gradients"
            around(owners, name, before=_clipping(name), after=_changed, lost=lost)
    around(torch.amp.GradScaler, "unscale_", before=_unscaling, after=_changed, lost=LOST)
    lifecycle.wrapped.subscribe(_wrapped, lost=LOST)
    lifecycle.pulse.subscribe(_pulse, lost=LOST)
    lifecycle.step_due.subscribe(_step_due, lost=LOST)
    _looking[:] = (
        lifecycle.backward_ends.subscribe(_backward_ends, lost=LOST),
        lifecycle.step_begins.subscribe(_step_begins, lost=LOST),
        lifecycle.step_ends.subscribe(_step_ends, lost=LOST),
    )


def _clipping(name: str) -> Any:
    def before(
        recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, int]:
        _changing()
        site = recorder.site()
        call = _edits.calls.get(site, 0)
        _edits.calls[site] = call + 1
        if call < 20 or call & (call - 1) == 0:
            at = time.monotonic()
            recorder.emit(Clipped(at=at, function=name, step=recorder.step, call=call, site=site))
        return name, site

    return before


def _unscaling(
    recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, int]:
    _changing()
    return "unscale_", -1


def _changing() -> None:
    """A function of torch's is about to change gradients."""
    _edits.depth += 1
    if _edits.depth > 1:
        return
    began = time.perf_counter_ns()
    for model, taken in _taken():
        taken.called(_gradients(model, taken.positions))
    _edits.spent_ns += time.perf_counter_ns() - began


def _changed(recorder: Recorder, token: Any, result: Any, error: BaseException | None) -> None:
    _edits.depth = max(0, _edits.depth - 1)
    if _edits.depth or token is None:
        return
    name, site = token
    began = time.perf_counter_ns()
    for model, taken in _taken():
        taken.returned(_gradients(model, taken.positions), name, site)
        tracer = _followed(model).tracer
        if tracer is not None and tracer.kind == "gradients":
            tracer.pass_over()
    _edits.spent_ns += time.perf_counter_ns() - began


def _taken() -> list[tuple[Model, Taken]]:
    return [(m, f.gradients) for m, f in _edits.models.items() if f.gradients is not None]


def _gradients(model: Model, positions: list[int]) -> list[Any]:
    return [_gradient(model, p) for p in positions]


def _followed(model: Model) -> Followed:
    if (found := _edits.models.get(model)) is None:
        found = _edits.models[model] = Followed()
    return found


def look_now(model: Model) -> None:
    """Something was seen to happen to the gradients: look from the next backward on, whatever it
    costs, for as long as at the start."""
    followed = _followed(model)
    followed.moments, followed.next_at = 0, 0.0
    followed.count = min(followed.count, EMITTED_AT_MOST - EMITTED_ON_DEMAND)
    _looking.enable()


def _wrapped(recorder: Recorder, model: Model) -> None:
    _looking.enable()


def _pulse(recorder: Recorder, step: Step) -> None:
    if any(step.began >= followed.next_at for followed in _edits.models.values()):
        _looking.enable()
    _step_due(recorder, step, OVERDUE)


def _step_due(recorder: Recorder, step: Step, apart: int = APART) -> None:
    """Look now and then whatever it costs, or what begins late would never be seen. Steps that are
    due are multiples of some number, and so may those be in which a program edits: a bit later."""
    for followed in _edits.models.values():
        if followed.next_at and recorder.step - followed.look_from >= apart:
            followed.look_at(recorder.step + 1 + recorder.step // apart % 7)
            _looking.enable()


def _affordable(recorder: Recorder, followed: Followed, what: int | None = None) -> bool:
    """Whether to take tensors now; the ranks need not agree, nothing here is compared."""
    followed.moments += 1
    if followed.moments <= 2 * ALWAYS:
        return True
    if recorder.every:
        return recorder.step % recorder.every == 0
    if recorder.step >= followed.look_from and followed.owes(recorder.step, what):
        followed.looked.add(what)
        return True
    now = time.monotonic()
    if now < followed.next_at:
        return False
    share = SHARE if recorder.affordable() else LEAST
    part = max(1e-9, recorder.budget_percent / 100 * share)
    followed.next_at = recorder.started + _edits.spent_ns / 1e9 / part
    return now >= followed.next_at


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    _edits.depth = 0
    if backward.error is not None:
        return
    for model in backward.models:
        followed = _followed(model)
        followed.gradients = None
        if not gradient_sync.averaged(model) or not _affordable(recorder, followed):
            continue
        began = time.perf_counter_ns()
        positions = _chosen(recorder, model.expected) if followed.whole else _some(model.expected)
        followed.gradients = Taken(positions, _gradients(model, positions), sampled=True)
        followed.backward_site = backward.site
        followed.gradients.touched = WrittenGradients(model, model.expected)
        _trace(recorder, followed, "gradients", model)
        _edits.spent_ns += time.perf_counter_ns() - began


def _chosen(recorder: Recorder, positions: list[int]) -> list[int]:
    """All of them where the user asked for this step."""
    asked = recorder.every and recorder.step % recorder.every == 0
    return list(positions) if asked else _some(positions)


def _some(positions: list[int]) -> list[int]:
    step = max(1, len(positions) // (LOOKED_AT - 1))
    return sorted({*positions[::step][: LOOKED_AT - 1], *positions[-1:]})


def _gradient(model: Model, position: int) -> Any:
    parameter = model.parameters[position]()
    return None if parameter is None else parameter.grad


def _step_begins(recorder: Recorder, step: Step) -> None:
    for holding in step.holdings:
        followed = _followed(holding.model)
        if holding.optimizer not in followed.parameters and followed.gradients is None:
            continue
        began = time.perf_counter_ns()
        emit_parameters(recorder, step.number, holding)
        if (before := followed.states.pop(holding.optimizer, None)) is not None:
            after = _state(step, holding, before.positions)
            if after.numbers != before.numbers:
                _find_state_edit(recorder, followed, step)
            _emit(recorder, step.number, holding, "state", before, after)
        taken = followed.gradients
        followed.gradients = None
        if taken is not None:
            mine = taken.only(holding.held)
            if mine.positions and not step.closure:
                now = Taken(mine.positions, _gradients(holding.model, mine.positions), sampled=True)
                _emit(recorder, step.number, holding, "gradients", mine, now)
            if rest := set(taken.positions).difference(mine.positions):
                followed.whole, followed.gradients = False, taken.only(rest)
        _edits.spent_ns += time.perf_counter_ns() - began


def emit_parameters(recorder: Recorder, step: int, holding: OptimizerModel) -> None:
    """Before a step, or when none is to come."""
    before = _followed(holding.model).parameters.pop(holding.optimizer, None)
    if before is not None:
        now = Taken(before.positions, holding.parameters(before.positions), sampled=False)
        _emit(recorder, step, holding, "parameters", before, now)


def _step_ends(recorder: Recorder, step: Step) -> None:
    for holding in step.holdings:
        followed = _followed(holding.model)
        if not _affordable(recorder, followed, holding.optimizer):
            continue
        began = time.perf_counter_ns()
        positions = _chosen(recorder, holding.positions)
        held = holding.parameters(positions)
        followed.parameters[holding.optimizer] = Taken(positions, held, sampled=False)
        followed.states[holding.optimizer] = _state(step, holding, positions)
        _trace(recorder, followed, "parameters", holding.model)
        _trace(recorder, followed, "state", holding.model, step)
        _edits.spent_ns += time.perf_counter_ns() - began
    if not recorder.every and all(f.waits(recorder.step) for f in _edits.models.values()):
        _looking.disable()


def _state(step: Step, holding: OptimizerModel, positions: list[int]) -> Taken:
    """The optimizer's state, by what stands for it: no tensor is read."""
    taken = Taken(positions, [], sampled=True)
    optimizer = step.optimizer()
    taken.numbers = [state_of(optimizer, p) for p in holding.parameters(positions)]
    return taken


def _find_state_edit(recorder: Recorder, followed: Followed, step: Step) -> None:
    """It may happen once only: the source of what is running is asked for its line."""
    optimizer = step.optimizer()
    if optimizer is None or ("state", True) in followed.sites or followed.searched == SEARCHES:
        return
    followed.searched += 1
    found = state_edit_in_frames(
        sys._getframe(1), lambda code: recorder.sites.kind(code) == "user", optimizer
    )
    if found is not None:
        followed.sites["state", True] = (recorder.sites.number(found.code, found.line),)


def _clearing(recorder: Recorder, followed: Followed) -> tuple[int, ...]:
    """The same for gradients that are gone, or zero."""
    if followed.clears is None:
        followed.clears = clearing_site(recorder, sys._getframe(1), followed.backward_site)
    return followed.clears


def _emit(
    recorder: Recorder, step: int, holding: OptimizerModel, kind: str, before: Taken, now: Taken
) -> None:
    followed = _followed(holding.model)
    pairs = zip(before.positions, before.numbers, now.numbers, strict=True)
    differing = [p for p, old, new in pairs if old != new]
    counted: list[int] = []
    if before.touched is not None:
        before.touched.look()
        counted = sorted(before.touched.besides(before.positions, holding.held))
    changed = bool(differing or counted)
    functions = tuple(before.functions) if differing else ()
    beside = bool(functions) and (before.beside or now.numbers != before.latest or bool(counted))
    undone = [] if changed else rewritten(before, now)
    changers = dict(before.changers) if differing else {}
    share = ratio(before.values, now.values) if differing and kind == "gradients" else 0.0
    besides = before.besides(now) if beside and differing else 0.0
    if followed.tracer is not None and followed.tracer.kind == kind:
        found = followed.tracer.stop()
        followed.tracer = None
        if found and (changed or undone):
            followed.wanted.pop(kind, None)
            divisors = {at: divided_by_world_size(at[0].co_filename, at[1]) for at in found}
            found.sort(key=lambda at: not divisors[at])
            followed.sites[kind, changed] = tuple(recorder.sites.number(*place) for place in found)
            followed.divisors[kind, changed] = divisors[found[0]]
    after = dict(zip(now.positions, now.numbers, strict=True))
    by_hand = undone or counted or (differing if beside or not functions else [])
    if by_hand and (kind, changed) not in followed.sites:
        gone = [p for p in by_hand if after.get(p) == ABSENT]
        followed.wanted[kind] = (gone or by_hand)[0]
        followed.expected[kind] = 2 * recorder.step - followed.changed_at.get(kind, recorder.step)
        followed.changed_at[kind] = recorder.step
    late = followed.next_at and followed.followed_up < TRACED_AT_MOST
    if late and kind in followed.wanted and recorder.step - followed.changed_at[kind] <= 1:
        followed.followed_up += 1  # it was seen just now: its line may be found in the next steps
        followed.look_at(recorder.step + 1)
    key = (kind, holding.optimizer)
    sites = followed.sites.get((kind, changed), ()) if changed or undone else ()
    if kind == "gradients" and differing and not sites:
        sites = _clearing(recorder, followed) if {after[p] for p in differing} <= CLEARED else ()
    how = (beside, bool(undone), bool(counted))
    state = (changed, share, besides, sites, how, functions, changers)
    if followed.emitted.get(key, NOTHING) == state or followed.count >= EMITTED_AT_MOST:
        return
    followed.count += 1
    followed.emitted[key] = state
    recorder.emit(
        Edited(
            at=time.monotonic(),
            model=holding.model.number,
            optimizer=holding.optimizer,
            kind=kind,
            step=step,
            changed=changed,
            ratio=share,
            site=sites[0] if sites else -1,
            more=sites[1:],
            functions=functions,
            changers=changers,
            besides=besides,
            beside=beside,
            undone=bool(undone),
            counted=bool(counted),
            divisor=followed.divisors.get((kind, True), "") if changed else "",
        )
    )


def _trace(
    recorder: Recorder, followed: Followed, kind: str, model: Model, step: Step | None = None
) -> None:
    """Follow the lines up to the next moment, where the last time something was edited."""
    position = followed.wanted.get(kind, -1)
    traced = followed.traced.get(kind, 0)
    if position < 0 or followed.tracer is not None:
        return
    if traced >= TRACED_AT_MOST and followed.expected.get(kind) != recorder.step:
        return
    inner = model.inner()
    if inner is None or any(
        hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in inner.modules()
    ):
        return  # torch.compile and a trace function do not go together
    reference = model.parameters[position]
    optimizer = step.optimizer if step is not None else None

    def number() -> int:
        parameter = reference()
        if optimizer is not None:
            return state_of(optimizer(), parameter)
        tensor = parameter.grad if parameter is not None and kind == "gradients" else parameter
        return digests([tensor])[0]

    followed.traced[kind] = traced + 1
    followed.tracer = Tracer.start(recorder, kind, number)
