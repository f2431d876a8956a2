"""Is the loss divided by a count that was summed over all ranks, although DDP averages gradients?

The mean over all tokens of all ranks is the sum of this rank's losses over the count of all, times
the number of ranks: DDP divides by that once more.
"""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ....events import LossCounted
from ...collectives import call_hooks
from ...recording.frames import variables
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...source.ast_cache import last_name, parts_of
from ...tensors.autograd_nodes import communicates, divisor_of, terms_of
from ...tensors.tensor_watch import writes
from ...training import lifecycle
from ...training.records import Backward
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from ..gradients.gradient_sync import GradientSync
from .limits import COUNTED_BACKWARDS, COUNTS_KEPT, SMALLEST_COUNT, TERM_NODES
from .loss_scaling import group_size

GATHERS = ("all_gather", "all_gather_into_tensor")

MOST_NUMBERS, MOST_BYTES = 4, 256
"""Of a tensor that may hold a count, and of its storage: it is kept until the next backward."""


TIMES_WRITTEN = 7
"""Backwards in which what was written to before it was summed must be whole numbers: the halves of
counts are by chance, too."""


class _Count(NamedTuple):
    """Small tensors of all ranks of a group, that were summed or gathered.

    Attributes:
        tensor: that holds the sum; `gathered` those of the ranks, which the program may sum.
        site: the line of the call; code: of the user's function with it; name: of the variable that
            holds the tensor there, empty for none.
        version: how often it was written to before the call.
    """

    tensor: Any
    gathered: tuple[Any, ...]
    group: int
    site: int
    code: CodeType | None
    name: str
    version: int

    @property
    def as_reduced(self) -> bool:
        """Whether it still holds the sum: nothing has been written to it since."""
        return bool(self.gathered) or bool(writes(self.tensor) == self.version)

    def sums(self, size: int) -> list[float]:
        """The sums over the ranks, of which the group has so many."""
        if not self.gathered:
            return [float(v) for v in self.tensor.detach().flatten().tolist()]
        numbers = [float(v) for t in self.gathered for v in t.detach().flatten().tolist()]
        each = len(numbers) // size
        return [sum(numbers[n::each]) for n in range(each)] if each else []


