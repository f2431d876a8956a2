"""Ranks that are at one line of the program, and at different places in a library that it calls."""

from __future__ import annotations

from collections.abc import Mapping

from ...events import StackFrame
from ...run import listed, ranks_were
from ..waiting.snapshot import Snapshot
from .align import CallDivergence
from .attribution import Attribution
from .explanation import CallExplanation
from .suspects import Suspect

Stack = tuple[StackFrame, ...]
"""Outermost first, from the program's line to the collective."""

NEAR = 1
"""Calls between the one in the ring and the one in the stack, at most."""

MOST_NAMED = 4
"""Functions of one side."""

INSTALLED = "site-packages", "dist-packages"


def stacks(now: Snapshot, divergence: CallDivergence) -> Mapping[int, Stack]:
    """Of the ranks that stand in these calls, the functions of libraries that lead there."""
    found = {}
    for number, made in divergence.calls.items():
        stand = now.by_rank.get(number)
        if stand is None or stand.stood is None:
            continue
        frames = stand.stood.frames
        # The ring may be a call ahead of the stack, or between two calls.
        ahead = stand.made.index - made.index if stand.made and stand.key == divergence.key else 0
        function = made.signature.op.removeprefix("DDP ")  # `DDP backward` is issued in `backward`
        if not 0 <= ahead <= NEAR or all(f.function != function for f in frames):
            continue
        users = next((n for n, frame in enumerate(frames) if frame.user), 0)
        found[number] = tuple(reversed(frames[:users]))
    return found


class WithinLibrary(CallExplanation):
    rule = "within-library"
    text = "the ranks are at one line of the program, and a library went different ways there"

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence = suspect.divergence
        if len({made.location for made in divergence.calls.values()}) > 1:
            return None  # the program itself goes different ways
        sides = [
            (side, suspect.stacks[with_stack])
            for side, _ in divergence.sides(suspect.ranks)
            if (with_stack := next((r for r in side if suspect.stacks.get(r)), None)) is not None
        ]
        if len(sides) != 2:
            return None
        common = _common(*(stack for _, stack in sides))
        ways = [(side, stack[common:]) for side, stack in sides]
        if not common or not all(_named(way) for _, way in ways):
            return None
        where = sides[0][1][common - 1]
        told = listed([f"{ranks_were(side)} in {_named(way)}" for side, way in ways])
        return self.blame(
            suspect,
            cause=f"the library that this line calls goes different ways: in `{where.function}` "
            f"({_file(where)}) {told}. What it decides by differs between the ranks",
            fix="give it the same on every rank: reduce a metric over the ranks before the library "
            "reads it (with Lightning, `sync_dist=True` and no `rank_zero_only=True`), set its "
            "flags and options alike, and let it find the same files",
        )


def _common(one: Stack, other: Stack) -> int:
    """How many functions both stacks begin with."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if (a.file, a.function) != (b.file, b.function):
            break
        count += 1
        if a.line != b.line:
            break
    return count


def _named(way: Stack) -> str:
    """`on_train_batch_end`, `_save_topk_checkpoint` (callbacks/model_checkpoint.py:589)."""
    ours = [f for f in way if "torch/distributed/" not in f.file]
    shown = ours[:MOST_NAMED]
    if not shown:
        return ""
    return f"{listed([f'`{f.function}`' for f in shown])} ({_file(shown[-1])}:{shown[-1].line})"


def _file(frame: StackFrame) -> str:
    """A path below the folder that libraries are installed in."""
    parts = frame.file.split("/")
    places = [n for n, part in enumerate(parts) if part in INSTALLED]
    return "/".join(parts[places[-1] + 1 :] if places else parts[-2:])
