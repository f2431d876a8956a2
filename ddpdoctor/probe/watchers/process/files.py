"""Which files does this rank write, and which does it read that another rank may be writing?

An audit hook sees every `open` and rename of the process. Python cannot remove audit hooks, so it
tests a switch first. `torch.save` and safetensors open files in C++ and are wrapped.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from ....events import FileLocked, FileRead, FileRemoved, FileWritten, FolderMade
from ...collectives.sync_points import SyncPoints
from ...recording import hooks, stack_file, threads
from ...recording.code_locations import OWN, USER
from ...recording.import_hooks import when_imported
from ...recording.patching import on_restore
from ...recording.recorder import Recorder, current_recorder, guarded
from ...recording.threads import Threads
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...source import file_polling, source_text

MOST_PATHS = 400
MOST_READ = 100
RECORDS_PER_PATH = 6
"""Records of one file; after that only at powers of two (writes) or of failures (reads)."""

FAILURE_LIMIT = 1000
"""Characters of a read's error; torch gives the reason at the end of a long message."""

CALLERS = 4
"""User frames that are searched for a loop that waited for the file."""

_PRODUCED = (
    ".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle", ".npy", ".npz", ".safetensors", ".json",
    ".yaml", ".yml", ".h5", ".hdf5", ".tar", ".model", ".state", ".txt", ".csv",
)  # fmt: skip
"""Suffixes of files that runs produce; reads of other files are ignored."""

_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_LIBRARY_PATHS = (
    "__pycache__", "site-packages", "dist-packages", ".cache", ".triton", ".nv", ".config",
    "torchinductor_", "matplotlib", ".ipython", "pytorch-errorfile-", "torchelastic_",
)  # fmt: skip
"""Parts of paths where libraries write; all ranks may write the same files there."""

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME")
_LOCK_ENDINGS = (".lock", ".lck", ".pid")
_NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "fuse.", "afs", "9p")

_REMOVING = ("os.remove", "os.rmdir", "shutil.rmtree")
"""Audited events before something is removed."""

_LOCKING = ("fcntl.flock", "fcntl.lockf")
_AUDITED = frozenset(("open", "os.rename", "shutil.move", "os.mkdir", *_REMOVING, *_LOCKING))

_audited: list[bool] = []
"""Not empty once the audit hook is added: Python cannot remove it, and another would record
everything twice."""


