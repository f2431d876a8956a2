"""DDP411."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ddpdoctor.events import Carried, OptimizerSeen, StepDone
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Rank, Run, ranks_do, ranks_text

LEAST_STEPS = 2


class ZeroGradMissing(Check):
    """Gradients are never cleared between optimizer steps

    ## What it finds
    An optimizer whose gradients are still those of the step before when the next backward adds to
    them: no `zero_grad()`, no `grad = None`, in any step, or in none from some step on after it was
    done in every step before.

    ## How it knows
    A few gradients of each optimizer are looked at after a step and before the backwards that
    follow: whether they are other tensors, whether torch counts a write, whether small ones on the
    CPU have become zero; so it does not matter how a program clears them. Each rank does so at
    every step until it has seen them cleared, then at the steps of `hyperparameter-skew`. It is
    told where no look ever found them cleared, or where four or more did and the four after them
    did not. Where steps between these two were not looked at, it says between which it began. The
    finding is proven.

    ## Why it hurts
    Every step applies the sum of all gradients since the run began. Training resembles a momentum
    that never decays: it is unstable, and the effective learning rate grows with time.

    ## How to fix it
    `optimizer.zero_grad()` once per optimizer step, before the (first) backward or after the step.

    ## When it stays quiet
    Accumulation over micro-batches; other losses that leave gradients behind which are cleared
    before their own backward (GANs); several optimizers; a program that clears in some steps.
    """

    code = "DDP411"
    name = "zero-grad-missing"
    family = "drift"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(Carried) else "no two optimizer steps with a backward between"

    def examine(self, run: Run) -> Iterable[Finding]:
        seen: dict[int, dict[int, Carried]] = {}
        for rank in run.ranks.values():
            for optimizer in {e.optimizer for e in rank.of(Carried)}:
                if (event := _not_cleared(rank, optimizer)) is not None:
                    seen.setdefault(optimizer, {})[rank.rank] = event
        for optimizer, events in sorted(seen.items()):
            yield from self._finding(run, optimizer, events)

    def explains(self, mine: Finding, other: Finding) -> bool:
        return False

    def _finding(self, run: Run, optimizer: int, events: dict[int, Carried]) -> Iterator[Finding]:
        number, event = next(iter(events.items()))
        rank = run.ranks[number]
        made = next((e for e in rank.of(OptimizerSeen) if e.optimizer == optimizer), None)
        kind = made.kind if made else "the optimizer"
        clearing = [n for n, r in run.ranks.items() if n not in events and _clears(r, optimizer)]
        where = f" on {ranks_text(events)}" if clearing else ""
        last = _last(rank, optimizer)
        backward = rank.location(event.backward_site)
        before = any(_clears(run.ranks[n], optimizer) for n in events)
        since = _since(rank, event)
        how = f"are not cleared any more from {_span(*since)} on" if before else "are never cleared"
        fewest, most = (last - step + 1 for step in reversed(since))
        yield self.finding(
            ranks=tuple(sorted(events)),
            steps=Steps(event.step, last, last - event.step + 1),
            subjects=(kind,),
            location=rank.location(event.site),
            label=f"applies the gradients of all steps since {_span(*(n - 1 for n in since))}"
            if before
            else "applies the gradients of all steps so far",
            related=(Related("adds to the gradients of the step before", backward),)
            if backward
            else (),
            summary=f"{kind} steps {last + 1} times and its gradients {how}{where}",
            cause=f"backward adds to `.grad`; {_who_clears(clearing, events)}"
            + ("; until then it was cleared in every step that was looked at" * before),
            fix="`optimizer.zero_grad()` before the backward"
            + (", on every rank: outside of any `if rank == ...`" * bool(clearing)),
            fix_kind=FixKind.CHECK,
            evidence={
                "steps_with_old_gradients": f"{fewest} of {last + 1}"
                + f", or up to {most}" * (most > fewest),
                "parameters_looked_at": event.parameters,
                "cleared_on": ranks_text(clearing) if clearing else "",
            },
            at=rank.wall(event.at),
        )


def _since(rank: Rank, event: Carried) -> tuple[int, int]:
    """The first step with old gradients is one of these: after the last that was seen cleared, up
    to the one that was seen not to be."""
    before = (e.step for e in rank.of(Carried) if e.optimizer == event.optimizer and not e.carried)
    return max((step + 1 for step in before), default=event.step), event.step


def _span(first: int, last: int) -> str:
    return f"step {last}" if first == last else f"a step between {first} and {last}"


def _who_clears(clearing: list[int], never: Collection[int]) -> str:
    if not clearing:
        return "nothing clears it between one step and the next"
    rest = ranks_text(never) + (" never does" if len(never) == 1 else " never do")
    return f"{ranks_do(clearing, 'clear')} it between steps, {rest}"


def _clears(rank: Rank, optimizer: int) -> bool:
    return any(e.optimizer == optimizer and not e.carried for e in rank.of(Carried))


def _last(rank: Rank, optimizer: int) -> int:
    return max((e.step for e in rank.of(StepDone) if e.optimizer == optimizer), default=-1)


def _not_cleared(rank: Rank, optimizer: int) -> Carried | None:
    """The first step with old gradients, where every one from it on that could be judged had them,
    and none before."""
    reported = [e for e in rank.of(Carried) if e.optimizer == optimizer]
    cleared = next((n for n, e in enumerate(reported) if e.carried), len(reported))
    since = reported[cleared:]
    if not since or not all(e.carried for e in since):
        return None
    return since[0] if _last(rank, optimizer) - since[0].step + 1 >= LEAST_STEPS else None
