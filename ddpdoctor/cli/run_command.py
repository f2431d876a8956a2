"""Launch a script with torchrun, examine every rank, and report what is wrong at the end.

All options of torchrun are accepted. Without --nnodes, --nproc-per-node, --standalone and
--rdzv-*, the defaults are --standalone and one process per visible GPU, or 2 without GPUs.
Everything after the script is passed to the script. A script that starts its ranks itself
(mp.spawn) is run as by ddpdoctor exec.

Exit status: 4 if ddpdoctor stopped a hung run; else that of training if it is not 0; 3 if
--fail-on was reached; else 0.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .. import exporters
from ..config import SETTINGS, Options, resolve
from ..launch import torchrun
from ..report import registry
from ..storage.run_folder import printable
from .parsers import add_settings
from .split import Split, UsageError, split

if TYPE_CHECKING:
    from ..launch import Spawning


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ddpdoctor run [doctor options] [torchrun options] SCRIPT [arguments ...]"
    add_settings(parser, tuple(s.name for s in SETTINGS))
    parser.epilog = "torchrun --help lists the options of torchrun."


def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    parts = split(argv)
    if parts.help:
        parser.print_help()
        return 0
    _check_script(parts)
    _check_processes(parts)
    options = prepared(parts)
    from .. import launch

    if _is_script(parts) and (spawning := launch.starts_its_own_ranks(Path(parts.command[0]))):
        return launch.exec_command(options, _alone(parts, spawning))
    return launch.run(options, [*parts.launcher, *parts.command])


def _alone(parts: Split, spawning: Spawning) -> list[str]:
    """The command for a script that starts its ranks itself; tells the user about it.

    Raises:
        UsageError: torchrun was to start it on several nodes.
    """
    script, words = parts.command[0], shlex.join(parts.command)
    why = f"{script} starts its own ranks ({spawning.call}, line {spawning.line})"
    if parts.flags & {"--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-backend"}:
        raise UsageError(
            f"{why}, and torchrun would start them again; type ddpdoctor exec -- python {words}"
        )
    ignored = f"; ignoring {' '.join(sorted(parts.flags))}" if parts.flags else ""
    said = f"{why}: running `ddpdoctor exec -- python {words}` instead{ignored}"
    print(f"ddpdoctor: {printable(said)}", file=sys.stderr)
    return [sys.executable, *parts.command]


def _check_processes(parts: Split) -> None:
    """Raises UsageError for numbers that torchrun answers with an assertion."""
    said = torchrun.parse(parts.launcher).options.get("nproc-per-node", "")
    if said.lstrip("-").isdecimal() and int(said) < 1:
        raise UsageError(f"--nproc-per-node: {said!r} is not a number of processes; give 1 or more")


def prepared(parts: Split) -> Options:
    """The options, checked before anything is started.

    Raises:
        UsageError: a file that they name cannot be written.
        SelectionError: a name of a check is not known.
        ConfigError: the baseline cannot be read.
        ExportError: an exporter cannot be used.
    """
    options = resolve(parts.doctor)
    registry.select(options.select, options.ignore)
    options.unwanted()
    exporters.check(options.export)
    for flag, path in (("--json", options.json), ("--html", options.html)):
        _check_writable(flag, path)  # now, not after a day of training
    return options


def _check_writable(flag: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise UsageError(
            f"{flag}: {path} is a folder; give a file such as {path / 'findings'}.{flag[2:]}"
        )
    place = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not os.access(place, os.W_OK) or (place != path and not place.is_dir()):
        raise UsageError(f"{flag}: no permission to write {path}; give another file")


def _check_script(parts: Split) -> None:
    """Raises UsageError for a script on which torchrun would fail with a traceback of each rank."""
    if not parts.command:
        raise UsageError("no script to run; type ddpdoctor run [options] train.py [arguments]")
    script = parts.command[0]
    if script.startswith("-"):
        raise UsageError(f"expected the script, got {script!r}; put the script first")
    if not _is_script(parts):
        return
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"{script} is a folder; give the script in it")
    if not path.exists():
        hint = "; for a module type -m before it" if not path.suffix else ""
        raise UsageError(f"no such script: {script} (in {Path.cwd()}){hint}")


def _is_script(parts: Split) -> bool:
    return not any(_given(parts, flag) for flag in ("--module", "-m", "--no-python"))


def _given(parts: Split, flag: str) -> bool:
    variable = "PET_" + flag.strip("-").upper().replace("-", "_")  # torchrun reads these too
    return flag in parts.flags or os.environ.get(variable, "0") not in ("", "0")
