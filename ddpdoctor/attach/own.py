"""Whose a file of a stack is."""

from __future__ import annotations

import os
import sysconfig

_STANDARD = tuple(
    sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")} - {None, ""})
)
_FOREIGN = ("site-packages", "dist-packages", "/ddpdoctor/probe/", "(importlib._bootstrap)")


def is_own(file: str) -> bool:
    """Whether a file belongs to Python, torch or a package, and not to the program."""
    if not file or file.startswith("<") or any(part in file for part in _FOREIGN):
        return True
    return file.startswith(_STANDARD) or "/lib/python3." in file


def short(file: str) -> str:
    """The path as it would be typed here."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
