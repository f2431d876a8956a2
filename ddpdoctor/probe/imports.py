"""Modules that are to be watched if the program imports them at all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from .frames import unframe
from .patching import on_restore
from .recorder import guarded

Work = Callable[[Any], None]


class _Finder:
    """Finds nothing itself; wraps the loader of what the other finders find."""

    def __init__(self) -> None:
        self.awaited: dict[str, tuple[Work, str]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        work, lost = self.awaited.pop(name)
        spec = _found(name, path, target)
        if spec is not None:
            guarded("imports", lambda _: _wrap(spec, work, lost), lost=lost)
        return spec


def _found(name: str, path: Any, target: Any) -> ModuleSpec | None:
    """What the finders find, this one asked in vain."""
    finders = (getattr(finder, "find_spec", None) for finder in list(sys.meta_path))
    specs = (find(name, path, target) for find in finders if find)
    return next((spec for spec in specs if spec is not None), None)


def _wrap(spec: ModuleSpec, work: Work, lost: str) -> None:
    loader: Any = spec.loader
    run = loader.exec_module

    def exec_module(module: Any) -> None:
        try:
            run(module)
        except BaseException as error:
            unframe(error)
            raise
        guarded("imports", lambda _: work(module), lost=lost)

    loader.exec_module = exec_module


_finder = _Finder()


def when_imported(name: str, work: Work, *, lost: str) -> None:
    """Call `work(module)` right after that module is imported, or now where it has been."""
    if name in sys.modules:
        work(sys.modules[name])
        return
    if _finder not in sys.meta_path:
        _finder.awaited.clear()
        sys.meta_path.insert(0, _finder)
        on_restore(_take_back)
    _finder.awaited[name] = work, lost


def _take_back() -> None:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
