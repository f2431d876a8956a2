"""Where ranks of a mesh that hold the same part of a model hold it differently, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from msgspec import structs

from ...events.drift import ABSENT, ZERO
from ...report.findings import Confidence, FixKind, Related, Severity, Steps
from ...run import Run, odd_ones, plural, some
from .mesh_models import END, GROUP, REPLICATED, MeshCopies, mesh_models
from .split_by_hand import split_models

RULE = "apart-on-mesh"
RULES = {
    RULE: "ranks of a device mesh, or of a group that a model is split over, differ in what they "
    "hold alike"
}

DIMENSION = "dimension"
"""The evidence that names the dimension."""
ROUNDING = 1e-4
"""Relative difference of values up to which it may be one of rounding."""
DATA_PARALLEL = ("dp", "data", "rep", "fsdp", "batch")
"""Parts of the names that programs give to dimensions whose ranks train copies."""


@dataclass(frozen=True)
class Apart:
    """Parameters that differ along one dimension of the mesh.

    Attributes:
        names: of those that differ first; `count` how many differ in the end.
        steps: at which these differ, `END` last.
        parameter: the position of the first of them.
        by_gradients: their gradients differ before; `from_start`: their values differ at the first
            look, while their gradients agree.
        others: the same in other groups of ranks.
    """

    copies: MeshCopies
    dim: int
    names: list[str]
    count: int
    steps: list[int]
    parameter: int
    by_gradients: bool
    from_start: bool
    others: tuple[Apart, ...] = ()

    @property
    def dim_name(self) -> str:
        return self.copies.any.dims[self.dim]

    @property
    def split(self) -> bool:
        """Whether layers are split over this dimension, so that its ranks need equal inputs."""
        return self.dim in self.copies.split

    @property
    def declared(self) -> bool:
        """Whether the placements of these parameters say that they are replicated."""
        return self.copies.any.placed[self.parameter][self.dim] == REPLICATED

    @property
    def distance(self) -> float | None:
        """The largest relative difference of sampled values, at the last look; None if unknown."""
        look = self.copies.looks[self.steps[-1]]
        found = None
        for line in self.copies.lines(self.dim):
            rows = [s[self.parameter] if (s := look[r].samples) else () for r in line]
            for one, other in pairwise(rows):
                size = max((abs(v) for v in (*one, *other)), default=0.0)
                if size and len(one) == len(other):
                    apart = max(abs(a - b) for a, b in zip(one, other, strict=True)) / size
                    found = max(apart, found or 0.0)
        return found

    def _lines(self) -> Iterator[tuple[int, ...]]:
        """The sets of ranks that differ."""
        yield from self._own_lines()
        for other in self.others:
            yield from other._own_lines()

    def _own_lines(self) -> Iterator[tuple[int, ...]]:
        look = self.copies.looks[self.steps[0]]
        for line in self.copies.lines(self.dim):
            if len({look[r].values[self.parameter] for r in line}) > 1:
                yield line

    @property
    def ranks(self) -> tuple[int, ...]:
        look = self.copies.looks[self.steps[0]]
        found = {rank for other in self.others for rank in other.ranks}
        for line in self._own_lines():
            sides: dict[int, list[int]] = {}
            for rank in line:
                sides.setdefault(look[rank].values[self.parameter], []).append(rank)
            found.update(odd_ones(sorted(map(tuple, sides.values()), key=lambda s: -len(s))))
        return tuple(sorted(found))

    def severity(self) -> Severity:
        distance = self.distance
        if distance is not None and distance < ROUNDING:
            return Severity.NOTE
        meant = self.split or self.declared or self.from_start
        named = any(part in self.dim_name for part in DATA_PARALLEL)
        return Severity.ERROR if meant or named else Severity.WARNING

    @property
    def by_hand(self) -> bool:
        """Whether the program itself splits the model over a process group."""
        return self.copies.any.dims == (GROUP,)

    def _mesh(self) -> str:
        name = self.dim_name
        return "mesh" if len(self.copies.any.dims) == 1 else f'mesh["{name}"]'

    def cause(self) -> str:
        dim = "these ranks" if self.by_hand else self.dim_name
        over = "these ranks" if self.by_hand else f"the ranks of mesh dimension {dim}"
        if self.from_start:
            return (
                f"{over} made this part of the model from different values; their gradients agree, "
                "but nothing has made the parameters equal"
            )
        if self.by_gradients and self.split:
            return (
                f"layers are split over {dim}, and gradients of what these ranks hold alike "
                "differ: they are given different inputs, or each computes only its part of the "
                "gradient, and nothing sums these parts"
            )
        if self.by_gradients:
            return f"their gradients differ: nothing averages them over {over}"
        return f"their gradients agree, but {over} apply or write different values"

    def fix(self) -> str:
        if self.by_hand:
            return (
                "sum these gradients over the ranks that split the layers, before each step: "
                "`dist.all_reduce(p.grad, group=group)` with the group of these ranks; if they "
                "differ because the inputs do, give these ranks the same batches"
            )
        mesh = self._mesh()
        group = f"group={mesh}.get_group()"
        if self.from_start and self.copies.any.flat:
            return (
                "make the model from the same seed on all ranks, or have it sent once: "
                "`FullyShardedDataParallel(model, sync_module_states=True, ...)` (on a GPU)"
            )
        if self.from_start:
            return (
                "make the model from the same seed on these ranks, or send it once: `dist."
                f"broadcast(p.to_local(), group_src=0, {group})` (`p` itself for a plain tensor)"
            )
        if self.by_gradients and self.split:
            return (
                f"give the ranks of {self.dim_name} the same batches; if they get them, make the "
                "module that holds these parameters a part of the plan of `parallelize_module` "
                f"(`SequenceParallel()`), or sum the gradients: `dist.all_reduce(p.grad, {group})`"
            )
        if self.by_gradients:
            return (
                f"average the gradients before each step: `dist.all_reduce(g, {group})` and `g /= "
                f"{mesh}.size()` for `g = p.grad.to_local()` of a DTensor and `g = p.grad` of a "
                f"plain tensor; or apply `fully_shard(model, mesh={mesh})` after "
                "`parallelize_module`"
            )
        return f"change parameters on all ranks of {self.dim_name} in the same way"

    def fields(self) -> dict[str, object]:
        """The fields of a finding."""
        copies, one = self.copies, self.copies.any
        made, stepped = copies.line("site"), copies.line("step_site")
        steps = Steps.of(s for s in self.steps if s != END)
        steps = steps and structs.replace(steps, compared=steps.count)
        at = "at the end of the run"
        if steps:
            first = self.steps[0] == copies.steps[0]
            at = (
                f"when first examined, before step {steps.first}"
                if first
                else (f"since step {steps.first}")
            )
        lines = list(self._lines())
        between = ", ".join(f"ranks {' and '.join(map(str, line))}" for line in lines[:4])
        between += ", ..." if len(lines) > 4 else ""
        where = f"along mesh dimension {self.dim_name} ({between})"
        if self.by_hand:
            where = f"between {between}, over which other layers are split,"
        mesh = ", ".join(f"{n} {s}" for n, s in zip(one.dims, one.sizes, strict=True))
        distance = self.distance
        related = (
            (Related("applies the gradients", stepped),) if stepped and made != stepped else ()
        )
        return {
            "rule": RULE,
            "severity": self.severity(),
            "confidence": Confidence.PROVEN if self._sure() else Confidence.SUSPECTED,
            "ranks": self.ranks,
            "steps": steps,
            "subjects": tuple(self.names),
            "location": made or stepped,
            "label": "made here" if made else "applies gradients that differ",
            "related": related if made else (),
            "summary": f"{plural(len(self.names), 'parameter')} {some(self.names)} of "
            f"{one.kind or 'the model'} "
            f"{plural(len(self.names), 'differs', 'differ')} {where} {at}",
            "cause": self.cause()
            + ("" if self._sure() else "; if they are meant to train apart, this is fine"),
            "fix": self.fix(),
            "fix_kind": FixKind.CHECK,
            "evidence": {
                DIMENSION: self.dim_name,
                **({} if self.by_hand else {"mesh": mesh}),
                "parameters_that_differ_along_it": f"{self.count} of "
                f"{len(copies.comparable(self.dim))} that its ranks hold alike",
                "gradients_differ": "yes" if self.by_gradients else "no",
                **({} if distance is None else {"largest_relative_difference": f"{distance:.1g}"}),
            },
            "at": max(rank.wall(e.at) for rank, e in copies.ranks.values()),
        }

    def _sure(self) -> bool:
        return self.severity() is not Severity.WARNING


def apart(run: Run) -> Iterator[Apart]:
    """By model and dimension, the parameters that its ranks should hold equally and do not."""
    by_fault: dict[object, list[Apart]] = {}
    for copies in (*mesh_models(run), *split_models(run)):
        for dim, name in enumerate(copies.any.dims):
            if (found := _along(copies, dim)) is not None:
                key = copies.any.optimizer, name, tuple(found.names), found.steps[0]
                by_fault.setdefault(key, []).append(found)
    for first, *others in by_fault.values():
        yield replace(first, others=tuple(others))


def compared(run: Run) -> bool:
    """Whether any such model was examined on all its ranks."""
    return any(
        copies.looks and any(copies.comparable(d) for d in range(len(copies.any.dims)))
        for copies in (*mesh_models(run), *split_models(run))
    )


def gradients_differ(copies: MeshCopies, dim: int) -> bool:
    """Whether ranks along a dimension computed different gradients of something that they hold
    alike, at every look."""
    parameters = copies.comparable(dim)
    steps = [s for s in copies.steps if s != END]
    return bool(steps and parameters) and all(
        any(copies.differ(s, dim, p, gradients=True) for p in parameters) for s in steps
    )


def _along(copies: MeshCopies, dim: int) -> Apart | None:
    steps = copies.steps
    parameters = copies.comparable(dim)
    parted = any(event.parted for _, event in copies.ranks.values())
    if parted:  # the ranks may be stages of a pipeline, or hold experts of their own
        parameters = [p for p in parameters if copies.any.placed[p][dim] == REPLICATED]
    if not steps or not parameters or copies.any.sizes[dim] == 1:
        return None
    differs = {p: [copies.differ(s, dim, p) for s in steps] for p in parameters}
    alike = not any(row[0] for row in differs.values())
    since = {
        p: row.index(True)
        for p, row in differs.items()
        if row[-1] and all(row[row.index(True) :]) and (alike or _copies(copies, dim, p, row))
    }
    if not since:
        return None
    begin = min(since.values())
    first = [p for p, at in since.items() if at == begin]
    earlier = [s for s in steps[: max(begin, 1)] if s != END]
    by_gradients = [
        p for p in first if any(copies.differ(s, dim, p, gradients=True) for s in earlier)
    ]
    chosen = by_gradients or first
    return Apart(
        copies=copies,
        dim=dim,
        names=[copies.any.names[p] for p in chosen],
        count=len(since),
        steps=steps[begin:],
        parameter=chosen[0],
        by_gradients=bool(by_gradients),
        from_start=begin == 0 and not by_gradients,
    )


def _copies(copies: MeshCopies, dim: int, parameter: int, row: list[bool]) -> bool:
    """Whether ranks along a dimension are meant to hold a parameter equally, although not all of
    what they hold began equal: its placements say so, or its gradients agree where its values do
    not."""
    if copies.any.placed[parameter][dim] == REPLICATED:
        return True
    steps = [s for s, differs in zip(copies.steps, row, strict=True) if differs and s != END]
    line = copies.lines(dim)[0][0]
    seen = {copies.looks[s][line].gradients[parameter] for s in steps} - {ABSENT, ZERO}
    agree = not any(copies.differ(s, dim, parameter, gradients=True) for s in steps)
    return len(seen) > 1 and agree
