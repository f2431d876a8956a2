"""Descriptors in a process that is not ours, where the program may close or replace them.

Programs close every descriptor that they find (to become a daemon), or put another file in its
place. What such a number stands for then is theirs: it is neither written to nor closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

LOWEST = 100
"""Below it programs expect the numbers that they get: 0 to 2 after closing them, the next free."""

HIGHEST = 16_000


def out_of_the_way(fd: int) -> int:
    """The file of `fd` under a high number that programs do not use; `fd` is closed.

    Raises:
        OSError: only the numbers of the standard streams are left.
    """
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    except OSError:  # so few are allowed
        if fd > 2:
            return fd
        os.close(fd)
        raise
    os.close(fd)
    return moved


class Held:
    """A number, and what it stood for at first."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._what = _what(fd)

    def ours(self) -> bool:
        """Whether it still stands for that."""
        return self._what is not None and _what(self.fd) == self._what

    def same(self, other: Held) -> bool:
        return self._what == other._what

    def close(self) -> None:
        if self.ours():
            os.close(self.fd)
        self._what = None


class HeldFile:
    """A file to append to, opened anew where the program took its descriptor away."""

    def __init__(self, path: str | os.PathLike[str], *, exclusive: bool = False) -> None:
        """Raises OSError where the file cannot be made, or exists and must not (`exclusive`)."""
        self._path = os.path.abspath(path)
        self._held = self._open(os.O_CREAT | (os.O_EXCL if exclusive else 0))

    def fileno(self) -> int:
        """Its number, which may have changed.

        Raises:
            OSError: the descriptor is lost, and the file is no longer there or cannot be opened.
        """
        if not self._held.ours():
            again = self._open(os.O_NOFOLLOW)
            if not again.same(self._held):
                again.close()
                raise FileNotFoundError(self._path)
            self._held = again
        return self._held.fd

    def write(self, content: bytes) -> int:
        """How much of it was written, at once.

        Raises:
            OSError: nothing was.
        """
        return os.write(self.fileno(), content)

    def close(self) -> None:
        self._held.close()

    def _open(self, flags: int) -> Held:
        flags |= os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        return Held(out_of_the_way(os.open(self._path, flags, 0o600)))


@contextlib.contextmanager
def nowhere() -> Iterator[int]:
    """A number that no file will have: what is written there is lost. It is valid for now.

    Raises:
        OSError: there is none.
    """
    fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = min(allowed, HIGHEST) if allowed > 0 else HIGHEST
        top = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, highest - 1)
    finally:
        os.close(fd)
    try:
        yield top
    finally:
        os.close(top)


def mapped(path: Path, size: int, flags: int = 0) -> ctypes.Array[ctypes.c_char]:
    """A file of that size as memory, for good, without a descriptor. (Python's `mmap` keeps one,
    and closes that number in the end, whatever it is by then.)

    Raises:
        OSError: it cannot be made, or there is no room for it.
    """
    import ctypes

    system = ctypes.CDLL(None, use_errno=True).mmap
    system.restype = ctypes.c_void_p
    system.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        # A sparse file on a full disk would end the process with SIGBUS.
        os.posix_fallocate(fd, 0, size)
        at = system(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if at == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)
    return (ctypes.c_char * size).from_address(at)


def _what(fd: int) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.fstat(fd)
        return found.st_dev, found.st_ino
    return None
