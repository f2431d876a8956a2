"""DDP302."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.models import parameter_use as graphs
from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import UnusedParameters, Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Location, Rank, Run, equal_ranks, ranks_text, some, title_of


class RankDependentGraph(Check):
    """Ranks use different parameters in the same step

    ## What it finds
    A backward in which some ranks produced gradients for parameters that others left out: a branch
    on the rank, on a random number, or on what the batch holds (no boxes in this image, text only).

    ## How it knows
    Each rank records which parameters get no gradient in the first eight synchronising backwards of
    a model, and then in one of 8 (after 128 of them in one of 16; in a large model in one of half
    as many as it has parameters), the same ones on every rank, and what torch itself says where it
    refuses the next forward. A rank that has all gradients writes that down before DDP can make it
    wait, and of its first three forwards each rank notes the modules that it did not call: so the
    sets can be compared, backward by backward, also where the run then hangs or aborts. The finding
    is proven.

    ## Why it hurts
    The ranks that have all gradients wait in `backward` for those that do not: the run hangs, or
    ends with `Connection closed by peer` on the ranks that did nothing wrong.

    ## How to fix it
    Let every rank use the same modules, if need be with weight zero
    (`loss + 0.0 * sum(p.sum() for p in branch.parameters())`), or wrap with
    `find_unused_parameters=True`.

    ## When it stays quiet
    Ranks that agree in every step. With `find_unused_parameters=True`, or a static graph whose
    sets stay as they are, training is right and this is a note.
    """

    code = "DDP302"
    name = "rank-dependent-graph"
    family = "model"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if models.numbers(run) else models.NO_DDP

    def examine(self, run: Run) -> Iterable[Finding]:
        for model in models.numbers(run):
            found = graphs.differing(run, model)
            if found is not None:
                yield from self._report(run, model, *found)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if mine.severity is not Severity.ERROR:
            return False
        hang = ("rank-missing", "stall", "rank-exited-early", "collective-mismatch",
                "collective-shape-mismatch")  # fmt: skip
        if other.check == "first-failure":
            text = str(other.evidence)
            return "finished reduction" in text or "onnection" in text or "imed out" in text
        if other.check == "rank-died":  # gloo, of collectives that do not fit together
            return "SIGABRT" in other.subjects
        return other.check in (*hang, "gradient-drift", "parameter-drift", "unsynced-step")

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
        ranks = without if len(without) < len(left) else list(left)
        spot, label = _spot(run, wrapped, parts[0], left)
        yield self.finding(
            severity=Severity.NOTE if allowed else Severity.ERROR,
            ranks=tuple(ranks),
            steps=graphs.steps_seen(((run.ranks[r], ()) for r in without), model),
            subjects=names,
            location=spot,
            label=label,
            related=models.related(rank, ((wrapped.here, wrapped.site),)),
            summary=_summary(run, wrapped, title, event.step, left, without, names),
            cause=_cause(wrapped, title, parts, allowed),
            fix=_fix(parts, idle, allowed, models.names_in_code(rank, wrapped)[0]),
            fix_kind=FixKind.CHECK,
            evidence={
                "use": [_row(wrapped, part, left) for part in parts],
                **({"unused_on_all_ranks": some(idle, 4)} if idle else {}),
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
        return (
            f"{some(names)} of {title} got no gradient at step {step} "
            f"{models.on_ranks(run, without)}, but did on the others"
        )
    common = set.intersection(*left.values())
    groups = equal_ranks({r: tuple(sorted(missing - common)) for r, missing in left.items()})
    own = [
        f"{some(models.names_of(wrapped, sorted(left[g[0]] - common)))} on {ranks_text(g)}"
        for g in groups
    ]
    more = f"; and so on, {len(own)} different sets" if len(own) > 3 else ""
    return (
        f"the ranks used different parameters of {title} at step {step}, none of them all: "
        f"no gradient came to {'; '.join(own[:3])}{more}"
    )


def _parts(wrapped: Wrapped, disputed: list[int], left: dict[int, set[int]]) -> list[models.Part]:
    """What the same ranks left out, in the order of the model."""
    fates: dict[tuple[int, ...], list[int]] = {}
    for i in disputed:
        fates.setdefault(tuple(r for r, missing in left.items() if i in missing), []).append(i)
    parts = [part for same in fates.values() for part in models.parts_of(wrapped, same)]
    return sorted(parts, key=lambda part: part.positions)


def _spot(
    run: Run, wrapped: Wrapped, part: models.Part, left: dict[int, set[int]]
) -> tuple[Location | None, str]:
    """The branch that skips the part, where it was found; else the line that made the part."""
    without = sorted(r for r, missing in left.items() if missing.issuperset(part.positions))
    rank = run.ranks[without[0]]
    for event in models.sets_of(rank, wrapped.model):
        if (spot := rank.location(models.branch_of(event, part))) is not None:
            return spot, f"goes another way on {ranks_text(without)}"
    spot = models.made_at(rank, wrapped, part)
    return spot, f"takes no part in the loss on {ranks_text(without)}"


def _name(wrapped: Wrapped, part: models.Part) -> str:
    if not part.whole:
        return some(models.names_of(wrapped, part.positions))
    return part.module or "(root)"


def _row(wrapped: Wrapped, part: models.Part, left: dict[int, set[int]]) -> dict[str, str]:
    """Used or unused, rank by rank."""
    row = {"parameters": _name(wrapped, part), "class": part.kind}
    for rank, missing in sorted(left.items()):
        row[f"rank {rank}"] = "unused" if set(part.positions) & missing else "used"
    return row


def _cause(wrapped: Wrapped, title: str, parts: list[models.Part], allowed: bool) -> str:
    text = f"the forward of {title} depends on the rank or on its data: "
    first = parts[0]
    title = first.title if first.whole else _name(wrapped, first)
    text += f"{title} takes part in the loss on some ranks only"
    if allowed:
        return f"{text}; DDP was told to expect that, so training is right"
    return f"{text}; those that use it wait for its gradients from those that do not"


def _fix(parts: list[models.Part], idle: list[str], allowed: bool, wrapper: str) -> str:
    if allowed:
        return "nothing to change, as long as that is meant"
    alone = len({part.module for part in parts}) == 1 and not idle
    also = f" (also {some(idle)}, which no rank used)" if idle else ""
    what, where = ("it", "it is") if alone else ("them all", "they are")
    return (
        f"use {what} on every rank{also}, with weight zero where {where} not wanted: "
        "`loss = loss + 0.0 * sum(p.sum() for p in "
        f"{parts[0].code(f'{wrapper}.module') if alone else wrapper}.parameters())`; "
        "or `DDP(..., find_unused_parameters=True)`"
    )
