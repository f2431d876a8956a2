"""Totals of an evaluation that are divided by too much, or summed over the ranks too often: what
`metric-not-reduced` says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...events import TotalDivided, TotalReducedAgain
from ...report.findings import FixKind, Related
from ...run import Run
from .loaders import loaders
from .shared_evaluations import exchanged, read_apart

DIVIDED, AGAIN, TWICE = "divided-by-all", "total-reduced-again", "reduced-twice"

SHARED_BY = 1.5
"""The length of a data set over the samples that a rank reads of it, from which on it reads only
its share."""


def divided_totals(run: Run) -> Iterator[dict[str, Any]]:
    """Sums over a rank's share that are divided by the length of the whole data set, where no
    rank reduces any values after the loop."""
    reported: set[object] = set()
    apart = read_apart(run)
    for loader in filter(apart, loaders(run)):
        for number, reader in loader.readers.items():
            for event in reader.rank.of(TotalDivided):
                line = reader.rank.location(event.site)
                key = reader.loop_at, event.name
                if event.loader != reader.seen.loader or key in reported:
                    continue
                read = max((e.samples for e in reader.epochs if e.whole), default=0)
                factor = event.length / read if read else 0.0
                if factor < SHARED_BY or any(exchanged(loader)):
                    continue
                reported.add(key)
                yield {
                    "rule": DIVIDED,
                    "ranks": tuple(loader.readers),
                    "subjects": (event.name,),
                    "location": line,
                    "label": f"divides by the {event.length} samples of all ranks",
                    "related": (Related("adds up one rank's share", reader.loop_at),)
                    if reader.loop_at
                    else (),
                    "summary": f"`{event.name}` is divided by the {event.length} samples of all "
                    f"ranks, of which rank {number} has read {read}: the result is "
                    f"{factor:.2g} times too small",
                    "cause": "the loop adds up what this rank's share of the data gives, and no "
                    "rank sums the results over the ranks",
                    "fix": f"sum over the ranks first: `dist.all_reduce({event.name})` as a "
                    "tensor, on every rank; or divide by the number of samples that this rank "
                    "has read",
                    "fix_kind": FixKind.TEMPLATE,
                    "evidence": {
                        "samples_of_the_data_set": event.length,
                        "samples_read_by_rank": loader.samples_read,
                    },
                    "at": reader.rank.wall(event.at),
                }


def repeated_totals(run: Run) -> Iterator[dict[str, Any]]:
    """Running totals that go on from the sum over the ranks."""
    for line, events in run.by_line(TotalReducedAgain).items():
        number, event = next(iter(events.items()))
        passed, summed = event.passed, event.summed
        first = run.ranks[number].location(event.first_site)
        times = f"{summed[-1] / passed[-1]:.2g} times"
        if first is not None:
            summary = (
                f"what {first} has summed over the ranks is summed once more, and so {times} "
                f"too large: {summed[0]:.6g} becomes {summed[1]:.6g} on rank {number}"
            )
            cause = "both lines reduce the same tensor, which nothing changes in between"
            fix = "reduce each tensor once: is another one meant on this line?"
        else:
            summary = (
                "a running total is summed over the ranks again and again, so that it grows "
                f"{times} in each call: on rank {number} one turns {passed[0]:.6g} into "
                f"{summed[0]:.6g}, and the next {passed[1]:.6g} into {summed[1]:.6g}"
            )
            cause = (
                "each call gets the sum that the one before gave, with something added: what "
                "all ranks counted so far is counted again by every rank"
            )
            fix = (
                "sum once, after the loop; or sum over the ranks only what this round adds, "
                "and add that to the total"
            )
        yield {
            "rule": AGAIN if first is None else TWICE,
            "ranks": tuple(events),
            "location": line,
            "label": "sums what the call before has summed already",
            "related": (Related("summed here first", first),) if first is not None else (),
            "summary": summary,
            "cause": cause,
            "fix": fix,
            "fix_kind": FixKind.TEMPLATE,
            "evidence": {"passed": list(passed), "sums": list(summed)},
            "at": run.ranks[number].wall(event.at),
        }
