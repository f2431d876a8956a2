"""A loop that some ranks left, or skipped a round of, while others are in it, and its words."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from ...report.findings import Evidence
from ...run import Location, Rank, ranks_do, ranks_text
from ..control_flow.caught_exceptions import TOGETHER, skip_together
from ..control_flow.skipped_batches import SkippedBatches
from .thresholds import WAYS_NAMED

SKIPPED_BY = "took_no_step_for_a_batch"
"""Name of the evidence which ranks skipped a round."""


class LoopExitKind(enum.Enum):
    """How a rank left a loop that another rank is still in.

    `DRY`: its loader had fewer batches. `FEWER`: it had fewer iterations, over whatever. `SKIPPED`:
    it did all iterations, but skipped in some what the other rank does. `BROKE`: it left the very
    iteration of the loader that the other rank is in. `RAISED`: only an exception ends the loop
    early. `OVER`: it finished the loop, the other rank is in a later one. `UNKNOWN`: no loader
    tells.
    """

    DRY = enum.auto()
    FEWER = enum.auto()
    SKIPPED = enum.auto()
    BROKE = enum.auto()
    RAISED = enum.auto()
    OVER = enum.auto()
    UNKNOWN = enum.auto()


@dataclass(frozen=True)
class ShortLoader:
    """The loader of those who left a loop because it had fewer batches.

    Attributes:
        batches: that it had.
        stream: it iterates over a stream, which has no length.
        joins: it trains a model in DDP, which can wait for ranks with more batches.
    """

    batches: int
    stream: bool
    joins: bool

    @property
    def fix(self) -> str:
        if not self.batches:
            return (
                "divide the data so that every rank gets some, the same number of batches where "
                "possible: shards, at least one for each worker of each rank"
            )
        even = (
            "leave the loop together: before each round `all_reduce` (`ReduceOp.MIN`) whether this "
            "rank still has a batch, and end it on all ranks where one has none"
            if self.stream
            else "give every rank the same number of batches (`DistributedSampler`, "
            "`drop_last=True`)"
        )
        join = ", or train inside `with Join([model]):`, which covers none of your own collectives"
        return even + join * self.joins


@dataclass(frozen=True)
class LeftLoop:
    """A loop that some ranks left, or skipped a round of, while others are in it.

    Attributes:
        ranks: who left it.
        steps: `3 of its 6`, where they skipped some: for how many of their batches they took a
            step; skips: who skipped batches in all iterations; short: where `DRY`, its loader.
        ways: the statements that skip the rest of a round, or catch what ends it; their `source` is
            the condition or handler that each is under.
        exits: the statements that decide to end the loop; jump: where there is one, the statement
            that then ends it; guard: the condition on the rank around them.
        known: all of these ranks did so; otherwise some of them, nothing tells which.
        together: what to do where a rank skips what raised on it.
        turn: the branch that shows the round, as its condition depends on the round's number only.
    """

    ranks: list[int]
    loop: Location
    how: LoopExitKind
    steps: str = ""
    ways: tuple[Location, ...] = ()
    exits: tuple[Location, ...] = ()
    jump: Location | None = None
    guard: Location | None = None
    known: bool = True
    turn: str = ""
    skips: SkippedBatches | None = None
    short: ShortLoader | None = None
    together: str = TOGETHER

    def among(self, ranks: Collection[Rank]) -> LeftLoop:
        """With what to do about exceptions, as the calls of these ranks tell."""
        mine = [rank for rank in ranks if rank.rank in self.ranks]
        return replace(self, together=skip_together(ranks, mine, self.ways))

    @property
    def skipped(self) -> bool:
        return self.how is LoopExitKind.SKIPPED

    @property
    def evidence(self) -> Evidence:
        return {SKIPPED_BY: sorted(self.ranks)} if self.skipped and self.known else {}

    @property
    def who(self) -> str:
        """`rank 1`, `some of ranks 0-3`."""
        return ranks_text(self.ranks) if self.known else f"some of {ranks_text(self.ranks)}"

    @property
    def place(self) -> Location:
        """The line to point at: the statement that did it, if only one can have, or the loop."""
        lines = self.ways if self.surely else () if self._or_skipped else self.exits
        return lines[0] if len(lines) == 1 else self.loop

    @property
    def _or_skipped(self) -> bool:
        """Whether those who left the loop may have skipped a round of it instead."""
        return self.how is LoopExitKind.UNKNOWN and bool(self.ways)

    @property
    def _asked(self) -> Location | None:
        """The statement that ends the loop, where another one decides."""
        return self.jump if self.jump is not None and self.jump not in self.exits else None

    @property
    def cause(self) -> str:
        """`rank 1 left the loop at train.py:8 before the others`."""
        who = self.who
        ways = _either(self.ways)
        short = f": {ways} skips the rest of a round" if ways else ""
        if self.skipped and self.steps:
            batches = f"{who} took optimizer steps for only {self.steps} batches"
            before = self.skips.before(self.ranks) if self.skips else ""
            return f"{batches} in the loop at {self.loop}{short}{before}"
        if self.skipped:
            shown = f"; `{self.turn}` depends on the number of the round" if self.turn else ""
            return f"{who} skipped rounds of the loop at {self.loop}{short}{shown}"
        if self.how is LoopExitKind.FEWER:
            return f"{who} had fewer iterations of `{self.loop.source}` ({self.loop})"
        if self.how is LoopExitKind.RAISED:
            return f"an exception ended the loop at {self.loop} on {who}; {ways} caught it"
        had = f" ({self.short.batches})" if self.short else ""
        dry = f"; its loader had fewer batches{had}" if self.how is LoopExitKind.DRY else ""
        exits = _either(self.exits)
        ended = f": {exits} ends it" if exits else ""
        if self._asked is not None:
            ended = f": `{self._asked.source}` ({self._asked}) ends it, as {exits} decides"
        if self.guard is not None:
            ended += f", and only who enters `{self.guard.source}` ({self.guard}) comes to it"
        or_skipped = f", or skipped a round{short}" if self._or_skipped else ""
        return f"{who} left the loop at {self.loop} before the others{dry}{ended}{or_skipped}"

    @property
    def label(self) -> str:
        who = self.who
        if self.how is LoopExitKind.RAISED:
            return f"{who} caught an exception here"
        if self.skipped:
            if not self.known:
                return "skips the rest of a round"
            rounds = "batches in" if self.steps else "rounds of"
            return (
                f"{who} skipped {rounds} this loop"
                if self.place == self.loop
                else f"{ranks_do(self.ranks, 'skip')} the rest of a round here"
            )
        if self.how is LoopExitKind.FEWER:
            return f"{who} had fewer iterations of this loop"
        if self._asked is not None and self.place in self.exits:
            return f"{who} left the loop because of what is decided here"
        return f"{who} left {'this loop' if self.place == self.loop else 'the loop here'}"

    @property
    def surely(self) -> bool:
        """Whether those who left had to do the round that the others are in, too."""
        return self.how in (LoopExitKind.SKIPPED, LoopExitKind.RAISED)

    @property
    def blames(self) -> bool:
        """Whether those who left it are at fault."""
        return self.surely or bool(self.exits)

    @property
    def fix(self) -> str:
        """What to change."""
        if self.short is not None:
            return self.short.fix
        if self.how is LoopExitKind.FEWER:
            return (
                "give that loop the same number of iterations on every rank: divide the work "
                "equally, or `all_reduce` the number of items with `ReduceOp.MAX` and add empty "
                "rounds (`loss * 0`) on the ranks with fewer; stop at the smallest number "
                "(`ReduceOp.MIN`) only where the items left over may be dropped; what is only "
                "counted or summed is best reduced once, after the loop"
            )
        alone = f"let no rank skip a {'batch' if self.steps else 'round'} on its own: "
        handled = any(w.source.startswith("except") for w in self.ways)
        if self.skipped and (handled or (self.skips and self.skips.caught)):
            return f"{alone}{self.together}"
        if self.skipped:
            share = f"{alone}share the condition with `all_reduce`"
            # NaN times zero is NaN.
            if any(_FINITE.search(way.source) for way in self.ways):
                return f"{share}, and skip on all ranks or on none"
            return f"{share}, or take the step with `loss * 0`"
        if self.how is LoopExitKind.RAISED:
            return (
                "if ranks are to stop there, decide it together: `all_reduce` the condition before "
                "the exception is raised; otherwise raise it again, so that the rank exits with a "
                "non-zero status and the launcher ends the others"
            )
        if self.exits and not self._or_skipped and self.guard is not None:
            return (
                f"decide together: after `{self.guard.source}`, send the decision to all ranks "
                f"(`stop = torch.tensor(int(...))`, `dist.broadcast(stop, src={self.ranks[0]})`), "
                "and leave the loop on all of them where it says so"
            )
        if self.exits and not self._or_skipped:
            return (
                "decide together: `all_reduce` the decision, or what it is computed from, and "
                "leave the loop on all ranks in the same round"
            )
        return (
            "run the same rounds of the loop, with the same calls in each, on all ranks: compute "
            "its bounds from values that are equal on all of them, and `all_reduce` any condition "
            "to stop or to skip"
        )


_FINITE = re.compile(r"finite|nan\b|inf\b", re.IGNORECASE)
"""What a condition asks that looks for NaN and infinity."""


def _either(ways: tuple[Location, ...]) -> str:
    """`` `if bad:` (train.py:22) or `except ValueError:` (train.py:30)``."""
    return " or ".join(f"`{w.source}` ({w})" for w in ways[:WAYS_NAMED])
