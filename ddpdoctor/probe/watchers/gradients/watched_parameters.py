"""Which parameters of a model are watched for edits: a few of all, since most edits reach many, and
those that the program's source names where it writes to tensors in place."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from types import CodeType

from ...recording.code_locations import classify
from ...source.ast_cache import source_of
from ...source.parameter_writes import paths_written
from ...tensors.tensor_watch import spread
from ...training.tracked_model import Model
from .limits import LOOKED_AT, NAMED_ALIKE

_known: weakref.WeakKeyDictionary[Model, dict[frozenset[str], list[int]]] = (
    weakref.WeakKeyDictionary()
)
"""By model and the files that were searched: the positions of the parameters named there."""


def to_watch(positions: Sequence[int], named: Collection[int] = ()) -> list[int]:
    """Some of these positions, in their order: a few of all, and those that are named."""
    return sorted({*spread(positions, LOOKED_AT), *set(positions).intersection(named)})


def named_where_written(model: Model, lines: Iterable[tuple[CodeType, int]]) -> list[int]:
    """The parameters that the program's source names where it writes to tensors in place.

    Args:
        lines: the program's lines that are running: the files that they stand in are searched, and
            that of the model.
    """
    files = frozenset(code.co_filename for code, _ in lines)
    known = _known.setdefault(model, {})
    if files not in known:
        known[files] = _named(model, files)
    return known[files]


def _named(model: Model, files: frozenset[str]) -> list[int]:
    """The parameters that a path stands for that is written to: `head.scale` for
    `module.head.scale`, and the other way round, if few end so."""
    forward = getattr(type(model.inner()), "forward", None)
    own = getattr(getattr(forward, "__code__", None), "co_filename", "")
    sources = [source_of(file) for file in {*files, own} if classify(file) == "user"]
    paths = {
        path for source in sources if source is not None for path in source.once(paths_written)
    }
    found: set[int] = set()
    for path in sorted(paths):
        ends = [p for p, name in enumerate(model.names) if _ends_alike(name.split("."), path)]
        found.update(ends if len(ends) <= NAMED_ALIKE else ())
    return sorted(found)[:LOOKED_AT]


def _ends_alike(name: Sequence[str], path: Sequence[str]) -> bool:
    common = min(len(name), len(path))
    return [*name[-common:]] == [*path[-common:]]
