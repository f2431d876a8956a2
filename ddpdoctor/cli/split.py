"""Splits a command line into the doctor's options, the launcher's options and the command.

The script may have options with the same names as the doctor's, so nothing after the script is
read. To find the script it must be known which of torchrun's options take a value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from ..config import SETTINGS
from ..launch.torchrun import FLAGS, SHORT, VALUED

TORCHRUN: Mapping[str, bool] = {
    **{f"--{name}": False for name in FLAGS},
    **{f"--{name}": True for name in VALUED},
    **{f"-{short}": name in VALUED for short, name in SHORT.items() if name != "help"},
}
"""torchrun's options, with dashes, and whether each takes a value."""

SWITCHES = frozenset(s.name for s in SETTINGS if not s.metavar)

HELP = ("-h", "--help")

OF_OTHERS = dict.fromkeys(
    ("-n", "-np", "--np", "--num-processes", "--num-gpus", "--gpus", "--devices"),
    "--nproc-per-node",
)
"""What other launchers call an option of torchrun's."""


class UsageError(Exception):
    """The command line is wrong; the message is one line that says what to type instead."""


@dataclass(frozen=True)
class Split:
    """The parts of a command line.

    Attributes:
        doctor: the doctor's options as text, by field of `config.Options`.
        launcher: the launcher's options as they were written.
        command: the script (or module, or program) and everything after it.
        flags: full names, with dashes, of the launcher's options that were given.
        help: whether `--help` comes before the script.
    """

    doctor: Mapping[str, object]
    launcher: tuple[str, ...]
    command: tuple[str, ...]
    flags: frozenset[str]
    help: bool = False


def split(argv: Iterable[str], launcher: Mapping[str, bool] = TORCHRUN) -> Split:
    """Split a command line.

    Args:
        launcher: the launcher's options, and whether each takes a value.

    Raises:
        UsageError: an option is unknown, or lacks its value.
    """
    words = list(argv)
    doctor: dict[str, object] = {}
    theirs: list[str] = []
    flags: set[str] = set()
    wants_help = False
    while words:
        word = words[0]
        if word == "--" or not word.startswith("-") or word == "-":
            break
        words.pop(0)
        name, equals, value = word.partition("=")
        own = _own(name)
        if word in HELP:
            wants_help = True
        elif own is not None:
            if own in SWITCHES:
                if equals:
                    raise UsageError(f"{name} takes no value; type {name}")
                doctor[own] = not name.startswith("--no-")
            else:
                text = value if equals else _take(words, name)
                doctor[own] = _joined(doctor.get(own), text, own)
        else:
            full = _known(name, launcher, bool(equals))
            flags.add(full)
            theirs.append(_written(word, name, full))
            if launcher.get(full) and not equals and _separate(word, full):
                theirs.append(_take(words, name))
    if words[:1] == ["--"]:
        words.pop(0)
    return Split(doctor, tuple(theirs), tuple(words), frozenset(flags), wants_help)


def _own(name: str) -> str | None:
    """The doctor's option of a name, None where there is none. Abbreviations do not count, as they
    could shadow options of torchrun."""
    switches = {"--no-live": "live"}
    return switches.get(name) or next((s.name for s in SETTINGS if s.flag == name), None)


def _known(name: str, launcher: Mapping[str, bool], has_value: bool) -> str:
    """The full name of a launcher's option: torchrun accepts unique abbreviations and underscores.

    Raises:
        UsageError: the option is unknown or ambiguous.
    """
    plain = name.replace("_", "-") if name.startswith("--") else name[:2]
    if plain in launcher:
        return plain
    near = [o for o in launcher if plain.startswith("--") and o.startswith(plain)]
    if len(near) == 1:
        return near[0]
    if len(near) > 1:
        raise UsageError(f"{name} may be {' or '.join(sorted(near))}; type one in full")
    theirs = OF_OTHERS.get(name.replace("_", "-"), "")
    close = theirs if theirs in launcher else ""
    if has_value and launcher and not close:
        return plain  # newer than the table: it cannot hide where the script begins
    close = close or _closest(plain, [*(s.flag for s in SETTINGS), *launcher])
    hint = f"did you mean {close}?" if close else "options of the script come after the script"
    raise UsageError(f"unknown option {name}; {hint}")


def _closest(word: str, names: list[str]) -> str:
    """The name with the longest common prefix, else the most similar one, else an empty text."""
    shared = {
        name: sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word, name, strict=False))
        )
        for name in names
    }
    best = max(shared, key=lambda name: shared[name], default="")
    if best and shared[best] >= len("--nproc"):
        return best
    return next(iter(difflib.get_close_matches(word, names, 1, 0.7)), "")


def _written(word: str, name: str, full: str) -> str:
    """An option as typed, but with its full name: argparse finds abbreviations of options with two
    spellings ambiguous."""
    short = name.startswith("--") and name.replace("_", "-") != full
    return full + word[len(name) :] if short else word


def _separate(word: str, full: str) -> bool:
    """Whether the value is the next word: `-r 3`, not `-r3`."""
    return full.startswith("--") or len(word) == 2


def _take(words: list[str], name: str) -> str:
    if not words:
        raise UsageError(f"{name} needs a value after it")
    return words.pop(0)


def _joined(before: object, text: str, name: str) -> str:
    """The value of an option that may come twice: selections add up, else the last one counts."""
    return f"{before},{text}" if before and name in ("select", "ignore", "export") else text
