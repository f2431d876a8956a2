"""Which numbers does the program compare, when do they change, and do they decide what is saved, or
when a loop that trains ends?

The numbers that running functions compare are read when an iteration over a loader begins, and when
the process group is destroyed. So it is known whether one changes with an evaluation or with
training, and what it is on every rank.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
import time
from collections import Counter
from math import isfinite
from types import FrameType
from typing import Any

from ....events import (
    ComparedValue,
    EndDecided,
    FileWritten,
    ResultWritten,
    SaveDecided,
    TotalDivided,
    WeightsKept,
)
from ...recording import hooks
from ...recording.code_locations import USER
from ...recording.frames import variables
from ...recording.import_hooks import when_imported
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...source.call_resolver import FRAMES, Scope, resolve, searched
from ...source.decisions import Decision, compared, deciding, ending, written_result
from ...source.dependence import Line
from ...source.division import totals_divided
from .dataset_entries import length
from .loaders import Loaders

VALUES_AT_MOST = 400
"""Values recorded."""

ITERATIONS_LOOKED_AT = 200
"""Iterations over loaders at whose begin values are read."""

SAVES_AT_MOST = 8
"""Saves by one line at which they are read."""

ENDS_AT_MOST = 8
"""Rounds of a loop around an evaluation in which it is asked what may end it."""

RESULTS_AT_MOST = 64
"""Pairs of a line that writes and a loop that are looked at."""

_COUNTS = (int, bool)
"""Types of numbers of epochs and of calls."""

_PUT = ("rename", "into")
"""Ways to write a file (`FileWritten.how`) that put one in place which was written before."""

LOOPS_SEARCHED = 3
"""Loaders, those iterated last, whose loops may give the number that decides about a save."""


class _Outermost:
    """Whether no `state_dict` is running: it calls that of every submodule."""

    looking = True


class ComparedValues(Watcher):
    """
    Attributes:
        last: the loader that was iterated last, -1 for none; `iterations` over any so far.
        values: by function and expression, the value recorded last.
        recorded: values recorded so far.
        loops: by number of each of the loaders iterated last, the running functions then, with
            their lines; the last one comes last.
        saves: by line, how often a file was saved.
        decisions: by the lines of a save and a loop, what decides; results: what is written.
        began: by the lines of a loop over a loader, the steps taken when it began last, and how
            often it has begun again.
    """

    lost = "which metrics decide what is saved, or when training ends"
    after = (Loaders,)

    def __init__(self) -> None:
        self.last = -1
        self.iterations = 0
        self.values: dict[tuple[str, int, str], float] = {}
        self.recorded = 0
        self.loops: dict[int, list[Line]] = {}
        self.saves: Counter[Line] = Counter()
        self.decisions: dict[tuple[Line, ...], Decision | None] = {}
        self.results: dict[tuple[Line, ...], str | None] = {}
        self.began: dict[tuple[Line, ...], tuple[int, int]] = {}
        self._outermost = _Outermost()

    def install(self) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d
        import torch.serialization
        from torch.utils.data import dataloader

        base = dataloader._BaseDataLoaderIter
        self.around(base, "__init__", before=self._loader, after=self._begun)
        self.around(base, "_reset", before=self._loader_again, after=self._begun)
        self.around((torch.serialization, torch), "save", before=self._saving)
        self.around(shutil, "copyfile", before=self._saving)
        for name in ("link", "symlink"):
            self.around(os, name, before=self._saving)
        when_imported(
            "safetensors.torch",
            lambda module: self.around(module, "save_file", before=self._saving),
            lost=self.lost,
        )
        self.around(
            torch.nn.Module,
            "state_dict",
            before=self._taking_state,
            after=self._state_taken,
            only=self._outermost,
        )
        self.around((c10d, dist), "destroy_process_group", before=self._ends)

    def _loader(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        self._read(recorder)
        return args[1] if len(args) > 1 else kwargs.get("loader")

    def _ends(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        self._read(recorder)

    def _loader_again(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        first = args[2] if len(args) > 2 else kwargs.get("first_iter", False)
        return None if first else self._loader(recorder, args, kwargs)

    def _begun(self, recorder: Recorder, loader: Any, result: Any, error: Error) -> None:
        if loader is not None and error is None:
            number = Loaders.current.loaders.get(loader)
            self.last = -1 if number is None else number
            self.iterations += 1
            self.loops.pop(self.last, None)
            frames = recorder.sites.user_frames(sys._getframe(1), FRAMES)
            self.loops[self.last] = [(frame.f_code, frame.f_lineno) for frame in frames]
            if len(self.loops) > LOOPS_SEARCHED:
                self.loops.pop(next(iter(self.loops)))
            if self.iterations <= ITERATIONS_LOOKED_AT:
                self._again(recorder, frames)

    def _again(self, recorder: Recorder, frames: list[FrameType]) -> None:
        """Record what decides about the end of a loop in which this one over a loader began before,
        and a step was taken since."""
        running = self.loops[self.last]
        key, now = (*running,), recorder.step
        before, times = self.began.get(key, (now, -1))
        if times >= 0 and now == before:
            times = ENDS_AT_MOST  # there are rounds without a step
        self.began[key] = now, times + 1
        if not 0 <= times < ENDS_AT_MOST:
            return
        found = ending(running, [Scope(variables(f), f.f_globals) for f in frames])
        if found is None:
            return
        self.began[key] = now, ENDS_AT_MOST
        decision, (leaving, line) = found
        value = _value(decision, frames)
        if type(value) not in _COUNTS:
            recorder.emit(
                EndDecided(
                    at=time.monotonic(),
                    name=ast.unparse(decision.value),
                    value=_number(value),
                    step=now,
                    compared=recorder.sites.number(decision.code, decision.line),
                    loader=self.last,
                    site=recorder.sites.number(leaving, line),
                )
            )

    def _read(self, recorder: Recorder) -> None:
        """Record the compared numbers that changed since the last iteration began."""
        if self.iterations > ITERATIONS_LOOKED_AT:
            return

        def compares(frame: FrameType) -> bool:
            code = frame.f_code
            return recorder.sites.kind(code) is USER and bool(compared(code))

        for frame, scope in searched(sys._getframe(1), compares):
            for node in compared(frame.f_code):
                number = _number(resolve(node, scope))
                name = frame.f_code.co_filename, frame.f_code.co_firstlineno, ast.unparse(node)
                if number is None or self.values.get(name) == number:
                    continue
                self.values[name] = number
                if self.last >= 0 and self.recorded < VALUES_AT_MOST:
                    self.recorded += 1
                    recorder.emit(
                        ComparedValue(
                            at=time.monotonic(),
                            name=name[2],
                            value=number,
                            loader=self.last,
                            step=recorder.step,
                            site=recorder.sites.number(frame.f_code, node.lineno),
                        )
                    )

    def _saving(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        self._kept(recorder)

    def _taking_state(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        self._outermost.looking = False
        self._kept(recorder, WeightsKept)

    def _state_taken(self, recorder: Recorder, before: Any, result: Any, error: Error) -> None:
        self._outermost.looking = True

    def _kept(self, recorder: Recorder, kind: type[SaveDecided] = SaveDecided) -> None:
        """Record the number that decides about a file that is saved, copied, renamed or linked, or
        about the state of a module that is taken."""
        frames = recorder.sites.user_frames(sys._getframe(1), FRAMES)
        if not frames or (found := self._decision(frames)) is None:
            return
        loader, decision = found
        value = _value(decision, frames)
        if type(value) not in _COUNTS:
            recorder.emit(
                kind(
                    at=time.monotonic(),
                    name=ast.unparse(decision.value),
                    value=_number(value),
                    step=recorder.step,
                    compared=recorder.sites.number(decision.code, decision.line),
                    loader=loader,
                    site=recorder.site(),
                )
            )

    @on(hooks.writing)
    def _writing(self, recorder: Recorder, written: FileWritten) -> None:
        """Record a result of a loop over a loader that is written to a file which the program
        opens, each time once for a line and a loop; a file that it renames is one that it keeps."""
        if written.how in _PUT:
            self._kept(recorder)
        frames = recorder.sites.user_frames(sys._getframe(1), FRAMES) if self.loops else []
        running = [(frame.f_code, frame.f_lineno) for frame in frames]
        if not running or written.how != "open" or len(self.results) >= RESULTS_AT_MOST:
            return
        if _copies(frames[0]):
            return
        for loader, loop in reversed(self.loops.items()):
            key = *running, *loop
            if key in self.results:
                continue
            name = self.results[key] = written_result(running, loop)
            if name is not None:
                recorder.emit(
                    ResultWritten(
                        at=time.monotonic(),
                        name=name,
                        loader=loader,
                        step=recorder.step,
                        site=recorder.site(),
                        path=written.path,
                    )
                )

    def _decision(self, frames: list[FrameType]) -> tuple[int, Decision] | None:
        """The loader, of those iterated last, whose loop gave a number that decides about a save,
        and the comparison of that number."""
        running = [(frame.f_code, frame.f_lineno) for frame in frames]
        place = running[0]
        self.saves[place] += 1
        if self.saves[place] > SAVES_AT_MOST:
            return None
        for loader, loop in reversed(self.loops.items()):
            key = *running, *loop
            if key not in self.decisions:
                scopes = [Scope(variables(f), f.f_globals) for f in frames]
                self.decisions[key] = deciding(running, loop, scopes)
            if (decision := self.decisions[key]) is not None:
                return loader, decision
        return None


class DividedTotals(Watcher):
    """
    Attributes:
        looked: the loops whose functions were read, by file and line.
    """

    lost = "which sums are divided by the length of a data set"
    after = (Loaders,)

    def __init__(self) -> None:
        self.looked: set[tuple[str, int]] = set()

    def install(self) -> None:
        from torch.utils.data import dataloader

        base = dataloader._BaseDataLoaderIter
        self.around(base, "__init__", before=self._begins, after=self._begun)

    def _begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        """The loader, with the function and the names of the loop."""
        frame = recorder.sites.user_frame(sys._getframe(1))
        if frame is None or len(self.looked) >= ITERATIONS_LOOKED_AT:
            return None
        place = frame.f_code.co_filename, frame.f_lineno
        if place in self.looked:
            return None
        self.looked.add(place)
        loader = args[1] if len(args) > 1 else kwargs["loader"]
        dataset, found = getattr(loader, "dataset", None), []
        for division in totals_divided(frame.f_code, frame.f_lineno):
            scope = Scope(variables(frame), frame.f_globals)
            if dataset is not None and resolve(division.of, scope) is dataset:
                found.append(division)
        return (loader, dataset, frame.f_code, found) if found else None

    def _begun(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if token is None or error is not None:
            return
        loader, dataset, code, found = token
        number = Loaders.current.loaders.get(loader)
        for division in found if number is not None else ():
            recorder.emit(
                TotalDivided(
                    at=time.monotonic(),
                    loader=number,
                    name=division.total,
                    length=length(dataset),
                    site=recorder.sites.number(code, division.line),
                )
            )


def _value(decision: Decision, frames: list[FrameType]) -> Any:
    """What is compared, as far as the running functions still know it."""
    scopes = (Scope(variables(f), f.f_globals) for f in frames if f.f_code is decision.code)
    return resolve(decision.value, next(scopes, Scope({}, {})))


def _copies(user: FrameType) -> bool:
    """Whether what this frame of the program's called copies a file, whose content was written
    before."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not user:
        if frame.f_globals is vars(shutil):
            return True
        frame = frame.f_back
    return False


def _number(value: Any) -> float | None:
    """A finite number that is not an integer by type, as metrics are, or one in a CPU tensor.

    A program compares objects of any class: only those of Python, NumPy and torch itself are asked,
    for a class of the user's may run code when it is.
    """
    kind = type(value)
    if kind is sys.modules["torch"].Tensor:
        if value.numel() != 1 or not value.is_cpu or not value.is_floating_point():
            return None
        value = float(value.detach())
    elif kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()
    return value if type(value) is float and isfinite(value) else None
