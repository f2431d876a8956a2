"""Loaders that give other samples to ranks over which the layers of one model are split."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...events import Unwrapped
from ...run import Run
from ..meshes.mesh_drift import gradients_differ
from ..meshes.mesh_models import MeshCopies, mesh_models
from ..meshes.split_by_hand import split_models
from .fault import LoaderFault
from .loaders import Reader, loaders, same_order
from .thresholds import FEWEST_TO_ORDER

SHARES_INPUTS = re.compile(r"(?<![a-z])(?:pp|pipe|stage|cp|sp|seq|context|ep|expert)")
"""Beginnings of words in the names that programs give to dimensions whose ranks may share
samples."""


def data_parallel(run: Run) -> list[frozenset[int]] | None:
    """Sets of ranks that ought to divide the data, of models whose layers are split over ranks:
    those along dimensions over which gradients are averaged. None where there is no such model, an
    empty list where it is not known."""
    found: list[frozenset[int]] = []
    known = False
    for copies in mesh_models(run):
        if not copies.split:
            continue
        known = True
        dims = [d for d in range(len(copies.any.dims)) if copies.any.sizes[d] > 1]
        rest = [d for d in dims if d not in copies.split]
        parted = any(event.parted for _, event in copies.ranks.values())
        if not rest or parted or not all(_averaged(copies, d) for d in rest):
            return []
        found += [frozenset(line) for line in copies.lines(*rest)]
    return list(dict.fromkeys(found)) if known else None


def of_one_replica(run: Run, ranks: frozenset[int]) -> list[frozenset[int]]:
    """The sets of ranks that divide the data among these ranks, where some of them work on one
    replica together: the program splits its layers over them, or each trains another model (the
    stages of a pipeline)."""
    groups = [frozenset(copies.ranks) for copies in split_models(run)]
    within = [group for group in dict.fromkeys(groups) if group <= ranks]
    if within and set().union(*within) == ranks and len(set(map(len, within))) == 1:
        return [frozenset(line) for line in zip(*map(sorted, within), strict=True)]
    forms: dict[object, set[int]] = {}
    for number in ranks:
        events = run.everyone[number].of(Unwrapped)
        form = frozenset(tuple((p.shape, p.dtype) for p in e.parameters) for e in events)
        forms.setdefault(form, set()).add(number)
    return [frozenset(alike) for alike in forms.values()]


def _averaged(copies: MeshCopies, dim: int) -> bool:
    if SHARES_INPUTS.search(copies.any.dims[dim].lower()):
        return False
    return not copies.comparable(dim) or copies.gradients_agree(dim)


def split_layers(run: Run) -> Iterator[LoaderFault]:
    """The training loaders that deliver other indices to ranks that need equal inputs. That they
    need them shows in their gradients, which differ for what each of them holds alike."""
    by_hand = list(split_models(run))
    groups = {copies.any.ranks: None for copies in by_hand}
    for copies in (*mesh_models(run), *by_hand):
        dims = [d for d in copies.split if gradients_differ(copies, d)]
        for loader in loaders(run) if dims else ():
            lines = [line for line in copies.lines(*dims) if _apart(loader.of(line), len(line))]
            if loader.trains and lines:
                ranks = tuple(sorted(rank for line in lines for rank in line))
                names = [copies.any.dims[d] for d in dims]
                rest = [n for n in copies.any.dims if n not in copies.any.split]
                yield LoaderFault(
                    "sampler-rank-mismatch",
                    "split-layers",
                    loader,
                    ranks,
                    loader.of(ranks),
                    facts={
                        "dims": names,
                        "rest": rest,
                        "lines": lines,
                        "groups": [*groups] if copies.any.ranks in groups else [],
                    },
                )


def _apart(readers: list[Reader], ranks: int) -> bool:
    """Whether these ranks read other indices in every epoch that all of them ended."""
    if len(readers) < ranks or any(r.seen.indexless or r.seen.iterable for r in readers):
        return False
    numbers = range(min(len(r.epochs) for r in readers))
    ends = [[e for r in readers if (e := r.epochs[n].ended) and e.samples] for n in numbers]
    compared = [
        any(not same_order(first, other, FEWEST_TO_ORDER) for other in others)
        for first, *others in filter(None, ends)
        if len(others) == len(readers) - 1
    ]
    return bool(compared) and all(compared)
