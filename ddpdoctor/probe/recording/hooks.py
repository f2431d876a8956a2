"""Hooks: moments of a run that several watchers care about, and the callbacks for each.

A watcher whose callback fails is counted and switched off on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .recorder import Recorder

M = TypeVar("M")

Callback = Callable[[Recorder, M], None]

_every: list[Hook[Any]] = []


class Subscription(Generic[M]):
    """A callback of a moment. One that waits for nothing now can rest: it then costs nothing.

    Attributes:
        part: how its failures are told; `lost` is what they lose.
        fast_path: it is told of fast_path steps too (see `fast_path`).
        given_up: it failed too often, and rests for ever.
    """

    __slots__ = ("_hook", "callback", "enabled", "fast_path", "given_up", "lost", "part")

    def __init__(
        self, moment: Hook[M], callback: Callback[M], fast_path: bool, lost: str, enabled: bool
    ) -> None:
        self._hook = moment
        self.part = f"{callback.__module__.rpartition('.')[2]}.{callback.__name__.strip('_')}"
        self.callback = callback
        self.fast_path = fast_path
        self.lost = lost
        self.enabled = enabled
        self.given_up = False

    def enable(self, enabled: bool = True) -> None:
        """Have the callback called from the next such moment on."""
        if self.enabled is not enabled and not self.given_up:
            self.enabled = enabled
            self._hook.update()

    def disable(self) -> None:
        """Have it called no more, until it is woken."""
        self.enable(False)


class Subscriptions(list[Subscription[Any]]):
    """Some that wake and rest together."""

    def enable(self, enabled: bool = True) -> None:
        for one in self:
            one.enable(enabled)

    def disable(self) -> None:
        self.enable(False)


class Hook(Generic[M]):
    """A kind of moment: callbacks, called in the order they subscribed.

    Attributes:
        on_fast_path: those to be told of it in a fast_path step.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        _every.append(self)
        self._every: list[Subscription[M]] = []
        self._enabled: list[Subscription[M]] = []
        self.on_fast_path: list[Subscription[M]] = []

    def subscribe(
        self,
        callback: Callback[M],
        *,
        fast_path: bool = True,
        lost: str = "",
        enabled: bool = True,
    ) -> Subscription[M]:
        """Have `callback(recorder, moment)` called, in fast_path steps only if `fast_path`; `lost`
        says what its failure loses."""
        new = Subscription(self, callback, fast_path, lost, enabled)
        self._every.append(new)
        self.update()
        return new

    def update(self) -> None:
        """Some of the subscriptions went to rest or woke up."""
        self._enabled = [one for one in self._every if one.enabled]  # a new list: `happens` may run
        self.on_fast_path = [one for one in self._enabled if one.fast_path]

    def fire(self, recorder: Recorder, moment: M) -> None:
        for one in self._enabled:
            try:
                one.callback(recorder, moment)
            except Exception as error:
                self._failed(recorder, one, error)

    def fire_fast(self, recorder: Recorder, moment: M) -> None:
        """It happens in a fast_path step."""
        for one in self.on_fast_path:
            try:
                one.callback(recorder, moment)
            except Exception as error:
                self._failed(recorder, one, error)

    def _failed(self, recorder: Recorder, one: Subscription[M], error: Exception) -> None:
        recorder.trouble(one.part, error, one.lost)
        if one.part in recorder.off:
            one.disable()
            one.given_up = True

    def clear(self) -> None:
        self._every, self._enabled, self.on_fast_path = [], [], []


handled: Hook[BaseException] = Hook("handled")
"""A handler of the user's logs or prints what it caught."""

leaving: Hook[None] = Hook("leaving")
"""The interpreter is about to leave; the last chance to record."""


def forget() -> None:
    """Drop every subscription."""
    for moment in _every:
        moment.clear()
