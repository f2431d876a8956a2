"""Gradients and parameters that the program itself exchanges, and divides twice or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...events import Averaged, OptimizerSeen
from ...report.findings import Confidence, Related, Severity, Steps
from ...run import Rank, Run
from ..replicas.optimizer_options import scales_itself
from .copies import Copies, aligned, trained_copies
from .thresholds import LARGE, LOOKS, NEAR

MANUAL_DIVIDED_LOSS = "divided-loss-manual-sync"
MANUAL_DIVIDED_TWICE = "divided-gradients-manual-sync"
SUMMED_PARAMETERS = "summed-parameters"
SUMMED_GRADIENTS = "summed-gradients"

RULES = {
    MANUAL_DIVIDED_LOSS: "the loss is divided by the world size, and gradients averaged manually",
    MANUAL_DIVIDED_TWICE: "gradients are averaged manually and divided by the world size again",
    SUMMED_GRADIENTS: "gradients of mean losses are summed over the ranks and not divided",
    SUMMED_PARAMETERS: "parameters are replaced by their sum over the ranks, not by the mean",
}

Looks = dict[int, tuple[Rank, Averaged]]
"""By rank, the record of one step."""


def reported(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of a finding for every model whose gradients are divided twice, or that are summed
    and not divided."""
    for copies in trained_copies(run):
        yield from _summed_parameters(copies)
        looks = _looks(copies, "gradients")
        yield from _summed_gradients(copies, looks)
        for seen in looks:
            ratio = _ratio(seen)
            spot = _line(seen, looks, ratio) if ratio is not None else None
            if ratio is not None and spot is not None:
                yield _fields(copies, seen, ratio, *spot)
                break


def _looks(copies: Copies, kind: str) -> list[Looks]:
    """The steps that all ranks recorded."""
    tables = {
        number: {
            e.step: (rank, e)
            for e in rank.of(Averaged)
            if e.optimizer == event.optimizer and e.kind == kind
        }
        for number, (rank, event) in copies.members.items()
    }
    return aligned(tables)


def _summed_parameters(copies: Copies) -> Iterator[dict[str, Any]]:
    """A finding where every exchange on record left the sum of the ranks' parameters."""
    looks = _looks(copies, "parameters")
    ratios = [_ratio(seen) for seen in looks]
    size = len(copies.members)
    if not looks or any(r is None or abs(r / size - 1) > NEAR for r in ratios):
        return
    rank, event = next(iter(looks[0].values()))
    kind = next(iter(copies.members.values()))[1].kind or "a set of parameters"
    yield {
        "rule": SUMMED_PARAMETERS,
        "ranks": tuple(looks[0]),
        "steps": Steps(event.step, looks[-1][rank.rank][1].step, len(looks), len(looks)),
        "subjects": (kind,),
        "location": rank.location(event.site),
        "label": "exchanged here",
        "summary": f"each exchange replaces the parameters of {kind} by the sum over the {size} "
        f"ranks: they grow {size}-fold each time",
        "cause": "the parameters are all-reduced with SUM and not divided by the number of ranks",
        "fix": "divide by `dist.get_world_size()` after the `all_reduce`, before the values become "
        "the parameters",
        "evidence": {
            "parameters after the exchange, in means": [float(f"{r:.5g}") for r in ratios if r]
        },
        "at": rank.wall(event.at),
    }


def _summed_gradients(copies: Copies, looks: list[Looks]) -> Iterator[dict[str, Any]]:
    """A finding where every step on record applied the sum of the gradients of losses that are
    means over a rank's own samples, and something depends on that: not the updates of Adam, say,
    but a limit that they are clipped to."""
    size = len(copies.members)
    looks = [seen for seen in looks if all(event.alone for _, event in seen.values())]
    if len(looks) < LOOKS or not all(_local_means(seen) for seen in looks):
        return
    ratios = [_ratio(seen) for seen in looks]
    if any(r is None or abs(r / size - 1) > NEAR for r in ratios):
        return
    number, (rank, event) = next(iter(looks[0].items()))
    own = copies.members[number][1]
    optimizers = (e.kind for e in rank.of(OptimizerSeen) if e.optimizer == event.optimizer)
    optimizer, kind = next(optimizers, ""), own.kind or "a set of parameters"
    clip = next((e.clip_site for k in looks for _, e in k.values() if e.unclipped), -1)
    adapts = scales_itself(optimizer)
    if adapts and clip < 0:
        return
    effects, meant = [], []
    if not adapts:
        effects.append(f"a learning rate that is right for one process is {size} times too large")
        meant.append("the learning rate")
    if clip >= 0:
        effects.append(f"the norm that is clipped is {size} times that of the mean")
        meant.append("the limit of the clipping")
    exchanged = rank.location(copies.looks[0][number].exchange_site) if copies.looks else None
    stepped, clipped = rank.location(own.step_site), rank.location(clip)
    last = max(event.step, max(r.steps_of(event.optimizer) for r, _ in looks[0].values()) - 1)
    spots = (("clipped here", clipped), ("applied here", stepped if exchanged else None))
    yield {
        "rule": SUMMED_GRADIENTS,
        "severity": Severity.NOTE,
        "confidence": Confidence.SUSPECTED,
        "ranks": tuple(looks[0]),
        "steps": Steps(event.step, last, last - event.step + 1),
        "subjects": (kind,),
        "location": exchanged or stepped,
        "label": "sums the gradients over the ranks",
        "related": tuple(Related(text, spot) for text, spot in spots if spot),
        "summary": f"the gradients of {kind} are summed over the {size} ranks and not divided: "
        f"they are {size} times the mean of the ranks' own gradients",
        "cause": "the loss of each rank is a mean over its own samples, so that the sum grows with "
        f"the number of ranks: {', and '.join(effects)}",
        "fix": "divide what the `all_reduce` returns by the number of ranks: "
        f"`/= dist.get_world_size()`. If {' and '.join(meant)} "
        f"{'are' if len(meant) > 1 else 'is'} chosen for the sum, nothing",
        "evidence": {
            "ratios_of_reduced_gradients_to_mean": [float(f"{r:.5g}") for r in ratios if r],
            "factors_of_the_means_in_the_loss": list(event.means),
        },
        "at": rank.wall(event.at),
    }


