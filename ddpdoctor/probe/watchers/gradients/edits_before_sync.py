"""Are gradients clipped or scaled before they are averaged over the ranks?

Between a backward that did not synchronise and what averages its gradients later, a few values of
them tell whether the program changed them: a synchronised backward of DDP, or collectives of the
program's own. What is cleared in between, or applied without being averaged, is left alone.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ....events import EditedBeforeSync
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...recording.weak_references import Reference
from ...tensors.tensor_watch import TensorWatch, grad_of, spread
from ...training import lifecycle
from ...training.optimizers import Optimizers
from ...training.records import Backward, Optimizer, Step
from ...training.tracked_model import Model
from ..manual_sync.exchanges import Exchanges
from ..manual_sync.unwrapped import UnwrappedParameters
from .gradient_edits import NOW, ratio, values
from .limits import EARLY_EDITS_EMITTED, EARLY_LOOKS, LOOKED_AT

LAST = "last"
"""The moment with which gradients are compared."""

CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


class _Edit(NamedTuple):
    """A change of gradients that were not averaged yet.

    Attributes:
        function: of torch, called at `site`; empty and -1 for a change by hand.
        factor: all looked-at values were multiplied by it, 0 if there is no such factor.
        backward_site: the line of the backward before it.
    """

    function: str
    site: int
    factor: float
    backward_site: int


class _Gradients:
    """Gradients of one wrapped model, or of one optimizer's parameters that are in none.

    Attributes:
        parameters: a few of them.
        looked_at: values and identities of their gradients after the last backward that did not
            average them, or the last change since; `waiting` while there was such a backward.
        edits: changes since they were cleared; `averaged`: DDP averaged them afterwards.
        backward_site: the line of that backward.
    """

    def __init__(self, every: list[Reference]) -> None:
        self.every = every
        self.parameters = parameters = spread(every, LOOKED_AT)
        self.looked_at = TensorWatch(
            range(len(parameters)), partial(_gradients_of, parameters), values, _identities
        )
        self.waiting = False
        self.edits: list[_Edit] = []
        self.averaged = False
        self.backward_site = -1

    def keep(self) -> None:
        self.looked_at.keep(LAST)

    def forget(self) -> None:
        """They were cleared, or applied."""
        self.waiting = self.averaged = False
        self.edits = []

    def changed(self, function: str = "", site: int = -1) -> None:
        """Note a change since the last look, if there was one."""
        kept = self.looked_at.kept
        before = kept[LAST][0]
        if self.looked_at.changed_again(LAST):
            factor = ratio(before, kept[LAST][0])
            self.edits.append(_Edit(function, site, factor, self.backward_site))

    def cleared(self) -> bool:
        """Whether they were dropped, replaced or set to zero since the last look."""
        self.looked_at.keep(NOW)
        then, now = (self.looked_at.kept[moment][0] for moment in (LAST, NOW))
        replaced = self.looked_at.changed(LAST, until=NOW, column=1)
        return len(replaced) == len(self.parameters) or (
            not any(map(any, now)) and any(map(any, then))
        )


def _gradients_of(parameters: list[Reference], positions: list[int]) -> list[Any]:
    return [grad_of(parameters[position]()) for position in positions]


def _identities(tensors: list[Any]) -> list[int]:
    return list(map(id, tensors))


class EditsBeforeSync(Watcher):
    """
    Attributes:
        models: by wrapped model.
        depth: functions of torch that change gradients and are running.
        looks: steps looked at.
        emitted: events recorded.
    """

    lost = "gradients that are clipped before they are averaged"

    def __init__(self) -> None:
        self.models: WeakKeyDictionary[Model, _Gradients] = WeakKeyDictionary()
        self.depth = self.looks = self.emitted = 0
        self._looking = Subscriptions()

    def install(self) -> None:
        import torch.nn.utils as utils
        from torch.nn.utils import clip_grad

        for name in CLIPPING:
            if hasattr(clip_grad, name):
                self.around(
                    (clip_grad, utils), name, before=self._clipping(name), after=self._clipped
                )

    def _clipping(self, name: str) -> Any:
        def before(recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
            self.depth += 1
            if self.depth > 1 or not self._looking or not self._looking[0].enabled:
                return None
            waiting = [one for one in self.models.values() if one.waiting]
            for known in Optimizers.current.known():
                if (one := _unwrapped(known)) is not None and not _exchanged(one):
                    one.keep()
                    waiting.append(one)
            # What the program did itself before this call is a change of its own.
            for one in waiting:
                if one.waiting:
                    one.changed()
            return (name, recorder.site(), waiting) if waiting else None

        return before

    def _clipped(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        self.depth = max(0, self.depth - 1)
        if token is None or error is not None:
            return
        name, site, waiting = token
        for one in waiting:
            # Where the program has exchanged them, this is no change before that.
            if not (one.waiting and _exchanged(one)):
                one.changed(name, site)

    @on(lifecycle.backward_begins, during="_looking", enabled=True)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        self.depth = 0
        for one in self.models.values():
            if (one.waiting or one.edits) and one.cleared():
                one.forget()
            elif one.waiting:
                one.changed()
        for known in Optimizers.current.known():
            if (mine := known.notes.get(_Gradients)) is not None and mine.edits and mine.cleared():
                mine.forget()

    @on(lifecycle.backward_ends, during="_looking", enabled=True)
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        if backward.error is not None:
            return
        for model in backward.models:
            one = self.models.get(model)
            if model.number in backward.synced:
                if one is not None:
                    one.averaged, one.waiting = bool(one.edits), False
                    if one.edits:
                        one.keep()
                continue
            if one is None:
                one = self.models[model] = _Gradients([model.parameters[p] for p in model.expected])
            one.waiting, one.backward_site = True, backward.site
            one.keep()

    @on(lifecycle.step_begins, during="_looking", enabled=True)
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        for holding in step.holdings:
            one = self.models.get(holding.model)
            if one is not None:
                self._emit(recorder, step, one, holding.model.number, one.averaged)
        if (one := _unwrapped(step.known)) is not None:
            self._emit(recorder, step, one, -1, False)
        # Steps in which nothing waits count too: most programs never have any that does.
        self.looks += 1
        if self.looks >= EARLY_LOOKS:
            self._looking.disable()

    def _emit(
        self, recorder: Recorder, step: Step, one: _Gradients, model: int, averaged: bool
    ) -> None:
        edits = one.edits
        by_hand = bool(edits) and not averaged and _exchanged(one, all_of=step)
        one.forget()
        if not (averaged or by_hand) or step.closure or self.emitted >= EARLY_EDITS_EMITTED:
            return
        self.emitted += 1
        edit = next((e for e in edits if e.function), edits[0])
        recorder.emit(
            EditedBeforeSync(
                at=time.monotonic(),
                model=model,
                optimizer=step.known.number,
                step=step.number,
                times=len([e for e in edits if e.function == edit.function]),
                function=edit.function,
                factor=edit.factor,
                by_hand=by_hand,
                site=edit.site,
                backward_site=edit.backward_site,
            )
        )

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        if self.looks >= EARLY_LOOKS and recorder.affordable():
            self.looks = EARLY_LOOKS - 1
            self._looking.enable()


def _unwrapped(known: Optimizer) -> _Gradients | None:
    """What is known of an optimizer's parameters that are in no wrapper, and whose gradients the
    program exchanges."""
    unwrapped = known.notes.get(UnwrappedParameters)
    if unwrapped is None or unwrapped.exchanged != "gradients":
        return None
    mine: _Gradients | None = known.notes.get(_Gradients)
    if mine is None:
        mine = known.notes[_Gradients] = _Gradients(list(unwrapped.parameters))
    return mine


def _exchanged(one: _Gradients, all_of: Step | None = None) -> bool:
    """Whether the program passed the gradients to collectives since the last backward: those of
    `one`, or of a step. All of them are asked for: a flat buffer is known by its size."""
    if all_of is not None and (optimizer := all_of.optimizer()) is not None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
    else:
        held = [p for ref in one.every if (p := ref()) is not None]
    return Exchanges.current.gradients_exchanged(held)
