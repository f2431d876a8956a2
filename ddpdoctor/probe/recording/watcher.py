"""The base class of what observes a run: a watcher says what it subscribes to and what it wraps.

Watchers are found by walking the packages, so a new one is a new class in a module and no list is
edited. They are installed package by package, and within that by `after` and `before`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from . import patching
from .hooks import Hook, Light, Subscription, Subscriptions

W = TypeVar("W", bound="Watcher")
F = TypeVar("F", bound=Callable[..., None])

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Error = BaseException | None
"""What the hooks of `around` get: the arguments of a call, and the exception that ended it."""

Activate = Callable[[int, int, str | None], None]
"""Called with (rank, world size, init method) of `init_process_group`; -1 for what is left out."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """A subscription that a method declares; see `on`."""

    hook: Hook[Any]
    during: str
    fast_path: bool
    lost: str | None
    enabled: bool
    light: Light


def on(
    hook: Hook[Any],
    *,
    during: str = "",
    fast_path: bool = True,
    lost: str | None = None,
    enabled: bool = False,
    light: Light = Light.NONE,
) -> Callable[[F], F]:
    """Declare that a method `(self, recorder, moment)` is called when a hook fires.

    Args:
        during: the attribute with the `Subscriptions` that this one is enabled and disabled with;
            without it, it is enabled from the start.
        fast_path: call it also in steps that take the fast path.
        lost: what is not observed if it fails, if that differs from the watcher's `lost`.
        enabled: one that is `during` something is enabled at the start, too.
        light: for one on the fast path, whether it is called in light steps.
    """

    def declare(method: F) -> F:
        wishes: list[_Wish] = vars(method).setdefault("wishes", [])
        # Decorators are applied from the lowest up: the first line is the first subscription.
        wishes.insert(0, _Wish(hook, during, fast_path, lost, enabled or not during, light))
        return method

    return declare


class _Current:
    """The watcher of a class that is at work; made when it is asked for the first time."""

    def __get__(self, _: object, owner: type[W]) -> W:
        owner.renew()
        made: W = vars(owner)["current"]
        return made


class Watcher:
    """Observes one thing in a rank. What it knows is in its attributes.

    A watcher is made anew each time that torch is wrapped, so nothing of an earlier run in the same
    process remains.

    Attributes:
        lost: what is not observed if it fails, for the report.
        after: watchers that are installed, and called at a hook, earlier than this one.
        before: watchers that are installed, and called at a hook, later; for those that this one
            asks, which cannot name it.
        current: the watcher that is at work, for others that ask it.
    """

    lost: ClassVar[str]
    after: ClassVar[tuple[type[Watcher], ...]] = ()
    before: ClassVar[tuple[type[Watcher], ...]] = ()
    current: ClassVar[_Current] = _Current()

    def install(self) -> None:
        """Wrap functions of torch, see `around`; called once, before the subscriptions are made."""

    def around(self, owners: Any, name: str, *, lost: str = "", **hooks: Any) -> None:
        """Call `before` and `after` around a function; see `patching.around`."""
        patching.around(owners, name, lost=lost or self.lost, **hooks)

    def activate_with(self, activate: Activate) -> None:
        """Have a call that makes this process a rank call `activate` before it can block.

        Called once all watchers are installed: only so is this wrapper the outermost, and those of
        `around`, which do nothing before this process is a rank, find a recorder.
        """

    @classmethod
    def renew(cls) -> None:
        """Put a new watcher in the place of the current one, with nothing known yet."""
        setattr(cls, "current", cls())  # noqa: B010  (the descriptor is only for the first access)

    @classmethod
    def begin(cls) -> None:
        """Have a new watcher observe from now on."""
        cls.renew()
        current: Watcher = cls.current
        current.install()
        current.subscribe()

    def subscribe(self) -> None:
        """Make the subscriptions that the methods declare, in the order of the methods."""
        for name, method in list(vars(type(self)).items()):
            for wish in getattr(method, "wishes", ()):
                made: Subscription[Any] = wish.hook.subscribe(
                    getattr(self, name),
                    fast_path=wish.fast_path,
                    lost=self.lost if wish.lost is None else wish.lost,
                    enabled=wish.enabled,
                    light=wish.light,
                )
                if wish.during:
                    group: Subscriptions = getattr(self, wish.during)
                    group.append(made)


def _is_watcher(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Watcher)


def find(packages: Iterable[str]) -> Iterator[type[Watcher]]:
    """The watchers in the modules of some packages, package by package."""
    for package in packages:
        whole = importlib.import_module(package)
        for module in pkgutil.walk_packages(whole.__path__, f"{package}."):
            for value in vars(importlib.import_module(module.name)).values():
                defined_here = getattr(value, "__module__", "") == module.name
                if defined_here and value is not Watcher and _is_watcher(value):
                    yield value


def in_order(watchers: Iterable[type[Watcher]]) -> list[type[Watcher]]:
    """Watchers in the order given, but each after those that its `after` or their `before` names.

    Raises:
        ValueError: one is named that is not among them, or they wait for each other.
    """
    every = list(watchers)
    placed: dict[type[Watcher], None] = {}
    named = {other for one in every for other in (*one.after, *one.before)}
    if unknown := named.difference(every):
        raise ValueError(f"not found: {', '.join(sorted(one.__name__ for one in unknown))}")

    def place(one: type[Watcher], waiting: tuple[type[Watcher], ...]) -> None:
        if one in waiting:
            names = " after ".join(each.__name__ for each in (*waiting, one))
            raise ValueError(f"no order of installation: {names}")
        if one in placed:
            return
        for other in every:
            if other in one.after or one in other.before:
                place(other, (*waiting, one))
        placed[one] = None

    for each in every:
        place(each, ())
    return list(placed)
