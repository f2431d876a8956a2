"""DDP302."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.models import parameter_use as graphs
from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrap_options import WrapOptions
from ddpdoctor.events import UnusedParameters, Wrapped
from ddpdoctor.report.declarations import NOT_AVERAGED, WAITING, Effect, When
from ddpdoctor.report.errors import ErrorKind
from ddpdoctor.report.findings import Check, Finding, Severity
from ddpdoctor.run import Location, Rank, Run, equal_ranks, plural, ranks_text, some, title_of


class RankDependentGraph(Check):
    """Ranks use different parameters in the same step

    ## What it finds
    A backward in which some ranks computed gradients of parameters that others did not use: a
    branch on the rank, on a random number, or on the batch (an image without boxes, text only).

    ## How it knows
    Each rank records which parameters get no gradient in the first eight synchronising backwards of
    a model, and then in every 8th (every 16th after 128; in a large model, one in half as many as
    it has parameters). These are the same backwards on every rank. If torch rejects the next
    forward, its own list is recorded.

    A rank with all gradients records that before DDP makes it wait, and for its first three
    forwards each rank records the modules that it did not call. So the sets can be compared,
    backward by backward, even if the run then hangs or aborts. The finding is proven.

    ## Why it hurts
    The ranks with all gradients wait in `backward` for the others: the run hangs, or ends with
    `Connection closed by peer` on the ranks that are not at fault.

    ## How to fix it
    Use the same modules on every rank, if need be with weight zero
    (`loss + 0.0 * sum(p.sum() for p in branch.parameters())`), or wrap with
    `find_unused_parameters=True`.

    ## When it stays quiet
    - The ranks use the same parameters in every step.

    Only a note: with `find_unused_parameters=True`, or a static graph whose sets do not change,
    training is correct.
    """

    code = "DDP302"
    name = "rank-dependent-graph"
    family = "model"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "unused-on-some-ranks": "some ranks did not use parameters that the others used",
        "different-on-each-rank": "every rank left out parameters that others used",
    }
    requires = (models.needs_ddp,)
    effects = (
        Effect(
            ("first-failure",),
            errors=(ErrorKind.REDUCTION_UNFINISHED, ErrorKind.CONNECTION, ErrorKind.TIMED_OUT),
            when=(When.IS_ERROR,),
        ),
        # gloo aborts at collectives that do not fit together.
        Effect(("rank-died",), when=(When.IS_ERROR, When.about("SIGABRT"))),
        Effect(
            (*WAITING, *NOT_AVERAGED, "collective-mismatch", "collective-shape-mismatch"),
            when=(When.IS_ERROR,),
        ),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        for model in models.numbers(run):
            found = graphs.differing(run, model)
            if found is not None:
                yield from self._report(run, model, *found)

    def _report(
        self,
        run: Run,
        model: int,
        rank: Rank,
        event: UnusedParameters,
        left: dict[int, set[int]],
    ) -> Iterable[Finding]:
        wrapped = models.wrap_of(rank, model)
        if wrapped is None:
            return
        title = title_of(rank, wrapped)
        common = set.intersection(*left.values())
        disputed = sorted(set.union(*left.values()) - common)
        names = models.names_of(wrapped, disputed)
        parts = _parts(wrapped, disputed, left)
        idle = [_name(wrapped, part) for part in models.parts_of(wrapped, common)]
        without = [r for r, missing in left.items() if missing - common]
        allowed = event.find_unused or event.static_graph
        some_ranks = len(without) < len(left)
        spot, label = _spot(run, wrapped, parts[0], left)
        yield self.finding(
            rule="unused-on-some-ranks" if some_ranks else "different-on-each-rank",
            severity=Severity.NOTE if allowed else Severity.ERROR,
            ranks=tuple(without if some_ranks else left),
            steps=graphs.steps_seen(
                ((run.ranks[r], left[r] - common) for r in without), model, event.step
            ),
            subjects=names,
            location=spot,
            label=label,
            related=models.related(rank, ((wrapped.here, wrapped.site),)),
            summary=_summary(run, wrapped, title, event.step, left, without, names),
            cause=_cause(wrapped, title, parts, allowed),
            fix=_fix(
                parts, idle, allowed, models.names_in_code(rank, wrapped)[0], WrapOptions(wrapped)
            ),
            evidence={
                "use": [_row(wrapped, part, left) for part in parts],
                **({"unused on all ranks": some(idle, 4)} if idle else {}),
                "backward": event.backward,
                **graphs.seen_by(rank, model, event),
                "find_unused_parameters": event.find_unused,
            },
            at=rank.wall(event.at),
        )


def _summary(
    run: Run,
    wrapped: Wrapped,
    title: str,
    step: int,
    left: dict[int, set[int]],
    without: list[int],
    names: tuple[str, ...],
) -> str:
    if len(without) < len(left):
        get = plural(len(names), "gets", "get")
        return (
            f"{some(names)} of {title} {get} no gradient {models.on_ranks(run, without)} at step "
            f"{step}, but {get} one on the other {plural(len(left) - len(without), 'rank')}"
        )
    common = set.intersection(*left.values())
    groups = equal_ranks({r: tuple(sorted(missing - common)) for r, missing in left.items()})
    own = [
        f"{some(models.names_of(wrapped, sorted(left[g[0]] - common)))} on {ranks_text(g)}"
        for g in groups
    ]
    more = f"; {len(own)} different sets in all" if len(own) > 3 else ""
    return (
        f"each rank leaves out other parameters of {title} at step {step}: no gradient for "
        f"{'; '.join(own[:3])}{more}"
    )


def _parts(wrapped: Wrapped, disputed: list[int], left: dict[int, set[int]]) -> list[models.Part]:
    """The parameters in question by module, those that the same ranks left out together, in the
    order of the model."""
    fates: dict[tuple[int, ...], list[int]] = {}
    for i in disputed:
        fates.setdefault(tuple(r for r, missing in left.items() if i in missing), []).append(i)
    parts = [part for same in fates.values() for part in models.parts_of(wrapped, same)]
    return sorted(parts, key=lambda part: part.positions)


def _spot(
    run: Run, wrapped: Wrapped, part: models.Part, left: dict[int, set[int]]
) -> tuple[Location | None, str]:
    """The line of the branch that skips a part, else the one that made it, and a label."""
    without = sorted(r for r, missing in left.items() if missing.issuperset(part.positions))
    rank = run.ranks[without[0]]
    for event in models.sets_of(rank, wrapped.model):
        if (spot := rank.location(models.branch_of(event, part))) is not None:
            return spot, f"takes another branch on {ranks_text(without)}"
    spot = models.made_at(rank, wrapped, part)
    return spot, f"not used in the loss on {ranks_text(without)}"


def _name(wrapped: Wrapped, part: models.Part) -> str:
    if not part.whole:
        return some(models.names_of(wrapped, part.positions))
    return part.module or "(root)"


def _row(wrapped: Wrapped, part: models.Part, left: dict[int, set[int]]) -> dict[str, str]:
    """A row of evidence: a part, and on each rank `used` or `unused`."""
    row = {"parameters": _name(wrapped, part), "class": part.kind}
    for rank, missing in sorted(left.items()):
        row[f"rank {rank}"] = "unused" if set(part.positions) & missing else "used"
    return row


def _cause(wrapped: Wrapped, title: str, parts: list[models.Part], allowed: bool) -> str:
    text = f"the forward of {title} depends on the rank, its data or its random numbers: "
    first = parts[0]
    title = first.title if first.whole else _name(wrapped, first)
    text += f"the loss depends on {title} on some ranks only"
    if allowed:
        return (
            f"{text}. The options of DDP allow that; it divides the sum of the gradients by the "
            "number of all ranks, so a part counts less, the fewer of them use it"
        )
    return f"{text}. The ranks that use it then wait for a gradient that the others never send"


def _fix(
    parts: list[models.Part], idle: list[str], allowed: bool, wrapper: str, ddp: WrapOptions
) -> str:
    if allowed:
        return (
            "nothing, if this is intended; if a rank draws at random what it uses, let all ranks "
            "draw the same, from a generator of its own with one seed: `random.Random(seed)`"
        )
    alone = len({part.module for part in parts}) == 1 and not idle
    also = f" (also {some(idle)}, which no rank used)" if idle else ""
    what, where = ("it", "it is") if alone else ("all of them", "they are")
    return (
        f"use {what} on every rank{also}, with weight zero where {where} not needed: "
        f"`loss = loss + 0.0 * sum(p.sum() for p in {wrapper}.parameters())`; "
        f"or {ddp.unused}"
    )
