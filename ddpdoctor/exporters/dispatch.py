"""Finds the exporters by name, and runs them so that nothing they do changes how a run ends."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Protocol

from ..report.findings import Report

GROUP = "ddpdoctor.exporters"
"""The entry points by which other packages add exporters."""

BUILT_IN = {"tensorboard": "tensorboard", "wandb": "wandb", "opentelemetry": "opentelemetry.sdk"}
"""Each exporter with the package that it needs; the module of that name here has `export`."""

LIMIT_S = 60.0
"""An exporter is not waited for longer than this."""


class ExportError(Exception):
    """An exporter cannot be used, or could not write. One line."""


class Exporter(Protocol):
    """Writes a report somewhere.

    Args:
        target: a path or an address; by default a path in the run folder that ends with the name
            of the exporter.

    Returns:
        Where the report is, in a few words.

    Raises:
        Exception: it is not there. That is told in one line.
    """

    def __call__(self, report: Report, target: str) -> str: ...


def check(asked: Iterable[str]) -> None:
    """Raises ExportError unless every `NAME` or `NAME=TARGET` can be used."""
    for word in asked:
        name = word.partition("=")[0]
        if name in _others():
            continue
        if name not in BUILT_IN:
            known = sorted({*BUILT_IN, *_others()})
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ExportError(f"--export: no exporter is called {name!r}; {hint}")
        if not _installed(BUILT_IN[name]):
            raise ExportError(f"--export {name}: type pip install 'ddpdoctor[{name}]' first")


def export(report: Report, asked: Iterable[str], place: Path) -> Iterator[str]:
    """Run the exporters, one after the other; never raises.

    Args:
        asked: `NAME` or `NAME=TARGET`.
        place: a folder for those that are given no target.

    Yields:
        A line for each: where the report is, or why it is not there.
    """
    for word in asked:
        name, _, target = word.partition("=")
        said: list[str] = []
        worker = threading.Thread(
            target=_run, args=(name, report, target or str(place / name), said), daemon=True
        )
        with contextlib.redirect_stdout(sys.stderr):  # stdout may be a report
            worker.start()
            worker.join(LIMIT_S)
        yield said[0] if said else f"export to {name} took too long; it is not waited for"


def _run(name: str, report: Report, target: str, said: list[str]) -> None:
    try:
        said.append(f"exported to {name}: {_load(name)(report, target)}")
    except BaseException as error:  # of a thread, whatever it is
        lines = str(error).splitlines() or [type(error).__name__]
        said.append(f"cannot export to {name}: {lines[0]}")


def _load(name: str) -> Exporter:
    if name in BUILT_IN:
        found: Exporter = importlib.import_module(f"{__package__}.{name}").export
        return found
    loaded: Exporter = _others()[name].load()
    return loaded


def _others() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package above it
        return False
