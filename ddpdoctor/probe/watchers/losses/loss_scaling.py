"""Is the loss divided by the world size, although DDP averages gradients; how is it reduced?

The last autograd nodes of the loss are looked at when a backward begins. Where a divisor equals the
world size, torch's anomaly mode finds the line of the division in the next forward.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from math import isfinite
from types import CodeType
from typing import Any, NamedTuple

import msgspec

from ....events import BatchSeen, LossMeans, LossScaled
from ...recording import hooks
from ...recording.code_locations import classify
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.torch_compat import anomaly_mode, made_at
from ...recording.watcher import Watcher, on
from ...source.division import divided_by_world_size, loss_divided
from ...tensors.autograd_nodes import (
    SUMS,
    communicates,
    divisor_of,
    is_of_a_device,
    reduction_of,
    terms_of,
)
from ...training import lifecycle
from ...training.records import Backward, Forward
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from ..gradients.gradient_sync import GradientSync
from .limits import (
    BACKWARDS_LOOKED_AT,
    BATCHES_AT_MOST,
    COUNTED_LOOKED_AT,
    FOLLOWED_AT_MOST,
    GRAPHS_AT_MOST,
    LOOKED_AT_AGAIN,
    LOSSES_ENOUGH,
    NODES_FOLLOWED,
    TERM_NODES,
)
from .reductions import mean_divisor, means_of, rows_of, valid_elements
from .sharded_models import Sharded, ShardedModels

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')
_NONE = "", "0", ""


class LossScaling(Watcher):
    """
    Attributes:
        looked: by site of the backward, how often its loss was looked at.
        graphs: by site, the last nodes of its losses.
        counted: sites of which some elements of the loss do not count.
        suspected: by site, the step since which its loss may be divided by the world size.
        unclear: by site, the finding to record if no later backward shows the dividing line.
        cleared: by site, divisors that equal the world size or a multiple by chance: no line of
            theirs names it.
        emitted: sites that are on record, or given up.
        following: anomaly mode is on.
        batches: by model, the batch recorded last; `means`: how many elements each mean in its loss
            was taken over.
        idle: backwards of known lines in a row.
        last: number of the last backward that was looked at.
        followed: forwards under anomaly mode so far.
    """

    lost = "how losses are scaled"
    after = (GradientSync,)  # decides whether gradients were synchronised

    def __init__(self) -> None:
        self.looked: dict[int, int] = {}
        self.graphs: dict[int, set[tuple[str, ...]]] = {}
        self.counted: set[int] = set()
        self.cleared: dict[int, set[tuple[float, ...]]] = {}
        self.suspected: dict[int, int] = {}
        self.unclear: dict[int, tuple[CodeType, int, LossScaled]] = {}
        self.emitted: set[int] = set()
        self.following = False
        self.batches: dict[Model | Sharded, tuple[int, str, float, int]] = {}
        self.batches_emitted = 0
        self.means: dict[Model | Sharded, tuple[tuple[int, float], ...]] = {}
        self.idle = 0
        self.last = 0
        self.followed = 0
        self._sizing = Subscriptions()

    def _follow_forward(self) -> None:
        """Switch on anomaly mode where a loss is suspected."""
        wanted = self.suspected.keys() - self.emitted and self.followed < FOLLOWED_AT_MOST
        if wanted and not self.following:
            self.following = anomaly_mode(True)
            self.followed += 1

    @on(lifecycle.forward_begins, during="_sizing", enabled=True)
    def _forward_begins(self, recorder: Recorder, forward: Forward) -> None:
        """Every second time the whole forward is followed: the wrapped module may compute the
        loss."""
        if forward.grad_enabled and self.followed % 2:
            self._follow_forward()

    @on(lifecycle.forward_ends, during="_sizing", enabled=True)
    def _forward_ends(self, recorder: Recorder, forward: Forward) -> None:
        """Follow what is computed from here on; note the batch size of the inputs."""
        if not forward.grad_enabled:
            return
        self._follow_forward()
        if forward.error is None:
            given = (*forward.args, *forward.kwargs.values())
            tensors = [v for v in given if hasattr(v, "untyped_storage") and v.dim()]
            forward.model.leading = tuple(int(t.shape[0]) for t in tensors)

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        if self.following:
            anomaly_mode(False)
            self.following = False
        looked = self.looked.get(backward.site, 0)
        suspected = backward.site in self.suspected and backward.site not in self.emitted
        due = backward.number >= self.last + LOOKED_AT_AGAIN
        due |= self._new_graph(backward)
        due |= backward.site in self.counted and looked < COUNTED_LOOKED_AT
        if looked >= BACKWARDS_LOOKED_AT and not suspected and not due:
            self.idle += 1
            if self.idle == LOSSES_ENOUGH:
                self._sizing.disable()
                for model in WrappedModels.current.live():
                    model.leading = ()
            return
        if looked < BACKWARDS_LOOKED_AT or suspected:
            self.idle = 0
            self._sizing.enable()
        pending: list[Model | Sharded] = [m for m in WrappedModels.current.live() if m.pending]
        pending = pending or [*ShardedModels.current.trained(recorder, backward.number)]
        if not pending:
            return
        self.last = backward.number
        self.looked[backward.site] = looked + 1
        for root in backward.roots:
            node = getattr(root, "grad_fn", None)
            if node is not None:
                reduced = self._walk(recorder, backward, node, pending)
                if reduced.valid:
                    self.counted.add(backward.site)
                means = means_of(node)
                for trained in pending:
                    self._emit_batch(recorder, backward, trained, reduced)
                    self._emit_means(recorder, backward, trained, means)

    def follow(self, site: int, step: int) -> None:
        """Have torch record the lines of the nodes of a backward's next graph."""
        self.suspected.setdefault(site, step)
        self._sizing.enable()

    def unfollow(self, site: int) -> None:
        if site not in self.unclear:
            self.suspected.pop(site, None)

    def _new_graph(self, backward: Backward) -> bool:
        """Whether the last three nodes of the loss are new for this line."""
        ways = self.graphs.setdefault(backward.site, set())
        node = getattr(backward.roots[0], "grad_fn", None) if backward.roots else None
        way: tuple[str, ...] = ()
        while node is not None and len(way) < 3:
            way = (*way, node.name())
            node = next((n for n, _ in node.next_functions), None)
        if way in ways or len(ways) >= GRAPHS_AT_MOST:
            return False
        ways.add(way)
        return True

    def _walk(
        self, recorder: Recorder, backward: Backward, node: Any, pending: list[Model | Sharded]
    ) -> _Reduced:
        """Walk the graph from the loss to the node that reduces it to one number."""
        root = node
        sizes = {group_size(m): m for m in pending if not _frozen(m)}
        divided: list[tuple[Any, float, Model | Sharded]] = []
        undone = unread = False
        reduction, weight, rows = "", 1.0, 0
        for _ in range(NODES_FOLLOWED):
            divisor = divisor_of(node)
            unread |= is_of_a_device(node)
            weight /= divisor or 1.0
            if (model := _model_of_size(divisor, sizes)) is not None:
                divided.append((node, divisor, model))
            # Multiplied by the world size too, or summed over the ranks by a differentiable
            # collective: then the division is right.
            undone |= any(size > 1 and abs(divisor * size - 1) < 1e-6 for size in sizes)
            undone |= communicates(node)
            reduction = reduction_of(node)
            ahead = [n for n, _ in node.next_functions if n is not None]
            if reduction:
                rows = rows_of(node)
            if len(ahead) != 1 or reduction:
                break
            node = ahead[0]
        if divided and not undone:
            self._suspect(recorder, backward, divided, mean_divisor(node, reduction))
        elif not undone and (terms := _divided_terms(root, sizes)):
            self._suspect(recorder, backward, terms, 0, of_a_term=True)
        if reduction == "sum" and len(ahead) == 1:  # each sample may be weighted before it as well
            weight /= divisor_of(ahead[0]) or 1.0
            unread |= is_of_a_device(ahead[0])
        unknown = unread and reduction == "sum"
        valid = 0 if unknown else valid_elements(node, reduction, weight)
        return _Reduced(reduction, 0.0 if unknown else weight, rows, valid)

    def _suspect(
        self,
        recorder: Recorder,
        backward: Backward,
        divided: list[tuple[Any, float, Model | Sharded]],
        averaging: int,
        *,
        of_a_term: bool = False,
    ) -> None:
        """Find out whether a divisor that equals the world size, or a multiple, is meant as that:
        only the source of the dividing line can tell.

        Args:
            averaging: see `mean_divisor`.
            of_a_term: only terms of the loss are divided. A weight may be one over the world size
                by chance, so nothing is said without a line.
        """
        cleared = self.cleared.setdefault(backward.site, set())
        divisors = (float(of_a_term), *(divisor for _, divisor, _ in divided))
        if backward.site in self.emitted or divisors in cleared:
            return
        known = [(made_at(node) or [], divisor, model) for node, divisor, model in divided]
        if not any(text for text, _, _ in known):
            self.suspected.setdefault(backward.site, recorder.step)
            exact = [model for _, divisor, model in known if divisor == group_size(model)]
            if (frame := backward.frame) is not None and exact and not of_a_term:
                event = LossScaled(
                    at=time.monotonic(),
                    model=exact[0].number,
                    step=self.suspected[backward.site],
                    divisor=group_size(exact[0]),
                    site=-1,
                    backward_site=backward.site,
                )
                self.unclear[backward.site] = frame.f_code, frame.f_lineno, event
            self._sizing.enable()
            return
        for text, divisor, model in known:
            frames = [m.groups() for line in text if (m := _FRAME.search(line))]
            file, line, function = next(
                (f for f in reversed(frames) if classify(f[0]) == "user"), _NONE
            )
            size = group_size(model)
            expression = divided_by_world_size(file, int(line)) if divisor == size else ""
            # A sum over gathered samples is rightly divided by their number, world size included.
            if not expression and averaging and (averaging == 1 or divisor == averaging * size):
                expression = divided_by_world_size(file, int(line), product=True)
            if expression:
                recorder.emit(
                    LossScaled(
                        at=time.monotonic(),
                        model=model.number,
                        step=self.suspected.get(backward.site, recorder.step),
                        divisor=size,
                        site=recorder.sites.place(file, int(line), function),
                        backward_site=backward.site,
                        expression=expression,
                        of_a_term=of_a_term,
                    )
                )
                self.emitted.add(backward.site)
                return
        cleared.add(divisors)
        if len(cleared) >= GRAPHS_AT_MOST:
            self.emitted.add(backward.site)
        self.suspected.pop(backward.site, None)
        self.unclear.pop(backward.site, None)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        """Record suspicions without a line: search the function that called the backward for
        one."""
        for site, (code, number, event) in self.unclear.items():
            if site not in self.emitted:
                line, expression = loss_divided(code, number)
                place = recorder.sites.number(code, line) if expression else -1
                recorder.emit(msgspec.structs.replace(event, site=place, expression=expression))
        self.unclear.clear()

    def _emit_batch(
        self,
        recorder: Recorder,
        backward: Backward,
        model: Model | Sharded,
        reduced: _Reduced,
    ) -> None:
        reduction, weight, rows, valid = reduced
        if not reduction or not (model.leading or valid):
            return
        size = model.leading[0] if model.leading else rows
        if reduction == "sum" and model.leading:
            size, reduction = _summed_samples(rows, model.leading)
        now = size, reduction, weight, valid
        if self.batches.get(model) == now or not isfinite(weight):
            return
        if self.batches_emitted >= BATCHES_AT_MOST:
            return
        self.batches[model] = now
        self.batches_emitted += 1
        recorder.emit(
            BatchSeen(
                at=time.monotonic(),
                model=model.number,
                forward=model.forwards - 1,
                size=size,
                reduction=reduction,
                weight=float(f"{weight:.6g}"),
                site=backward.site,
                valid=valid,
                step=recorder.step,
            )
        )

    def _emit_means(
        self,
        recorder: Recorder,
        backward: Backward,
        model: Model | Sharded,
        means: tuple[tuple[int, float], ...],
    ) -> None:
        if self.means.get(model, ()) == means or self.batches_emitted >= BATCHES_AT_MOST:
            return
        self.means[model] = means
        self.batches_emitted += 1
        recorder.emit(
            LossMeans(
                at=time.monotonic(),
                model=model.number,
                forward=model.forwards - 1,
                elements=tuple(elements for elements, _ in means),
                weights=tuple(weight for _, weight in means),
                step=recorder.step,
                site=backward.site,
            )
        )


