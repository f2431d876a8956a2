"""DDP512."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import ClassVar, TypeVar

from ddpdoctor.analysis.data import data_calls
from ddpdoctor.analysis.data.division import divided_loaders
from ddpdoctor.analysis.data.epoch_audit import pads, partitioned
from ddpdoctor.analysis.data.loaders import Loader, Reader, loaders
from ddpdoctor.analysis.models.wrap_options import reduced
from ddpdoctor.events import (
    ComparedValue,
    FileWritten,
    MetricUsed,
    ResultDropped,
    SaveDecided,
    SchedulerStep,
    TotalDivided,
)
from ddpdoctor.report.declarations import several_records
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity
from ddpdoctor.run import Location, Rank, Run, counted, ranks_do, ranks_text

SAVED = "decides-what-is-saved"
STOPPED = "decides-when-to-stop"
DIVIDED = "divided-by-all"
SCHEDULED = "decides-the-schedule"
ONE_RANK = "reduced-to-one-rank"
NEVER = "never-reduced"
UNUSED = "result-not-used"

ROUNDING = 1e-6
"""Relative difference up to which values count as equal."""

SHARED_BY = 1.5
"""The length of a data set over the samples that a rank reads of it, from which on it reads only
its share."""

FEWEST = 2
"""Evaluations in which the values must differ, or one that is not the first: that may be an
accident."""

TO_FEW_RANKS = data_calls.EXCHANGES - {"all_reduce"}
"""Collectives after which one rank may know the whole result and the others not. After an
`all_reduce` the result is equal on all ranks."""

REDUCE = (
    "sum what it is made of over the ranks first, on every rank: `dist.all_reduce(totals)` with "
    "the sum and the number of samples"
)


class MetricNotReduced(Check):
    """A metric of one rank's share of the data decides, without being reduced over the ranks

    ## What it finds
    An evaluation in which each rank takes its share of the data, and whose result differs between
    ranks where it decides: whether a file is saved (`if accuracy > best:` around `torch.save`),
    what `ReduceLROnPlateau.step` is given, or when a framework stops. Also a sum over one rank's
    share that is divided by `len(loader.dataset)`, and that no rank reduces: it is too small by the
    number of ranks. And an `all_reduce` of a copy whose result nobody uses.

    ## How it knows
    When an iteration over a loader begins, each rank reads the numbers that its running functions
    compare by `<` and the like, and records those that changed. When a file is saved it records the
    number that the `if` around it compares with the best one so far, and what `ReduceLROnPlateau`
    is given, and by what numbers a framework decides (Lightning's `ModelCheckpoint` and
    `EarlyStopping`, `EarlyStoppingCallback` of Transformers). One is reported if it changes with
    evaluations only, over a loader that is divided between ranks, and differs between ranks at
    least twice, while the rank that saves took part in no gathering of values after the same
    optimizer step. An `all_reduce` is no excuse where the number changes on every rank and differs
    all the same: the result of the call was not used for it.
    Where nothing is seen to be decided, and no rank reduces or gathers any value in an evaluation
    that is divided between ranks, or after it, that is a note: what is printed of it is the result
    of one rank's share.
    The source around each `all_reduce` tells whether it is made in a copy (`torch.tensor(x)`,
    `x.clone()`, `x / n`) that is used for nothing else, or returned to a caller that drops it; it
    is noted where this happens at least twice after the first optimizer step.
    When a loop over a loader begins, the function with it is searched for sums that are divided by
    the length of its data set; how many samples the rank has read, and which values the ranks
    exchange in the loop and after it, is on record.

    ## Why it hurts
    The best checkpoint is chosen by a part of the validation data, or the schedule follows noise:
    on several ranks the model that is kept is another one than on a single rank.

    ## How to fix it
    Reduce the sums, not the averages, before the value is used, on every rank:
    `dist.all_reduce(totals)` with `totals = torch.tensor([correct, count])`. `dist.reduce` is not
    enough where all ranks use the value: only one of them gets the sum. In Lightning:
    `self.log("val_loss", ..., sync_dist=True)`.

    ## When it stays quiet
    - Metrics that are equal on all ranks: reduced, gathered, or sent from one rank.
    - Metrics that are reduced to the rank that uses them.
    - Evaluations of all the data on each rank, or on one rank only.
    - Numbers that also change with training, such as a training loss, and those that are compared
      with a limit and not with the best one so far.
    - Evaluations after which every rank writes a file of its own.
    - Metrics that are only printed, where any values are exchanged in the evaluation or after it,
      but for sums that are divided by the samples of all ranks.
    """

    code = "DDP512"
    name = "metric-not-reduced"
    family = "data"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        SAVED: "a file is saved or not by a metric that differs between ranks",
        DIVIDED: "a sum over one rank's share is divided by the number of samples of all ranks",
        STOPPED: "training ends or goes on by a metric that differs between ranks",
        UNUSED: "values are reduced in a copy, and the copy is not used",
        NEVER: "an evaluation is divided between ranks, and no values are exchanged for it",
        ONE_RANK: "`ReduceLROnPlateau` is given a metric that was reduced to one rank only",
        SCHEDULED: "`ReduceLROnPlateau` is given a metric that differs between ranks",
    }
    requires = (several_records,)

    def unobserved(self, run: Run) -> str | None:
        if (why := super().unobserved(run)) is not None:
            return why
        if run.any(TotalDivided) or run.any(ResultDropped):
            return None
        if not _evaluations(run):
            return "no evaluation was seen to be divided between ranks"
        return None

    def examine(self, run: Run) -> Iterable[Finding]:
        found = [*self._divided(run), *self._dropped(run)]
        evaluations = _evaluations(run)
        if evaluations:
            found += self._schedules(run, evaluations[0])
            places = {finding.location for finding in found}
            decided = self._decisions(run, evaluations[0])
            found += [f for f in decided if f.location not in places]
            found += self._saves(run, evaluations)
        yield from found or self._never_reduced(run, evaluations)

    def _divided(self, run: Run) -> Iterator[Finding]:
        """Sums over a rank's share that are divided by the length of the whole data set, where no
        rank reduces any values after the loop."""
        reported: set[object] = set()
        apart = _read_apart(run)
        for loader in filter(apart, loaders(run)):
            for number, reader in loader.readers.items():
                for event in reader.rank.of(TotalDivided):
                    line = reader.rank.location(event.site)
                    key = reader.loop_at, event.name
                    if event.loader != reader.seen.loader or key in reported:
                        continue
                    read = max((e.samples for e in reader.epochs if e.exhausted), default=0)
                    factor = event.length / read if read else 0.0
                    if factor < SHARED_BY or _reduces(loader):
                        continue
                    reported.add(key)
                    yield self.finding(
                        rule=DIVIDED,
                        ranks=tuple(loader.readers),
                        subjects=(event.name,),
                        location=line,
                        label=f"divides by the {event.length} samples of all ranks",
                        related=(Related("adds up one rank's share", reader.loop_at),)
                        if reader.loop_at
                        else (),
                        summary=f"`{event.name}` is divided by the {event.length} samples of all "
                        f"ranks, of which rank {number} has read {read}: the result is "
                        f"{factor:.2g} times too small",
                        cause="the loop adds up what this rank's share of the data gives, and no "
                        "rank sums the results over the ranks",
                        fix=f"sum over the ranks first: `dist.all_reduce({event.name})` as a "
                        "tensor, on every rank; or divide by the number of samples that this rank "
                        "has read",
                        fix_kind=FixKind.TEMPLATE,
                        evidence={
                            "samples_of_the_data_set": event.length,
                            "samples_read_by_rank": {
                                n: max((e.samples for e in r.epochs), default=0)
                                for n, r in loader.readers.items()
                            },
                        },
                        at=reader.rank.wall(event.at),
                    )

    def _dropped(self, run: Run) -> Iterator[Finding]:
        """Reductions whose results nobody uses."""
        lines: dict[Location, dict[int, ResultDropped]] = {}
        for number, rank in run.ranks.items():
            for event in rank.of(ResultDropped):
                if (line := rank.location(event.dropped_site)) is not None:
                    lines.setdefault(line, {})[number] = event
        for line, events in lines.items():
            rank, event = next((run.ranks[n], e) for n, e in events.items())
            reduced = rank.location(event.site)
            away = reduced not in (None, line)
            yield self.finding(
                rule=UNUSED,
                severity=Severity.NOTE,
                ranks=tuple(events),
                subjects=(event.name,),
                location=line,
                label="drops what it returns"
                if away
                else f"nothing uses `{event.name}` after this",
                related=(Related("reduces the copy", reduced),) if away and reduced else (),
                summary=f"the result of an all_reduce is not used: `{event.name}` is a copy, and "
                "what it was copied from keeps this rank's own values",
                cause="`all_reduce` changes the tensor that it is given, which is a copy here",
                fix=f"use what it returns: `x = {line.source.strip()}`"
                if away
                else f"use `{event.name}` after the call, in place of what it was copied from",
                fix_kind=FixKind.TEMPLATE,
                at=rank.wall(event.at),
            )

    def _never_reduced(self, run: Run, evaluations: list[Loader]) -> Iterator[Finding]:
        """Evaluations whose results no rank exchanges with another one."""
        writes = all(run.everyone[n].first(FileWritten) for e in evaluations for n in e.readers)
        if writes or run.outcome() != "completed":  # the last calls may not be on record
            return
        for loader in evaluations:
            reader = loader.first
            if _reduces(loader) or reader.loop_at is None:
                continue
            read = {
                n: max((e.samples for e in r.epochs), default=0) for n, r in loader.readers.items()
            }
            number, samples = next(iter(read.items()))
            yield self.finding(
                rule=NEVER,
                severity=Severity.NOTE,
                ranks=tuple(loader.readers),
                subjects=(reader.seen.dataset,),
                location=reader.loop_at,
                label="evaluates one rank's share",
                summary=f"the ranks share this evaluation, and exchange no values in it or after "
                f"it: its result on {ranks_text([number])} is that of {samples} of "
                f"{sum(read.values())} samples",
                cause="each rank has the result of the samples that its sampler gave it",
                fix=REDUCE,
                fix_kind=FixKind.TEMPLATE,
                evidence={"samples_read_by_rank": read},
                at=reader.rank.wall(reader.epochs[0].began.at),
            )

    def _schedules(self, run: Run, loader: Loader) -> Iterator[Finding]:
        for line, by_rank in _metrics(run, SchedulerStep).items():
            if (found := _unequal(by_rank, loader)) is None:
                continue
            call, values, unequal = found
            event = next(iter(by_rank.values()))[call]
            to_one = all(
                data_calls.values_exchanged(run.everyone[n], by_rank[n][call].step, {"reduce"})
                for n in by_rank
            )
            rule = ONE_RANK if to_one else SCHEDULED
            logged, rank = event.logged, run.everyone[next(iter(by_rank))]
            logs = rank.location(logged.site) if logged is not None else None
            yield self._finding(
                rule, run, loader, tuple(by_rank), logs or line, values, event.kind,
                label=f"logs each rank's own `{logged.name}`"
                if logged is not None and logs is not None
                else "steps with each rank's own metric",
                steps=line if logs is not None else None,
                use=f"{event.kind}.step is given a metric that differs between ranks",
                why="`dist.reduce` gives the result to one rank; the others go on with values that "
                "are not the result"
                if to_one
                else "each rank passes a value of its own, and its schedule follows that",
                fix="reduce with `dist.all_reduce`, which gives the result to every rank"
                if to_one
                else (reduced(logged.by, logged.name) if logged is not None else "") or REDUCE,
                unequal=unequal,
                when=rank.wall(event.at),
            )  # fmt: skip

    def _decisions(self, run: Run, loader: Loader) -> Iterator[Finding]:
        """What a framework decides by a number that is logged by name."""
        for line, by_rank in _metrics(run, MetricUsed).items():
            if (found := _unequal(by_rank, loader)) is None:
                continue
            call, values, unequal = found
            number, calls = next(iter(by_rank.items()))
            event = calls[call]
            logged = event.logged
            stops = "Stopping" in event.kind
            yield self._finding(
                STOPPED if stops else SAVED, run, loader, tuple(by_rank),
                line, values, event.kind,
                label=f"{'hands over' if stops else 'logs'} each rank's own `{logged.name}`",
                use=f"{event.kind} decides by `{logged.name}`, which differs between ranks",
                why=f"`{logged.name}` comes from each rank's share of the data, and is not reduced "
                + ("before: training ends, on this rank or on all, by a part of the data" if stops
                   else "where it is logged"),
                fix=reduced(logged.by, logged.name) or REDUCE,
                unequal=unequal,
                when=run.everyone[number].wall(event.at),
                saves=None if stops else run.everyone[number].location(event.site),
            )  # fmt: skip

    def _saves(self, run: Run, evaluations: list[Loader]) -> Iterator[Finding]:
        reported: set[object] = set()
        for rank in run.ranks.values():
            for event in rank.of(SaveDecided):
                place = rank.location(event.compared)
                key = place, event.name
                if place is None or key in reported:
                    continue
                reported.add(key)
                if (found := _unreduced(run, rank, event, evaluations)) is None:
                    continue
                loader, values, unequal, of = found
                yield self._finding(
                    SAVED, run, loader, (rank.rank,), place, values, event.name,
                    label=f"compares {ranks_text([rank.rank])}'s own `{event.name}`",
                    use=f"{ranks_do([rank.rank], 'save')} a file by `{event.name}`, which differs "
                    "between ranks",
                    why=f"`{event.name}` comes from each rank's share of the data, and "
                    f"{ranks_text([rank.rank])} decides by its own, not reduced over the ranks",
                    unequal=f"{unequal} of {of}",
                    when=rank.wall(event.at),
                    saves=rank.location(event.site),
                )  # fmt: skip

    def _finding(
        self,
        rule: str,
        run: Run,
        loader: Loader,
        ranks: tuple[int, ...],
        line: Location,
        values: Mapping[int, float | None],
        subject: str,
        *,
        label: str,
        use: str,
        why: str,
        unequal: str,
        when: float,
        fix: str = REDUCE,
        saves: Location | None = None,
        steps: Location | None = None,
    ) -> Finding:
        at = loader.first.loop_at if rule in (SAVED, STOPPED) else None
        return self.finding(
            rule=rule,
            ranks=ranks,
            subjects=(subject,),
            location=line,
            label=label,
            related=tuple(
                Related(text, spot)
                for text, spot in (
                    ("evaluates one rank's share", at),
                    ("saves here", saves),
                    (f"{subject} steps here", steps),
                )
                if spot is not None
            ),
            summary=f"{use}: {_spelled(values)}",
            cause=why,
            fix=fix,
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "values": {f"rank {n}": value for n, value in values.items()},
                "evaluations_compared_in_which_they_differ": unequal,
            },
            at=when,
        )


def _reduces(loader: Loader) -> bool:
    """Whether some rank reduces or gathers values of its own in the loop or after it."""
    return any(
        data_calls.values_exchanged(reader.rank, step)
        for reader in loader.readers.values()
        for epoch in reader.epochs
        for step in {epoch.began.step, epoch.began.step + epoch.steps}
    )


def _read_apart(run: Run) -> Callable[[Loader], bool]:
    """Tells loaders of which several ranks each read a share: as their sampler says, or as the
    samples show."""
    shown = {
        id(d.loader)
        for d in divided_loaders(run)
        if any(partitioned(a) or pads(a, d.batch) for a in d.audits)
    }

    def apart(loader: Loader) -> bool:
        readers = loader.readers.values()
        shares = {r.seen.sampler_rank for r in readers if r.seen.replicas > 1}
        return len(readers) > 1 and (len(shares) == len(readers) or id(loader) in shown)

    return apart


def _evaluations(run: Run) -> list[Loader]:
    """The loaders that are only evaluated, on several ranks, each of which takes its share."""
    return [
        loader
        for loader in filter(_read_apart(run), loaders(run))
        if not loader.trains and all(map(_evaluates, loader.readers.values()))
    ]


def _evaluates(reader: Reader) -> bool:
    """Whether it is read under `no_grad`, or its batches go through a model without gradients."""
    ends = (epoch.ended for epoch in reader.epochs)
    return any(e.evaluated or not e.grad_enabled for e in ends if e is not None)


Used = TypeVar("Used", SchedulerStep, MetricUsed)


def _metrics(run: Run, of: type[Used]) -> dict[Location, dict[int, dict[int, Used]]]:
    """What schedulers, or others that decide, are given: by the line of the call, or the line that
    logs it, by rank and number of the call there."""
    found: dict[Location, dict[int, dict[int, Used]]] = {}
    for number, rank in run.ranks.items():
        for event in rank.of(of):
            by_name = event.logged if isinstance(event, MetricUsed) else None
            line = rank.location(event.site if by_name is None else by_name.site)
            if event.metric is not None and line is not None:
                found.setdefault(line, {}).setdefault(number, {})[event.call] = event
    return found


def _unequal(
    by_rank: Mapping[int, Mapping[int, Used]], loader: Loader
) -> tuple[int, dict[int, float | None], str] | None:
    """The first call in which the numbers of all ranks of a loader differ, these, and in how many
    calls they do, in words; None where they differ in few."""
    common = set.intersection(*(set(calls) for calls in by_rank.values()))
    calls: dict[int, dict[int, float | None]] = {
        c: {n: m[c].metric for n, m in by_rank.items()} for c in sorted(common)
    }
    unequal = {c: values for c, values in calls.items() if _differ(values)}
    if set(by_rank) != set(loader.readers) or len(unequal) < FEWEST:
        return None
    call, values = next(iter(unequal.items()))
    return call, values, f"{len(unequal)} of {len(calls)}"


def _unreduced(
    run: Run, rank: Rank, event: SaveDecided, evaluations: list[Loader]
) -> tuple[Loader, dict[int, float | None], int, int] | None:
    """The evaluation that the number comes from, its values on all ranks when they first differ,
    how often they do, and of how many times; None if it is not known to differ by the share."""
    place = rank.location(event.compared)
    for loader in evaluations:
        tables: dict[int, dict[int, float]] = {}
        for number, reader in loader.readers.items():
            mine = [
                e
                for e in reader.rank.of(ComparedValue)
                if e.name == event.name and reader.rank.location(e.site) == place
            ]
            theirs = {ep.seen.loader for ep in reader.epochs}
            if not mine or any(e.loader not in theirs for e in mine):
                break
            tables[number] = {e.step: e.value for e in mine}
        if len(tables) < len(loader.readers) or rank.rank not in tables:
            continue
        steps = sorted({step for t in tables.values() for step in t})
        rows = [{n: _at(t, step) for n, t in tables.items()} for step in steps]
        rows = [row for row in rows if None not in row.values()]
        unequal = [row for row in rows if _differ(row)]
        varies = all(len({*table.values()}) >= FEWEST for table in tables.values())
        ops = TO_FEW_RANKS if varies else data_calls.EXCHANGES
        if not unequal or unequal == rows[:1] or _exchanged(rank, steps, ops):
            continue
        return loader, unequal[0], len(unequal), len(rows)
    return None


def _at(table: Mapping[int, float], step: int) -> float | None:
    """The value at a step, of which only changes are on record; None before the first."""
    return table[max(known)] if (known := [s for s in table if s <= step]) else None


def _exchanged(rank: Rank, steps: list[int], ops: Set[str]) -> bool:
    """Whether the rank took part in one of these collectives of the program's own after one of
    these steps and before the next."""
    return any(data_calls.values_exchanged(rank, step, ops) for step in steps)


def _differ(values: Mapping[int, float | None]) -> bool:
    known = [v for v in values.values() if v is not None]
    return max(known) - min(known) > ROUNDING * max(map(abs, known)) if known else False


def _spelled(values: Mapping[int, float | None]) -> str:
    shown = [
        f"{value:.6g} on rank {n}" for n, value in list(values.items())[:4] if value is not None
    ]
    more = len(values) - len(shown)
    return ", ".join(shown) + (f" and {counted(more, 'more rank')}" if more else "")
