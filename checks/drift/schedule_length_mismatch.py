"""DDP413."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import ClassVar, NamedTuple

from msgspec.structs import replace

from ddpdoctor.analysis.data.division import Shares, batches_of_whole, epochs_of_shares
from ddpdoctor.analysis.models.wrap_options import planned
from ddpdoctor.events import Hyperparameters, ScheduleEnded, SchedulerStep, StepDone
from ddpdoctor.report.declarations import seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity
from ddpdoctor.run import Location, Rank, Run, counted

FEWEST_CALLS = 4
"""Shorter runs are tries of the code, and small numbers are equal by chance."""

EXACTLY = 0.1
"""By how much a ratio of two numbers of steps may differ from the whole number it is taken for:
rounding up in every epoch makes it inexact."""

UNDIVIDED = "counts-undivided-batches"
MICRO_BATCHES = "counts-micro-batches"
DIVIDED_TWICE = "divided-twice"
TOO_OFTEN = "stepped-too-often"
NOT_PREPARED = "loader-not-prepared"
PATIENCE = "patience-counted-per-rank"
STEPS = "steps-counted-per-rank"
EPOCHS = "epochs-counted-per-rank"

PLATEAU = "ReduceLROnPlateau"
FEWEST_TIMES = 3
"""Metrics, or epochs, that must all have been counted as often as there are ranks."""


class Unit(NamedTuple):
    """What a scheduler counts once for each rank, and the words for it."""

    rule: str
    name: str
    every: str
    over: str
    fix: str
    severity: Severity = Severity.WARNING


PREPARED = " (Accelerate does so with a scheduler that it has prepared)"
KEEP_OUT = "keep the scheduler out of `accelerator.prepare`"
MULTIPLY = (
    "multiply every number of steps that it is given, a warm-up's included, by the number of ranks"
)
ONCE = "step the scheduler once per optimizer step"

METRIC = Unit(
    PATIENCE,
    "metric",
    "with each metric",
    "its patience counts calls, so that it is over after a part of the evaluations that it was "
    "meant for",
    "step it once per evaluation: keep it out of `accelerator.prepare`, or step the scheduler "
    "inside, `scheduler.scheduler.step(metric)`",
)
EPOCH = Unit(
    EPOCHS,
    "epoch",
    "in every epoch",
    "it counts calls, so that what is planned for some epochs is over after a part of those",
    "step it once per epoch: keep it out of `accelerator.prepare`, or step the scheduler inside, "
    "`scheduler.scheduler.step()`",
)


STEP = Unit(
    STEPS,
    "optimizer step",
    "in every optimizer step",
    "it counts calls: what is planned for some optimizer steps is over after a part of those; only "
    "numbers that count the batches of the whole data set are right",
    f"{KEEP_OUT}, or {MULTIPLY}",
    Severity.NOTE,
)


class Backwards(NamedTuple):
    """The backwards of an optimizer: in its usual step (`micro`), and in all steps."""

    micro: int
    backwards: int


class Mismatch(NamedTuple):
    """How a plan and a run differ: by `factor`, which `what` explains."""

    rule: str
    factor: int
    cause: str
    fix: str


class ScheduleLengthMismatch(Check):
    """A learning-rate schedule was planned for another number of steps than the run took

    ## What it finds
    A scheduler with a planned length (`OneCycleLR`, `CosineAnnealingLR`, a falling `LinearLR`,
    `PolynomialLR`, or a `SequentialLR` that ends in one of them) whose run ended after another
    number of steps, by a factor that is the number of ranks or of micro-batches per step. And a
    scheduler that is stepped once per epoch, but counts every epoch once for each rank; or a
    `ReduceLROnPlateau` that counts every metric so, whose patience is over too soon.

    ## How it knows
    Each rank records the planned length, the calls of `step`, and the line that made the scheduler.
    At the end of a run that completed, the length is compared with four counts: the calls, the
    optimizer's steps, the batches this rank was given, and those that the whole data set would give
    one process. It is reported only if one of these numbers explains the plan and another the run.
    Each rank records the first calls of a scheduler, with the metrics of a `ReduceLROnPlateau`: one
    line makes as many of them as there are ranks, with no optimizer step in between, and several
    optimizer steps before the next.

    ## Why it hurts
    A schedule that is too long never comes down: the run ends at a high learning rate. One that is
    too short leaves the rest of the run at the lowest rate, or raises it again.

    ## How to fix it
    Plan for the optimizer steps of one rank: `epochs * len(loader)` with the loader that has the
    distributed sampler, divided by the number of micro-batches per step; call `scheduler.step()`
    once per `optimizer.step()`.

    ## When it stays quiet
    - Runs that failed, were stopped or left a training epoch early.
    - A plan that is too long where a loop around the step has a `break` or `return`: the run may
      have been meant to go on.
    - A plan that is too long by the number of ranks in a program that asked for the length of the
      divided loader before it made the scheduler.
    - Schedulers whose state was loaded, and those stepped once per epoch that count it once.
    - Schedulers that count each epoch once for each rank and are planned for as many steps.
    - Cosine schedules of whole epochs that the run repeats, and warm-ups (a rising `LinearLR`).
    - Schedulers of functions that never change the rate.
    - Only a note for schedulers of functions (`LambdaLR`), or of intervals (`StepLR`), that are
      given no length of a plan, where Accelerate steps them once for each rank in every step.
    """

    code = "DDP413"
    name = "schedule-length-mismatch"
    family = "drift"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        TOO_OFTEN: "the schedule is as long as the run, but is stepped several times per step",
        NOT_PREPARED: "the plan counts the batches of a loader that Accelerate was not given to "
        "divide, and it steps the scheduler once for each rank",
        UNDIVIDED: "the plan counts the batches of the whole data set, not those of one rank",
        MICRO_BATCHES: "the plan counts batches, the scheduler is stepped once per optimizer step",
        DIVIDED_TWICE: "the plan counts the batches of one rank, divided by the ranks again",
        PATIENCE: "`ReduceLROnPlateau` is stepped once for each rank with every metric",
        STEPS: "a scheduler without a known length is stepped once for each rank in every step",
        EPOCHS: "a scheduler of epochs is stepped once for each rank in every epoch",
    }
    requires = (
        seen(
            ScheduleEnded,
            SchedulerStep,
            otherwise="no scheduler with a planned number of steps was stepped",
        ),
    )

    def unobserved(self, run: Run) -> str | None:
        if (why := super().unobserved(run)) is not None:
            return why
        if any(_seldom(e) for r in run.ranks.values() for e in r.of(SchedulerStep)):
            return None
        if not run.any(ScheduleEnded):
            return "no scheduler with a planned number of steps was stepped"
        return None if run.outcome() == "completed" else "the run did not end by itself"

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from self._counted_per_rank(run)
        yield from self._without_plan(run)
        if run.outcome() != "completed":
            return
        found: dict[object, list[tuple[Rank, ScheduleEnded, Mismatch]]] = {}
        for rank in run.ranks.values():
            for event in rank.of(ScheduleEnded):
                if (mismatch := _mismatch(run, rank, event)) is not None:
                    key = rank.location(event.site), event.kind, event.planned, mismatch
                    found.setdefault(key, []).append((rank, event, mismatch))
        for same in found.values():
            yield self._finding(same)

    def _counted_per_rank(self, run: Run) -> Iterator[Finding]:
        """Schedulers that count each metric, or epoch, once for each rank."""
        size = run.world_size
        found: dict[object, list[tuple[Rank, list[SchedulerStep]]]] = {}
        for rank in run.ranks.values():
            for steps in _once_for_each_rank(rank, size):
                if steps[0].kind == PLATEAU or not _planned_so(rank, steps[0], size):
                    key = rank.location(steps[0].site), steps[0].kind, steps[0].scheduler
                    found.setdefault(key, []).append((rank, steps))
        for same in found.values():
            steps = same[0][1]
            first = steps[: size * 4]
            plateau = steps[0].kind == PLATEAU
            yield self._once_more(
                run,
                METRIC if plateau else EPOCH,
                tuple(r.rank for r, _ in same),
                steps[0],
                {"metrics": [e.metric for e in first[::size]]}
                if plateau
                else {"optimizer_steps_before": [e.step for e in first]},
            )

    def _without_plan(self, run: Run) -> Iterator[Finding]:
        """Schedulers without a length of a plan that count each optimizer step once per rank."""
        size = run.world_size
        for events in run.by_line(ScheduleEnded).values():
            number, event = next(iter(events.items()))
            counted_so = event.steps >= FEWEST_CALLS and event.calls == event.steps * size
            if event.planned or event.calls != event.counted or size < 2 or not counted_so:
                continue
            if _constant(run.ranks[number], event.optimizer):
                continue
            yield self._once_more(
                run,
                STEP,
                tuple(events),
                event,
                {"scheduler_steps": event.calls, "optimizer_steps": event.steps},
                run.ranks[number].location(event.step_site),
            )

    def _once_more(
        self,
        run: Run,
        unit: Unit,
        ranks: tuple[int, ...],
        event: SchedulerStep | ScheduleEnded,
        evidence: dict[str, object],
        stepped: Location | None = None,
    ) -> Finding:
        """A scheduler that these ranks step once for each rank, where once was meant."""
        rank, times = run.ranks[ranks[0]], run.world_size
        return self.finding(
            rule=unit.rule,
            severity=unit.severity,
            ranks=ranks,
            subjects=(event.kind,),
            optimizers=(event.optimizer,),
            location=rank.location(event.site),
            label=f"counts each {unit.name} {counted(times, 'time')}",
            related=(Related("steps it", stepped),) if stepped else (),
            summary=f"{event.kind} is stepped {counted(times, 'time')} {unit.every}, once for each "
            f"of the {times} ranks",
            cause=f"{unit.over} (Accelerate steps a scheduler that it has prepared once for each "
            "process)",
            fix=unit.fix,
            fix_kind=FixKind.CHECK,
            evidence=evidence,
            at=rank.wall(event.at),
        )

    def _finding(self, same: list[tuple[Rank, ScheduleEnded, Mismatch]]) -> Finding:
        rank, event, mismatch = same[0]
        stepped = rank.location(event.step_site)
        ends = "ends" if event.calls > event.planned else "would end"
        return self.finding(
            rule=mismatch.rule,
            ranks=tuple(r.rank for r, _, _ in same),
            subjects=(event.kind,),
            optimizers=(event.optimizer,),
            location=rank.location(event.site) or stepped,
            label=f"{ends} after {counted(event.planned, 'step')}",
            related=(Related(f"steps it {counted(event.calls, 'time')} in all", stepped),)
            if stepped
            else (),
            summary=f"{event.kind} is planned for {counted(event.planned, 'step')} and takes "
            f"{event.calls}, {_about(event, mismatch.factor)}a factor of {mismatch.factor}",
            cause=mismatch.cause,
            fix=mismatch.fix,
            fix_kind=FixKind.CHECK,
            evidence={
                "planned_steps": event.planned,
                "scheduler_steps": event.calls,
                "optimizer_steps": event.steps,
                **({"learning_rate_at_the_end": event.rate} if event.rate >= 0 else {}),
            },
            at=rank.wall(event.at),
        )


def _once_for_each_rank(rank: Rank, ranks: int) -> Iterator[list[SchedulerStep]]:
    """The first calls of each scheduler by one line, if that steps it with every metric, or once in
    a while, as often as there are ranks."""
    by_line: dict[int, list[SchedulerStep]] = {}
    for event in rank.of(SchedulerStep):
        known = by_line.setdefault(event.site, [])
        if event.call == len(known):  # later ones are not all on record
            known.append(event)
    by_scheduler: dict[tuple[int, int], list[SchedulerStep]] = {}
    for event in chain.from_iterable(by_line.values()):
        if _seldom(event):
            by_scheduler.setdefault((event.site, event.scheduler), []).append(event)
    for steps in by_scheduler.values():
        given = Counter((e.step, e.metric) for e in steps)
        # The last ones may not be on record.
        times, taken = list(given.values())[:-1], sorted({e.step for e in steps})
        apart = steps[0].kind == PLATEAU or all(b - a > 1 for a, b in pairwise(taken))
        if ranks > 1 and len(times) >= FEWEST_TIMES and set(times) == {ranks} and apart:
            yield steps


def _constant(rank: Rank, optimizer: int) -> bool:
    """Whether the learning rates of an optimizer are known never to have changed."""
    read = [e for e in rank.of(Hyperparameters) if e.optimizer == optimizer]
    return len({tuple(group.get("lr") for group in e.groups) for e in read}) == 1


def _seldom(event: SchedulerStep) -> bool:
    """Whether a call of this kind may be one per epoch or evaluation."""
    return event.kind != PLATEAU or event.metric is not None


def _planned_so(rank: Rank, event: SchedulerStep, ranks: int) -> bool:
    """Whether a scheduler that counts epochs once for each rank is planned for more steps than
    there are epochs, or repeats on purpose what it is planned for."""
    plans = [
        e
        for e in rank.of(ScheduleEnded)
        if e.step_site == event.site and e.kind == event.kind and e.planned
    ]
    return any(not _close(e.calls / e.planned, ranks) for e in plans)


def _mismatch(run: Run, rank: Rank, event: ScheduleEnded) -> Mismatch | None:
    """How the plan and the run differ; None if they do not, or if it is not known why."""
    if event.calls != event.counted or min(event.calls, event.planned) < FEWEST_CALLS:
        return None
    if not event.steps or event.calls < event.steps * (1 - EXACTLY):
        return None  # stepped once per epoch, or now and then
    done = _backwards(rank, event.optimizer)
    if (own := _once_per_rank(run, event)) is not None and own.planned > own.steps * (1 + EXACTLY):
        event = own
    if event.calls > event.steps * (1 + EXACTLY):
        return _too_often(run, rank, event, done)
    micro = done.micro
    epochs = epochs_of_shares(run, rank)
    if epochs is None or event.calls not in _steps(epochs.number, epochs.batches, micro):
        return None
    if event.planned > event.calls:
        return None if event.may_stop else _too_long(event, epochs, micro)
    return _too_short(event, epochs, micro)


def _once_per_rank(run: Run, event: ScheduleEnded) -> ScheduleEnded | None:
    """The plan and the calls of one rank, where the scheduler steps once for each rank in every
    optimizer step (as Accelerate's does); None where it does not."""
    size = run.world_size
    if size < 2 or event.calls != event.steps * size or event.planned % size:
        return None
    return replace(event, planned=event.planned // size, calls=event.steps, counted=event.steps)


def _too_often(run: Run, rank: Rank, event: ScheduleEnded, done: Backwards) -> Mismatch | None:
    if abs(event.planned - event.steps) > max(1, EXACTLY * event.steps):
        return None
    after = f"after {event.planned} of {event.calls} calls " + (
        "the rate stays at 0" if event.rate == 0.0 else "the schedule is over"
    )
    if done.micro > 1 and abs(event.calls - done.backwards) <= 1:
        return Mismatch(
            TOO_OFTEN,
            done.micro,
            f"the plan counts optimizer steps, of which there is one per {done.micro} backwards, "
            f"but the scheduler steps after each backward; {after}",
            "call `scheduler.step()` once after each `optimizer.step()`",
        )
    if _close(event.calls / event.planned, run.world_size):
        prepared = event.by.startswith("accelerate")
        whole = batches_of_whole(run, rank) if prepared else 0
        return Mismatch(
            NOT_PREPARED if event.planned in _steps(1, whole, done.micro) else TOO_OFTEN,
            run.world_size,
            "the plan counts optimizer steps, but the scheduler steps once for each of the "
            f"{run.world_size} ranks in every one"
            f"{PREPARED * prepared}; {after}",
            f"{KEEP_OUT}, or {MULTIPLY}" if prepared else ONCE,
        )
    return None


def _too_long(event: ScheduleEnded, epochs: Shares, micro: int) -> Mismatch | None:
    ended = f"the run ended after {event.calls} of {event.planned} steps, before the rate came down"
    if micro > 1 and event.planned == epochs.number * epochs.batches:
        return Mismatch(
            MICRO_BATCHES,
            micro,
            "the plan counts every batch, but the optimizer and the scheduler step once per "
            f"{micro} batches; {ended}",
            f"divide the planned number by the {micro} batches of a step",
        )
    if epochs.batches in event.lengths and epochs.batches not in epochs.undivided:
        return None
    low, high = epochs.undivided
    for each in sorted({1, micro}):
        factor = epochs.ranks * micro // each
        fewest, most = (_steps(epochs.number, n, each) for n in (low, high))
        if fewest.start <= event.planned < most.stop and _close(
            event.planned / event.calls, factor
        ):
            return Mismatch(
                UNDIVIDED,
                factor,
                f"the plan counts the batches of the whole data set, of which each of the "
                f"{epochs.ranks} ranks takes its share"
                + f", and the optimizer steps once per {micro} batches" * (micro > each)
                + f"; {ended}",
                planned(event.by)
                or "plan with the length of the loader that has the distributed sampler: "
                f"`epochs * len(loader){f' // {micro}' if micro > 1 else ''}`",
            )
    return None


def _too_short(event: ScheduleEnded, epochs: Shares, micro: int) -> Mismatch | None:
    factor = epochs.ranks
    if not _close(event.calls / event.planned, factor):
        return None
    if event.planned not in _steps(epochs.number, epochs.batches, micro * factor):
        return None
    whole = event.planned * micro % epochs.batches == 0
    # A rate of 0 for the rest of the run is nobody's wish; a schedule of whole epochs may be.
    if event.rate != 0.0 and (whole or "Cosine" not in event.kind):
        return None
    stays = "the rate stays at 0" if event.rate == 0.0 else "the rate rises again"
    return Mismatch(
        DIVIDED_TWICE,
        factor,
        f"the plan divides the batches of one rank by the {factor} ranks once more; after "
        f"{event.planned} of {event.calls} steps {stays}",
        "plan with `epochs * len(loader)`: the length of a loader with a distributed sampler is "
        "that of one rank already",
    )


def _backwards(rank: Rank, optimizer: int) -> Backwards:
    usual: Counter[int] = Counter()
    backwards = 0
    for event in rank.of(StepDone):
        if event.optimizer == optimizer:
            usual[round(event.backwards / event.count)] += event.count
            backwards += event.backwards
    return Backwards(max(1, usual.most_common(1)[0][0]) if usual else 1, backwards)


def _steps(epochs: int, batches: int, per_step: int) -> range:
    """The numbers of steps that some epochs may take, however each one rounds."""
    return range(epochs * (batches // per_step), epochs * -(-batches // per_step) + 1)


def _about(event: ScheduleEnded, factor: int) -> str:
    fewer, more = sorted((event.planned, event.calls))
    return "" if more == factor * fewer else "about "


def _close(ratio: float, whole: int) -> bool:
    return whole > 1 and abs(ratio / whole - 1) <= EXACTLY
