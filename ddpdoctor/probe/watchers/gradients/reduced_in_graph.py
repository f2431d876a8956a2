"""Is a tensor that is part of the loss all-reduced in place, or gathered from all ranks without a
gradient that flows to the others?

Autograd does not see a collective that writes into a tensor: the loss follows from the values of
all ranks, its gradient from those of this rank. The node that made the tensor is kept until the
next backward and searched for in the graph of the loss; nothing of it is changed.

A function of the program's own, or `gathered[rank] = tensor`, may give back this rank's part of the
gradient of what was gathered. That is measured in the backward, at the node that gathers.
"""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

from ....events import GatheredInGraph, ReducedInGraph
from ...collectives import call_hooks
from ...recording.code_locations import classify
from ...recording.recorder import Recorder, shielded
from ...recording.torch_compat import node_number
from ...recording.watcher import Watcher, on
from ...source.ast_cache import parts_of
from ...tensors.autograd_nodes import divisor_of
from ...tensors.digests import Sketcher
from ...training import lifecycle
from ...training.records import Backward
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from .gradient_sync import GradientSync
from .limits import GATHERED_FRAMES, REDUCED_KEPT, REDUCED_LOOKED_AT, REDUCED_NODES
from .loss_scaling import group_size, reduction_of

LINEAR = (
    "Add", "Alias", "AsStrided", "Cat", "Clone", "Diagonal", "Div", "Expand", "Index", "Mean",
    "Mul", "Neg", "Permute", "Repeat", "Reshape", "Rsub", "Select", "Slice", "Split", "Squeeze",
    "Stack", "Sub", "Sum", "T", "ToCopy", "Trace", "Transpose", "Unbind", "UnsafeView",
    "Unsqueeze", "View",
)  # fmt: skip
"""Nodes whose result is a sum of their inputs, each times a constant. A product is, too, if only
one factor takes part in the graph."""

KINDS = frozenset(f"{kind}Backward" for kind in LINEAR)


class _Reduced(NamedTuple):
    """A tensor of a graph that was all-reduced in place.

    Attributes:
        node: that made it; site: the line of the call.
    """

    node: Any
    group: int
    shape: tuple[int, ...]
    site: int


class ReducedInGraphs(Watcher):
    """
    Attributes:
        reduced: what was reduced since the last backward.
        looked: by line of the call, tensors that were looked for; lines on record are no more.
    """

    lost = "whether tensors of the loss are all-reduced in place"
    after = (GradientSync,)

    def __init__(self) -> None:
        self.reduced: list[_Reduced] = []
        self.looked: dict[int, int] = {}
        self.grad_enabled: Callable[[], bool] = bool

    def install(self) -> None:
        import torch

        self.grad_enabled = torch.is_grad_enabled

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: call_hooks.Call) -> None:
        if call.op != "all_reduce" or len(self.reduced) >= REDUCED_KEPT:
            return
        for tensor in call.tensors:
            node = tensor.grad_fn if tensor.requires_grad and tensor.numel() > 1 else None
            if node is None or not self.grad_enabled():
                continue  # functions that know their own gradient call it with gradients off
            # DDP's mean is right for the mean of all ranks; hooks may multiply the gradient.
            if call.reduces_by != "SUM" or tensor._backward_hooks:
                continue
            site = recorder.site()
            if self.looked.setdefault(site, 0) < REDUCED_LOOKED_AT:
                self.looked[site] += 1
                self.reduced.append(_Reduced(node, call.group, tuple(tensor.shape), site))

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        reduced, self.reduced = self.reduced, []
        if not reduced:
            return
        pending = [m for m in WrappedModels.current.live() if m.pending]
        roots = [r.grad_fn for r in backward.roots if getattr(r, "grad_fn", None) is not None]
        for one in reduced:
            model = next((m for m in pending if m.group == one.group), None)
            if model is None or self.looked[one.site] > REDUCED_LOOKED_AT or group_size(model) < 2:
                continue
            if _shapes(roots, one.node, group_size(model)) and _leads_to(one.node, model):
                self.looked[one.site] = REDUCED_LOOKED_AT + 1
                recorder.emit(
                    ReducedInGraph(
                        at=time.monotonic(),
                        model=model.number,
                        step=recorder.step,
                        size=group_size(model),
                        shape=one.shape,
                        site=one.site,
                        backward_site=backward.site,
                    )
                )


