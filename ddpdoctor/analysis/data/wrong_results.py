"""Results of evaluations that are divided by too much, summed over the ranks too often, not used
after they were reduced, or written by some ranks only: what `metric-not-reduced` says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...events import ResultDropped, ResultWritten, TotalDivided, TotalReducedAgain
from ...report.findings import FixKind, Related, Severity
from ...run import Run, counted, ranks_do
from .loaders import Loader, loaders
from .shared_evaluations import divided_evaluations, exchanged, read_apart

DIVIDED, AGAIN, TWICE = "divided-by-all", "total-reduced-again", "reduced-twice"
WRITTEN = "written-by-some-ranks"
UNUSED, UNWAITED = "result-not-used", "never-waited-for"

EXAMPLES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".webp", ".bmp", ".tif", ".tiff",
            ".mp4", ".wav", ".mp3", ".flac")  # fmt: skip
"""Files of pictures and sounds."""

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


def dropped_results(run: Run) -> Iterator[dict[str, Any]]:
    """Collectives whose results nobody uses, or whose handles nobody waits for."""
    for line, events in run.by_line(ResultDropped, "dropped_site").items():
        rank, event = next((run.ranks[n], e) for n, e in events.items())
        reduced = rank.location(event.site)
        away = reduced not in (None, line)
        name, op = event.name, event.op
        severity = Severity.WARNING if event.learns or event.handle else Severity.NOTE
        label = f"nothing uses `{name}` after this"
        summary = f"the result of an {op} is not used: "
        if event.handle:
            label = "nobody waits for it" if not away else "drops the handle that it returns"
            summary = (
                f"nobody waits for an asynchronous {op}: its handle is dropped, and what reads the "
                "tensor next may get values from before it"
            )
            cause = f"`{op}` with `async_op=True` returns at once, and goes on in the background"
            fix = "leave out `async_op=True`; or keep what it returns, and call `wait()` on that "
            fix += "before the result is read"
        elif event.copy:
            summary += f"`{name}` is a copy, and what it was copied from stays as it is on each "
            summary += "rank (right only where the call is to wait for the other ranks)"
            cause = "`all_reduce` changes the tensor that it is given, which is a copy here"
            fix = f"use `{name}` after the call, in place of what it was copied from"
            if not name.isidentifier():
                fix = f"keep the copy, `totals = {name}`, reduce that, and use `totals` after the "
                fix += "call, in place of what it was copied from"
        else:
            summary += "the program goes on with this rank's own values"
            cause = f"nothing reads what `{name}` {'returns' if name == op else 'holds'}"
            fix = f"use `{name}` after the call, in place of what it was gathered from"
        if not event.handle and (away or name == op):
            label = "drops what it returns"
            fix = f"use what it returns: `x = {line.source.strip()}`, or `return` it"
        yield {
            "rule": UNWAITED if event.handle else UNUSED,
            "severity": severity,
            "ranks": tuple(events),
            "subjects": (name,),
            "location": line,
            "label": label,
            "related": (Related("the collective", reduced),) if away and reduced else (),
            "summary": summary + (", which require gradients" if event.learns else ""),
            "cause": cause,
            "fix": fix,
            "fix_kind": FixKind.TEMPLATE,
            "at": rank.wall(event.at),
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
    """Whether it is the result of a whole evaluation: what is written within the loop, or as a
    picture or sound, may be an example."""
    reader = loader.readers.get(rank)
    return (
        reader is not None
        and not event.path.lower().endswith(EXAMPLES)
        and any(
            e.seen.loader == event.loader
            and e.ended is not None
            and e.whole
            and e.ended.at <= event.at
            for e in reader.epochs
        )
    )
