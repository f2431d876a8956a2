"""DDP408."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.models.wrap_options import unsynced
from ddpdoctor.analysis.replicas.gradient_patterns import Span, patterns
from ddpdoctor.analysis.replicas.replica import Member
from ddpdoctor.analysis.replicas.replicas import Replicas, needs_copies, replicas
from ddpdoctor.analysis.replicas.thresholds import SEVERAL_STEPS
from ddpdoctor.events import SyncPattern, UnusedParameters
from ddpdoctor.report.declarations import seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Run

EVERY_BACKWARD = "every-micro-batch"
DIFFERENT_LINES = "backwards-of-different-lines"
BACKWARD_ONLY = "no-sync-around-backward-only"

ALWAYS = (
    "gradients only need to agree when the optimizer steps; DDP averages in every backward unless "
    "told otherwise"
)
STATIC = (
    ", once the static graph is switched off: with it torch fails in a first backward that is not "
    "synchronised"
)
CAUSES = {
    EVERY_BACKWARD: ALWAYS,
    DIFFERENT_LINES: ALWAYS,
    BACKWARD_ONLY: "`no_sync()` is active during backward only, which has no effect: DDP decides "
    "in the forward",
}


class RedundantSync(Check):
    """Gradient accumulation all-reduces the gradients in every micro-batch

    ## What it finds
    Several backwards from one line between two optimizer steps that each all-reduce the gradients
    of the same parameters: only the last of them needs to. This includes a `no_sync()` around
    backward only, which has no effect.

    ## How it knows
    For every optimizer step, each rank counts the synchronised backwards since the gradients were
    cleared: from the group's count of collectives and DDP's flag at the end of the forward. A few
    parameters tell whether two backwards reached the same ones. At least two such steps are
    required, and prove it; the time lost is DDP's own estimate.

    ## Why it hurts
    All but one of these all-reduces are wasted: the result is the same, and each one takes network
    time and makes every rank wait for the slowest.

    ## How to fix it
    Run forward and backward of all but the last micro-batch under `model.no_sync()`.

    ## When it stays quiet
    - One synchronised backward per step.
    - Gradients that are cleared in between (line searches, several optimizers), and losses of
      different parameters.
    - Backwards from different lines (a GAN's two losses) are a note.
    """

    code = "DDP408"
    name = "redundant-sync"
    family = "drift"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        EVERY_BACKWARD: "several backwards of one line per step each all-reduce the gradients",
        BACKWARD_ONLY: "`no_sync()` is active during backward only, which has no effect",
        DIFFERENT_LINES: "backwards of different lines per step each all-reduce the gradients",
    }
    requires = (
        needs_copies,
        seen(SyncPattern, otherwise="no optimizer step after DDP's backward was seen"),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        for group in replicas(run):
            yield from self._judge(group)

    def _judge(self, group: Replicas) -> Iterator[Finding]:
        for member in group.members.values():
            spans = [s for s in patterns(member) if s.pattern.synced > 1 and s.pattern.once]
            steps = sum(s.count for s in spans)
            if steps < SEVERAL_STEPS:
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
        late = next((s.pattern.late for s in spans if s.pattern.late >= 0), -1)
        same_line = any(s.pattern.once > 1 for s in spans)
        rule = BACKWARD_ONLY if late >= 0 else EVERY_BACKWARD if same_line else DIFFERENT_LINES
        typical = max(spans, key=lambda s: s.count).pattern
        wasted = typical.synced - 1
        latest = [s.pattern for s in patterns(member)][-1]
        exposed = min(latest.exposed_s, latest.backward_s)
        step_s = member.rank.step_time() or 0.0
        saving = wasted * exposed
        share = 100 * saving / step_s if step_s else 0.0
        fits = typical.synced * exposed <= step_s  # DDP may have measured a slower backward
        estimate = "an unknown time, which DDP did not measure"
        if saving:
            estimate = "an unknown time (DDP measured a slower backward)"
        if saving and fits:
            few = ".2g" if saving < 0.0995 else ".0f"
            estimate = f"about {1000 * saving:{few}} ms of each {1000 * step_s:.3g} ms step"
        name = member.rank.names_of(member.wrapped)[0] or "model"
        return self.finding(
            rule=rule,
            severity=Severity.NOTE if rule == DIFFERENT_LINES else Severity.WARNING,
            ranks=tuple(group.members),
            steps=Steps(spans[0].first, spans[-1].last, steps),
            subjects=(group.any.wrapped.kind,),
            location=member.rank.location(typical.line),
            label=f"all-reduces the gradients {typical.synced} times per step",
            related=_late(member, late),
            summary=f"{typical.synced} backwards per optimizer step all-reduce the same "
            f"gradients, {wasted} of them needlessly; `no_sync` would save {estimate}",
            cause=CAUSES[rule],
            fix=f"`with {unsynced(member.wrapped.by, name)}:` around "
            "forward and backward of all but the last micro-batch"
            + (STATIC if _is_static(member) else ""),
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "synchronised_backwards_per_step": typical.synced,
                "steps": f"{steps} of {member.last_step + 1}",
                "waiting_for_communication_per_backward_s": round(exposed, 6),
                "step_time_s": round(step_s, 6),
                "saving_percent": round(share, 1) if fits else None,
            },
            at=member.rank.wall(spans[0].pattern.at),
        )


def _late(member: Member, site: int) -> tuple[Related, ...]:
    spot = member.rank.location(site)
    return (Related("covers backward only", spot),) if spot else ()


def _is_static(member: Member) -> bool:
    """Whether DDP was told that the graph stays the same, in its constructor or later."""
    told = (e.static_graph for e in member.rank.of(UnusedParameters) if e.model == member.model)
    return bool(member.wrapped.options.get("static_graph")) or any(told)