class _Gathered(NamedTuple):
    """A tensor that was gathered from all ranks.

    Attributes:
        node: of the program's function that gathers it; None without one.
        shape: of this rank's part; `site` the line of the call.
    """

    node: Any
    group: int
    shape: tuple[int, ...]
    site: int


class _Measured(NamedTuple):
    """The gradient of all ranks' parts, of which this rank's was given back.

    Attributes:
        gathered: None where it is to be found by its shape.
    """

    model: Model
    gathered: _Gathered | None
    function: str
    shape: tuple[int, ...]
    norm: float
    sketch: tuple[float, ...]
    dropped: float


class GatheredInGraphs(Watcher):
    """
    Attributes:
        gathered: what was gathered since the last backward.
        looked: by line of the call, backwards that were looked at.
        measured: in the backward that runs; `handles` of the hooks at its nodes.
    """

    lost = "whether tensors of the loss are gathered without their gradient"
    after = (GradientSync,)

    def __init__(self) -> None:
        self.gathered: list[_Gathered] = []
        self.looked: dict[int, int] = {}
        self.measured: list[_Measured] = []
        self.handles: list[Any] = []
        self.sketcher: Sketcher | None = None
        self.grad_enabled: Callable[[], bool] = bool

    def install(self) -> None:
        import torch

        self.grad_enabled = torch.is_grad_enabled

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: call_hooks.Call) -> None:
        if not call.gathers or len(call.tensors) != 1 or len(self.gathered) >= REDUCED_KEPT:
            return
        (tensor,) = call.tensors
        if not tensor.is_floating_point() or tensor._backward_hooks:
            return
        node = None
        if not self.grad_enabled() and tensor.requires_grad:
            node = _running_function()
        site = recorder.site()
        if self.looked.get(site, 0) < REDUCED_LOOKED_AT:
            self.gathered.append(_Gathered(node, call.group, tuple(tensor.shape), site))

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        self._forget()
        if not self.gathered:
            return
        pending = [m for m in WrappedModels.current.live() if m.pending and m.pending_sync]
        roots = [r.grad_fn for r in backward.roots if getattr(r, "grad_fn", None) is not None]
        for site in {g.site for g in self.gathered}:
            self.looked[site] = self.looked.get(site, 0) + 1
        for model in pending:
            size, rank = group_size(model), _rank_in_group(model)
            mine = [g for g in self.gathered if g.group == model.group]
            if not mine or size < 2 or rank < 0:
                continue
            nodes: list[tuple[Any, _Gathered | None]]
            nodes = [(g.node, g) for g in mine if g.node is not None]
            if any(g.node is None for g in mine):
                nodes += [(node, None) for node in _put_back(roots, size, rank)[:REDUCED_KEPT]]
            for node, gathered in nodes:
                if _scaled_up(roots, node, size) or not _leads_to(node, model):
                    continue
                given: list[Any] = []
                before = partial(_keep, given)
                after = partial(self._runs, model, node.name(), gathered, size, rank, given)
                part = "gathered in graph"
                self.handles += [
                    node.register_prehook(shielded(part, before, self.lost)),
                    node.register_hook(shielded(part, after, self.lost)),
                ]

    def _runs(
        self,
        model: Model,
        name: str,
        gathered: _Gathered | None,
        size: int,
        rank: int,
        given: list[Any],
        given_back: Sequence[Any],
        _: Sequence[Any],
    ) -> None:
        """The backward of a node that gathers has run.

        Args:
            given: the gradients it was given, before it could write into them.
        """
        import torch

        gradients = [*given]
        given.clear()
        with torch.no_grad():
            parts = _parts(given_back, gradients, size, rank, own=gathered is not None)
            if parts is None:
                return
            whole = torch.stack(parts)
            norm = float(whole.float().norm())
            dropped = float(torch.stack([*parts[:rank], *parts[rank + 1 :]]).float().norm())
            self.sketcher = self.sketcher or Sketcher()
            bins = self.sketcher.bins(whole)
        if bins is None or not norm or not isfinite(norm):
            return
        sketch = tuple(float(f"{value:.6g}") for value in bins.tolist())
        function = name.removesuffix("Backward") if gathered is not None else ""
        shape = tuple(parts[0].shape)
        self.measured.append(_Measured(model, gathered, function, shape, norm, sketch, dropped))

    @on(lifecycle.backward_ends, fast_path=False)
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        measured, known = self.measured, self.gathered
        self.gathered = []
        self._forget()
        found: dict[int, tuple[_Gathered, _Measured]] = {}
        for one in measured:
            of_shape = (g for g in known if g.node is None and _fits(g.shape, one.shape))
            free = (g for g in of_shape if g.site not in found)
            if (gathered := one.gathered or next(free, None)) is not None:
                found.setdefault(gathered.site, (gathered, one))
        for site in dict.fromkeys(g.site for g in known if g.site in found):
            gathered, one = found[site]
            recorder.emit(
                GatheredInGraph(
                    at=time.monotonic(),
                    model=one.model.number,
                    forward=one.model.forwards - 1,
                    step=recorder.step,
                    size=group_size(one.model),
                    shape=gathered.shape,
                    function=one.function,
                    norm=float(f"{one.norm:.6g}"),
                    sketch=one.sketch,
                    dropped=float(f"{one.dropped:.6g}"),
                    site=site,
                    backward_site=backward.site,
                    gives_back=_gives_back(recorder, gathered.node),
                )
            )

    def _forget(self) -> None:
        """Drop what belongs to a backward that is over, or failed."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.measured = [], []


def _keep(given: list[Any], gradients: Sequence[Any]) -> None:
    """Copy the gradients that a node is given: its backward may reduce them in place."""
    given[:] = [None if g is None else g.detach().clone() for g in gradients]


def _running_function() -> Any:
    """The node of the `autograd.Function` whose forward runs; None for none."""
    import torch

    frame = sys._getframe(2)
    for _ in range(GATHERED_FRAMES):
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, torch.autograd.function.BackwardCFunction):
                return context
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _gives_back(recorder: Recorder, node: Any) -> int:
    """The site of the last `return` in the backward of a function of the program; -1 if unknown."""
    function = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    code = getattr(function, "__code__", None)
    if code is None or classify(code.co_filename) != "user":
        return -1
    returns = [part.lineno for part in parts_of(code) if isinstance(part, ast.Return)]
    return recorder.sites.number(code, max(returns)) if returns else -1


def _rank_in_group(model: Model) -> int:
    """This rank's place among those that average the gradients of a model; -1 for unknown."""
    group = getattr(model.ddp(), "process_group", None)
    return int(group.rank()) if group is not None else -1


