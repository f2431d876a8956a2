"""Was a tensor changed between two moments? By its digest, or by what torch counts about it.

A digest tells whether values changed; torch's version counter only whether the tensor was written
to, but no value is read, so that many tensors can be asked. torch does not count writes through
`.data`, and a write need not change a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, TypeVar

from ..recording.torch_compat import shard
from .digests import digests
from .limits import FEW

T = TypeVar("T")

Read = Callable[[list[int]], list[Any]]
"""The tensors at some positions as they are now, None for what is gone."""

By = Callable[[list[Any]], list[Any]]
"""What is noted of tensors, in their order: `digests` of the values, `marks`, or the like."""

NO_TENSOR = (0, -1)
"""The mark of None."""


def spread(every: Sequence[T], most: int = FEW) -> list[T]:
    """At most `most` items of a sequence, evenly spread over it, the last one among them; the same
    on every rank."""
    last = len(every) - 1
    if last < most:
        return list(every)
    return [every[last * number // (most - 1)] for number in range(most)]


def writes(tensor: Any) -> int:
    """How often a tensor was written to; -1 for None and inference tensors, which do not count."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def mark(tensor: Any) -> tuple[int, int]:
    """Identity and count of writes: another mark means that the tensor was written to, or that
    another one has its place. A DTensor does not count writes to its shard, as those of FSDP2 to
    gradients: the shard's own are added."""
    if tensor is None:
        return NO_TENSOR
    held = shard(tensor)
    count = writes(tensor)
    return id(held), count if held is tensor else count + writes(held)


def marks(tensors: Iterable[Any]) -> list[tuple[int, int]]:
    return [mark(tensor) for tensor in tensors]


def owner_marks(tensors: Iterable[Any]) -> list[tuple[int, int]]:
    """The marks of tensors, or of what they are views of: FSDP makes new views of its flat gradient
    in each forward."""
    return [mark(t if t is None or t._base is None else t._base) for t in tensors]


def grad_of(parameter: Any) -> Any:
    """The gradient of a parameter; None if it has none, or for None."""
    return None if parameter is None else parameter.grad


def state_mark(optimizer: Any, parameter: Any) -> int:
    """A hash of an optimizer's state of a parameter, without reading values: it changes if a tensor
    in it is replaced or written to."""
    state = getattr(optimizer, "state", None)
    held = None if state is None or parameter is None else state.get(parameter)
    return hash(
        tuple(
            (key, mark(v))
            if hasattr(v, "_version")
            else (key, v if isinstance(v, (int, float, str)) else id(v))
            for key, v in (held or {}).items()
        )
    )


class TensorWatch:
    """Some tensors that are looked at again.

    Attributes:
        positions: which, for `read`.
        kept: what was noted of them at each moment that was named, column by column.

    Args:
        columns: what is noted; `digests` if nothing is given.
    """

    def __init__(self, positions: Sequence[int], read: Read, *columns: By) -> None:
        self.positions = list(positions)
        self._read, self._columns = read, columns or (digests,)
        self.kept: dict[str, list[list[Any]]] = {}

    def keep(self, moment: str) -> None:
        """Note the tensors as they are now."""
        tensors = self._read(self.positions)
        self.kept[moment] = [by(tensors) for by in self._columns]

    def changed(self, since: str, *, until: str = "", column: int = 0) -> list[int]:
        """Positions of the tensors that differ from what they were: now, or `until` another
        moment."""
        if until:
            return self._differing(self.kept[since], self.kept[until], column)
        now = self._columns[column](self._read(self.positions))
        return self._differing([self.kept[since][column]], [now])

    def changed_again(self, moment: str) -> list[int]:
        """Positions of the tensors that differ from what they were at a moment, which is now from
        here on."""
        before = self.kept[moment]
        self.keep(moment)
        return self._differing(before, self.kept[moment])

    def _differing(
        self, before: list[list[Any]], after: list[list[Any]], column: int = 0
    ) -> list[int]:
        rows = zip(self.positions, before[column], after[column], strict=True)
        return [position for position, old, new in rows if old != new]

    def now(self, position: int) -> Any:
        """What is noted first of one tensor, as it is now."""
        return self._columns[0](self._read([position]))[0]

    def noted(self, moment: str, *, column: int = 0) -> dict[int, Any]:
        """What was noted at a moment, by position."""
        return dict(zip(self.positions, self.kept[moment][column], strict=True))

    def only(self, positions: Iterable[int]) -> TensorWatch:
        """A copy restricted to the tensors at some positions."""
        chosen = [position in positions for position in self.positions]
        part = TensorWatch(list(compress(self.positions, chosen)), self._read, *self._columns)
        for moment, columns in self.kept.items():
            part.kept[moment] = [list(compress(column, chosen)) for column in columns]
        return part
