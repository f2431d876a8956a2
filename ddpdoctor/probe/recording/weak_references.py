"""Weak references to the user's objects that do not get in the way of `torch.utils.swap_tensors`.

That function refuses tensors with weak references. The probe wants whatever the object has become,
so its own references are hidden from torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

from .patching import replace
from .watcher import Watcher


class Reference(weakref.ref[Any]):
    """A weak reference of the probe. A class of its own, as Python shares plain ones."""

    __slots__ = ()


V = TypeVar("V")
W = TypeVar("W")


class WeakIdentityMap(MutableMapping[Any, V]):
    """Maps the user's objects, which it does not keep alive, to what is known of them.

    Goes by identity, unlike `WeakKeyDictionary`: a class of the user's may have no `__hash__` (a
    data class), one that fails before the constructor has run, or one that changes.
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
        """The objects that are alive, in the order in which they were added."""
        for reference, _ in list(self._entries.values()):
            if (key := reference()) is not None:
                yield key

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any, default: W = None) -> V | W:  # type: ignore[assignment]
        entry = self._entries.get(id(key))  # the inherited one raises and catches: slow
        return entry[1] if entry is not None and entry[0]() is key else default


def _remover(entries: dict[int, tuple[Reference, V]], number: int) -> Callable[[Any], None]:
    def remove(reference: Any) -> None:
        if number in entries and entries[number][0] is reference:
            del entries[number]

    return remove


class _WeakrefModule:
    """Stands in for the module `weakref` in torch: `getweakrefs` omits the probe's references."""

    def __getattr__(self, name: str) -> Any:
        return getattr(weakref, name)

    @staticmethod
    def getweakrefs(of: Any) -> list[Any]:
        return [one for one in weakref.getweakrefs(of) if type(one) is not Reference]


class ScriptedReferences(Watcher):
    lost = "nothing, but tensors that the probe knows cannot be swapped"

    def install(self) -> None:
        import torch.utils

        if vars(torch.utils).get("weakref") is weakref:
            replace(torch.utils, "weakref", _WeakrefModule())