def _put_back(roots: list[Any], size: int, rank: int) -> list[Any]:
    """The nodes that join one tensor of each rank, of which only this rank's has a gradient."""
    found, left, seen = [], [*roots], {*roots}
    while left and len(seen) < REDUCED_NODES:
        node = left.pop()
        ahead = [n for n, _ in node.next_functions]
        joins = len(ahead) == size and node.name().startswith(("CatBackward", "StackBackward"))
        if joins and [n for n, a in enumerate(ahead) if a is not None] == [rank]:
            found.append(node)
        new = {n for n in ahead if n is not None} - seen
        seen |= new
        left += new
    return sorted(found, key=node_number)


def _scaled_up(roots: list[Any], target: Any, size: int) -> bool:
    """Whether the loss does not follow from a node, is multiplied by the number of ranks on the
    way, or is a sum over what is gathered, of which DDP's mean may be wanted."""
    between = _between(roots, target)
    if between is None:
        return True
    if any(abs(divisor_of(n) * size - 1) < 1e-6 for n in _after_reduction(roots)):
        return True
    means = any(
        n.name().startswith("Mean") or (divisor_of(n) >= size and divisor_of(n) % size == 0)
        for n in between
    )
    return not means and all(map(_linear, between))


def _after_reduction(roots: list[Any]) -> set[Any]:
    """The nodes from a loss down to those that reduce it to one number, and the next ones, where
    each sample's loss may be weighted; a factor further down is a temperature, say."""
    found, left = {*roots}, [*roots]
    while left and len(found) < REDUCED_NODES:
        node = left.pop()
        new = {n for n, _ in node.next_functions if n is not None} - found
        found |= new
        if not reduction_of(node):
            left += new
    return found


