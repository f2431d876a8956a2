"""Whether the gradients that a step applies were averaged, and how often on the way."""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from typing import Any

from ....events import SyncPattern
from ...recording.patching import around
from ...recording.recorder import Recorder, current_recorder
from ...recording.torch_compat import exposed_seconds
from ...recording.weak_references import WeakIdentityMap
from ...source.call_resolver import setting_in_frames
from ...training import autograd_grad, lifecycle, wrapped_models
from ...training.accumulate_grad import Captures
from ...training.backward_observation import Look
from ...training.records import Backward, Forward, OptimizerModel, Step
from ...training.steady_state import Plan, interrupted, routine
from ...training.tracked_model import Model
from ..manual_sync import exchanges

LOST = "which backwards synchronised"

NOT_REDUCED = "not reduced"
INSIDE = "inside forward"
EMITTED_AT_MOST = 2000
AGAIN_AT = (9, 99, 999)
"""Steps at which an unchanged pattern is told again, with what DDP has measured by then."""


class Contribution:
    """One backward into a model's gradients."""

    __slots__ = ("blame", "forward_site", "late", "reason", "site", "synced", "touched")

    def __init__(self, site: int, synced: bool, touched: frozenset[int]) -> None:
        self.site = site
        self.synced = synced
        self.touched = touched
        self.reason = ""
        self.blame = -1
        self.late = -1
        self.forward_site = -1


class Sync:
    """What is known of one model since its gradients were last cleared.

    Attributes:
        forwards: with gradients, since the last backward; the last one at `forward_site` with
            synchronisation on or off (`flag`), switched off at `off_site`.
        functional: the line of an `autograd.grad` on its parameters since the last step or, if
            that came later, the last backward.
        carried: `exchanges.numbers_passed()` when the last of these, or the last backward, began.
        last: whether the last backward averaged, None where that is not known; `stepped` are the
            optimizers that have stepped since.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.contributions: list[Contribution] = []
        self.forwards = 0
        self.flag = True
        self.forward_site = -1
        self.off_site = -1
        self.functional = -1
        self.carried = 0
        self.last: bool | None = None
        self.stepped: set[int] = set()
        self.after: list[tuple[int, int]] = []
        self.backward_s = 0.0
        self.emitted: dict[int, tuple[Any, ...]] = {}
        self.count = 0


class _Syncs(dict[Model, Sync]):
    """`carried` is `exchanges.numbers_passed()` when the last backward began."""

    carried = 0

    def __missing__(self, model: Model) -> Sync:
        sync = self[model] = Sync(model)
        return sync


_syncs = _Syncs()
_off_sites: WeakIdentityMap[int] = WeakIdentityMap()
"""By wrapper, the line of its last `no_sync`; `_contexts` what that gave, `_set_sites` the line
that sets DDP's flag by hand."""
_contexts: WeakIdentityMap[weakref.ref[Any]] = WeakIdentityMap()
_set_sites: WeakIdentityMap[int] = WeakIdentityMap()


def install() -> None:
    import torch.autograd
    from torch.nn.parallel.distributed import DistributedDataParallel

    _syncs.clear()
    for known in (_off_sites, _contexts, _set_sites):
        known.clear()
    autograd_grad.forget()
    lost = "the lines of no_sync"
    around(DistributedDataParallel, "no_sync", before=_no_sync, after=_no_sync_made, lost=lost)
    lost = "gradients taken by autograd.grad"
    around(torch.autograd, "grad", before=_functional, after=_functional_ends, lost=lost)
    lifecycle.forward_ends.subscribe(_forward_ends, routine=False, lost=LOST)
    lifecycle.backward_begins.subscribe(_backward_begins, routine=False, lost=LOST)
    lifecycle.backward_ends.subscribe(_backward_ends, routine=False, lost=LOST)
    lifecycle.step_begins.subscribe(_step_begins, routine=False, lost=LOST)
    lifecycle.closure_ends.subscribe(_closure_ends, lost=LOST)
    lifecycle.step_ends.subscribe(_step_ends, routine=False, lost=LOST)
    interrupted.subscribe(_interrupted, lost=LOST)


def averaged(model: Model, optimizer: int | None = None) -> bool | None:
    """Whether the last backward into a model's gradients averaged them; None where there was
    none since the last step (of that optimizer, if given: several may share a backward)."""
    if routine.averaged(model):
        return True
    sync = _syncs.get(model)
    if sync is not None and sync.contributions:
        return sync.contributions[-1].synced
    if sync is None or optimizer is None or optimizer in sync.stepped:
        return None
    return sync.last


