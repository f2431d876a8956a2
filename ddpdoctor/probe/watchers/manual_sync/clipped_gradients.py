"""What were manually synchronised gradients before torch clipped them?

Clipping by a norm of all gradients makes also those differ that were synchronised, where the norm
covers some that were not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...recording.devices import hands_off
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Kwargs, Watcher
from ...recording.weak_references import WeakIdentityMap
from ...tensors.digests import sums
from ...tensors.pending_digests import Waiting
from ...training.optimizers import Optimizers
from .exchanges import Exchanges
from .trained_parameters import unwrapped_parameters

CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


class Unclipped(NamedTuple):
    """The gradients of an optimizer before the first clipping since an exchange.

    Attributes:
        step: that they are for; mark: the exchanges until then (`Exchanges.tensors_exchanged`).
        parameters: their identities; digests: of their gradients.
        site: the line that clips.
    """

    step: int
    mark: tuple[int, int]
    parameters: list[int]
    digests: Waiting
    site: int


NOT_CLIPPED = Unclipped(-1, (-1, -1), [], Waiting([]), -1)


def on_clipping(watcher: Watcher, before: Callable[[Recorder, Args, Kwargs], None]) -> None:
    """Have a watcher called before functions of torch clip gradients."""
    import torch.nn.utils as utils
    from torch.nn.utils import clip_grad

    for name in CLIPPING:
        if hasattr(clip_grad, name):
            watcher.around((clip_grad, utils), name, before=before)


class ClippedGradients(Watcher):
    lost = "gradients before they are clipped"
    after = (Exchanges,)

    def __init__(self) -> None:
        self._kept: WeakIdentityMap[Unclipped] = WeakIdentityMap()

    def install(self) -> None:
        on_clipping(self, self._clips)

    def _clips(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        if not Exchanges.current.in_or_after_backward() or hands_off():
            return
        mark = Exchanges.current.tensors_exchanged()
        for optimizer in Optimizers.current.made():
            known = Optimizers.current.known_optimizer(optimizer)
            step = known.steps if known is not None else 0
            if step & (step - 1):
                continue  # no digest of each gradient is recorded before this step
            kept = self._kept.get(optimizer)
            if kept is not None and (kept.step, kept.mark) == (step, mark):
                continue
            if parameters := unwrapped_parameters(optimizer):
                digests = Waiting(sums(p.grad for p in parameters)[0])
                ids = [id(p) for p in parameters]
                self._kept[optimizer] = Unclipped(step, mark, ids, digests, recorder.site())

    def take(self, optimizer: Any, step: int, parameters: Sequence[Any]) -> Unclipped:
        """What the gradients of these parameters were before they were clipped for this step."""
        if (kept := self._kept.get(optimizer)) is None:
            return NOT_CLIPPED
        del self._kept[optimizer]
        same = kept.step == step and kept.mark == Exchanges.current.tensors_exchanged()
        same &= kept.parameters == [id(p) for p in parameters]
        return kept if same else NOT_CLIPPED
