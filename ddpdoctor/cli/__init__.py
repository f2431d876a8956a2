"""The commands of `ddpdoctor`. None imports torch; each imports what else it needs when it runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from .._version import __version__
from ..attach.records import RecordError
from ..config import ConfigError, unknown_variables
from ..exporters import ExportError
from ..report.registry import RegistryError, SelectionError
from ..storage.run_folder import FolderError
from .parsers import Parser, formatter
from .split import UsageError

COMMANDS = {
    "run": "launch a script with torchrun, examine every rank, report at the end",
    "exec": "the same with any other launcher: mp.spawn, accelerate, srun, mpirun",
    "report": "report on a finished or killed run, from its folder",
    "explain": "explain a check: what it finds, how it knows, how to fix it",
    "watch": "live view of a running run, one row per rank",
    "compare": "compare two runs",
    "attach": "look at a job that runs without the doctor: who waits where, who is missing",
    "preflight": "before training: compare software, test and time communication",
}
"""Each command with its help text; a module of this package each, with `configure` and `main`."""

MISUSED = 2
INTERRUPTED = 130
DEFECT = 70

ERRORS = (
    UsageError, ConfigError, ExportError, FolderError, SelectionError, RegistryError, RecordError,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdin", "stdout", "stderr"):  # None where it was closed before we started
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    try:
        return _dispatch(words)
    except ERRORS as error:
        _say(str(error))
        return MISUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has gone (`| head`)
        _lose_output()
        return 0
    except OSError as error:
        _lose_output()
        place = f": {error.filename}" if error.filename else ""
        _say(f"{(error.strerror or str(error)).lower()}{place}")
        return MISUSED
    except Exception as error:
        if os.environ.get("DDPDOCTOR_DEBUG"):
            raise
        _say(
            f"internal error: {error!r}; please report it with the output of the same command "
            "after `DDPDOCTOR_DEBUG=1`"
        )
        return DEFECT


def _lose_output() -> None:
    """Redirect stdout to the null device, since Python flushes it once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    from ..storage.run_folder import printable

    with contextlib.suppress(OSError, ValueError):
        print(f"ddpdoctor: {printable(text)}", file=sys.stderr, flush=True)


def _dispatch(words: list[str]) -> int:
    parser = _parser()
    if not words:
        parser.print_help()
        return MISUSED
    name = words[0]
    if name not in COMMANDS:
        parser.parse_args(words)  # --help, --version, or an error with the likely name
        return MISUSED
    module = importlib.import_module(f"{__name__}.{_module(name)}")
    command = Parser(
        prog=f"ddpdoctor {name}",
        description=module.__doc__,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    module.configure(command)
    if odd := unknown_variables(os.environ):
        _say(odd)
    status: int = module.main(command, words[1:])
    sys.stdout.flush()
    return status


def _parser() -> argparse.ArgumentParser:
    table = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="ddpdoctor",
        usage="ddpdoctor COMMAND ...",
        description=(
            "Runs a PyTorch distributed training job and reports what is wrong with it:\n"
            "which fault, which rank, which line, why, and what to change.\n\n"
            f"commands:\n{table}"
        ),
        epilog="ddpdoctor COMMAND --help describes a command.",
        formatter_class=formatter,
    )
    parser.commands = tuple(COMMANDS)
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"ddpdoctor {__version__}")
    return parser


def _module(name: str) -> str:
    return {"run": "run_command", "exec": "exec_command"}.get(name, name)
