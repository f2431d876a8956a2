"""Where each module and parameter was made, so that a finding can point at the line."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from ..recording.code_locations import classify
from ..recording.frames import disguise, unframe, variables
from ..recording.patching import on_restore, replace
from ..recording.recorder import current_recorder
from ..recording.weak_references import WeakIdentityMap

LOST = "the lines that make modules"


class _Origins:
    """The user's line that called a module's class, by module. Known also from before the
    process became a rank, so lines are numbered only when asked for.

    Attributes:
        copies: modules that no constructor made: copied or unpickled ones.
    """

    def __init__(self) -> None:
        self.lines: WeakIdentityMap[tuple[CodeType, int]] = WeakIdentityMap()
        self.parameters: WeakIdentityMap[dict[str, tuple[CodeType, int]]] = WeakIdentityMap()
        self.copies: WeakIdentityMap[None] = WeakIdentityMap()
        self.registrations = 0
        self.user_code: dict[CodeType, bool] = {}

    def is_user(self, code: CodeType) -> bool:
        try:
            return self.user_code[code]
        except KeyError:
            self.user_code[code] = found = classify(code.co_filename) == "user"
            return found


_origins = _Origins()


def install() -> None:
    import torch.nn

    _origins.lines.clear()
    _origins.parameters.clear()
    _origins.copies.clear()
    _origins.registrations = 0
    original = torch.nn.Module.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            _record_origin(self, sys._getframe(1))
        except Exception as error:
            _missed(error)
        try:
            original(self, *args, **kwargs)
        except BaseException as error:
            unframe(error)
            raise

    replace(torch.nn.Module, "__init__", disguise(__init__, original))
    _watch_copies(torch.nn.Module)
    hooks = torch.nn.modules.module
    on_restore(hooks.register_module_parameter_registration_hook(_registered).remove)


def _watch_copies(kind: Any) -> None:
    original = kind.__setstate__

    def __setstate__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except BaseException as error:
            unframe(error)
            raise
        try:
            _origins.copies[self] = None
        except Exception as error:
            _missed(error)

    replace(kind, "__setstate__", disguise(__setstate__, original))


def origin_line(module: Any) -> tuple[CodeType, int] | None:
    """The user's line that made a module, None where unknown (a copy, say)."""
    return _origins.lines.get(module) if hasattr(module, "_modules") else None


def origin_site(module: Any) -> int:
    """The number of the user's line that made a module, -1 where unknown."""
    recorder = current_recorder()
    line = origin_line(module)
    return recorder.sites.number(*line) if recorder is not None and line else -1


def parameter_site(module: Any, name: str) -> int:
    """The number of the user's line that gave a module this parameter, -1 where a library did."""
    recorder = current_recorder()
    line = _origins.parameters.get(module, {}).get(name)
    return recorder.sites.number(*line) if recorder is not None and line else -1


def added_site(module: Any, name: str) -> int:
    """The number of the user's line that brought in a parameter which the model did not have: the
    one that made its module, if it came with that."""
    line = _origins.parameters.get(module, {}).get(name)
    born = origin_site(module) if line is None or line[0].co_name == "__init__" else -1
    return born if born >= 0 else parameter_site(module, name)


def named_roots(parameters: list[Any]) -> tuple[dict[int, str], list[Any]]:
    """Names of parameters by identity, and the outermost modules that hold them, the one that
    holds the most first; as far as the modules are known."""
    wanted = {id(p) for p in parameters}
    known = living_modules()
    children = {id(c) for m in known for c in m._modules.values() if c is not None}
    names: dict[int, str] = {}
    roots = []
    for module in known:
        if id(module) in children:
            continue
        mine = {id(p): n for n, p in module.named_parameters() if id(p) in wanted}
        if mine:
            names = mine | names
            roots.append((len(mine), module))
    roots.sort(key=lambda pair: -pair[0])
    return names, [module for _, module in roots]


def living_modules() -> list[Any]:
    """All modules that exist, as far as they are known."""
    return [*_origins.lines, *(m for m in _origins.copies if m not in _origins.lines)]


def in_some_module(parameter: Any) -> bool:
    """Whether a living module has this parameter."""
    return any(parameter is held for m in living_modules() for held in m._parameters.values())


def registrations() -> int:
    """How many parameters were registered in this process; a new one may change a wrapped model."""
    return _origins.registrations


def _registered(module: Any, name: str, parameter: Any) -> None:
    try:
        _origins.registrations += 1
        frame: FrameType | None = sys._getframe(1)
        own = frame.f_code.co_filename if frame else ""
        while frame is not None and frame.f_code.co_filename == own:
            frame = frame.f_back
        if frame is not None and _origins.is_user(frame.f_code):
            lines = _origins.parameters.setdefault(module, {})
            lines[name] = (frame.f_code, frame.f_lineno)
    except Exception as error:
        _missed(error)


def _missed(error: Exception) -> None:
    if (recorder := current_recorder()) is not None:
        recorder.trouble("modules", error, LOST)


def _record_origin(module: Any, frame: FrameType | None) -> None:
    # Step out of the constructors of the module itself (`super().__init__()` in the user's class)
    # to the line that called its class.
    while frame is not None and frame.f_code.co_name == "__init__":
        names = frame.f_code.co_varnames
        if not names or variables(frame).get(names[0], module) is not module:
            break
        frame = frame.f_back
    while frame is not None and not _origins.is_user(frame.f_code):
        frame = frame.f_back
    if frame is not None:
        _origins.lines[module] = (frame.f_code, frame.f_lineno)