class LossCounts(Watcher):
    """
    Attributes:
        counts: small tensors that were summed or gathered in a group since the last backward.
        looked: backwards with such a sum before them; emitted: sites of those on record.
        seen: by site of the backward, in how many a count was the divisor, and the first step.
        parts: lines that sum what was written to before and is no whole number: each rank divides
            its count before (`reduce_mean`), so that the sum is a mean.
    """

    lost = "whether losses are divided by counts of all ranks"
    after = (GradientSync,)

    def __init__(self) -> None:
        self.counts: list[_Count] = []
        self.looked = 0
        self.plain: Any = None
        self.emitted: set[int] = set()
        self.seen: dict[int, tuple[int, int]] = {}
        self.parts: set[int] = set()

    def install(self) -> None:
        import torch

        self.plain = torch.Tensor

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: call_hooks.Call) -> None:
        if self.looked >= COUNTED_BACKWARDS or len(self.counts) >= COUNTS_KEPT or call.p2p:
            return
        if call.op in GATHERS:
            known = call.outputs and all(t.is_cpu for t in call.outputs)
            if known and len(call.tensors) == 1 and self._small(call.tensors[0]):
                self._keep(recorder, call, call.tensors[0], call.outputs)
        elif call.op == "all_reduce" and call.reduces_by == "SUM":
            for tensor in filter(self._small, call.tensors):
                self._keep(recorder, call, tensor, ())

    def _small(self, tensor: Any) -> bool:
        small = type(tensor) is self.plain and 0 < tensor.numel() <= MOST_NUMBERS
        if not small or not tensor.is_cpu or tensor.requires_grad:
            return False
        return bool(tensor.untyped_storage().nbytes() <= MOST_BYTES)

    def _keep(
        self, recorder: Recorder, call: call_hooks.Call, tensor: Any, gathered: tuple[Any, ...]
    ) -> None:
        frame = recorder.sites.user_frame(sys._getframe(2))
        known = variables(frame) if frame is not None else {}
        name = next((n for n, value in known.items() if value is tensor), "")
        code = frame.f_code if frame is not None else None
        site, version = recorder.site(), writes(tensor)
        if version and not all(float(v).is_integer() for v in tensor.flatten().tolist()):
            self.parts.add(site)
        self.counts.append(_Count(tensor, gathered, call.group, site, code, name, version))

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        counts, self.counts = self.counts, []
        if not counts:
            return
        self.looked += 1
        if backward.site in self.emitted:
            return
        pending = [m for m in WrappedModels.current.live() if m.pending and m.pending_sync]
        for root in backward.roots:
            node = getattr(root, "grad_fn", None)
            for model in pending if node is not None else ():
                mine = [c for c in counts if c.group == model.group and c.as_reduced]
                if mine and (found := _divisor(node, mine, group_size(model))) is not None:
                    self._note(recorder, backward, model, *found)
                    return

    def _note(
        self, recorder: Recorder, backward: Backward, model: Model, value: float, count: _Count
    ) -> None:
        times, step = self.seen.get(backward.site, (0, recorder.step))
        self.seen[backward.site] = times + 1, step
        if count.site in self.parts or times < (TIMES_WRITTEN if count.version else 1):
            return  # two numbers may be equal by chance once
        self.emitted.add(backward.site)
        frame, sites = backward.frame, recorder.sites
        site = -1
        if count.code is not None and (line := _line_dividing_by(count.code, count.name)):
            site = sites.number(count.code, line)
        elif frame is not None and (line := _line_dividing(frame, value)):
            site = sites.number(frame.f_code, line)
        recorder.emit(
            LossCounted(
                at=time.monotonic(),
                model=model.number,
                step=step,
                count=value,
                size=group_size(model),
                site=site,
                count_site=count.site,
                backward_site=backward.site,
            )
        )


def _divisor(root: Any, counts: list[_Count], size: int) -> tuple[float, _Count] | None:
    """The count that the loss, or a term of it, is divided by; None where it is divided by none, or
    multiplied by the number of ranks too."""
    of_terms = (_divisor_in(path, counts, size) for path in terms_of(root, TERM_NODES))
    return next((found for found in of_terms if found is not None), None) if size > 1 else None


def _divisor_in(path: list[Any], counts: list[_Count], size: int) -> tuple[float, _Count] | None:
    found: tuple[float, _Count] | None = None
    for node in path:
        divisor = divisor_of(node)
        if communicates(node) or abs(divisor * size - 1) < 1e-6:
            return None
        if found is None and divisor >= SMALLEST_COUNT and divisor != size:
            equal = (c for c in counts if divisor in c.sums(size))
            if (count := next(equal, None)) is not None:
                found = divisor, count
    return found


def _line_dividing_by(code: CodeType, name: str) -> int:
    """The line of a function that divides by a variable, or by one that is made from it; 0 for
    none."""
    names = {name} if name else set()
    for node in parts_of(code) if names else ():
        if isinstance(node, ast.Assign) and names & set(map(last_name, ast.walk(node.value))):
            names |= {last_name(target) for target in node.targets} - {""}
    return next((line for line, right in _divisions(code) if last_name(right) in names), 0)


def _line_dividing(frame: FrameType, value: float) -> int:
    """The line of a running function that divides by a variable of that value; 0 for none."""
    known = variables(frame)
    equal = (
        line
        for line, right in _divisions(frame.f_code)
        if _value(known.get(last_name(right))) == value
    )
    return next(equal, 0)


def _divisions(code: CodeType) -> Iterator[tuple[int, ast.expr]]:
    """The divisions in a function: line and divisor."""
    for node in parts_of(code):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.lineno, node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            yield node.lineno, node.value


def _value(thing: Any) -> float | None:
    if type(thing) in (int, float):
        return float(thing)
    plain = getattr(thing, "is_cpu", False) and thing.numel() == 1 and not thing.requires_grad
    return float(thing) if plain else None
