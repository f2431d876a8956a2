"""References to the user's objects: nothing is kept alive by them, or from being swapped.

`torch.utils.swap_tensors` refuses tensors that somebody refers to weakly. The probe wants what an
object is by then, so its own references do not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

from .patching import replace

LOST = "nothing, but tensors that the probe knows cannot be swapped"


class Reference(weakref.ref[Any]):
    """Of the probe's own, never one that others share."""

    __slots__ = ()


V = TypeVar("V")
W = TypeVar("W")


class WeakIdentityMap(MutableMapping[Any, V]):
    """From the user's objects, which it does not keep alive, to what is known of them.

    Unlike `WeakKeyDictionary` it goes by identity: a class of the user's may have no `__hash__` (a
    data class), one that needs what its constructor has yet to set, or one that changes.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Reference, V]] = {}

    def __getitem__(self, key: Any) -> V:
        reference, value = self._entries[id(key)]
        if reference() is not key:
            raise KeyError
        return value

    def __setitem__(self, key: Any, value: V) -> None:
        self._entries[id(key)] = Reference(key, _remover(self._entries, id(key))), value

    def __delitem__(self, key: Any) -> None:
        del self._entries[id(key)]

    def __iter__(self) -> Iterator[Any]:
        """The objects that are alive, in the order in which they came."""
        for reference, _ in list(self._entries.values()):
            if (key := reference()) is not None:
                yield key

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any, default: W = None) -> V | W:  # type: ignore[assignment]
        entry = self._entries.get(id(key))  # without the exception of the inherited one
        return entry[1] if entry is not None and entry[0]() is key else default


def _remover(entries: dict[int, tuple[Reference, V]], number: int) -> Callable[[Any], None]:
    def remove(reference: Any) -> None:
        if number in entries and entries[number][0] is reference:
            del entries[number]

    return remove


class _Others:
    """The module `weakref` without the probe's references."""

    def __getattr__(self, name: str) -> Any:
        return getattr(weakref, name)

    @staticmethod
    def getweakrefs(of: Any) -> list[Any]:
        return [one for one in weakref.getweakrefs(of) if type(one) is not Reference]


def install() -> None:
    import torch.utils

    if vars(torch.utils).get("weakref") is weakref:
        replace(torch.utils, "weakref", _Others())
