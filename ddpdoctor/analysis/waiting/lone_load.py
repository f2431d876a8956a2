"""The state of an optimizer that other ranks loaded, and the ranks that fail did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...events import Loaded, Wrapped
from ...report.findings import Related
from ...run import Location, Rank, Run, ranks_do, ranks_text
from ..calls.guards import Guard, guard
from .failures import Failure

NOT_LOADED = "optimizer-not-loaded"


@dataclass(frozen=True)
class LoneLoad:
    """
    Attributes:
        loaders: the ranks that load it, at a line that those that fail have passed.
        under: the condition of that line, where it is known.
    """

    loaders: tuple[int, ...]
    line: Location
    under: Guard | None
    rule = NOT_LOADED

    def cause(self, ranks: Sequence[int]) -> str:
        """In words, for the ranks that fail."""
        under = f" {self.under.text}" if self.under else ""
        return (
            f"{ranks_do(self.loaders, 'load')} the state of the optimizer used here{under}, "
            f"{ranks_text(ranks)} {'does' if len(ranks) == 1 else 'do'} not"
        )

    @property
    def fix(self) -> str:
        if self.under is not None:
            return self.under.fix(at_the_line=False, keep=True)
        return f"run `{self.line.source.strip()}` on every rank"

    @property
    def related(self) -> tuple[Related, ...]:
        loads = Related("loads its state, not on every rank", self.line)
        return (loads, self.under.related) if self.under else (loads,)


def lone_load(run: Run, failure: Failure, ranks: Sequence[int]) -> LoneLoad | None:
    """None where the ranks that fail have loaded it as well, or may not have come to that line."""
    raised = failure.exception
    if raised is None or failure.location is None:
        return None
    made = {str(failure.rank.location(site)) for site in raised.optimizers if site >= 0}
    loads = {n: found for n, r in run.ranks.items() if (found := _loads(r, made, raised.step))}
    if not loads or any(n in loads for n in ranks):
        return None
    first, (event, *_) = next(iter(loads.items()))
    wrapped = ({w.model for w in run.ranks[n].of(Wrapped)} for n in ranks)
    line = run.ranks[first].location(event.site)
    if line is None or not all(event.model in models for models in wrapped):
        return None  # loads before the wrap are recorded with it
    under, at = guard(run.ranks[first], event.places), failure.location
    here = (line.file, line.function) == (at.file, at.function)
    if line.line >= at.line if here else under is None:
        return None
    return LoneLoad(tuple(loads), line, under)


def _loads(rank: Rank, made: set[str], until: int) -> list[Loaded]:
    """Loads into optimizers that were made at these lines."""
    every = (e for e in rank.of(Loaded) if e.what == "optimizer" and e.step <= until)
    return [e for e in every if e.model >= 0 and str(rank.location(e.made)) in made]