class _Reduced(NamedTuple):
    """How a loss was reduced to one number.

    Attributes:
        reduction: `mean`, `sum` or empty.
        weight: the factor applied after it (0 if unknown).
        rows: leading size of what was reduced (0 if unknown).
        valid: see `BatchSeen`.
    """

    reduction: str
    weight: float
    rows: int
    valid: int


def _frozen(model: Model | Sharded) -> bool:
    """Whether all parameters are frozen: a backward only passes through the model (as through a
    discriminator in a generator's step)."""
    held = [p for i in model.expected if (p := model.parameters[i]()) is not None]
    return bool(held) and not any(p.requires_grad for p in held)


def _divided_terms(
    root: Any, sizes: dict[int, Model | Sharded]
) -> list[tuple[Any, float, Model | Sharded]]:
    """The nodes that divide a term of a loss, once it is one number, by the world size, unless it
    is multiplied by it, too, or summed over the ranks: each with its divisor and the model of that
    size."""
    found: dict[Any, tuple[float, Model | Sharded]] = {}
    for path in terms_of(root, TERM_NODES):
        divided: dict[Any, tuple[float, Model | Sharded]] = {}
        for node, ahead in zip(path, [*path[1:], None], strict=True):
            divisor = divisor_of(node)
            if any(size > 1 and abs(divisor * size - 1) < 1e-6 for size in sizes):
                break
            if communicates(node):
                break
            if divisor > 1 and (model := sizes.get(int(divisor))) and divisor == int(divisor):
                divided[node] = divisor, model
            of_terms = ahead is not None and ahead.name().startswith(SUMS)
            if reduction_of(node) and not of_terms:
                found |= divided
                break
    return [(node, divisor, model) for node, (divisor, model) in found.items()]


def _model_of_size(divisor: float, sizes: dict[int, Model | Sharded]) -> Model | Sharded | None:
    """The model whose group size divides `divisor`: programs divide by the world size, or by
    `accumulation * world_size`."""
    return next((m for n, m in sizes.items() if 1 < n <= divisor and not divisor % n), None)


def averaged(model: Model) -> Iterator[Any]:
    """The parameters whose gradients DDP averages."""
    return (model.parameters[i]() for i in model.expected)


def group_size(model: Model | Sharded) -> int:
    """How many ranks average the gradients of a model; 0 for unknown."""
    wrapper = model.ddp()
    group = getattr(wrapper, "process_group", None)
    return int(group.size()) if group is not None else 0


def _summed_samples(rows: int, leading: tuple[int, ...]) -> tuple[int, str]:
    """The batch size and reduction for a sum over `rows`, if some input has as many samples.

    The reduction is empty for a sum over anything else, as over the losses of several tasks.
    """
    over = [n for n in leading if n == rows or (n > 1 and rows and not rows % n)]
    if not over:
        return leading[0], ""
    return (rows if rows in over else over[0]), "sum"
