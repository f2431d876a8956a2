"""Were the gradients that a step applies averaged by DDP, and in how many backwards?

Every backward into a model's gradients is noted as synchronised or not, with the reason if not.
Before each step the pattern of backwards since the gradients were cleared is recorded if it is new.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from typing import Any

from ....events import SyncPattern
from ...recording.recorder import Recorder, current_recorder
from ...recording.torch_compat import exposed_seconds
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...recording.weak_references import WeakIdentityMap
from ...source.call_resolver import setting_in_frames
from ...training import autograd_grad, lifecycle
from ...training.accumulate_grad import Captures
from ...training.autograd_grad import AutogradGrad
from ...training.backward_observation import BackwardObservation
from ...training.records import Backward, Forward, OptimizerModel, Step
from ...training.steady_state import Plan, interrupted, steady_state
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from ..manual_sync.exchanges import Exchanges
from .limits import AGAIN_AT, PATTERNS_EMITTED

NOT_REDUCED = "not reduced"
INSIDE_FORWARD = "inside forward"


class Contribution:
    """One backward into a model's gradients.

    Attributes:
        site: line of the backward.
        synced: it averaged them.
        touched: positions of sampled parameters that it reached.
        reason, blame: why it did not average, and the line to blame; empty and -1 if it did.
        late: line that switched synchronisation off only after the forward, -1 if none.
        forward_site: line of the forward before it.
    """

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
    """The backwards into one model's gradients since these were last cleared.

    Attributes:
        contributions: these backwards, in order.
        forwards: forwards with gradients since the last backward. The last one is at
            `forward_site`, with synchronisation on or off (`flag`), switched off at `off_site`.
        autograd_grad_site: line of an `autograd.grad` with respect to the parameters since the last
            step or backward.
        numbers_passed: `Exchanges.numbers_passed` when that call or the last backward began.
        last_averaged: whether the last backward averaged, None if unknown; `stepped` are the
            optimizers that have stepped since.
        after: identity and version of sampled gradients after the last backward.
        backward_s: moving average of the seconds from a synchronised backward's begin to its end.
        emitted: by optimizer, the pattern recorded last.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.contributions: list[Contribution] = []
        self.forwards = 0
        self.flag = True
        self.forward_site = -1
        self.off_site = -1
        self.autograd_grad_site = -1
        self.numbers_passed = 0
        self.last_averaged: bool | None = None
        self.stepped: set[int] = set()
        self.after: list[tuple[int, int]] = []
        self.backward_s = 0.0
        self.emitted: dict[int, tuple[Any, ...]] = {}
        self.count = 0


class _Syncs(dict[Model, Sync]):
    def __missing__(self, model: Model) -> Sync:
        sync = self[model] = Sync(model)
        return sync


