"""DDP408."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.replicas.gradient_patterns import Span, patterns
from ddpdoctor.analysis.replicas.replica import Member
from ddpdoctor.analysis.replicas.replicas import NO_COPIES, Replicas, replicas
from ddpdoctor.events import SyncPattern
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Run

LEAST_STEPS = 2

EVERY = (
    "gradients only need to agree when the optimizer steps; DDP averages in every backward unless "
    "it is told not to"
)
LATE = (
    "synchronisation is switched off around the backward only, which has no effect: DDP decides in "
    "the forward"
)


class RedundantSync(Check):
    """Gradient accumulation averages the gradients in every micro-batch

    ## What it finds
    Several backwards from one line between two optimizer steps that each all-reduce the gradients
    of the same parameters. Only the last of them needs to. Also where `no_sync()` stands around the
    backward only, which has no effect.

    ## How it knows
    For every optimizer step it is counted how many backwards, since the gradients were cleared,
    averaged them: by the count of the group's collectives and by DDP's flag at the end of the
    forward. A few parameters of the model tell whether two of them reached the same ones. It takes
    two such steps or more, and the time lost is DDP's own estimate. The finding is proven.

    ## Why it hurts
    All but one of these all-reduces are wasted: the result is the same, and each one takes network
    time and makes every rank wait for the slowest.

    ## How to fix it
    Run forward and backward of all but the last micro-batch under `model.no_sync()`.

    ## When it stays quiet
    One averaging backward per step; gradients that are cleared in between (line searches, several
    optimizers); losses of different parameters. Backwards from different lines (a GAN's two losses)
    are a note.
    """

    code = "DDP408"
    name = "redundant-sync"
    family = "drift"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        if not replicas(run):
            return NO_COPIES
        return (
            None if run.any(SyncPattern) else "no backward through a wrapper before a step was seen"
        )

    def examine(self, run: Run) -> Iterable[Finding]:
        for group in replicas(run):
            yield from self._judge(group)

    def _judge(self, group: Replicas) -> Iterator[Finding]:
        for member in group.members.values():
            spans = [s for s in patterns(member) if s.pattern.synced > 1 and s.pattern.once]
            steps = sum(s.count for s in spans)
            if steps < LEAST_STEPS:
                continue
            yield self._finding(group, member, spans, steps)
            return

    def _finding(
        self,
        group: Replicas,
        member: Member,
        spans: list[Span],
        steps: int,
    ) -> Finding:
        same_line = any(s.pattern.once > 1 for s in spans)
        late = next((s.pattern.late for s in spans if s.pattern.late >= 0), -1)
        typical = max(spans, key=lambda s: s.count).pattern
        wasted = typical.synced - 1
        latest = [s.pattern for s in patterns(member)][-1]
        exposed = min(latest.exposed_s, latest.backward_s)
        step_s = member.rank.step_time() or 0.0
        saving = wasted * exposed
        share = 100 * saving / step_s if step_s else 0.0
        fits = typical.synced * exposed <= step_s  # DDP's own estimate may be of a slow backward
        estimate = "time that DDP did not measure"
        if saving:
            estimate = "time: how much is unknown, as DDP's figures are of a slower backward"
        if saving and fits:
            estimate = f"about {1000 * saving:.2g} ms of each {1000 * step_s:.3g} ms step"
        return self.finding(
            severity=Severity.WARNING if same_line or late >= 0 else Severity.NOTE,
            ranks=tuple(group.members),
            steps=Steps(spans[0].first, spans[-1].last, steps),
            subjects=(group.any.wrapped.kind,),
            location=member.rank.location(typical.line),
            label=f"averages the gradients {typical.synced} times per step",
            related=_late(member, late),
            summary=f"{typical.synced} backwards per optimizer step all-reduce the same "
            f"gradients, {wasted} of them for nothing; `no_sync` would save {estimate}",
            cause=LATE if late >= 0 else EVERY,
            fix=f"`with {member.rank.names_of(member.wrapped)[0] or 'model'}.no_sync():` around "
            "forward and backward of all but the last micro-batch",
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "averaging_backwards_per_step": typical.synced,
                "steps": f"{steps} of {member.last_step + 1}",
                "waiting_for_communication_per_backward_s": round(exposed, 6),
                "step_time_s": round(step_s, 6),
                "saving_percent": round(share, 1) if fits else None,
            },
            at=member.rank.wall(spans[0].pattern.at),
        )


def _late(member: Member, site: int) -> tuple[Related, ...]:
    spot = member.rank.location(site)
    return (Related("covers the backward only", spot),) if spot else ()
