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
        routine: it is told of routine steps too (see `routine`).
        given_up: it failed too often, and rests for ever.
    """

    __slots__ = ("_moment", "awake", "callback", "given_up", "lost", "part", "routine")

    def __init__(
        self, moment: Hook[M], callback: Callback[M], routine: bool, lost: str, awake: bool
    ) -> None:
        self._moment = moment
        self.part = f"{callback.__module__.rpartition('.')[2]}.{callback.__name__.strip('_')}"
        self.callback = callback
        self.routine = routine
        self.lost = lost
        self.awake = awake
        self.given_up = False

    def enable(self, awake: bool = True) -> None:
        """Have the callback called from the next such moment on."""
        if self.awake is not awake and not self.given_up:
            self.awake = awake
            self._moment.choose()

    def disable(self) -> None:
        """Have it called no more, until it is woken."""
        self.enable(False)


class Subscriptions(list[Subscription[Any]]):
    """Some that wake and rest together."""

    def enable(self, awake: bool = True) -> None:
        for one in self:
            one.enable(awake)

    def disable(self) -> None:
        self.enable(False)


class Hook(Generic[M]):
    """A kind of moment: callbacks, called in the order they subscribed.

    Attributes:
        in_routine: those to be told of it in a routine step.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        _every.append(self)
        self._every: list[Subscription[M]] = []
        self._awake: list[Subscription[M]] = []
        self.in_routine: list[Subscription[M]] = []

    def subscribe(
        self,
        callback: Callback[M],
        *,
        routine: bool = True,
        lost: str = "",
        awake: bool = True,
    ) -> Subscription[M]:
        """Have `callback(recorder, moment)` called, in routine steps only if `routine`; `lost`
        says what its failure loses."""
        new = Subscription(self, callback, routine, lost, awake)
        self._every.append(new)
        self.choose()
        return new

    def choose(self) -> None:
        """Some of the subscriptions went to rest or woke up."""
        self._awake = [one for one in self._every if one.awake]  # a new list: `happens` may run
        self.in_routine = [one for one in self._awake if one.routine]

    def fire(self, recorder: Recorder, moment: M) -> None:
        for one in self._awake:
            try:
                one.callback(recorder, moment)
            except Exception as error:
                self._failed(recorder, one, error)

    def fire_fast(self, recorder: Recorder, moment: M) -> None:
        """It happens in a routine step."""
        for one in self.in_routine:
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
        self._every, self._awake, self.in_routine = [], [], []


handled: Hook[BaseException] = Hook("handled")
"""A handler of the user's logs or prints what it caught."""

leaving: Hook[None] = Hook("leaving")
"""The interpreter is about to leave; the last chance to record."""


def forget() -> None:
    """Drop every subscription."""
    for moment in _every:
        moment.clear()