class GradientSync(Watcher):
    """
    Attributes:
        syncs: by model.
        numbers_passed: `Exchanges.numbers_passed` when the last backward began.
    """

    lost = "which backwards synchronised"

    def __init__(self) -> None:
        self.syncs = _Syncs()
        self.numbers_passed = 0
        # By wrapper, the line of its last `no_sync`.
        self._off_sites: WeakIdentityMap[int] = WeakIdentityMap()
        # By wrapper, the context manager that this `no_sync` returned.
        self._contexts: WeakIdentityMap[weakref.ref[Any]] = WeakIdentityMap()
        # By wrapper, the line that sets `require_backward_grad_sync` directly.
        self._set_sites: WeakIdentityMap[int] = WeakIdentityMap()
        # By the numbers of two models, which parameters of the first one the second one has, too.
        self._in_both: dict[tuple[int, int], frozenset[int]] = {}

    def install(self) -> None:
        import torch.autograd
        from torch.nn.parallel.distributed import DistributedDataParallel

        lost = "the lines of no_sync"
        self.around(
            DistributedDataParallel,
            "no_sync",
            before=self._no_sync,
            after=self._no_sync_made,
            lost=lost,
        )
        lost = "gradients taken by autograd.grad"
        self.around(
            torch.autograd, "grad", before=self._grad_begins, after=self._grad_ends, lost=lost
        )

    def averaged(self, model: Model, optimizer: int | None = None) -> bool | None:
        """Whether the last backward into a model's gradients averaged them.

        None if there was none since the last step, or since the last step of `optimizer` where that
        is given (several optimizers may share a backward)."""
        if steady_state.averaged(model):
            return True
        sync = self.syncs.get(model)
        if sync is not None and sync.contributions:
            return sync.contributions[-1].synced
        if sync is None or optimizer is None or optimizer in sync.stepped:
            return None
        return sync.last_averaged

    def _no_sync(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> weakref.ref[Any]:
        self._off_sites[args[0]] = recorder.site()
        return weakref.ref(args[0])

    def _no_sync_made(
        self,
        recorder: Recorder,
        wrapper: weakref.ref[Any],
        context: Any,
        error: BaseException | None,
    ) -> None:
        if error is None and (found := wrapper()) is not None:
            self._contexts[found] = weakref.ref(context)

    def _grad_begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> int:
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs", ())
        inputs = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
        Exchanges.current.autograd_grad_called(recorder, inputs)
        wanted = {id(t) for t in inputs}
        for model in WrappedModels.current.live():
            if any((p := ref()) is not None and id(p) in wanted for ref in model.parameters):
                steady_state.stop(recorder)
                self.syncs[model].autograd_grad_site, self.syncs[model].last_averaged = (
                    recorder.site(),
                    None,
                )
                self.syncs[model].numbers_passed = Exchanges.current.numbers_passed
        Captures.depth += 1
        return autograd_grad.begins(args, kwargs)

    def _grad_ends(self, recorder: Recorder, first: int | None, result: Any, error: Error) -> None:
        if first is None:
            return
        Captures.depth = max(0, Captures.depth - 1)
        AutogradGrad.current.ends(recorder, first)

    @on(lifecycle.forward_ends, fast_path=False)
    def _forward_ends(self, recorder: Recorder, forward: Forward) -> None:
        if not forward.grad_enabled or forward.error is not None:
            return
        sync = self.syncs[forward.model]
        sync.forwards += forward.model.pending > 0  # else the backward ran inside the forward
        sync.flag = bool(forward.wrapper.require_backward_grad_sync)  # DDP itself asks at the end
        sync.forward_site = forward.site
        sync.off_site = -1 if sync.flag else self._off_site(recorder, forward.wrapper)

    @on(interrupted)
    def _interrupted(self, recorder: Recorder, step: Plan) -> None:
        """Catch up on the forwards and backwards of a step that began on the fast path."""
        sync, wrapper = self.syncs[step.model], step.wrapper()
        sync.last_averaged = None
        for one in step.passed():
            if one.forward is not None:
                sync.forwards += 1
                sync.flag, sync.forward_site = one.sync, one.forward.site
                sync.off_site = -1 if one.sync else self._off_site(recorder, wrapper, now=False)
            elif one.backward is not None:
                sync.after = step.model.gradients()
                averaged = step.model.number in one.backward.synced
                new = Contribution(one.backward.site, averaged, frozenset(step.model.sample))
                self._add_contribution(sync, one.backward, new, own_forward=True)

    def _off_site(self, recorder: Recorder, wrapper: Any, *, now: bool = True) -> int:
        """Line that switched synchronisation off: the `no_sync` that is open (`now`) or was opened
        last, else an assignment of `require_backward_grad_sync`; -1 if unknown."""
        last = self._off_sites.get(wrapper, -1)
        if last >= 0 and not (now and self._no_sync_is_over(wrapper)):
            return last
        if wrapper not in self._set_sites:
            found = setting_in_frames(
                sys._getframe(1),
                lambda code: recorder.sites.kind(code) == "user",
                "require_backward_grad_sync",
            )
            self._set_sites[wrapper] = (
                recorder.sites.number(found.code, found.line) if found else -1
            )
        return self._set_sites[wrapper] if self._set_sites[wrapper] >= 0 else last

    def _no_sync_is_over(self, wrapper: Any) -> bool:
        """Whether the context of the last `no_sync` was left: its generator then has no frame."""
        reference = self._contexts.get(wrapper)
        context = reference() if reference is not None else None
        generator = getattr(context, "gen", None)
        return reference is not None and getattr(generator, "gi_frame", None) is None

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        self.numbers_passed = Exchanges.current.numbers_passed
        for look in backward.observations:
            sync = self.syncs.get(look.model)
            if sync is not None and sync.contributions and _cleared(sync, look.before):
                sync.contributions.clear()

    @on(lifecycle.backward_ends, fast_path=False)
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        if backward.error is not None:
            return
        for look in backward.observations:
            model = look.model
            if not model.forwards or look.wrapper is None:
                continue
            sync = self.syncs[model]
            sync.after = look.after
            touched = look.touched_positions()
            own = model in backward.models or model in backward.continued
            if own or (touched and not touched <= self._shared(model, backward.models)):
                self._add(recorder, sync, backward, look, touched)

    def _shared(self, model: Model, others: list[Model]) -> frozenset[int]:
        """The positions of the parameters that other wrappers have too: these average what a
        backward over a forward of theirs adds."""
        found: frozenset[int] = frozenset()
        for other in others:
            pair = model.number, other.number
            if pair not in self._in_both:
                theirs = {id(p) for p in (other.live_parameters() or ())}
                mine = enumerate(model.live_parameters() or ())
                self._in_both[pair] = frozenset(n for n, p in mine if id(p) in theirs)
            found |= self._in_both[pair]
        return found

    def _add(
        self,
        recorder: Recorder,
        sync: Sync,
        backward: Backward,
        look: BackwardObservation,
        touched: frozenset[int],
    ) -> None:
        now = look.sequence_after
        communicated = look.communicated or now < 0
        wrapper = look.wrapper
        # Inside a forward DDP's flags say nothing: the program may have prepared the reducer
        # itself. Only communication counts.
        if look.model.running:
            sync.forward_site = look.model.forward_site
            new = Contribution(backward.site, communicated, touched)
            self._add_contribution(sync, backward, new, own_forward=True)
            return
        own_forward = sync.forwards > 0 or look.model in backward.continued
        new = Contribution(backward.site, communicated and own_forward and sync.flag, touched)
        if new.synced and wrapper is not None and not wrapper.require_backward_grad_sync:
            new.late = self._off_site(recorder, wrapper)
        self._add_contribution(sync, backward, new, own_forward)

    def _add_contribution(
        self, sync: Sync, backward: Backward, new: Contribution, own_forward: bool
    ) -> None:
        new.forward_site = sync.forward_site
        if new.synced:
            took = time.monotonic() - backward.began
            sync.backward_s += (took - sync.backward_s) * (0.1 if sync.backward_s else 1.0)
        if not new.synced:
            new.reason, new.blame = self._reason(sync, backward, own_forward)
            examined = sync.model.number in backward.untouched  # then it is already reported
            if new.reason == NOT_REDUCED and not examined and (recorder := current_recorder()):
                lifecycle.gradients_missing.fire(recorder, (sync.model, backward.site))
        sync.contributions.append(new)
        sync.autograd_grad_site = -1
        sync.last_averaged = new.synced
        sync.stepped.clear()
        sync.numbers_passed = self.numbers_passed
        sync.forwards = 0

    def _reason(self, sync: Sync, backward: Backward, own_forward: bool) -> tuple[str, int]:
        if not own_forward:
            recorder, model = current_recorder(), sync.model
            none = recorder is not None and model.forward_step < recorder.step
            return "no forward" if none else "second backward", backward.site
        if sync.model.running:
            wrapper = sync.model.ddp()
            if wrapper is None or wrapper.require_backward_grad_sync:
                return INSIDE_FORWARD, backward.site
            blame = self._off_sites.get(wrapper, -1)
            return "no_sync", blame if blame >= 0 else backward.site
        if sync.flag:
            return NOT_REDUCED, backward.site
        wrapper = sync.model.ddp()
        blame = sync.off_site if sync.off_site >= 0 else backward.site
        flag = backward.flag  # of one on the fast path, which is long over
        if flag is None:
            flag = wrapper is not None and bool(wrapper.require_backward_grad_sync)
        if flag:
            return "forward only", blame
        return "no_sync", blame

    @on(lifecycle.step_begins, fast_path=False)
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        if step.closure:
            return
        for holding in step.holdings:
            self._emit_pattern(recorder, step, holding)

    @on(lifecycle.closure_ends)
    def _closure_ends(self, recorder: Recorder, step: Step) -> None:
        for holding in step.holdings:
            self._emit_pattern(recorder, step, holding)

    @on(lifecycle.step_ends, fast_path=False)
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        for holding in step.holdings:
            sync = self.syncs[holding.model]
            sync.contributions.clear()
            sync.autograd_grad_site = -1
            sync.stepped.add(holding.optimizer)

    def _emit_pattern(self, recorder: Recorder, step: Step, holding: OptimizerModel) -> None:
        sync = self.syncs[holding.model]
        made = sync.contributions
        last = made[-1] if made else None
        if sync.autograd_grad_site >= 0 and (last is None or last.reason):
            gradients = holding.model.gradients()
            there = any(version >= 0 for _, version in gradients)
            if there and (last is None or _cleared(sync, gradients)):
                last = Contribution(-1, False, frozenset())
                last.reason, last.blame = "autograd.grad", sync.autograd_grad_site
        if last is None:
            return
        reason, blame = last.reason, last.blame
        line, once = _most_synced(made)
        averaged = made[0].synced if len(made) == 1 else sum([c.synced for c in made])
        late = max((c.late for c in made), default=-1)
        pattern = (int(averaged), len(made) - averaged, reason, blame, line, late)
        unchanged = sync.emitted.get(holding.optimizer) == pattern and step.number not in AGAIN_AT
        if unchanged or sync.count >= PATTERNS_EMITTED:
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
                talked=Exchanges.current.gradients_exchanged(parameters),
                carried=Exchanges.current.numbers_passed - sync.numbers_passed,
                backward_s=sync.backward_s,
                exposed_s=exposed_seconds(holding.model.ddp()),
            )
        )


def _cleared(sync: Sync, gradients: list[tuple[int, int]]) -> bool:
    """Whether every gradient was dropped or overwritten since the last backward."""
    pairs = zip(gradients, sync.after, strict=True)
    return bool(sync.after) and all(now != then for now, then in pairs if then[1] >= 0)


def _most_synced(made: list[Contribution]) -> tuple[int, int]:
    """The line whose backwards averaged the same parameters most often, and how often; (-1, 0) if
    none did."""
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
