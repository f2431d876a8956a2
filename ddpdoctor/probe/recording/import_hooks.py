"""Modules that are to be watched if the program imports them at all.

To be asked for a module is not to import it (`importlib.util.find_spec("torch")` only asks), so a
module is awaited until its code has run, however often it is asked for, and in whatever thread.
Another finder, put before this one, may import it unasked: that is noticed at the next question
about any other module.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.machinery import BuiltinImporter, ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from .frames import unframe
from .patching import is_lazy, on_restore
from .recorder import guarded, write_probe_error

Work = Callable[[Any], None]


class Awaited(NamedTuple):
    """What to do once a module has been imported. Neither may raise.

    Attributes:
        work: called in the import, before the program has seen the module.
        late: called instead where the program may have used the module already.
    """

    work: Work
    late: Work


class Finder:
    """Finds nothing itself; wraps the loader of what the other finders find."""

    def __init__(self) -> None:
        self.awaited: dict[str, Awaited] = {}
        self.running: set[str] = set()
        self._asked = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        # What fails in us must not fail in the program's import; what fails in others must.
        try:
            asking = self._asking
            self._catch_up()
            if name not in self.awaited or name in asking:  # that thread asks on our behalf
                return None
            asking.add(name)
        except Exception as error:
            write_probe_error(error)
            return None
        try:
            finders = (getattr(finder, "find_spec", None) for finder in list(sys.meta_path))
            specs = (find(name, path, target) for find in finders if find)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            asking.discard(name)
        if spec is not None:
            try:
                self._wrap(name, spec.loader)
            except Exception as error:
                write_probe_error(error)
        return spec

    @property
    def _asking(self) -> set[str]:
        """The modules that this thread asks the other finders for."""
        try:
            return self._asked.names
        except AttributeError:
            self._asked.names = set()
            return self._asked.names

    def _wrap(self, name: str, loader: Any) -> None:
        """Have the module's code run by us. Where a loader cannot be changed, or is a class that
        loads other modules too, the module is noticed later."""
        run = getattr(loader, "exec_module", None)
        if run is None or isinstance(loader, type) or isinstance(run, _Execution):
            return
        try:
            loader.exec_module = _Execution(self, name, run)
        except AttributeError:
            return

    def imported(self, name: str, module: Any, *, late: bool = False) -> None:
        """A module's code has run."""
        if (awaited := self.awaited.pop(name, None)) is not None:
            (awaited.late if late else awaited.work)(module)

    def _catch_up(self) -> None:
        """Look for modules that were imported without our knowledge."""
        for name in list(self.awaited):
            if name in sys.modules and name not in self.running and is_loaded(name):
                self.imported(name, sys.modules[name], late=True)


class _Execution:
    """`exec_module` of one module's loader; a loader that serves several modules keeps it."""

    def __init__(self, finder: Finder, name: str, run: Callable[[Any], None]) -> None:
        self._finder, self._name, self._run = finder, name, run

    def __call__(self, module: Any) -> None:
        # `vars`: to ask a lazy module for an attribute would be to import it.
        spec = vars(module).get("__spec__")
        if getattr(spec, "name", "") != self._name:
            self._run(module)
            return
        running = self._finder.running
        running.add(self._name)
        try:
            self._run(module)
        except BaseException as error:
            unframe(error)
            raise
        finally:
            running.discard(self._name)
        try:
            self._finder.imported(self._name, module)
        except Exception as error:
            write_probe_error(error)


def is_loaded(name: str) -> bool:
    """Whether a module's code has run to its end; never by asking a lazy module, which would then
    be imported."""
    module: Any = sys.modules.get(name)
    if not isinstance(module, ModuleType) or is_lazy(module):
        return False
    return not getattr(vars(module).get("__spec__"), "_initializing", False)


_finder = Finder()


def when_imported(name: str, work: Work, *, lost: str) -> None:
    """Call `work(module)` right after that module is imported, or now where it has been.

    Args:
        lost: what is not observed when `work` fails.
    """
    if is_loaded(name):
        work(sys.modules[name])
        return

    def careful(module: Any) -> None:
        guarded("imports", lambda _: work(module), lost=lost)

    wait_for(name, careful, careful)


def wait_for(name: str, work: Work, late: Work) -> Finder:
    """Call `work(module)` once that module is imported, also before this process is a rank; what
    fails is left where the report finds it. The finder that waits.

    Args:
        late: called instead where the program may have used the module already.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(_place(), _finder)
    if name not in _finder.awaited:
        on_restore(lambda: _forget(name))
    _finder.awaited[name] = Awaited(_complaining(work), _complaining(late))
    return _finder


def _place() -> int:
    """Before the finders of Python itself. Programs put one of theirs in front for a while, and
    take away the first one, which must be theirs."""
    return sys.meta_path.index(BuiltinImporter) if BuiltinImporter in sys.meta_path else 0


def _complaining(work: Work) -> Work:
    def careful(module: Any) -> None:
        try:
            work(module)
        except Exception as error:
            write_probe_error(error)

    return careful


def _forget(name: str) -> None:
    _finder.awaited.pop(name, None)
    if not _finder.awaited and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
