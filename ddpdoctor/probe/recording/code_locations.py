"""Which line of the user's code is executing."""

from __future__ import annotations

import contextlib
import glob
import linecache
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType

from ...events import Event, Site

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STDLIB = tuple(
    os.path.realpath(p) + os.sep
    for name in ("stdlib", "platstdlib")
    if (p := sysconfig.get_path(name))
)
_START = os.getcwd() if os.path.isdir(".") else "/"

OWN, LIBRARY, USER = "own", "library", "user"


def classify(file: str) -> str:
    """`own` (the doctor, torch, the standard library), `library` (installed by pip) or `user`."""
    if file.startswith("<"):
        return OWN
    path = os.path.abspath(os.path.join(_START, file))
    parts = path.split(os.sep)
    if path.startswith(_OWN + os.sep):
        return OWN
    if "site-packages" in parts or "dist-packages" in parts:
        folder = "site-packages" if "site-packages" in parts else "dist-packages"
        return OWN if parts[parts.index(folder) + 1] in ("torch", "ddpdoctor") else LIBRARY
    if os.path.realpath(path).startswith(_STDLIB):
        return OWN
    return LIBRARY if _installed(path) else USER


def _installed(path: str) -> bool:
    """Whether pip put it into a folder of `PYTHONPATH` (`pip install --target`)."""
    for folder in sys.path[1:]:
        inside = os.path.join(folder, "")
        if folder and path.startswith(inside) and folder != _START:
            return path[len(inside) :].partition(os.sep)[0] in _packages(folder)
    return False


@cache
def _packages(folder: str) -> frozenset[str]:
    """What pip has installed into a folder, by its own records."""
    found: set[str] = set()
    for record in glob.iglob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with contextlib.suppress(OSError, ValueError), open(record, encoding="utf-8") as file:
            found.update(line.partition(",")[0].partition("/")[0] for line in file)
    return frozenset(found)


class Sites:
    """Numbers for lines of code; a line is recorded when it is met first.

    Attributes:
        kinds: what sort of code a file has, as far as it was asked.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        # By strings: their hashes are kept, those of code objects are computed each time.
        self.kinds: dict[str, str] = {}
        self._numbers: dict[tuple[str, int, str], int] = {}
        # By identity and instruction: to find out the line takes longer than all else. The code
        # objects are kept, so that an identity means one of them.
        self._instructions: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self._by_place: dict[tuple[str, int, str], int] = {}
        self._callers: dict[str, tuple[int, CodeType, int, int]] = {}

    def here(self) -> int:
        """The innermost line of the user's; failing that, of a library that is not torch."""
        return self.of(sys._getframe(1))

    def caller(self, hook: str) -> tuple[FrameType | None, int]:
        """The user's frame that is in a hook, as `user_frame` finds it, and the number of its line.

        Most often it is as far away as the last time that this hook asked, at the same instruction:
        then no frame between is looked at.
        """
        known = self._callers.get(hook)
        if known is not None:
            depth, code, instruction, number = known
            try:
                frame = sys._getframe(depth)
            except ValueError:
                pass
            else:
                if frame.f_code is code and frame.f_lasti == instruction:
                    return frame, number
        found = self.user_frame(sys._getframe(1))
        number = self.at(found)
        if found is not None:
            depth, above = 1, sys._getframe(1)
            while above is not found and above.f_back is not None:
                depth, above = depth + 1, above.f_back
            self._callers[hook] = depth, found.f_code, found.f_lasti, number
        return found, number

    def of(self, frame: FrameType | None) -> int:
        return self.at(self.user_frame(frame))

    def at(self, frame: FrameType | None) -> int:
        """The number of the line that a frame is executing, -1 for None."""
        if frame is None:
            return -1
        code = frame.f_code
        key = id(code), frame.f_lasti
        known = self._instructions.get(key)
        if known is None:
            known = self._instructions[key] = (self.number(code, frame.f_lineno), code)
        return known[0]

    def user_frame(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame of the user's at or above `frame`, or else of a library."""
        library = None
        kinds = self.kinds
        while frame is not None:
            kind = kinds.get(frame.f_code.co_filename) or self.kind(frame.f_code)
            if kind is USER:
                return frame
            if kind is LIBRARY and library is None:
                library = frame
            frame = frame.f_back
        return library

    def callers(self, most: int = 3) -> tuple[int, ...]:
        """The user's lines that led to the innermost one, the nearest first."""
        found: list[int] = []
        frame = self.user_frame(sys._getframe(1))
        while frame is not None and (frame := frame.f_back) is not None and len(found) < most:
            if self.kind(frame.f_code) is USER:
                found.append(self.at(frame))
        return tuple(found)

    def kind(self, code: CodeType) -> str:
        """What sort of code this is (see `classify`)."""
        return self.kind_of(code.co_filename)

    def kind_of(self, file: str) -> str:
        """What sort of code a file has."""
        try:
            return self.kinds[file]
        except KeyError:
            kind = self.kinds[file] = classify(file)
            return kind

    def number(self, code: CodeType, line: int) -> int:
        key = (code.co_filename, line, code.co_name)
        try:
            return self._numbers[key]
        except KeyError:
            number = self._numbers[key] = self.place(*key)
            return number

    def line(self, number: int, code: CodeType) -> int:
        """The line of a number, -1 where it is none of a function."""
        path = os.path.abspath(os.path.join(_START, code.co_filename))
        found = (p for p, n in self._by_place.items() if n == number)
        file, line, function = next(found, ("", -1, ""))
        return line if (file, function) == (path, code.co_name) else -1

    def place(self, file: str, line: int, function: str) -> int:
        """The number of a line given by name."""
        path = os.path.abspath(os.path.join(_START, file))
        key = (path, line, function)
        if key not in self._by_place:
            self._by_place[key] = len(self._by_place)
            self._emit(
                Site(
                    at=time.monotonic(),
                    id=self._by_place[key],
                    file=path,
                    line=line,
                    function=function,
                    text=linecache.getline(path, line).rstrip()[:500],
                )
            )
        return self._by_place[key]


MOST_FILES = 300


def own_files() -> list[str]:
    """The user's own modules that are loaded."""
    libraries = (sys.base_prefix + os.sep + "lib", sys.prefix + os.sep + "lib")
    found: list[str] = []
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if hasattr(module, "__dict__") else None
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(libraries):
            continue
        if len(found) < MOST_FILES and file not in found and classify(file) == "user":
            found.append(file)
    return found