def _no_sync(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> weakref.ref[Any]:
    _off_sites[args[0]] = recorder.site()
    return weakref.ref(args[0])


def _no_sync_made(
    recorder: Recorder, wrapper: weakref.ref[Any], context: Any, error: BaseException | None
) -> None:
    if error is None and (found := wrapper()) is not None:
        _contexts[found] = weakref.ref(context)


def _functional(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    inputs = args[1] if len(args) > 1 else kwargs.get("inputs", ())
    inputs = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
    exchanges.autograd_grad_called(recorder, inputs)
    wanted = {id(t) for t in inputs}
    for model in wrapped_models.live():
        if any((p := ref()) is not None and id(p) in wanted for ref in model.parameters):
            routine.stop(recorder)
            _syncs[model].functional, _syncs[model].last = recorder.site(), None
            _syncs[model].carried = exchanges.numbers_passed()
    Captures.depth += 1
    return autograd_grad.begins(args, kwargs)


def _functional_ends(
    recorder: Recorder, first: int | None, result: Any, error: BaseException | None
) -> None:
    if first is None:
        return
    Captures.depth = max(0, Captures.depth - 1)
    autograd_grad.ends(recorder, first)


def _forward_ends(recorder: Recorder, forward: Forward) -> None:
    if not forward.grad_enabled or forward.error is not None:
        return
    sync = _syncs[forward.model]
    sync.forwards += forward.model.pending > 0  # else its backward ran inside of it
    sync.flag = bool(forward.wrapper.require_backward_grad_sync)  # DDP itself asks at the end
    sync.forward_site = forward.site
    sync.off_site = -1 if sync.flag else _off_site(recorder, forward.wrapper)


def _interrupted(recorder: Recorder, step: Plan) -> None:
    """What has passed of a step that was a routine one so far."""
    sync, wrapper = _syncs[step.model], step.wrapper()
    sync.last = None
    for one in step.passed():
        if one.forward is not None:
            sync.forwards += 1
            sync.flag, sync.forward_site = one.sync, one.forward.site
            sync.off_site = -1 if one.sync else _off_site(recorder, wrapper, now=False)
        elif one.backward is not None:
            sync.after = step.model.gradients()
            averaged = step.model.number in one.backward.synced
            new = Contribution(one.backward.site, averaged, frozenset(step.model.sample))
            _contribute(sync, one.backward, new, own_forward=True)


def _off_site(recorder: Recorder, wrapper: Any, *, now: bool = True) -> int:
    """The line of the `no_sync` that is open (or was, if not `now`), or else the one that sets
    DDP's flag by hand."""
    last = _off_sites.get(wrapper, -1)
    if last >= 0 and not (now and _closed(wrapper)):
        return last
    if wrapper not in _set_sites:
        found = setting_in_frames(
            sys._getframe(1),
            lambda code: recorder.sites.kind(code) == "user",
            "require_backward_grad_sync",
        )
        _set_sites[wrapper] = recorder.sites.number(found.code, found.line) if found else -1
    return _set_sites[wrapper] if _set_sites[wrapper] >= 0 else last


def _closed(wrapper: Any) -> bool:
    """Whether the last `no_sync` is over."""
    reference = _contexts.get(wrapper)
    context = reference() if reference is not None else None
    generator = getattr(context, "gen", None)
    return reference is not None and getattr(generator, "gi_frame", None) is None


def _backward_begins(recorder: Recorder, backward: Backward) -> None:
    _syncs.carried = exchanges.numbers_passed()
    for look in backward.looks:
        sync = _syncs.get(look.model)
        if sync is not None and sync.contributions and _cleared(sync, look.before):
            sync.contributions.clear()


def _cleared(sync: Sync, gradients: list[tuple[int, int]]) -> bool:
    """Whether every gradient was dropped or overwritten since the last backward."""
    pairs = zip(gradients, sync.after, strict=True)
    return bool(sync.after) and all(now != then for now, then in pairs if then[1] >= 0)


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    if backward.error is not None:
        return
    for look in backward.looks:
        model = look.model
        if not model.forwards or look.wrapper is None:
            continue
        sync = _syncs[model]
        sync.after = look.after
        touched = look.touched_positions()
        if touched or model in backward.models or model in backward.continued:
            _contributed(recorder, sync, backward, look, touched)


def _contributed(
    recorder: Recorder, sync: Sync, backward: Backward, look: Look, touched: frozenset[int]
) -> None:
    now = look.sequence_after
    communicated = look.communicated or now < 0
    wrapper = look.wrapper
    if look.model.running:  # whoever asked DDP's reducer to prepare for it: did it communicate?
        sync.forward_site = look.model.forward_site
        new = Contribution(backward.site, communicated, touched)
        _contribute(sync, backward, new, own_forward=True)
        return
    own_forward = sync.forwards > 0 or look.model in backward.continued
    new = Contribution(backward.site, communicated and own_forward and sync.flag, touched)
    if new.synced and wrapper is not None and not wrapper.require_backward_grad_sync:
        new.late = _off_site(recorder, wrapper)
    _contribute(sync, backward, new, own_forward)


def _contribute(sync: Sync, backward: Backward, new: Contribution, own_forward: bool) -> None:
    new.forward_site = sync.forward_site
    if new.synced:
        took = time.monotonic() - backward.began
        sync.backward_s += (took - sync.backward_s) * (0.1 if sync.backward_s else 1.0)
    if not new.synced:
        new.reason, new.blame = _reason(sync, backward, own_forward)
        examined = sync.model.number in backward.untouched  # and told of as such
        if new.reason == NOT_REDUCED and not examined and (recorder := current_recorder()):
            lifecycle.gradients_missing.fire(recorder, (sync.model, backward.site))
    sync.contributions.append(new)
    sync.functional = -1
    sync.last = new.synced
    sync.stepped.clear()
    sync.carried = _syncs.carried
    sync.forwards = 0


def _reason(sync: Sync, backward: Backward, own_forward: bool) -> tuple[str, int]:
    if not own_forward:
        return "second backward", backward.site
    if sync.model.running:
        wrapper = sync.model.ddp()
        if wrapper is None or wrapper.require_backward_grad_sync:
            return INSIDE, backward.site
        blame = _off_sites.get(wrapper, -1)
        return "no_sync", blame if blame >= 0 else backward.site
    if sync.flag:
        return NOT_REDUCED, backward.site
    wrapper = sync.model.ddp()
    blame = sync.off_site if sync.off_site >= 0 else backward.site
    if wrapper is not None and wrapper.require_backward_grad_sync:
        return "forward only", blame
    return "no_sync", blame


def _step_begins(recorder: Recorder, step: Step) -> None:
    if step.closure:
        return
    for holding in step.holdings:
        _judge(recorder, step, holding)


def _closure_ends(recorder: Recorder, step: Step) -> None:
    for holding in step.holdings:
        _judge(recorder, step, holding)


def _step_ends(recorder: Recorder, step: Step) -> None:
    for holding in step.holdings:
        sync = _syncs[holding.model]
        sync.contributions.clear()
        sync.functional = -1
        sync.stepped.add(holding.optimizer)


def _judge(recorder: Recorder, step: Step, holding: OptimizerModel) -> None:
    sync = _syncs[holding.model]
    made = sync.contributions
    last = made[-1] if made else None
    if sync.functional >= 0 and (last is None or last.reason):
        gradients = holding.model.gradients()
        there = any(version >= 0 for _, version in gradients)
        if there and (last is None or _cleared(sync, gradients)):
            last = Contribution(-1, False, frozenset())
            last.reason, last.blame = "autograd.grad", sync.functional
    if last is None:
        return
    reason, blame = last.reason, last.blame
    line, once = _most_synced(made)
    averaged = made[0].synced if len(made) == 1 else sum([c.synced for c in made])
    late = max((c.late for c in made), default=-1)
    pattern = (int(averaged), len(made) - averaged, reason, blame, line, late)
    unchanged = sync.emitted.get(holding.optimizer) == pattern and step.number not in AGAIN_AT
    if unchanged or sync.count >= EMITTED_AT_MOST:
        return
    sync.emitted[holding.optimizer] = pattern
    sync.count += 1
    held = holding.parameters(holding.positions) if reason else []
    parameters = [p for p in held if p is not None]
    recorder.emit(
        SyncPattern(
            at=time.monotonic(),
            model=holding.model.number,
            optimizer=holding.optimizer,
            step=step.number,
            synced=pattern[0],
            unsynced=pattern[1],
            reason=reason,
            site=blame,
            forward_site=last.forward_site,
            backward_site=last.site,
            once=once,
            line=line,
            late=late,
            talked=exchanges.gradients_exchanged(parameters),
            carried=exchanges.numbers_passed() - sync.carried,
            backward_s=sync.backward_s,
            exposed_s=exposed_seconds(holding.model.ddp()),
        )
    )


def _most_synced(made: list[Contribution]) -> tuple[int, int]:
    """The line whose backwards averaged the same parameters most often, and how often."""
    if len(made) == 1:
        return (made[0].site, 1) if made[0].synced else (-1, 0)
    counts: Counter[int] = Counter()
    for position, one in enumerate(made):
        shared = any(
            one.touched & other.touched for other in made[:position] + made[position + 1 :]
        )
        if one.synced and shared:
            counts[one.site] += 1
    return counts.most_common(1)[0] if counts else (-1, 0)
