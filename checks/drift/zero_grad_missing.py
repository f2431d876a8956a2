"""DDP411."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.replicas.thresholds import SEVERAL_STEPS
from ddpdoctor.events import Carried, OptimizerSeen, StepDone
from ddpdoctor.report.declarations import seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Rank, Run, counted, plural, ranks_do, ranks_text

NEVER = "never-cleared"
NO_LONGER = "no-longer-cleared"


class ZeroGradMissing(Check):
    """Gradients are never cleared between optimizer steps

    ## What it finds
    An optimizer whose gradients still hold those of the previous step when the next backward adds
    to them: no `zero_grad()` and no `grad = None`, in any step, or in no step from some point on.

    ## How it knows
    Each rank examines a few gradients of each optimizer after a step and before the backwards that
    follow: whether they are new tensors, whether torch counted a write, whether small ones on the
    CPU are zero. So it does not matter how a program clears them. It does so at every step until it
    has seen them cleared, then at the steps of `hyperparameter-skew`. It reports gradients that
    were never seen cleared, or that were cleared at four or more steps and not at the four steps
    examined after these; if steps in between were not examined, it names the range. That proves the
    fault.

    ## Why it hurts
    Every step applies the sum of all gradients since the run began. This acts like momentum that
    never decays: training is unstable, and the effective learning rate grows with time.

    ## How to fix it
    Call `optimizer.zero_grad()` once per optimizer step, before the (first) backward or after the
    step.

    ## When it stays quiet
    - Accumulation over micro-batches, and several optimizers.
    - Other losses that leave gradients behind which are cleared before their own backward (GANs).
    - A program that clears gradients in some steps.
    """

    code = "DDP411"
    name = "zero-grad-missing"
    family = "drift"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        NEVER: "gradients are not cleared in any step",
        NO_LONGER: "gradients were cleared in every step, and are not from some step on",
    }
    requires = (seen(Carried, otherwise="no two optimizer steps with a backward in between"),)

    def examine(self, run: Run) -> Iterable[Finding]:
        seen: dict[int, dict[int, Carried]] = {}
        for rank in run.ranks.values():
            for optimizer in {e.optimizer for e in rank.of(Carried)}:
                if (event := _not_cleared(rank, optimizer)) is not None:
                    seen.setdefault(optimizer, {})[rank.rank] = event
        for optimizer, events in sorted(seen.items()):
            yield from self._finding(run, optimizer, events)

    def _finding(self, run: Run, optimizer: int, events: dict[int, Carried]) -> Iterator[Finding]:
        number, event = next(iter(events.items()))
        rank = run.ranks[number]
        made = next((e for e in rank.of(OptimizerSeen) if e.optimizer == optimizer), None)
        kind = made.kind if made else "the optimizer"
        clearing = [n for n, r in run.ranks.items() if n not in events and _clears(r, optimizer)]
        where = f" on {ranks_text(events)}" if clearing else ""
        last = _last(rank, optimizer)
        backward = rank.location(event.backward_site)
        rule = NO_LONGER if any(_clears(run.ranks[n], optimizer) for n in events) else NEVER
        since = _since(rank, event)
        if rule == NO_LONGER:
            how = f"they are no longer cleared from {_span(*since)} on"
            label = f"applies the gradients of all steps since {_span(*(n - 1 for n in since))}"
        else:
            how = f"they are never cleared in its {counted(last + 1, 'step')}"
            label = "applies the gradients of all previous steps as well"
        fewest, most = (last - step + 1 for step in reversed(since))
        yield self.finding(
            rule=rule,
            ranks=tuple(sorted(events)),
            steps=Steps(event.step, last, last - event.step + 1),
            subjects=(kind,),
            location=rank.location(event.site),
            label=label,
            related=(Related("adds to the gradients of the previous step", backward),)
            if backward
            else (),
            summary=f"{kind} applies old gradients: {how}{where}",
            cause=f"backward adds to `.grad`; {_who_clears(clearing, events)}"
            + ("; before that, they were cleared at every step examined" * (rule == NO_LONGER)),
            fix="call `optimizer.zero_grad()` before backward"
            + (", on every rank: not under `if rank == ...`" * bool(clearing)),
            fix_kind=FixKind.CHECK,
            evidence={
                "steps_with_old_gradients": f"{fewest} of {last + 1}"
                + f", or up to {most}" * (most > fewest),
                "parameters_examined": event.parameters,
                "cleared_on": ranks_text(clearing) if clearing else "",
            },
            at=rank.wall(event.at),
        )


def _since(rank: Rank, event: Carried) -> tuple[int, int]:
    """The range of steps in which old gradients were first applied: after the last step at which
    they were seen cleared, up to the first at which they were not."""
    before = (e.step for e in rank.of(Carried) if e.optimizer == event.optimizer and not e.carried)
    return max((step + 1 for step in before), default=event.step), event.step


def _span(first: int, last: int) -> str:
    return f"step {last}" if first == last else f"a step between {first} and {last}"


def _who_clears(clearing: list[int], never: Collection[int]) -> str:
    if not clearing:
        return "nothing clears it between two steps"
    return (
        f"{ranks_do(clearing, 'clear')} it between steps, {ranks_text(never)} "
        f"{plural(len(never), 'does', 'do')} not"
    )


def _clears(rank: Rank, optimizer: int) -> bool:
    return any(e.optimizer == optimizer and not e.carried for e in rank.of(Carried))


def _last(rank: Rank, optimizer: int) -> int:
    return max((e.step for e in rank.of(StepDone) if e.optimizer == optimizer), default=-1)


def _not_cleared(rank: Rank, optimizer: int) -> Carried | None:
    """The first step with old gradients, if all steps examined from it on had them, and none before
    it; None otherwise."""
    reported = [e for e in rank.of(Carried) if e.optimizer == optimizer]
    cleared = next((n for n, e in enumerate(reported) if e.carried), len(reported))
    since = reported[cleared:]
    if not since or not all(e.carried for e in since):
        return None
    return since[0] if _last(rank, optimizer) - since[0].step + 1 >= SEVERAL_STEPS else None
