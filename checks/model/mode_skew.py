"""DDP312."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import ClassVar, NamedTuple

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import Digests, TrainingMode
from ddpdoctor.report.declarations import seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import (
    Rank,
    Run,
    counted,
    equal_ranks,
    odd_ones,
    plural,
    ranks_do,
    ranks_text,
    some,
    title_of,
)

SKEW = "modes-differ"
EVERYWHERE = "never-back-to-training"

LEAST_STEPS = 2
"""Steps in a row in evaluation mode on all ranks: a program may compute one loss in it on purpose,
in every step."""

Modes = Mapping[Rank, TrainingMode]
"""The modes of one model on every rank at one moment."""


class Span(NamedTuple):
    """The modes from one change on any rank to the next; `first` and `end` are steps."""

    modes: Modes
    first: int
    end: int

    @property
    def steps(self) -> int:
        return max(1, self.end - self.first)


class ModeSkew(Check):
    """Ranks train the same model in different modes (`train()`, `eval()`)

    ## What it finds
    A wrapped model that some ranks train in evaluation mode and others in training mode, module by
    module: rank 0 evaluates and does not call `train()` again, so it trains on without dropout and
    with frozen BatchNorm statistics. A note says where all ranks do so after an evaluation.

    ## How it knows
    Each rank records which modules are in evaluation mode in forwards with gradients whose backward
    all-reduces: at the first one, after calls of `train()` and `eval()`, and in sampled ones. Only
    modules count that behave otherwise in evaluation: dropout, normalisation, code that reads
    `self.training`. The modes of all ranks at the same all-reduce are compared, which proves that
    they differ.

    ## Why it hurts
    The averaged gradient mixes those of two different functions. Regularisation is off and
    statistics do not follow the data on these ranks; if rank 0 is one of them, it saves such a
    model.

    ## How to fix it
    Call `model.train()` on every rank after an evaluation, or at the start of each epoch.

    ## When it stays quiet
    - The same modules are in evaluation mode on every rank, as with frozen BatchNorm.
    - Evaluation on one rank, with or without `no_grad`, as long as no backward follows.
    - Models without dropout, running statistics or other code that depends on the mode.
    - Where only code of the user's own reads `self.training`, it is a warning, as that may be
      without effect.
    - A model that all ranks train in evaluation mode from the start.
    """

    code = "DDP312"
    name = "mode-skew"
    family = "model"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        SKEW: "some ranks train modules in evaluation mode that others train in training mode",
        EVERYWHERE: "all ranks go on training in evaluation mode after an evaluation",
    }
    requires = (
        models.needs_ddp,
        seen(TrainingMode, otherwise="no model with dropout or running statistics was trained"),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        for model in models.numbers(run):
            for ranks in _groups(run, model):
                spans = list(_spans(ranks, model))
                skewed = [span for span in spans if len(_sides(span.modes)) > 1]
                if skewed:
                    yield self._skew(run, model, skewed)
                elif (found := _after_evaluation(spans)) and _evaluated(ranks, model):
                    yield self._everywhere(run, model, found)

    def _skew(self, run: Run, model: int, skewed: list[Span]) -> Finding:
        first = skewed[0]
        culprits = _culprits(first.modes)
        differing = _differing(first.modes)
        # Where ranks that train in training mode are at fault, the line is that of another one.
        inside = [r for r, e in first.modes.items() if differing.keys() & e.evaluating.keys()]
        source = next((r for r in inside if r.rank in culprits), inside[0])
        event = first.modes[source]
        wrapped = models.wrap_of(source, model)
        assert wrapped is not None
        within = ranks_text(r.rank for r in inside)
        outside = ranks_text(r.rank for r in first.modes if r not in inside)
        what = some([f"{name} ({kind})" if name else kind for name, kind in differing.items()])
        sure = not differing.keys() <= {n for e in first.modes.values() for n in e.unsure}
        steps = sum(span.steps for span in skewed)
        wrapper = models.names_in_code(source, wrapped)[0]
        return self.finding(
            rule=SKEW,
            severity=Severity.ERROR if sure else Severity.WARNING,
            ranks=culprits,
            steps=Steps(first.first, skewed[-1].first + skewed[-1].steps - 1, steps),
            subjects=tuple(differing),
            location=source.location(event.site) or source.location(event.forward_site),
            label="puts it into evaluation mode" if event.site >= 0 else "trains in that mode",
            related=models.related(source, [("trains in that mode", event.forward_site)])
            if event.site >= 0
            else (),
            summary=f"{ranks_do((r.rank for r in inside), 'train')} {what} of "
            f"{title_of(source, wrapped)} in evaluation mode, {outside} in training mode, in "
            f"{counted(steps, 'step')} from step {first.first} on",
            cause=f"nothing put the model back into training mode on {within} before "
            "training went on"
            if event.whole
            else f"the modes of {plural(len(differing), 'this module', 'these modules')} were not "
            "set alike on all ranks",
            fix=f"call `{wrapper}.train()` on every rank after the evaluation"
            if event.whole
            else "put the same modules into evaluation mode on every rank",
            fix_kind=FixKind.CHECK,
            evidence={
                "modules_in_evaluation_mode": {
                    f"rank {r.rank}": f"{e.count} of {e.total}" for r, e in first.modes.items()
                },
            },
            at=source.wall(event.at),
        )

    def _everywhere(self, run: Run, model: int, found: list[Span]) -> Finding:
        first = found[0]
        rank, event = next(iter(first.modes.items()))
        wrapped = models.wrap_of(rank, model)
        assert wrapped is not None
        steps = sum(span.steps for span in found)
        title, wrapper = title_of(rank, wrapped), models.names_in_code(rank, wrapped)[0]
        return self.finding(
            rule=EVERYWHERE,
            severity=Severity.NOTE,
            ranks=tuple(sorted(r.rank for r in first.modes)),
            steps=Steps(first.first, found[-1].end - 1, steps),
            subjects=tuple(event.evaluating),
            location=rank.location(event.site),
            label="puts it into evaluation mode",
            related=models.related(rank, [("trains in that mode", event.forward_site)]),
            summary=f"all ranks train {title} in evaluation mode after an evaluation, in "
            f"{counted(steps, 'step')} from step {first.first} on",
            cause="nothing put it back into training mode, so these still act as in evaluation: "
            f"{some(f'{n} ({k})' if n else k for n, k in event.evaluating.items())}",
            fix=f"call `{wrapper}.train()` after the evaluation, unless this is meant",
            evidence={"modules_in_evaluation_mode": f"{event.count} of {event.total}"},
            at=rank.wall(event.at),
        )


def _groups(run: Run, model: int) -> Iterator[list[Rank]]:
    """Ranks that train copies of a model, and recorded its modes."""
    found: dict[tuple[int, ...], list[Rank]] = {}
    for rank in run.ranks.values():
        wrapped = models.wrap_of(rank, model)
        if wrapped is not None and _events(rank, model):
            found.setdefault(models.members(rank, wrapped)[1], []).append(rank)
    yield from (ranks for ranks in found.values() if len(ranks) > 1)


def _events(rank: Rank, model: int) -> list[TrainingMode]:
    return [e for e in rank.of(TrainingMode) if e.model == model]


def _spans(ranks: list[Rank], model: int) -> Iterator[Span]:
    """The modes on all ranks, change by change, as far as every rank has come and recorded them."""
    events = {rank: _events(rank, model) for rank in ranks}
    taken = min(models.steps_of(rank, model) for rank in ranks)
    # A rank whose record ends may have changed its modes after that.
    known = min((e.backward for every in events.values() for e in every if e.last), default=None)
    moments = sorted({e.backward for every in events.values() for e in every})
    steps = {e.backward: e.step for every in events.values() for e in every}
    for moment, after in pairwise((*moments, -1)):
        modes = {
            rank: event
            for rank, every in events.items()
            if (event := next((e for e in reversed(every) if e.backward <= moment), None))
        }
        if known is not None and moment >= known:
            return
        first, end = steps[moment], min(taken, steps.get(after, taken))
        if len(modes) == len(ranks) and first < taken:
            yield Span(modes, first, end)


def _sides(modes: Modes) -> list[tuple[int, ...]]:
    """The ranks, grouped by equal modes."""
    return equal_ranks({r.rank: (frozenset(e.evaluating), e.count) for r, e in modes.items()})


def _culprits(modes: Modes) -> tuple[int, ...]:
    """Ranks that are in evaluation mode as a whole where others are not, else the minority, else
    those with most modules in evaluation mode."""
    whole = [rank.rank for rank, event in modes.items() if event.whole]
    if 0 < len(whole) < len(modes):
        return tuple(sorted(whole))
    largest, *others = _sides(modes)
    if all(len(side) < len(largest) for side in others):
        return odd_ones([largest, *others])
    most = max(event.count for event in modes.values())
    return tuple(sorted(rank.rank for rank, event in modes.items() if event.count == most))


def _differing(modes: Modes) -> dict[str, str]:
    """The modules, with their classes, that are in evaluation mode on some ranks only."""
    every = [set(event.evaluating) for event in modes.values()]
    common = set.intersection(*every)
    return {n: k for e in modes.values() for n, k in e.evaluating.items() if n not in common}


def _after_evaluation(spans: list[Span]) -> list[Span]:
    """The spans in which all ranks train in evaluation mode, after others in which none did."""
    start = next((n for n, s in enumerate(spans) if not _in_evaluation(s)), len(spans))
    return [
        span
        for span in spans[start:]
        if _in_evaluation(span)
        and span.end - span.first >= LEAST_STEPS
        and all(set(e.evaluating) - set(e.unsure) for e in span.modes.values())
    ]


def _in_evaluation(span: Span) -> bool:
    return all(event.whole for event in span.modes.values())


def _evaluated(ranks: list[Rank], model: int) -> bool:
    """Whether a rank was seen to evaluate the model."""
    return any(
        e.model == model and e.point in ("eval", "again")
        for rank in ranks
        for e in rank.of(Digests)
    )
