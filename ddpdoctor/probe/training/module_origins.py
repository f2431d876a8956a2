"""The lines of the user's code that created each module and parameter, for findings to point at."""

from __future__ import annotations

import sys
import time
from types import CodeType, FrameType
from typing import Any

from ..collectives import call_sites
from ..recording.code_locations import classify
from ..recording.frames import disguise, unframe, variables
from ..recording.patching import on_restore, replace
from ..recording.recorder import current_recorder
from ..recording.torch_compat import flattened, flattens, fully_sharded, fully_shards
from ..recording.watcher import Watcher
from ..recording.weak_references import WeakIdentityMap
from .steady_state import steady_state


class ModuleOrigins(Watcher):
    """What is known of the modules of this process, also from before it became a rank: so lines get
    their sites only when asked for.

    Attributes:
        lines: the user's line that called a module's class.
        parameters: by module, the user's line that assigned each parameter.
        copies: modules that were copied or unpickled, without their constructor: the user's line
            that did it, and when.
        registrations: how many parameters were registered.
        user_code: whether a code object is the user's.
    """

    lost = "the lines that make modules"

    def __init__(self) -> None:
        self.lines: WeakIdentityMap[tuple[CodeType, int]] = WeakIdentityMap()
        self.parameters: WeakIdentityMap[dict[str, tuple[CodeType, int]]] = WeakIdentityMap()
        self.copies: WeakIdentityMap[tuple[tuple[CodeType, int] | None, float]] = WeakIdentityMap()
        self._names: WeakIdentityMap[str] = WeakIdentityMap()
        self.registrations = 0
        self.user_code: dict[CodeType, bool] = {}

    def is_user(self, code: CodeType) -> bool:
        try:
            return self.user_code[code]
        except KeyError:
            self.user_code[code] = found = classify(code.co_filename) == "user"
            return found

    def install(self) -> None:
        import torch.nn

        call_sites.names.of_object = self._name_of
        original = torch.nn.Module.__init__

        def __init__(module: Any, *args: Any, **kwargs: Any) -> None:
            try:
                self._record_origin(module, sys._getframe(1))
            except Exception as error:
                self._missed(error)
            try:
                original(module, *args, **kwargs)
            except BaseException as error:
                unframe(error)
                raise

        replace(torch.nn.Module, "__init__", disguise(__init__, original))
        self._watch_copies(torch.nn.Module)
        hooks = torch.nn.modules.module
        on_restore(hooks.register_module_parameter_registration_hook(self._registered).remove)

    def _watch_copies(self, kind: Any) -> None:
        original = kind.__setstate__

        def __setstate__(module: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(module, *args, **kwargs)
            except BaseException as error:
                unframe(error)
                raise
            try:
                self.copies[module] = self._user_line(sys._getframe(1)), time.monotonic()
            except Exception as error:
                self._missed(error)

        replace(kind, "__setstate__", disguise(__setstate__, original))

    def origin_line(self, module: Any) -> tuple[CodeType, int] | None:
        """The user's line that created a module; None if unknown (for a copy, say)."""
        return self.lines.get(module) if hasattr(module, "_modules") else None

    def origin_site(self, module: Any) -> int:
        """The site of the user's line that created a module; -1 if unknown."""
        recorder = current_recorder()
        line = self.origin_line(module)
        return recorder.sites.number(*line) if recorder is not None and line else -1

    def copied(self, module: Any) -> tuple[int, float] | None:
        """For a module that was copied: the site of the user's line that did it, and when."""
        recorder = current_recorder()
        known = self.copies.get(module)
        if known is None or recorder is None:
            return None
        line, at = known
        return recorder.sites.number(*line) if line else -1, at

    def parameter_site(self, module: Any, name: str) -> int:
        """The site of the user's line that assigned this parameter to a module; -1 if a library
        did."""
        recorder = current_recorder()
        line = self.parameters.get(module, {}).get(name)
        return recorder.sites.number(*line) if recorder is not None and line else -1

    def added_site(self, module: Any, name: str) -> int:
        """The site of the user's line that added a parameter to a model later: the line that
        created the module if that brought it along, else the line that assigned the parameter."""
        line = self.parameters.get(module, {}).get(name)
        born = self.origin_site(module) if line is None or line[0].co_name == "__init__" else -1
        return born if born >= 0 else self.parameter_site(module, name)

    def named_roots(self, parameters: list[Any]) -> tuple[dict[int, str], list[Any]]:
        """Names of parameters by id, and the outermost known modules that contain them, the one
        with most of them first."""
        wanted = {id(p) for p in parameters}
        names: dict[int, str] = {}
        roots = []
        for module in self.outermost():
            mine = {id(p): n for n, p in module.named_parameters() if id(p) in wanted}
            if mine:
                names = mine | names
                roots.append((len(mine), module))
        roots.sort(key=lambda pair: -pair[0])
        return names, [module for _, module in roots]

    def _name_of(self, parameter: Any) -> str:
        """The name of a parameter in the outermost module that has it; empty if none does, or if it
        is in a module that was made after the first such question."""
        if not issubclass(type(parameter), sys.modules["torch"].Tensor):
            return ""
        if not self._names:
            for module in self.outermost():
                for name, held in module.named_parameters():
                    self._names.setdefault(held, name)
        return self._names.get(parameter, "")

    def outermost(self) -> list[Any]:
        """The living modules that are in no other one."""
        known = self.living_modules()
        children = {id(c) for m in known for c in m._modules.values() if c is not None}
        return [module for module in known if id(module) not in children]

    def living_modules(self) -> list[Any]:
        """All living modules that are known."""
        return [*self.lines, *(m for m in self.copies if m not in self.lines)]

    def in_some_module(self, parameter: Any) -> bool:
        """Whether a living module has this parameter."""
        return any(
            parameter is held for m in self.living_modules() for held in m._parameters.values()
        )

    def _registered(self, module: Any, name: str, parameter: Any) -> None:
        try:
            self.registrations += 1
            if steady_state.expected is not None:
                steady_state.expected.light = 0
            frame: FrameType | None = sys._getframe(1)
            own = frame.f_code.co_filename if frame else ""
            while frame is not None and frame.f_code.co_filename == own:
                frame = frame.f_back
            if frame is not None and self.is_user(frame.f_code):
                lines = self.parameters.setdefault(module, {})
                lines[name] = (frame.f_code, frame.f_lineno)
        except Exception as error:
            self._missed(error)

    def _missed(self, error: Exception) -> None:
        if (recorder := current_recorder()) is not None:
            recorder.trouble("modules", error, self.lost)

    def _record_origin(self, module: Any, frame: FrameType | None) -> None:
        # Step out of the module's own constructors (`super().__init__()` in the user's class) to
        # the line that called its class.
        while frame is not None and frame.f_code.co_name == "__init__":
            names = frame.f_code.co_varnames
            if not names or variables(frame).get(names[0], module) is not module:
                break
            frame = frame.f_back
        if (line := self._user_line(frame)) is not None:
            self.lines[module] = line

    def _user_line(self, frame: FrameType | None) -> tuple[CodeType, int] | None:
        while frame is not None and not self.is_user(frame.f_code):
            frame = frame.f_back
        return None if frame is None else (frame.f_code, frame.f_lineno)


def sharded_roots() -> list[Any]:
    """The outermost modules that `fully_shard` or `FullyShardedDataParallel` was applied to."""
    shards = fully_shards()
    every = [
        m
        for m in (ModuleOrigins.current.living_modules() if shards or flattens() else ())
        if flattened(m) or (shards and fully_sharded(m))
    ]
    within = {id(part) for m in every for part in m.modules() if part is not m}
    return [m for m in every if id(m) not in within]
