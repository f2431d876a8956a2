"""Models of DTensors as all ranks of their mesh recorded them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from ...events import MeshDigests, MeshModel
from ...events.pack import unpack
from ...run import Location, Rank, Run

END = 1 << 62
"""Stands for the end of the run among the steps."""

GROUP = "group"
"""The only dimension of a model that the program itself splits over a process group."""

SHARDED, REPLICATED = "s", "r"
"""How a parameter lies on one dimension, see `MeshModel.placed`."""

Lines = list[tuple[int, ...]]
"""Ranks that differ in one coordinate only, one tuple for each value of the others."""


@dataclass(frozen=True)
class Look:
    """What one rank recorded before one step: digests by parameter, and some values."""

    gradients: list[int]
    values: list[int]
    samples: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class MeshCopies:
    """A model on all ranks of its mesh.

    Attributes:
        ranks: by global rank, the rank and its record of the model.
        looks: by step, what every rank recorded; `END` last.
    """

    ranks: dict[int, tuple[Rank, MeshModel]]
    looks: dict[int, dict[int, Look]]

    @property
    def any(self) -> MeshModel:
        return next(iter(self.ranks.values()))[1]

    @cached_property
    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """Of each rank in the mesh."""
        places = product(*(range(size) for size in self.any.sizes))
        return dict(zip(self.any.ranks, places, strict=True))

    def lines(self, *dims: int) -> Lines:
        """The sets of ranks that differ only in their coordinates in these dimensions."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in self.coordinates.items():
            rest = tuple(n for d, n in enumerate(place) if d not in dims)
            found.setdefault(rest, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def line(self, site: str) -> Location | None:
        """The line of a site of the record, of the first rank that knows it."""
        spots = (rank.location(getattr(event, site)) for rank, event in self.ranks.values())
        return next((spot for spot in spots if spot is not None), None)

    @property
    def steps(self) -> list[int]:
        return sorted(self.looks)

    @property
    def split(self) -> list[int]:
        """The dimensions over which layers are split, by position."""
        return [d for d, name in enumerate(self.any.dims) if name in self.any.split]

    def comparable(self, dim: int) -> list[int]:
        """The positions of the parameters of which ranks along a dimension hold the same part."""
        return [
            n
            for n, placed in enumerate(self.any.placed)
            if placed[dim] != SHARDED and len({e.shapes[n] for _, e in self.ranks.values()}) == 1
        ]

    def differ(self, step: int, dim: int, parameter: int, *, gradients: bool = False) -> bool:
        """Whether ranks along a dimension hold different values of a parameter (its gradient)."""
        look = self.looks[step]
        rows = {r: (one.gradients if gradients else one.values) for r, one in look.items()}
        return any(len({rows[r][parameter] for r in line}) > 1 for line in self.lines(dim))

    def gradients_agree(self, dim: int) -> bool:
        """Whether ranks along a dimension have equal gradients, of all that they hold alike, at
        every step that was compared."""
        steps = [s for s in self.steps if s != END]
        return bool(steps) and not any(
            self.differ(s, dim, p, gradients=True) for s in steps for p in self.comparable(dim)
        )


def mesh_models(run: Run) -> Iterator[MeshCopies]:
    """The models of DTensors of which every rank of the mesh recorded something."""
    numbers = sorted({e.optimizer for r in run.ranks.values() for e in r.of(MeshModel)})
    for number in numbers:
        models = {
            n: (rank, event)
            for n, rank in run.ranks.items()
            for event in rank.of(MeshModel)
            if event.optimizer == number
        }
        for mesh in sorted({event.ranks for _, event in models.values()}):
            ranks = {n: models[n] for n in mesh if n in models}
            alike = {(e.ranks, e.names, e.placed) for _, e in ranks.values()}
            if len(ranks) == len(mesh) > 1 and len(alike) == 1:
                yield MeshCopies(ranks, _looks(ranks, number))


def _looks(ranks: dict[int, tuple[Rank, MeshModel]], optimizer: int) -> dict[int, dict[int, Look]]:
    tables = {
        n: {
            END if e.step < 0 else e.step: Look(unpack(e.gradients), unpack(e.values), e.samples)
            for e in rank.of(MeshDigests)
            if e.optimizer == optimizer
        }
        for n, (rank, _) in ranks.items()
    }
    common = set.intersection(*(set(table) for table in tables.values()))
    return {step: {n: table[step] for n, table in tables.items()} for step in sorted(common)}