def _local_means(seen: Looks) -> bool:
    """Whether the losses of all ranks are the same means, and not all of them are divided by a
    multiple of the number of ranks."""
    first, *others = {event.means for _, event in seen.values()}
    parts = [abs(1 / factor / len(seen)) for factor in first if factor]
    return not others and any(part < 0.5 or abs(part - round(part)) > NEAR for part in parts)


def _ratio(seen: Looks) -> float | None:
    """What was applied, or clipped, over the mean of the ranks' own gradients; None where the
    values have no ratio in common."""
    rows = [event for _, event in seen.values()]
    if len({(len(e.local), e.unclipped or e.applied) for e in rows}) != 1:
        return None
    ratios = []
    every = zip(*(e.local for e in rows), strict=True)
    for values, applied in zip(every, rows[0].unclipped or rows[0].applied, strict=False):
        mean = sum(values) / len(values)
        if mean and abs(mean) >= LARGE * max(map(abs, values)):
            ratios.append(applied / mean)
    middle = sorted(ratios)[len(ratios) // 2] if ratios else 0.0
    if not middle or any(abs(r / middle - 1) > NEAR for r in ratios):
        return None
    return middle


def _line(seen: Looks, looks: list[Looks], ratio: float) -> tuple[int, str, bool] | None:
    """The line that divides once too often, the divisor as written, and whether it divides the
    loss; None where no line is known to."""
    _, first = next(iter(seen.values()))
    if abs(ratio - 1) < NEAR and all(e.loss_divisor for _, e in seen.values()):
        return first.loss_site, first.loss_divisor, True
    if abs(ratio * len(seen) - 1) > NEAR:
        return None
    number = next(iter(seen))
    events = [look[number][1] for look in looks]
    lines = {s: d for e in events for s, d in zip(e.sites, e.divisors, strict=True) if d}
    averages = any("AVG" in e.operations for e in events)
    if len(lines) + averages < 2:
        return None
    site, written = list(lines.items())[-1]
    return site, written, False


def _fields(
    copies: Copies, seen: Looks, ratio: float, site: int, written: str, loss: bool
) -> dict[str, Any]:
    number, (rank, event) = next(iter(seen.items()))
    size = len(seen)
    kind = copies.members[number][1].kind or "a set of parameters"
    steps = [r.steps_of(event.optimizer) for r, _ in seen.values()]
    last = max(event.step, max(steps) - 1)
    stepped = rank.location(copies.members[number][1].step_site)
    if loss:
        summary = f"the loss is divided by the world size ({size}), and the gradients of {kind} "
        summary += "are averaged over the ranks manually"
        cause = "the optimizer applies the mean of the ranks' gradients, whose losses were already "
        cause += "divided by the number of ranks"
        fix = f"remove the division by `{written}` here, or that of the gradients"
    else:
        summary = f"the gradients of {kind} are averaged over the ranks manually and divided by "
        summary += f"the world size ({size}) once more"
        cause = f"the optimizer applies 1/{size} of the mean of the ranks' own gradients"
        fix = f"remove this division by `{written}`: one division turns the sum into the mean"
    return {
        "rule": MANUAL_DIVIDED_LOSS if loss else MANUAL_DIVIDED_TWICE,
        "ranks": tuple(seen),
        "steps": Steps(event.step, last, last - event.step + 1),
        "subjects": (kind,),
        "location": rank.location(site),
        "label": "the gradients are averaged over the ranks as well",
        "related": (Related("applied here", stepped),) if stepped else (),
        "summary": f"{summary}: they are {size} times too small",
        "cause": cause,
        "fix": fix,
        "evidence": {
            "ratio_of_applied_gradient_to_mean_over_ranks": float(f"{ratio:.5g}"),
            "written_as": written,
            "step": event.step,
        },
        "at": rank.wall(event.at),
    }
