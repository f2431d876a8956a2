"""Results of shared evaluations that only some ranks write to a file: what `metric-not-reduced`
says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...events import ResultWritten
from ...report.findings import FixKind, Related
from ...run import Run, counted, ranks_do
from .loaders import Loader
from .shared_evaluations import divided_evaluations, exchanged

WRITTEN = "written-by-some-ranks"


def written_by_some(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of a finding for each line at which some ranks write what they compute from their
    shares, and the others write nothing of theirs."""
    evaluations = divided_evaluations(run)
    for line, events in run.by_line(ResultWritten).items():
        number, event = next(iter(events.items()))
        loader = _loader(evaluations, number, event)
        if loader is None or any(exchanged(loader)) or run.outcome() != "completed":
            continue
        writing = {
            n
            for n, reader in loader.readers.items()
            if any(_is_of(loader, n, e) for e in reader.rank.of(ResultWritten))
        }
        read, idle = loader.samples_read, sorted(loader.readers.keys() - writing)
        if not idle:
            continue
        some = tuple(sorted(writing))
        whose = sum(read[n] for n in some)
        yield {
            "rule": WRITTEN,
            "ranks": some,
            "subjects": (event.name,),
            "location": line,
            "label": f"writes the results of {whose} of {sum(read.values())} samples",
            "related": (Related("evaluates each rank's share", loader.first.loop_at),)
            if loader.first.loop_at
            else (),
            "summary": f"only {ranks_do(some, 'write')} the results of an evaluation that "
            f"{counted(len(loader.readers), 'rank')} share: those of {whose} of "
            f"{sum(read.values())} samples",
            "cause": f"`{event.name}` comes from a loop over this rank's share of the data, and no "
            "collective or message carries the results of the other ranks",
            "fix": "gather the results before they are written, on every rank: "
            "`dist.all_gather_object(parts, results)`; or let every rank write a file of its own",
            "fix_kind": FixKind.TEMPLATE,
            "evidence": {"samples_read_by_rank": read},
            "at": run.ranks[number].wall(event.at),
        }


def _loader(evaluations: list[Loader], rank: int, event: ResultWritten) -> Loader | None:
    return next((loader for loader in evaluations if _is_of(loader, rank, event)), None)


def _is_of(loader: Loader, rank: int, event: ResultWritten) -> bool:
    reader = loader.readers.get(rank)
    return reader is not None and any(e.seen.loader == event.loader for e in reader.epochs)
