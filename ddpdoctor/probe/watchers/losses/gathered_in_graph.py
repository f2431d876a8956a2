"""Is a tensor that is part of the loss gathered from all ranks, without a gradient that flows to
the others, or without any?

Autograd does not see a collective that writes into tensors. A function of the program's own, or
`gathered[rank] = tensor`, may give back this rank's part of the gradient of what was gathered. That
is measured in the backward, at the node that gathers. Whether this rank's tensor has any part in
the loss is read from the graph of the loss, and whether the loss is computed from what was gathered
from the source. Nothing of the graph is changed.
"""

from __future__ import annotations

import ast
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from types import CodeType
from typing import Any, NamedTuple

from ....events import GatheredInGraph, GatheredWithoutGradient
from ...collectives import call_hooks
from ...recording.code_locations import USER, classify
from ...recording.recorder import Recorder, shielded
from ...recording.torch_compat import node_number
from ...recording.watcher import Watcher, on
from ...source.ast_cache import parts_of
from ...source.call_resolver import FRAMES
from ...source.dependence import Line
from ...source.passthrough import in_loss
from ...tensors.autograd_nodes import (
    before_views,
    divisor_of,
    is_used,
    leads_to,
    linear,
    nodes_between,
    nodes_of,
    reduction_of,
)
from ...tensors.digests import Sketcher
from ...tensors.limits import GRAPH_NODES
from ...training import lifecycle
from ...training.records import Backward
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from ..gradients.gradient_sync import GradientSync
from .limits import CUT_BACKWARDS, GATHERED_FRAMES, REDUCED_KEPT, REDUCED_LOOKED_AT
from .loss_scaling import averaged, group_size


class _Gathered(NamedTuple):
    """A tensor that was gathered from all ranks.

    Attributes:
        node: of the program's function that gathers it; None without one.
        shape: of this rank's part; `site` the line of the call.
        made: the node that made this rank's part, and the number of its output; None where it has
            no gradient.
        calling: the running functions of the program and their lines, innermost first; `entered`
            those that a library called.
    """

    node: Any
    group: int
    shape: tuple[int, ...]
    site: int
    made: tuple[Any, int] | None = None
    calling: tuple[Line, ...] = ()
    entered: tuple[CodeType, ...] = ()


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
        cut: by line of the call, backwards that gave the tensor no gradient; a large negative
            number once one did.
        measured: in the backward that runs; `handles` of the hooks at its nodes.
    """

    lost = "whether tensors of the loss are gathered without their gradient"
    after = (GradientSync,)

    def __init__(self) -> None:
        self.gathered: list[_Gathered] = []
        self.looked: dict[int, int] = {}
        self.cut: Counter[int] = Counter()
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
            one = _Gathered(node, call.group, tuple(tensor.shape), site)
            if node is None and tensor.grad_fn is not None and _trains():
                frames = recorder.sites.user_frames(sys._getframe(1), FRAMES)
                one = one._replace(
                    made=before_views(tensor.grad_fn, tensor.output_nr),
                    calling=tuple((f.f_code, f.f_lineno) for f in frames),
                    entered=tuple(
                        f.f_code
                        for f in frames
                        if f.f_back and recorder.sites.kind(f.f_back.f_code) is not USER
                    ),
                )
            self.gathered.append(one)

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        self._forget()
        if not self.gathered:
            return
        pending = [m for m in WrappedModels.current.live() if m.pending and m.pending_sync]
        roots = [r.grad_fn for r in backward.roots if getattr(r, "grad_fn", None) is not None]
        self._find_cut(recorder, backward, pending, roots)
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
                if _scaled_up(roots, node, size) or not leads_to(node, averaged(model)):
                    continue
                given: list[Any] = []
                before = partial(_keep, given)
                after = partial(self._runs, model, node.name(), gathered, size, rank, given)
                part = "gathered in graph"
                self.handles += [
                    node.register_prehook(shielded(part, before, self.lost)),
                    node.register_hook(shielded(part, after, self.lost)),
                ]

    def _find_cut(
        self, recorder: Recorder, backward: Backward, pending: list[Model], roots: list[Any]
    ) -> None:
        """Look for tensors that were gathered for the loss that the backward starts from, and that
        get no gradient from it."""
        frame = backward.frame
        line = (frame.f_code, frame.f_lineno) if frame is not None else None
        for one in self.gathered:
            model = next((m for m in pending if m.group == one.group), None)
            if one.made is None or model is None or not 0 <= self.cut[one.site] < CUT_BACKWARDS:
                continue
            if is_used(one.made, roots):
                self.cut[one.site] = -1
            elif leads_to(one.made[0], averaged(model)) and in_loss(
                [*one.calling], line, one.entered[-1:]
            ):
                self.cut[one.site] += 1
                if self.cut[one.site] == CUT_BACKWARDS:
                    recorder.emit(
                        GatheredWithoutGradient(
                            at=time.monotonic(),
                            model=model.number,
                            step=recorder.step,
                            size=group_size(model),
                            shape=one.shape,
                            backwards=CUT_BACKWARDS,
                            site=one.site,
                            backward_site=backward.site,
                        )
                    )

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


def _trains() -> bool:
    """Whether a forward in training mode waits for its backward. In an evaluation with gradients
    there will be none, and a node would keep a graph alive until the next backward."""
    wrappers = (model.ddp() for model in WrappedModels.current.live() if model.pending)
    return any(wrapper is not None and wrapper.training for wrapper in wrappers)


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
    found = []
    for node in nodes_of(roots, GRAPH_NODES):
        ahead = [n for n, _ in node.next_functions]
        joins = len(ahead) == size and node.name().startswith(("CatBackward", "StackBackward"))
        if joins and [n for n, a in enumerate(ahead) if a is not None] == [rank]:
            found.append(node)
    return sorted(found, key=node_number)


def _scaled_up(roots: list[Any], target: Any, size: int) -> bool:
    """Whether the loss does not follow from a node, is multiplied by the number of ranks on the
    way, or is a sum over what is gathered, of which DDP's mean may be wanted."""
    between = nodes_between(roots, target)
    if between is None:
        return True
    if any(abs(divisor_of(n) * size - 1) < 1e-6 for n in _after_reduction(roots)):
        return True
    means = any(
        n.name().startswith("Mean") or (divisor_of(n) >= size and divisor_of(n) % size == 0)
        for n in between
    )
    return not means and all(map(linear, between))


def _after_reduction(roots: list[Any]) -> set[Any]:
    """The nodes from a loss down to those that reduce it to one number, and the next ones, where
    each sample's loss may be weighted; a factor further down is a temperature, say."""
    found, left = {*roots}, [*roots]
    while left and len(found) < GRAPH_NODES:
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
