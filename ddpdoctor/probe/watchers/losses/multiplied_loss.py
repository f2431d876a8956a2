"""Is a loss that is a mean multiplied by the world size, although DDP averages gradients?

The mean over the ranks' means is what DDP makes of them. A sum is wanted where a loss is a sum, is
divided by something of all ranks, or is computed from values of other ranks: nothing is said then.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Any

from ....events import LossMultiplied
from ...collectives import call_hooks
from ...recording.code_locations import classify
from ...recording.recorder import Recorder
from ...recording.torch_compat import made_at, saved
from ...recording.watcher import Watcher, on
from ...source.division import multiplied_by_world_size
from ...tensors.autograd_nodes import communicates, divisor_of, is_of_a_device, reduction_of
from ...tensors.limits import GRAPH_NODES
from ...training import lifecycle
from ...training.records import Backward
from ...training.wrapped_models import WrappedModels
from .limits import BACKWARDS_LOOKED_AT, MULTIPLIED_FOLLOWED, NODES_FOLLOWED
from .loss_scaling import LossScaling, group_size
from .reductions import elements_counted, rows_of

FIGURES = 4
"""Elements of a tensor of figures for the log; a larger one may be part of the loss."""

OF_TORCH = ("DDPSink", "CheckpointFunction", "SyncBatchNorm")
"""Functions with a backward in Python that bring no values of other ranks into the loss, but for
statistics."""

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')


class MultipliedLoss(Watcher):
    """
    Attributes:
        exchanged: tensors that may be part of the loss were exchanged since the last backward.
        looked: by site of the backward, how often its loss was looked at; `emitted`: sites that are
            on record, or given up.
        since: by site, the first step with the multiplication; `followed`: later backwards with it.
    """

    lost = "whether losses are multiplied by the world size"
    after = (LossScaling,)  # has the lines of nodes recorded

    def __init__(self) -> None:
        self.exchanged = False
        self.looked: dict[int, int] = {}
        self.since: dict[int, int] = {}
        self.followed: dict[int, int] = {}
        self.emitted: set[int] = set()

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: call_hooks.Call) -> None:
        if self.exchanged or not (call.carries_values or call.p2p):
            return
        parts = any(t.requires_grad or t.numel() > FIGURES for t in call.tensors)
        self.exchanged = (parts or not call.tensors) and not _of_batch_norm()

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        exchanged, self.exchanged = self.exchanged, False
        site = backward.site
        looked = self.looked.get(site, 0)
        if site in self.emitted or (looked >= BACKWARDS_LOOKED_AT and site not in self.since):
            return
        pending = [m for m in WrappedModels.current.live() if m.pending and m.pending_sync]
        if not pending:
            return
        self.looked[site] = looked + 1
        node = backward.roots[0].grad_fn if len(backward.roots) == 1 else None
        if exchanged or node is None:
            return
        for model in pending:
            size = group_size(model)
            found = multiplication(node, size, model.leading) if size > 1 else None
            if found is None:
                continue
            since = self.since.setdefault(site, recorder.step)
            file, line, function = _line(made_at(found) or [])
            if not file:
                self._follow(site)
                return
            self.emitted.add(site)
            LossScaling.current.unfollow(site)
            if expression := multiplied_by_world_size(file, line):
                recorder.emit(
                    LossMultiplied(
                        at=time.monotonic(),
                        model=model.number,
                        step=since,
                        size=size,
                        site=recorder.sites.place(file, line, function),
                        backward_site=site,
                        expression=expression,
                    )
                )
            return

    def _follow(self, site: int) -> None:
        """Have the lines of the next forward recorded, unless that did not help."""
        self.followed[site] = self.followed.get(site, 0) + 1
        if self.followed[site] > MULTIPLIED_FOLLOWED:
            self.emitted.add(site)
            LossScaling.current.unfollow(site)
        else:
            LossScaling.current.follow(site, self.since[site])


def multiplication(root: Any, size: int, leading: tuple[int, ...]) -> Any:
    """The node that multiplies by the number of ranks a mean, or a sum of means, over samples; None
    if there is none, or a sum over the ranks may be what the program wants.

    Args:
        leading: the leading sizes of the model's inputs, of which the first is the batch size.
    """
    found, last, node, weight = None, None, root, 1.0
    for _ in range(NODES_FOLLOWED):
        ahead = [n for n, _ in node.next_functions if n is not None]
        if is_of_a_device(node):
            return None
        if divisor := divisor_of(node):
            last, weight = node, weight / divisor
            if found is None and abs(divisor * size - 1) < 1e-6:
                found, weight = node, weight / size
        if len(ahead) != 1 or reduction_of(node):
            break
        node = ahead[0]
    if found is None and last is not None and reduction_of(node) == "sum":
        found, weight = last, weight / size  # times `size / count`
    if found is None or not leading or (weight != 1 and reduction_of(node) != "sum"):
        return None
    if not _means(node, size, leading[0], weight):
        return None
    return None if _of_other_ranks(root) else found


def _means(node: Any, size: int, batch: int, weight: float) -> bool:
    """Whether a node is a mean over samples, or a sum of means that may have weights.

    Args:
        weight: what it is multiplied by: a sum over the elements that count divided by their number
            is a mean, and a mean that is scaled is none.
    """
    terms = [(node, weight)]
    for _ in range(NODES_FOLLOWED * 4):
        if not terms:
            return True
        node, weight = terms.pop()
        ahead = [n for n, _ in node.next_functions if n is not None]
        if is_of_a_device(node):
            return False
        if reduction := reduction_of(node):
            by_hand = _mean_by_hand(node, size, batch, weight)
            scaled = reduction != "mean" or _counts(1 / weight if weight else 0.0, size)
            if not by_hand and (scaled or not _over_samples(node, size, batch)):
                return False
        elif len(ahead) == 1 or (node.name().startswith(("Add", "Sub")) and ahead):
            weight /= divisor_of(node) or 1.0
            terms += [(n, weight) for n in ahead]
        else:
            return False
    return False


def _counts(divisor: float, size: int) -> bool:
    """Whether a weight may be a number of samples or ranks, or one over that."""
    factor = 1 / divisor if divisor else 1.0
    whole = abs(factor - round(factor)) < 1e-6 * factor and round(factor) != 1
    return whole or (divisor != 0 and divisor % size == 0)


def _mean_by_hand(node: Any, size: int, batch: int, weight: float) -> bool:
    """Whether a sum over the samples, times a weight, is their mean, or that of the elements that
    count on this rank."""
    if reduction_of(node) != "sum" or not _over_samples(node, size, batch):
        return False
    return abs(weight * elements_counted(node) - 1) < 1e-4


def _over_samples(node: Any, size: int, batch: int) -> bool:
    """Whether a node reduces the samples, none of which were summed or weighted before."""
    if rows_of(node) < 1 or rows_of(node) % batch:
        return False
    for _ in range(NODES_FOLLOWED):
        ahead = [n for n, _ in node.next_functions if n is not None]
        if len(ahead) != 1:
            return True
        node = ahead[0]
        if divisor_of(node) and divisor_of(node) % size == 0:
            return False
        if node.name().startswith("Sum"):
            try:
                over = saved(node, "_saved_dim")
            except LookupError:
                return False
            if over is None or 0 in tuple(over):
                return False
    return True


def _of_other_ranks(root: Any) -> bool:
    """Whether the graph has functions that may bring in values of other ranks."""
    import torch

    left, seen = [root], {root}
    while left and len(seen) < GRAPH_NODES:
        node = left.pop()
        name = node.name()
        custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        if custom and not any(known in name for known in OF_TORCH):
            return True
        if communicates(node):
            return True
        ahead = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= ahead
        left += ahead
    return bool(left)


def _of_batch_norm() -> bool:
    """Whether torch's synchronised batch normalisation makes the call."""
    frame = sys._getframe(1)
    for _ in range(20):
        if frame.f_back is None:
            break
        frame = frame.f_back
        if frame.f_code.co_filename.endswith("torch/nn/modules/_functions.py"):
            return True
    return False


def _line(text: list[str]) -> tuple[str, int, str]:
    """The user's line in a stack of torch's: file, line, function; empty for none."""
    frames = [m.groups() for line in text if (m := _FRAME.search(line))]
    of_user = (f for f in reversed(frames) if classify(f[0]) == "user")
    file, line, function = next(of_user, ("", "0", ""))
    return file, int(line), function
