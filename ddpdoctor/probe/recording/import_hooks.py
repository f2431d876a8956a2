"""Calls functions of the probe once the program imports a module, without importing it itself.

A module that is looked up need not be imported (`importlib.util.find_spec("torch")`), so a module
is awaited until its code has run, however often it is looked up, and in whatever thread. If another
finder, put before ours, imports it, that is noticed when the next module is looked up.
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
    """What to call once a module has been imported. Neither may raise.

    Attributes:
        work: called with the module within the import, before the program has it.
        late: called instead if the program may have used the module already.
    """

    work: Work
    late: Work


class Finder:
    """An import finder that finds nothing itself: it wraps the loaders that other finders find.

    Attributes:
        awaited: what to call, by name of the module.
        running: modules whose code is running.
    """

    def __init__(self) -> None:
        self.awaited: dict[str, Awaited] = {}
        self.running: set[str] = set()
        self._asked = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        # Our own failures must not break the program's import; those of other finders must.
        try:
            asking = self._asking
            self._catch_up()
            if name not in self.awaited or name in asking:  # this look-up is our own, see below
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
        """The modules that this finder is looking up itself in this thread."""
        try:
            return self._asked.names
        except AttributeError:
            self._asked.names = set()
            return self._asked.names

    def _wrap(self, name: str, loader: Any) -> None:
        """Replace the loader's `exec_module`, unless the loader is a class, which loads other
        modules too, or cannot be changed: then `_catch_up` notices the module later."""
        run = getattr(loader, "exec_module", None)
        if run is None or isinstance(loader, type) or isinstance(run, _Execution):
            return
        try:
            loader.exec_module = _Execution(self, name, run)
        except AttributeError:
            return

    def imported(self, name: str, module: Any, *, late: bool = False) -> None:
        """Call what waits for a module whose code has run."""
        if (awaited := self.awaited.pop(name, None)) is not None:
            (awaited.late if late else awaited.work)(module)

    def _catch_up(self) -> None:
        """Find awaited modules that were imported past this finder."""
        for name in list(self.awaited):
            if name in sys.modules and name not in self.running and is_loaded(name):
                self.imported(name, sys.modules[name], late=True)


class _Execution:
    """Replaces `exec_module` of a loader, which may be used for other modules too."""

    def __init__(self, finder: Finder, name: str, run: Callable[[Any], None]) -> None:
        self._finder, self._name, self._run = finder, name, run

    def __call__(self, module: Any) -> None:
        # `vars`, since access to an attribute would import a lazy module.
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
    """Whether a module's code has run to its end. Does not import lazy modules."""
    module: Any = sys.modules.get(name)
    if not isinstance(module, ModuleType) or is_lazy(module):
        return False
    return not getattr(vars(module).get("__spec__"), "_initializing", False)


_finder = Finder()


def when_imported(name: str, work: Work, *, lost: str) -> None:
    """Call `work(module)` right after that module is imported, or now if it was.

    Args:
        lost: what is not observed if `work` fails, for the report.
    """
    if is_loaded(name):
        work(sys.modules[name])
        return

    def careful(module: Any) -> None:
        guarded("imports", lambda _: work(module), lost=lost)

    wait_for(name, careful, careful)


def wait_for(name: str, work: Work, late: Work) -> Finder:
    """Call `work(module)` once that module is imported, even before this process is a rank; returns
    the finder. Errors go to a file in the run folder.

    Args:
        late: called instead if the program may have used the module already.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(_place(), _finder)
    mine = Awaited(_with_errors_written(work), _with_errors_written(late))
    if (others := _finder.awaited.get(name)) is None:
        on_restore(lambda: _forget(name))
        _finder.awaited[name] = mine
    else:
        _finder.awaited[name] = Awaited(
            _both(others.work, mine.work), _both(others.late, mine.late)
        )
    return _finder


def _both(first: Work, second: Work) -> Work:
    def work(module: Any) -> None:
        first(module)
        second(module)

    return work


def _place() -> int:
    """The position in `sys.meta_path` for our finder: just before Python's own finders.

    Not the first: programs insert a finder in front and later `pop(0)` it.
    """
    return sys.meta_path.index(BuiltinImporter) if BuiltinImporter in sys.meta_path else 0


def _with_errors_written(work: Work) -> Work:
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