def _parts(
    given_back: Sequence[Any], gradients: Sequence[Any], size: int, rank: int, *, own: bool
) -> list[Any] | None:
    """The gradients of the ranks' parts, if that of this rank is what a node gives back.

    Args:
        own: the node is a function of the program's own; torch's gives back the parts themselves.
    """
    import torch

    if own:
        mine = next((g for g in given_back if g is not None), None)
    else:
        mine = given_back[rank] if len(given_back) == size else None
    if mine is None or mine.layout != torch.strided:
        return None
    if len(gradients) == size and size > 1:
        there = [torch.zeros_like(mine) if g is None else g for g in gradients]
        if any(g.shape != mine.shape for g in there):
            return None
        return there if torch.equal(there[rank], mine) else None
    if len(gradients) != 1 or gradients[0] is None or gradients[0].numel() != size * mine.numel():
        return None
    whole = gradients[0]
    if whole.dim() == mine.dim() + 1:  # stacked
        ways = [list(whole.unbind(d)) for d in range(whole.dim()) if whole.shape[d] == size]
    else:
        ways = [list(whole.chunk(size, d)) for d in range(whole.dim())]
    for parts in ways:
        same = len(parts) == size and all(p.shape == mine.shape for p in parts)
        if same and torch.equal(parts[rank], mine):
            return parts
    return None


def _fits(gathered: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Whether parts of one shape are what was gathered: that of a number may have a dimension."""
    return gathered == part or (gathered in ((), (1,)) and part in ((), (1,)))


def _shapes(roots: list[Any], target: Any, size: int) -> bool:
    """Whether the gradient at a node follows from the values there, and is that of this rank.

    Where the loss is linear from the sum over the ranks on, the sum only multiplies all by one
    number. A program may multiply by the world size, or have functions with gradients of their own.
    """
    between = _between(roots, target)
    if between is None:
        return False
    if any(abs(divisor_of(n) * size - 1) < 1e-6 or _of_the_program(n) for n in between):
        return False
    return not all(map(_linear, between))


def _between(roots: list[Any], target: Any) -> set[Any] | None:
    """The nodes from the loss to another one, which is not among them; None if it is not found."""
    first = node_number(target)
    above: dict[Any, list[Any]] = {root: [] for root in roots}
    left = list(above)
    while left and len(above) < REDUCED_NODES:
        node = left.pop()
        for ahead, _ in node.next_functions:
            if ahead is None or node_number(ahead) < first:
                continue  # made before
            if ahead not in above:
                above[ahead] = []
                left.append(ahead)
            above[ahead].append(node)
    if left or target not in above:
        return None
    between, left = {target}, [target]
    while left:
        new = {*above[left.pop()]} - between
        between |= new
        left += new
    between.remove(target)
    return between


def _linear(node: Any) -> bool:
    kind = node.name().rstrip("0123456789")
    inputs = sum(n is not None for n, _ in node.next_functions)
    return kind in KINDS and not (kind in ("MulBackward", "DivBackward") and inputs > 1)


def _of_the_program(node: Any) -> bool:
    """Whether a node is a Python function with a backward of its own, other than DDP's."""
    import torch

    custom = isinstance(node, torch.autograd.function.BackwardCFunction)
    return custom and "DDPSink" not in node.name()


def _leads_to(node: Any, model: Model) -> bool:
    """Whether parameters whose gradients DDP averages are below a node."""
    wanted = {id(p) for i in model.expected if (p := model.parameters[i]()) is not None}
    left, seen = [node], {node}
    while left and len(seen) < REDUCED_NODES:
        node = left.pop()
        if id(getattr(node, "variable", None)) in wanted:
            return True
        ahead = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= ahead
        left += ahead
    return False
