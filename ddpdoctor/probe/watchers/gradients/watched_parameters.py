"""Which parameters of a model are watched for edits: a few of all, since most edits reach many, and
those that the program's source names where it writes to tensors in place."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Collection, Iterable, Sequence
from types import CodeType

from ...recording.code_locations import classify
from ...source.ast_cache import Source, source_of
from ...source.parameter_writes import paths_written
from ...tensors.tensor_watch import spread
from ...training.tracked_model import Model
from .limits import LOOKED_AT, NAMED_ALIKE

Named = dict[int, set[tuple[str, int, str]]]
"""By position of a parameter, the places that name it: file, line and function."""

_known: weakref.WeakKeyDictionary[Model, dict[frozenset[str], Named]] = weakref.WeakKeyDictionary()
"""By model and the files that were searched."""


def to_watch(positions: Sequence[int], named: Collection[int] = ()) -> list[int]:
    """Some of these positions, in their order: a few of all, and those that are named."""
    return sorted({*spread(positions, LOOKED_AT), *set(positions).intersection(named)})


def named_where_written(model: Model, lines: Iterable[tuple[CodeType, int]]) -> Named:
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


def only_place(named: Named, positions: Iterable[int]) -> tuple[str, int, str] | None:
    """The place that alone names all of these parameters; None if there is none, or several."""
    found = {place for position in positions for place in named.get(position, {None})}
    return found.pop() if len(found) == 1 else None


def _named(model: Model, files: frozenset[str]) -> Named:
    """The parameters that a path stands for that is written to: `head.scale` for
    `module.head.scale`, and the other way round, if few end so."""
    forward = getattr(type(model.inner()), "forward", None)
    own = getattr(getattr(forward, "__code__", None), "co_filename", "")
    found: Named = {}
    for file in sorted(file for file in {*files, own} if classify(file) == "user"):
        source = source_of(file)
        for path, line in sorted(source.once(paths_written)) if source is not None else ():
            ends = [p for p, name in enumerate(model.names) if _ends_alike(name.split("."), path)]
            for position in ends if len(ends) <= NAMED_ALIKE else ():
                if position in found or len(found) < LOOKED_AT:
                    found.setdefault(position, set()).add((file, line, _function(source, line)))
    return found


def _function(source: Source | None, line: int) -> str:
    around = source.around(line) if source is not None else []
    names = [n.name for n in around if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return names[-1] if names else "<module>"


def _ends_alike(name: Sequence[str], path: Sequence[str]) -> bool:
    common = min(len(name), len(path))
    return [*name[-common:]] == [*path[-common:]]
