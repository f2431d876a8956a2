"""DDP512."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data import data_calls
from ddpdoctor.analysis.data.loaders import Loader
from ddpdoctor.analysis.data.shared_evaluations import (
    divided_evaluations,
    ends_apart,
    evaluation_of,
    exchanged,
    first_unequal,
    metrics_given,
    seen_to_evaluate,
    unread_shares,
    unreduced,
)
from ddpdoctor.analysis.data.wrong_results import (
    AGAIN,
    DIVIDED,
    TWICE,
    UNUSED,
    UNWAITED,
    WRITTEN,
    divided_totals,
    dropped_results,
    repeated_totals,
    written_by_some,
)
from ddpdoctor.analysis.models.wrap_options import reduced
from ddpdoctor.analysis.replicas.replicas import replicas
from ddpdoctor.events import (
    EndDecided,
    FileWritten,
    MetricUsed,
    ResultDropped,
    SaveDecided,
    SchedulerStep,
    TotalDivided,
    TotalReducedAgain,
    WeightsKept,
)
from ddpdoctor.report.declarations import several_records
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity
from ddpdoctor.run import Location, Run, counted, listed, ranks_do, ranks_text

SAVED = "decides-what-is-saved"
STOPPED = "decides-when-to-stop"
SCHEDULED = "decides-the-schedule"
ONE_RANK = "reduced-to-one-rank"
NEVER = "never-reduced"
ONE_SHARE = "one-share-only"

SHOWN = 4
"""Evaluations that are named."""

REDUCE = (
    "sum what it is made of over the ranks first, on every rank: `dist.all_reduce(totals)` with "
    "the sum and the number of samples; one that is no mean over samples (AUC, EER, mAP) is "
    "computed from the scores of all ranks: `dist.all_gather_object(parts, scores)`"
)


class MetricNotReduced(Check):
    """A metric of one rank's share of the data decides, without being reduced over the ranks

    ## What it finds
    An evaluation in which each rank takes its share of the data, and whose result differs between
    ranks where it decides: whether a file is saved (`if accuracy > best:` around `torch.save`), or
    the weights are kept in memory (around `model.state_dict()`),
    what `ReduceLROnPlateau.step` is given, or when a framework or the program's own loop stops
    training: once two ranks decide differently, one waits for the other. Also a sum over one rank's
    share that is divided by `len(loader.dataset)`, and that no rank reduces: it is too small by the
    number of ranks. A running total that is summed over the ranks in every round of a loop, and
    goes on from the sum, so that it grows by the number of ranks each time; a tensor that two
    lines sum. An evaluation on one rank, through a sampler that gives it a share only; or one on
    all ranks, of which one rank writes what it computed from its share to a file. And values that
    are reduced in a copy, or gathered, where nobody uses the result: a warning where the
    values require gradients, else a note. And asynchronous collectives that nobody waits for.

    ## How it knows
    When an iteration over a loader begins, each rank reads the numbers that its running functions
    compare by `<` and the like, and records those that changed. When a file is saved, copied,
    renamed or linked, the source of the running functions is searched for a comparison that decides
    about it, of a number that comes from a loop over a loader: through assignments, arguments,
    returned values, and attributes that methods of an object set. What `ReduceLROnPlateau` is given
    is recorded, too (also a training loss, where the ranks train copies of a model), and by what
    numbers a framework decides (Lightning's `ModelCheckpoint` and `EarlyStopping`,
    `EarlyStoppingCallback` of Transformers).
    Where an evaluation is begun again and steps were taken since, the `break` and `return` of the
    loops around it are searched in the same way; what else their conditions need has to hold then.
    It is reported where each rank that evaluates may leave a loop by it, while no values are
    exchanged, or sent from one rank, in the evaluation or after it. What was exchanged before the
    evaluation began, as the meters of training, is not counted.
    One that decides about a file is reported if no rank exchanges any values in the evaluation that
    it comes from, or after it. Another one is reported if it changes with
    evaluations only, over a loader that is divided between ranks, and differs between ranks at
    least twice, while the rank that saves took part in no gathering of values after the same
    optimizer step. An `all_reduce` is no excuse where the number changes on every rank and differs
    all the same: the result of the call was not used for it.
    Where nothing is seen to be decided, and no rank reduces or gathers any value in an evaluation
    that is divided between ranks, or after it, that is a note: what is printed of it is the result
    of one rank's share. So is one that is reduced at some times only.
    The source around each collective tells whether it reduces a copy (`torch.tensor(x)`,
    `x.clone()`, `x / n`) or gathers into something that is used for nothing else, or is returned
    to a caller that drops it; and whether what a call with `async_op=True` returns is dropped, so
    that nobody can wait for it. It is told where this happens at least twice after the first
    optimizer step.
    Of the first calls of `all_reduce` after the first optimizer step that sum up to 64 numbers, the
    values before and after are compared: a total is reported that is, four times in a row at one
    line and between the same optimizer steps, at least the sum that the call before gave; and a
    tensor that another line has summed before, in the same step and with the same numbers.
    When a file is opened to be written, the source of the running functions tells whether what is
    written comes from a loop over a loader.
    When a loop over a loader begins, the function with it is searched for sums that are divided by
    the length of its data set; how many samples the rank has read, and which values the ranks
    exchange in the loop and after it, is on record.

    ## Why it hurts
    The best checkpoint is chosen by a part of the validation data, or the schedule follows noise:
    on several ranks the model that is kept is another one than on a single rank.

    ## How to fix it
    Reduce the sums, not the averages, before the value is used, on every rank:
    `dist.all_reduce(totals)` with `totals = torch.tensor([correct, count])`. A metric that is no
    mean over samples (AUC, EER, mAP) is computed from the scores of all ranks
    (`dist.all_gather_object`). `dist.reduce` is not
    enough where all ranks use the value: only one of them gets the sum. In Lightning, a mean over
    samples that is logged in a step: `self.log("val_loss", ..., sync_dist=True)`; a metric that is
    no such mean (IoU, F1, perplexity): a torchmetrics `Metric`, whose `compute()` sums over ranks.

    ## When it stays quiet
    - Metrics that are equal on all ranks: reduced, gathered, or sent from one rank.
    - Metrics that are reduced to the rank that uses them.
    - Ways out of a loop that one rank decides about and tells the others, or that an option
      switches off; and loops that take no steps.
    - Evaluations of all the data on each rank, or on one rank only.
    - Numbers that also change with training, such as a training loss.
    - Evaluations after which every rank writes a file of its own, unless a result decides
      whether it does.
    - Pictures and sounds that one rank writes, and what it writes within the loop: examples.
    - Totals on an accelerator that are reduced again: to read them would stop its queue.
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
        UNUSED: "values are reduced in a copy, or gathered, and the result is not used",
        UNWAITED: "nobody waits for an asynchronous collective before its result is used",
        AGAIN: "a running total is summed over the ranks again and again",
        ONE_SHARE: "one rank evaluates alone, through a sampler that gives it a share",
        TWICE: "two lines sum the same tensor over the ranks",
        WRITTEN: "some ranks write what they compute from their shares, and the others do not",
        NEVER: "an evaluation is divided between ranks, and no values are exchanged for it",
        ONE_RANK: "`ReduceLROnPlateau` is given a metric that was reduced to one rank only",
        SCHEDULED: "`ReduceLROnPlateau` is given a metric that differs between ranks",
    }
    requires = (several_records,)

    def unobserved(self, run: Run) -> str | None:
        if (why := super().unobserved(run)) is not None:
            return why
        if any(run.any(of) for of in (TotalDivided, ResultDropped, TotalReducedAgain)):
            return None
        given = metrics_given(run, SchedulerStep)
        if not given and not divided_evaluations(run) and not unread_shares(run):
            return "no evaluation was seen to be divided between ranks"
        return None

    def examine(self, run: Run) -> Iterable[Finding]:
        told = (*divided_totals(run), *repeated_totals(run), *written_by_some(run))
        found = [self.finding(**fields) for fields in (*told, *dropped_results(run))]
        found += self._one_share(run)
        evaluations = divided_evaluations(run)
        shared: list[Collection[int]] = [e.readers for e in evaluations]
        for ranks in (shared or [group.members for group in replicas(run)])[:1]:
            found += self._schedules(run, ranks)
        if evaluations:
            places = {finding.location for finding in found}
            decided = self._decisions(run, evaluations[0])
            found += [f for f in decided if f.location not in places]
            ends = list(self._ends(run, evaluations))
            worse = {finding.location for finding in ends}
            found += [f for f in self._saves(run, evaluations) if f.location not in worse]
            found += ends
        yield from found or self._never_reduced(run, evaluations)

    def _one_share(self, run: Run) -> Iterator[Finding]:
        """Evaluations of which some ranks read their shares, and the others never theirs."""
        for loader, unread in unread_shares(run):
            reader, ranks = loader.first, tuple(loader.readers)
            read = loader.samples_read
            yield self.finding(
                rule=ONE_SHARE,
                ranks=ranks,
                subjects=(reader.seen.dataset,),
                location=reader.sampler_at,
                label="gives each rank a share",
                related=(Related("evaluated here", reader.loop_at),) if reader.loop_at else (),
                summary=f"only {ranks_text(ranks)} {'evaluates' if len(ranks) == 1 else 'evaluate'}"
                f", and its sampler gives a rank {read[ranks[0]]} of {reader.seen.length} samples: "
                f"the share of {ranks_text(unread)} is never read",
                cause=f"`{reader.seen.sampler}` divides the data among {reader.seen.replicas} "
                "ranks, and not all of them iterate over it",
                fix="use no distributed sampler where one rank evaluates alone; or evaluate on "
                "every rank, and `all_reduce` the sums and counts",
                fix_kind=FixKind.TEMPLATE,
                evidence={"samples_read_by_rank": read},
                at=reader.rank.wall(reader.epochs[0].began.at),
            )

    def _never_reduced(self, run: Run, evaluations: list[Loader]) -> Iterator[Finding]:
        """Evaluations whose results no rank exchanges with another one."""
        if _all_write(run, evaluations) or run.outcome() != "completed":
            # The ranks' files may be put together; of a run that failed the last calls may be lost.
            return
        for loader in filter(seen_to_evaluate, evaluations):
            reader = loader.first
            known = exchanged(loader)
            alone = [e for e, together in zip(reader.epochs, known, strict=False) if not together]
            if any(known):  # a trial before training may stop early
                alone = [epoch for epoch in alone if epoch.whole]
            if not alone or reader.loop_at is None:
                continue
            read = loader.samples_read
            number, samples = next(iter(read.items()))
            times, after = "", ""
            if any(known):
                times = f"{len(alone)} of {len(known)} times "
                steps = listed([str(epoch.began.step) for epoch in alone[:SHOWN]])
                after = f", as after step {steps}"
            yield self.finding(
                rule=NEVER,
                severity=Severity.NOTE,
                ranks=tuple(loader.readers),
                subjects=(reader.seen.dataset,),
                location=reader.loop_at,
                label="evaluates one rank's share",
                summary=f"the ranks share this evaluation, and {times}exchange no values in it or "
                f"after it by collectives or messages{after}: its result on "
                f"{ranks_text([number])} is that of {samples} of {sum(read.values())} samples",
                cause="each rank has the result of the samples that its sampler gave it",
                fix=REDUCE,
                fix_kind=FixKind.TEMPLATE,
                evidence={"samples_read_by_rank": read},
                at=reader.rank.wall(alone[0].began.at),
            )

    def _schedules(self, run: Run, sharing: Collection[int]) -> Iterator[Finding]:
        """Schedules of the ranks that share an evaluation, or else train copies of a model."""
        for line, by_rank in metrics_given(run, SchedulerStep).items():
            if (found := first_unequal(by_rank, sharing)) is None:
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
                rule, None, tuple(by_rank), logs or line, values, event.kind,
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
                else (logged and reduced(logged.by, logged.name, logs)) or REDUCE,
                unequal=unequal,
                when=rank.wall(event.at),
            )  # fmt: skip

    def _decisions(self, run: Run, loader: Loader) -> Iterator[Finding]:
        """What a framework decides by a number that is logged by name."""
        for line, by_rank in metrics_given(run, MetricUsed).items():
            if (found := first_unequal(by_rank, loader.readers)) is None:
                continue
            call, values, unequal = found
            number, calls = next(iter(by_rank.items()))
            event = calls[call]
            logged = event.logged
            stops = "Stopping" in event.kind
            yield self._finding(
                STOPPED if stops else SAVED, loader, tuple(by_rank),
                line, values, event.kind,
                label=f"{'hands over' if stops else 'logs'} each rank's own `{logged.name}`",
                use=f"{event.kind} decides by `{logged.name}`, which differs between ranks",
                why=f"`{logged.name}` comes from each rank's share of the data, and is not reduced "
                + ("before: training ends, on this rank or on all, by a part of the data" if stops
                   else "where it is logged"),
                fix=reduced(logged.by, logged.name, line) or REDUCE,
                unequal=unequal,
                when=run.everyone[number].wall(event.at),
                saves=None if stops else run.everyone[number].location(event.site),
            )  # fmt: skip

    def _saves(self, run: Run, evaluations: list[Loader]) -> Iterator[Finding]:
        kept: dict[Location, dict[int, SaveDecided]] = {**run.by_line(WeightsKept, "compared")}
        for place, events in (kept | run.by_line(SaveDecided, "compared")).items():
            number, event = next(iter(events.items()))
            rank, ranks = run.ranks[number], tuple(events)
            use, unequal = f"{ranks_do(ranks, 'save')} a file by `{event.name}`", ""
            if in_memory := isinstance(event, WeightsKept):
                use = f"{ranks_do(ranks, 'keep')} the weights of a model by `{event.name}`"
            values: Mapping[int, float | None] = {}
            if (found := unreduced(rank, event, evaluations)) is not None:
                loader, values, count, of = found
                unequal = f"{count} of {of}"
                use += ", which differs between ranks"
            elif (shared := evaluation_of(rank, event, evaluations)) is not None:
                loader = shared
                read = loader.samples_read
                use += (
                    f", the result of {read[number]} of {sum(read.values())} samples: no "
                    "collective or message carries values in this evaluation or after it"
                )
                values = {n: e.value for n, e in events.items() if e.value is not None}
            else:
                continue
            yield self._finding(
                SAVED, loader, ranks, place, values, event.name,
                label=f"compares {_whose(ranks)} own `{event.name}`",
                use=use,
                why=f"`{event.name}` comes from each rank's share of the data, and is not reduced "
                f"over the ranks: {_whose(ranks)} own decides",
                unequal=unequal,
                when=rank.wall(event.at),
                saves=None if in_memory else rank.location(event.site),
                keeps=rank.location(event.site) if in_memory else None,
            )  # fmt: skip

    def _ends(self, run: Run, evaluations: list[Loader]) -> Iterator[Finding]:
        """Loops that train, and that each rank leaves by the result of its own share."""
        for place, events in run.by_line(EndDecided, "compared").items():
            if (loader := ends_apart(run, events, evaluations)) is None:
                continue
            number, event = next(iter(events.items()))
            rank, read = run.ranks[number], loader.samples_read
            yield self._finding(
                STOPPED, loader, tuple(events), place,
                {n: e.value for n, e in events.items() if e.value is not None}, event.name,
                label=f"compares each rank's own `{event.name}`",
                use=f"each rank ends training or goes on by `{event.name}`, the result of "
                f"{read[number]} of {sum(read.values())} samples: no collective or message carries "
                "values in this evaluation or after it",
                why=f"`{event.name}` comes from each rank's share of the data, and is not reduced "
                "over the ranks: once they decide differently, those that go on wait for the "
                "others forever",
                unequal="",
                when=rank.wall(event.at),
                leaves=rank.location(event.site),
            )  # fmt: skip

    def _finding(
        self,
        rule: str,
        loader: Loader | None,
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
        keeps: Location | None = None,
        steps: Location | None = None,
        leaves: Location | None = None,
    ) -> Finding:
        at = loader.first.loop_at if loader is not None else None
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
                    ("keeps the weights here", keeps),
                    ("leaves the loop here", leaves),
                    (f"{subject} steps here", steps),
                )
                if spot is not None
            ),
            summary=f"{use}: {_spelled(values)}" if values else use,
            cause=why,
            fix=fix,
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "values": {f"rank {n}": value for n, value in values.items()},
                **({"comparisons_in_which_they_differ": unequal} if unequal else {}),
            },
            at=when,
        )


def _whose(ranks: tuple[int, ...]) -> str:
    return "each rank's" if len(ranks) > 1 else f"{ranks_text(ranks)}'s"


def _all_write(run: Run, evaluations: list[Loader]) -> bool:
    """Whether every rank that evaluates writes files."""
    return all(run.everyone[n].first(FileWritten) for e in evaluations for n in e.readers)


def _spelled(values: Mapping[int, float | None]) -> str:
    shown = [
        f"{value:.6g} on rank {n}" for n, value in list(values.items())[:4] if value is not None
    ]
    more = len(values) - len(shown)
    return ", ".join(shown) + (f" and {counted(more, 'more rank')}" if more else "")