class Files(Watcher):
    lost = "which files the ranks write and read"

    def __init__(self) -> None:
        self.on = False
        self.written: dict[str, int] = {}
        self.read: dict[str, int] = {}
        self.removed: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.locks = 0
        self.locked: dict[str, int] = {}
        self.inside = threading.local()
        self.ours = ""
        self.caches: tuple[str, ...] = ()
        self._mounts: list[tuple[str, bool]] = []

    def install(self) -> None:
        import torch
        import torch.serialization

        self.on = True
        on_restore(self._switch_off)
        if not _audited:
            _audited.append(True)
            sys.addaudithook(lambda event, args: Files.current._audit(event, args))
        self._watch_function((torch.serialization, torch), "save", 1, "f", self._saves, self._saved)
        self._watch_function(
            (torch.serialization, torch), "load", 0, "f", self._loads, self._loaded
        )
        when_imported("safetensors.torch", self._watch_safetensors, lost=self.lost)

    def _switch_off(self) -> None:
        self.on = False

    @on(hooks.leaving)
    def _leave(self, recorder: Recorder, _: None) -> None:
        self.on = False  # the interpreter ends: from here on only libraries write

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        # Runs at every audited event of the process, so the cheapest and most selective tests come
        # first.
        if event not in _AUDITED or not self.on or current_recorder() is None:
            return
        if event in _LOCKING:
            self._handle(self._locked, args[:2])
        elif getattr(self.inside, "busy", False):
            return
        elif event == "open":
            self._handle(self._opened, args)
        elif event == "os.rename":
            self._handle(self._renamed, args)
        elif event == "shutil.move":
            self._handle(self._moved, args)
        elif args[-1] not in (-1, None):
            return  # beside an open folder: `rmtree` removes what is in its folder
        elif event == "os.mkdir":
            self._handle(self._made, args[:1])
        else:
            self._handle(self._removed, (event, args[0]))

    def _handle(self, work: Any, args: tuple[Any, ...]) -> None:
        """Call `work` guarded, ignoring files that the doctor itself opens meanwhile."""
        self.inside.busy = True
        try:
            guarded("files", lambda recorder: work(recorder, *args), lost=self.lost)
        finally:
            self.inside.busy = False

    def _locked(self, recorder: Recorder, file: Any, operation: Any) -> None:
        if operation & fcntl.LOCK_UN:
            self.locks = max(0, self.locks - 1)
            return
        if operation & fcntl.LOCK_EX:
            self.locks += 1
        path = os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")
        times = self.locked[path] = self.locked.get(path, 0) + 1
        if times <= RECORDS_PER_PATH and len(self.locked) <= MOST_PATHS:
            recorder.emit(
                FileLocked(
                    at=time.monotonic(),
                    path=path,
                    site=recorder.site(),
                    shared=self._is_shared(path),
                )
            )

    def _opened(self, recorder: Recorder, name: Any, mode: Any, flags: Any, *_: Any) -> None:
        stack_file.keep()  # the program may have closed its descriptor, which this file would get
        if not isinstance(name, (str, bytes, os.PathLike)) or not isinstance(flags, int):
            return
        kind = flags & os.O_ACCMODE
        if kind == os.O_RDONLY:
            text = os.fsdecode(name)
            if text.endswith(_PRODUCED) and (path := self._path(text)):
                self._emit_read(
                    recorder,
                    path,
                    "open",
                    time.monotonic(),
                    0.0,
                    SyncPoints.current.marks(recorder),
                    {},
                    "",
                )
            return
        # Record only what replaces the content: files that are appended to or written in place are
        # shared on purpose, and only one exclusive creation can succeed.
        if flags & os.O_TRUNC and not flags & os.O_EXCL and (path := self._path(os.fsdecode(name))):
            if os.path.isdir(path):  # `O_TMPFILE`: a temporary file without a name
                return
            self._emit_written(
                recorder, path, "open", time.monotonic(), 0.0, SyncPoints.current.marks(recorder)
            )

    def _renamed(self, recorder: Recorder, source: Any, target: Any, *_: Any) -> None:
        if isinstance(target, (str, bytes, os.PathLike)) and (
            path := self._path(os.fsdecode(target))
        ):
            now = time.monotonic()
            marks = SyncPoints.current.marks(recorder)
            tree = os.path.isdir(os.fsdecode(source))
            self._emit_written(recorder, path, "rename", now, now, marks, tree=tree)

    def _moved(self, recorder: Recorder, source: Any, target: Any) -> None:
        """`shutil.move` renames, unless the target is a folder: then it moves into that one."""
        if not os.path.isdir(source) or not os.path.isdir(target):
            return
        if not os.path.samefile(source, target) and (path := self._path(os.fsdecode(target))):
            now = time.monotonic()
            marks = SyncPoints.current.marks(recorder)
            self._emit_written(recorder, path, "into", now, now, marks, tree=True)

    def _removed(self, recorder: Recorder, event: str, name: Any) -> None:
        if not isinstance(name, (str, bytes, os.PathLike)) or not (
            path := self._path(os.fsdecode(name))
        ):
            return
        site = recorder.site()
        times = self.removed[site] = self.removed.get(site, 0) + 1
        if times <= RECORDS_PER_PATH and len(self.removed) <= MOST_PATHS:
            tree = event == "shutil.rmtree"
            recorder.emit(FileRemoved(at=time.monotonic(), path=path, site=site, tree=tree))

    def _made(self, recorder: Recorder, name: Any) -> None:
        if not isinstance(name, (str, bytes, os.PathLike)) or os.path.lexists(name):
            return
        if path := self._path(os.fsdecode(name)):
            site = recorder.site()
            times = self.made[site] = self.made.get(site, 0) + 1
            if times <= RECORDS_PER_PATH and len(self.made) <= MOST_PATHS:
                recorder.emit(FolderMade(at=time.monotonic(), path=path, site=site))

    def _path(self, name: str) -> str:
        """The real path of a file to record, empty for files to ignore."""
        if name.endswith(_LOCK_ENDINGS):
            return ""
        path = os.path.realpath(name)
        if path.startswith(_NOT_FILES) or any(part in path for part in _LIBRARY_PATHS):
            return ""
        if not self.ours:
            self.ours = _run_folder() + os.sep
            self.caches = tuple(os.path.realpath(v) for n in _CACHES if (v := os.environ.get(n)))
        if path.startswith(self.ours) or (self.caches and path.startswith(self.caches)):
            return ""
        return path

    def _watch_function(
        self, owners: Any, name: str, position: int, keyword: str, begin: Any, end: Any
    ) -> None:
        """Watch a function that writes or reads a whole file.

        Args:
            position, keyword: of the argument that is the file.
            begin, end: called before and after it; `end` gets what `begin` returned.
        """

        def begins(recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
            given = args[position] if len(args) > position else kwargs.get(keyword)
            path = self._path(os.fsdecode(given)) if isinstance(given, (str, os.PathLike)) else ""
            if not path:
                return None
            begun = begin(recorder, path, time.monotonic(), SyncPoints.current.marks(recorder))
            self.inside.busy = True
            return (begun,)

        def ends(recorder: Recorder, token: Any, result: Any, error: Error) -> None:
            if token is None:
                return
            self.inside.busy = False
            end(recorder, *token, error)

        self.around(owners, name, before=begins, after=ends)

    def _watch_safetensors(self, module: Any) -> None:
        self._watch_function(module, "save_file", 1, "filename", self._saves, self._saved)
        self._watch_function(module, "load_file", 0, "filename", self._loads, self._loaded)

    def _saves(
        self, recorder: Recorder, path: str, began: float, marks: dict[str, int]
    ) -> FileWritten | None:
        # Record it before the write ends: a rank that fails reading it may bring this one down.
        return self._emit_written(recorder, path, "save", began, 0.0, marks)

    def _saved(
        self, recorder: Recorder, begun: FileWritten | None, error: BaseException | None
    ) -> None:
        if begun is not None:
            now, marks = time.monotonic(), SyncPoints.current.marks(recorder)
            recorder.emit(msgspec.structs.replace(begun, ended=now, marks_after=marks))

    def _loads(self, recorder: Recorder, *begun: Any) -> tuple[Any, ...]:
        return begun

    def _loaded(
        self, recorder: Recorder, begun: tuple[Any, ...], error: BaseException | None
    ) -> None:
        path, began, marks = begun
        failed = f"{type(error).__name__}: {error}"[:FAILURE_LIMIT] if error is not None else ""
        self._emit_read(
            recorder,
            path,
            "load",
            began,
            time.monotonic(),
            marks,
            SyncPoints.current.marks(recorder),
            failed,
        )

    def _emit_written(
        self,
        recorder: Recorder,
        path: str,
        how: str,
        began: float,
        ended: float,
        marks: dict[str, int],
        *,
        tree: bool = False,
    ) -> FileWritten | None:
        times = self.written.get(path, 0) + 1
        if times == 1 and len(self.written) >= MOST_PATHS:
            return None
        self.written[path] = times
        if times > RECORDS_PER_PATH and times & (times - 1):
            return None
        writer = _writer(recorder)
        event = FileWritten(
            at=began,
            path=path,
            site=_site(recorder),
            how=how,
            step=recorder.step,
            ended=ended,
            marks=marks,
            marks_after=marks,
            locked=self.locks > 0,
            shared=self._is_shared(path),
            times=times,
            library=_library(recorder, writer),
            callers=recorder.sites.callers(),
            empty=how == "open"
            and writer is not None
            and source_text.only_opens(writer.f_code, writer.f_lineno),
            tree=tree,
            in_thread=threads.current() is not None,
        )
        recorder.emit(event)
        hooks.writing.fire(recorder, event)
        return event

    def _emit_read(
        self,
        recorder: Recorder,
        path: str,
        how: str,
        began: float,
        ended: float,
        marks: dict[str, int],
        after: dict[str, int],
        failed: str,
    ) -> None:
        times = self.read.get(path, 0) + 1
        if times == 1 and len(self.read) >= MOST_READ:
            return
        self.read[path] = times
        if times > RECORDS_PER_PATH and not failed:
            return
        recorder.emit(
            FileRead(
                at=began,
                path=path,
                site=_site(recorder),
                how=how,
                step=recorder.step,
                ended=ended,
                marks=marks,
                marks_after=after or marks,
                shared=self._is_shared(path),
                failed=failed,
                stored=SyncPoints.current.stored_at,
                callers=recorder.sites.callers(),
                polled=_polled(recorder),
                awaited=_polled(recorder, itself=True),
            )
        )

    def _is_shared(self, path: str) -> bool:
        """Whether a path is on a network file system, which other machines see too."""
        if not self._mounts:
            try:
                lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
            except OSError:
                lines = []
            rows = [line.split() for line in lines]
            self._mounts.extend((r[1], r[2].startswith(_NETWORK)) for r in rows if len(r) > 2)
            self._mounts.append(("/", False))
            self._mounts.sort(key=lambda m: len(m[0]), reverse=True)
        inside = (far for place, far in self._mounts if path.startswith(place.rstrip("/") + "/"))
        return next(inside, False)


def _run_folder() -> str:
    """The run folder, from the recorder or else from the launcher's environment variable."""
    recorder = current_recorder()
    if recorder is None:
        return os.path.realpath(os.environ.get("DDPDOCTOR_DIR", "/nowhere"))
    folder = os.path.realpath(recorder.directory)
    return os.path.dirname(folder) if os.path.basename(folder).startswith("restart-") else folder


def _writer(recorder: Recorder) -> FrameType | None:
    """The innermost frame that is not the doctor's: the code that writes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and recorder.sites.kind(frame.f_code) is OWN:
        frame = frame.f_back
    return frame


def _site(recorder: Recorder) -> int:
    """The user's line that is executing, or the one that started this thread if it has none."""
    here = recorder.site()
    return here if here >= 0 else Threads.current.started_at()


def _library(recorder: Recorder, writer: FrameType | None) -> str:
    """The package that writes, empty if the user's own code does."""
    if writer is None or recorder.sites.kind(writer.f_code) is USER:
        return ""
    return str(writer.f_globals.get("__name__", "")).partition(".")[0]


def _polled(recorder: Recorder, *, itself: bool = False) -> bool:
    """Whether the reading function or a caller polled for another file before; with `itself`, for
    this or another file."""
    frame = recorder.sites.user_frame(sys._getframe(1))
    for _ in range(CALLERS):
        if frame is None:
            break
        if recorder.sites.kind(frame.f_code) is USER and file_polling.polled_before(
            frame, itself=itself
        ):
            return True
        frame = frame.f_back
    return False
