"""The Python interface: `ddpdoctor.checkup`, `ddpdoctor.examine` and `ddpdoctor.load`."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from ..config import ConfigError, resolve
from ..monitor.stop_agreement import END_OF_BLOCK
from ..report.findings import Finding, Report, Severity
from .in_rank import session

if TYPE_CHECKING:
    from .loaded import LoadedReport

P = ParamSpec("P")
R = TypeVar("R")


class FaultFound(Exception):
    """Raised on every rank for a fault that `raise_on` selects; the report is written before.

    Attributes:
        findings: the findings that stop the program, worst first.
        folder: the run folder.
    """

    __module__ = "ddpdoctor"

    def __init__(self, findings: Sequence[Finding] = (), folder: str = "") -> None:
        super().__init__(tuple(findings), folder)
        self.findings = tuple(findings)
        self.folder = folder

    def __str__(self) -> str:
        lines = []
        for f in self.findings:
            place = f" at {f.location}" if f.location else ""
            lines.append(f"{f.severity.value}[{f.code}] {f.check}: {f.summary}{place}")
            lines.append(f"  fix: {f.fix}")
        return "\n".join([*lines, f"the report: ddpdoctor report {self.folder}"])


@overload
def checkup(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def checkup(
    *,
    select: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    every: int | str | None = None,
    raise_on: str | None = None,
    **options: Any,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def checkup(function: Any = None, /, **options: Any) -> Any:
    """Examine the run of the decorated function, which takes one training step.

        @ddpdoctor.checkup(select=["drift"], every=10, raise_on="error")
        def train_step(batch): ...

    Under `ddpdoctor run` it only adds `raise_on`. Under any other launcher the ranks record to one
    run folder, and a monitor process prints the report when they have ended.

    Args:
        raise_on: `error`, `warning` or `note`: once there is a finding of that severity or worse,
            write the report and raise `FaultFound` on every rank, after the same call.
        options: any option of `ddpdoctor run`, by name (`out`, `select`, `ignore`, `every`,
            `budget`, `quiet`, ...).

    Raises:
        TypeError: what it decorates is not a function.
        ValueError: an option is unknown or has an invalid value.
    """
    asked = _checked(options)
    raise_on = _severity(options)
    if function is None:
        return functools.partial(_decorated, asked, raise_on)
    return _decorated(asked, raise_on, function)


class Steps:
    """The context of each training step of a process: of each call of a decorated function, and of
    each batch of a framework's loop."""

    def __init__(self, asked: dict[str, Any], raise_on: str | None) -> None:
        self._asked = asked
        self._raise_on = raise_on
        self._count = 0
        self._prepare()

    def _prepare(self) -> None:
        if "torch" in sys.modules:  # else torch has done nothing yet that could be missed
            session().prepare(self._asked)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()  # in a process that a framework has spawned

    def begin(self) -> None:
        """Start the examination, unless it has started."""
        session().begin(self._asked)

    def __enter__(self) -> None:
        self._count += 1
        if self._count == 1:
            self.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._raise_on is None:
            return
        current = session()
        if kind is not None:
            self.left()
            return
        verdict = current.verdict(self._raise_on, self._asked, self._count)
        if verdict is not None:
            fault = FaultFound(verdict.findings, str(current.folder or ""))
            current.raising(fault)
            raise fault

    def left(self) -> None:
        """The training raised: no other rank waits for this one."""
        if self._raise_on is not None:
            session().left()

    @property
    def report(self) -> Report | None:
        """The report; None where there is none (yet)."""
        return session().report()


def steps_of(options: dict[str, Any]) -> Steps:
    """The steps of a framework's loop, examined with options as in `checkup`.

    Raises:
        ValueError: an option is unknown or has an invalid value.
    """
    return Steps(_checked(options), _severity(options))


def _decorated(asked: dict[str, Any], raise_on: str | None, function: Any) -> Any:
    """The decorated function, of the same kind: coroutine, generator or plain function."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_decorated(asked, raise_on, function.__func__))
    if isinstance(function, type):
        raise TypeError(
            f"checkup decorates a function, not the class {function.__qualname__}; decorate its "
            "method that takes a training step"
        )
    if not callable(function):
        raise TypeError(
            f"checkup decorates a function, not {function!r}; options go by name: "
            "@ddpdoctor.checkup(every=10)"
        )
    calls = Steps(asked, raise_on)
    like = functools.wraps(function)
    if inspect.iscoroutinefunction(function):

        @like
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with calls:
                return await function(*args, **kwargs)

        return awaited
    if inspect.isgeneratorfunction(function):

        @like
        def generated(*args: Any, **kwargs: Any) -> Any:
            with calls:
                return (yield from function(*args, **kwargs))

        return generated

    @like
    def called(*args: Any, **kwargs: Any) -> Any:
        with calls:
            return function(*args, **kwargs)

    return called


class examine:
    """Examine a `with` block; the report is written when it ends.

        with ddpdoctor.examine(out="runs/a", raise_on="error") as examination:
            train()
        examination.report.findings

    Options as in `checkup`. With `raise_on`, every rank raises `FaultFound` when the block ends.
    """

    def __init__(self, **options: Any) -> None:
        self._asked = _checked(options)
        self._raise_on = _severity(options)

    def __enter__(self) -> examine:
        session().prepare(self._asked)
        session().begin(self._asked, block=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        current = session()
        verdict = None
        if self._raise_on is not None and error is None:
            verdict = current.verdict(self._raise_on, self._asked, END_OF_BLOCK)
        current.end(error, trace)
        if verdict is not None:
            raise FaultFound(verdict.findings, str(current.folder or ""))

    @property
    def report(self) -> Report | None:
        """The report; None where there is none (yet)."""
        return session().report()


def load(*folders: str | os.PathLike[str]) -> LoadedReport:
    """Diagnose a run from its folder (several: the nodes of one run) and return the report.

    A notebook shows it as the page; `to_frame()` has the findings as a table of pandas.

    Raises:
        TypeError: no folder is given.
        ddpdoctor.storage.run_folder.FolderError: a folder cannot be used.
    """
    if not folders:
        raise TypeError("load() needs a run folder: ddpdoctor.load('ddpdoctor-runs/...')")
    from ..report.postmortem import open_run
    from ..report.registry import all_checks
    from .loaded import LoadedReport

    attempts = open_run(folders)
    return LoadedReport.of(attempts.report(all_checks()), attempts.last)


def _severity(options: dict[str, Any]) -> str | None:
    value = options.pop("raise_on", None)
    if value is None or value == "never":
        return None
    known = [s.value for s in Severity]
    if value not in known:
        raise ValueError(f"raise_on={value!r} is not one of {', '.join(known)}, never")
    return str(value)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given.

    Raises:
        ValueError: the command line would refuse one of them.
    """
    from .. import exporters
    from ..config import BY_NAME
    from ..report import registry

    asked = {
        k: os.fspath(v) if isinstance(v, os.PathLike) else v
        for k, v in options.items()
        if v is not None and k != "raise_on"
    }
    names = ["raise_on", *BY_NAME]
    for name in asked:
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"options: {', '.join(names)}"
            raise ValueError(f"no option is called {name!r}; {hint}")
    try:
        known = resolve(asked, environ={}, in_python=True)
        registry.select(known.select, known.ignore)
        exporters.check(known.export)
    except (ConfigError, exporters.ExportError, registry.SelectionError) as error:
        raise ValueError(str(error)) from None
    return asked
