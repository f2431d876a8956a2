"""Hooks: moments of a run that watchers subscribe to.

The failure of one callback is recorded and, if it keeps failing, switches off that callback alone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

from ...events import FileWritten
from .recorder import Recorder

M = TypeVar("M")

Callback = Callable[[Recorder, M], None]

_every: list[Hook[Any]] = []


class Light(enum.Enum):
    """What a callback that is called on the fast path means for light steps (see `LightSteps`):
    while it is enabled there are none, it is not called in them, or it is called."""

    NONE = enum.auto()
    LEFT_OUT = enum.auto()
    CALLED = enum.auto()


class Subscription(Generic[M]):
    """One callback of a hook. While disabled it costs nothing.

    Attributes:
        part: its name in records of failures; `lost` is what is not observed if it fails.
        fast_path: it is also called in steps that take the fast path (see `SteadyState`).
        light: whether it is called in light steps.
        given_up: it failed too often and cannot be enabled again.
    """

    __slots__ = ("_hook", "callback", "enabled", "fast_path", "given_up", "light", "lost", "part")

    def __init__(
        self,
        moment: Hook[M],
        callback: Callback[M],
        fast_path: bool,
        lost: str,
        enabled: bool,
        light: Light,
    ) -> None:
        self._hook = moment
        self.part = f"{callback.__module__.rpartition('.')[2]}.{callback.__name__.strip('_')}"
        self.callback = callback
        self.fast_path = fast_path
        self.light = light
        self.lost = lost
        self.enabled = enabled
        self.given_up = False

    def enable(self, on: bool = True) -> None:
        """Have the callback called from the next firing of the hook on."""
        if self.enabled is not on and not self.given_up:
            self.enabled = on
            self._hook.update()

    def disable(self) -> None:
        """Stop calling the callback until it is enabled again."""
        self.enable(False)


class Subscriptions(list[Subscription[Any]]):
    """Subscriptions that are enabled and disabled together."""

    def enable(self, on: bool = True) -> None:
        for one in self:
            one.enable(on)

    def disable(self) -> None:
        self.enable(False)


class Hook(Generic[M]):
    """A moment of a run; calls its callbacks in the order of subscription.

    Attributes:
        on_fast_path: the enabled subscriptions that are also called in a step on the fast path.
            Callers test whether it is empty before they do anything for it.
        in_light: those of them that are called in light steps: all, while one of them wants every
            step (`needed`).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        _every.append(self)
        self._every: list[Subscription[M]] = []
        self._enabled: list[Subscription[M]] = []
        self.on_fast_path: list[Subscription[M]] = []
        self.in_light: list[Subscription[M]] = []
        self.needed = False

    def subscribe(
        self,
        callback: Callback[M],
        *,
        fast_path: bool = True,
        lost: str = "",
        enabled: bool = True,
        light: Light = Light.NONE,
    ) -> Subscription[M]:
        """Have `callback(recorder, moment)` called when the hook fires.

        Args:
            fast_path: call it also in steps that take the fast path.
            lost: what is not observed if it fails, for the report.
            enabled: call it from now on; else once `enable` was called.
            light: for one on the fast path, whether it is called in light steps.
        """
        new = Subscription(self, callback, fast_path, lost, enabled, light)
        self._every.append(new)
        self.update()
        return new

    def update(self) -> None:
        """Collect the enabled subscriptions again after one was enabled or disabled."""
        # New lists: `fire` may be iterating over the old ones.
        self._enabled = [one for one in self._every if one.enabled]
        self.on_fast_path = [one for one in self._enabled if one.fast_path]
        self.needed = any(one.light is Light.NONE for one in self.on_fast_path)
        self.in_light = [
            one for one in self.on_fast_path if self.needed or one.light is Light.CALLED
        ]

    def fire(self, recorder: Recorder, moment: M) -> None:
        """Call every enabled callback."""
        for one in self._enabled:
            try:
                one.callback(recorder, moment)
            except Exception as error:
                self._failed(recorder, one, error)

    def fire_fast(self, recorder: Recorder, moment: M, light: int = 0) -> None:
        """Call the enabled callbacks that also want steps on the fast path, or light ones."""
        for one in self.in_light if light else self.on_fast_path:
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
        self._every, self._enabled = [], []
        self.update()


handled: Hook[BaseException] = Hook("handled")
"""An exception handler of the program logs or prints the exception that it caught."""

failing: Hook[tuple[BaseException | None, list[FrameType]]] = Hook("failing")
"""An exception leaves the program, or (None) it calls `sys.exit` with a bad status: with the frames
that are left, innermost first, whose variables still exist."""

writing: Hook[FileWritten] = Hook("writing")
"""A file is about to be written."""

leaving: Hook[None] = Hook("leaving")
"""The interpreter is about to exit: the last chance to record."""

left: Hook[None] = Hook("left")
"""The record of this rank is complete."""


def forget() -> None:
    """Remove every subscription of every hook."""
    for moment in _every:
        moment.clear()
