"""Which line of the user's code is executing: tells the user's files from those of libraries, and
numbers their lines (*sites*)."""

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
from .limits import MOST_FILES

_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_STDLIB = tuple(
    os.path.realpath(p) + os.sep
    for name in ("stdlib", "platstdlib")
    if (p := sysconfig.get_path(name))
)
_START = os.getcwd() if os.path.isdir(".") else "/"


def absolute(file: str) -> str:
    """The path of a source file; where it is relative, it was so when the program began."""
    return os.path.abspath(os.path.join(_START, file))


OWN, LIBRARY, USER = "own", "library", "user"


def classify(file: str) -> str:
    """Which of `OWN` (doctor, torch, standard library), `LIBRARY` (pip) or `USER` a file is."""
    if file.startswith("<"):
        return OWN
    path = absolute(file)
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
    """Whether pip installed a file into a folder of `PYTHONPATH` (`pip install --target`)."""
    for folder in sys.path[1:]:
        inside = os.path.join(folder, "")
        if folder and path.startswith(inside) and folder != _START:
            return path[len(inside) :].partition(os.sep)[0] in _packages(folder)
    return False


@cache
def _packages(folder: str) -> frozenset[str]:
    """Top-level names that pip installed into a folder, by the RECORD files there."""
    found: set[str] = set()
    for record in glob.iglob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with contextlib.suppress(OSError, ValueError), open(record, encoding="utf-8") as file:
            found.update(line.partition(",")[0].partition("/")[0] for line in file)
    return frozenset(found)


_WITHIN = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Sites:
    """Numbers lines of code (*sites*); emits a `Site` the first time a line is met.

    Attributes:
        kinds: `classify` of the files that were met, by name.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        # Keyed by strings, which cache their hashes: code objects compute theirs each time.
        self.kinds: dict[str, str] = {}
        self._numbers: dict[tuple[str, int, str], int] = {}
        # Keyed by id(code) and instruction, since `f_lineno` costs more than all the rest. The
        # code objects are kept alive, so that an id is not reused.
        self._instructions: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self._by_place: dict[tuple[str, int, str], int] = {}
        self._callers: dict[str, tuple[int, CodeType, int, int]] = {}

    def here(self) -> int:
        """The site of the innermost line of the user's code, or else of a library's."""
        return self.of(sys._getframe(1))

    def caller(self, hook: str) -> tuple[FrameType | None, int]:
        """The frame of the user's code that called into a hook (None if there is none), and its
        site.

        Usually it is at the depth and instruction of the last call for this hook; then the frames
        in between are not looked at.
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
        """The site of the innermost line of the user's code at or above a frame."""
        return self.at(self.user_frame(frame))

    def at(self, frame: FrameType | None) -> int:
        """The site of the line that a frame is executing, -1 for None."""
        if frame is None:
            return -1
        code = frame.f_code
        key = id(code), frame.f_lasti
        known = self._instructions.get(key)
        if known is None:
            known = self._instructions[key] = (self.number(code, frame.f_lineno), code)
        return known[0]

    def user_frame(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame of the user's code at or above `frame`, or else of a library."""
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

    def user_frames(self, frame: FrameType | None, most: int) -> list[FrameType]:
        """The frames of the user's code at or above `frame`, innermost first, without those of
        comprehensions, which have no definition of their own in the source."""
        found: list[FrameType] = []
        while frame is not None and len(found) < most:
            code = frame.f_code
            if self.kind(code) is USER and code.co_name not in _WITHIN:
                found.append(frame)
            frame = frame.f_back
        return found

    def user_lines(self, frame: FrameType | None, most: int) -> list[tuple[CodeType, int]]:
        """The lines that these frames execute, innermost first."""
        return [(user.f_code, user.f_lineno) for user in self.user_frames(frame, most)]

    def library_called(self) -> str:
        """The module of a library that the innermost line of the user's code has called, by name;
        empty where it called torch itself."""
        frame, library = sys._getframe(1).f_back, ""
        while frame is not None and (kind := self.kind(frame.f_code)) is not USER:
            if kind is LIBRARY:
                library = str(frame.f_globals.get("__name__", ""))
            frame = frame.f_back
        return library if frame is not None else ""

    def callers(self, most: int = 3) -> tuple[int, ...]:
        """Sites of up to `most` lines of the user's that called the innermost one, nearest
        first."""
        found: list[int] = []
        frame = self.user_frame(sys._getframe(1))
        while frame is not None and (frame := frame.f_back) is not None and len(found) < most:
            if self.kind(frame.f_code) is USER:
                found.append(self.at(frame))
        return tuple(found)

    def kind(self, code: CodeType) -> str:
        """`classify` of the file that a code object comes from, cached."""
        return self.kind_of(code.co_filename)

    def kind_of(self, file: str) -> str:
        """`classify` of a file, cached."""
        try:
            return self.kinds[file]
        except KeyError:
            kind = self.kinds[file] = classify(file)
            return kind

    def number(self, code: CodeType, line: int) -> int:
        """The site of a line of a function."""
        key = (code.co_filename, line, code.co_name)
        try:
            return self._numbers[key]
        except KeyError:
            number = self._numbers[key] = self.place(*key)
            return number

    def line(self, number: int, code: CodeType) -> int:
        """The line of a site; -1 if the site is not in that function."""
        path = absolute(code.co_filename)
        found = (p for p, n in self._by_place.items() if n == number)
        file, line, function = next(found, ("", -1, ""))
        return line if (file, function) == (path, code.co_name) else -1

    def place(self, file: str, line: int, function: str) -> int:
        """The site of a line; emits it the first time."""
        path = absolute(file)
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


def own_files() -> list[str]:
    """The files of the loaded modules that are the user's, `MOST_FILES` at most."""
    libraries = (sys.base_prefix + os.sep + "lib", sys.prefix + os.sep + "lib")
    found: list[str] = []
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if hasattr(module, "__dict__") else None
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(libraries):
            continue
        if len(found) < MOST_FILES and file not in found and classify(file) == "user":
            found.append(file)
    return found
