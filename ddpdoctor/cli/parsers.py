"""What the commands' parsers share: one-line errors, style of `--help`, the doctor's options."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn

from ..config import BY_NAME
from .split import UsageError

EXAMINING = ("select", "ignore", "fail_on", "json", "html", "export", "baseline")
"""Options of `run` that `report` has too."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line instead of the usage text."""

    commands: tuple[str, ...] = ()

    def error(self, message: str) -> NoReturn:
        if self.commands and "invalid choice" in message:
            word = message.partition("invalid choice: ")[2].partition(" (choose")[0].strip("'\"")
            near = difflib.get_close_matches(word, self.commands, 1)
            known = f"did you mean {near[0]}?" if near else f"commands: {', '.join(self.commands)}"
            raise UsageError(f"no command is called {word!r}; {known}")
        raise UsageError(f"{message}; see {self.prog} --help")


def formatter(prog: str) -> argparse.HelpFormatter:
    """A formatter in the style of rich, which is imported only when a help text is printed."""
    from rich_argparse import RawDescriptionRichHelpFormatter

    class Formatter(RawDescriptionRichHelpFormatter):
        text_markup = False
        help_markup = False

    return Formatter(prog, max_help_position=30)


def add_settings(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Add the doctor's options of these names to a parser. Those that are not given stay out of its
    namespace, so that other sources apply."""
    group = parser.add_argument_group("doctor options")
    for setting in (BY_NAME[name] for name in names):
        text = setting.help.replace("%", "%%")
        more: dict[str, Any] = {"metavar": setting.metavar}
        if setting.name == "live":
            more = {"action": argparse.BooleanOptionalAction}
        elif not setting.metavar:
            more = {"action": "store_true"}
        elif setting.name in ("select", "ignore", "export"):
            more["action"] = "append"
        group.add_argument(setting.flag, default=argparse.SUPPRESS, help=text, **more)


def given(namespace: argparse.Namespace) -> dict[str, object]:
    """The doctor's options that a command line gives, by name, as text."""
    return {k: v for k, v in vars(namespace).items() if k in BY_NAME}
