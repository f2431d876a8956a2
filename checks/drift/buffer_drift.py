"""DDP403."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.replicas import causes, late_buffers
from ddpdoctor.analysis.replicas.replicas import (
    NO_COPIES,
    Divergence,
    Replicas,
    divergence,
    each_model,
    never_change,
    replicas,
)
from ddpdoctor.analysis.replicas.uncompared import uncompared
from ddpdoctor.events import Digests, FileWritten, LateBuffers, StateTaken
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, some

LATE = "differ_and_came_after_the_wrap"


class BufferDrift(Check):
    """Buffers differ between ranks where it matters

    ## What it finds
    Buffers (running statistics of BatchNorm, codebooks, queues) that are not the same on all ranks
    when the model or a part of it is evaluated, through the wrapper or around it, or its state is
    taken and a file is written. Also buffers that came after the wrap (masks of a pruning), at the
    steps compared.

    ## How it knows
    All buffers are digested at the first forward without gradients after training, in `eval()`
    mode, and at the end; those of a part where `eval()` is called on it and it is then called by
    itself, after four forwards of training or more; where DDP does not copy them, also before the
    forward that follows a step at which `parameter-drift` compares. When `state_dict()` is taken,
    the next step is compared whole; it counts as saved where a file is written in the same step.
    Those that came after the wrap are digested before steps 0, 1, 2, 4, 9, 19, 49, 99 and so on.
    The digests of one moment are compared between the ranks, of buffers with fractions only; the
    finding is proven.

    ## Why it hurts
    Each rank evaluates another model, and the checkpoint holds the statistics of one rank's data
    only: what was measured in training is not what is loaded later.

    ## How to fix it
    Leave `broadcast_buffers` (newer: `forward_sync_buffers`) on, convert the model with
    `nn.SyncBatchNorm.convert_sync_batchnorm(model)`, or average the buffers before evaluation.

    ## When it stays quiet
    The ordinary difference after each training forward, which DDP repairs by copying rank 0's
    buffers at the next one, or the program itself before it evaluates or saves; SyncBatchNorm;
    ignored buffers; counters and random states of a rank.
    Buffers that differ, but are neither evaluated nor saved, are a note at most; so are those of a
    part that is evaluated, where the next forward of the model copies them.
    """

    code = "DDP403"
    name = "buffer-drift"
    family = "drift"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        groups = replicas(run)
        if not groups:
            return NO_COPIES
        if not any(g.any.wrapped.buffers for g in groups) and not run.any(LateBuffers):
            return "the wrapped models have no buffers"
        return None

    def left_out(self, run: Run) -> str | None:
        return uncompared(run, "buffers")

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from each_model(run, self._judge)
        yield from each_model(run, self._judge_late)

    def explains(self, mine: Finding, other: Finding) -> bool:
        """Masks that differ leave parameters that differ, once they are made permanent."""
        if other.check != "parameter-drift" or LATE not in mine.evidence:
            return False
        return all(any(m.startswith(f"{s}_") for m in mine.subjects) for s in other.subjects)

    def _judge_late(self, run: Run, group: Replicas) -> Iterator[Finding]:
        late = None if group.left_out else late_buffers.differing(group)
        if late is None:
            return
        rank, taken = _taken(group)
        spot = _evaluation(group)
        saved = None if rank is None or taken is None else rank.location(taken.site)
        used = spot is not None or taken is not None
        wrapped = causes.wrap_line(group)
        yield self.finding(
            severity=Severity.WARNING if used else Severity.NOTE,
            ranks=tuple(group.members),
            steps=Steps(late.steps[0], late.steps[-1], len(late.steps), late.looked),
            subjects=tuple(late.names),
            location=wrapped,
            label="copies only the buffers of that time",
            related=tuple(Related("they matter here", s) for s in (spot or saved,) if s),
            summary=f"buffer{'s' if len(late.names) > 1 else ''} {some(late.names)} of "
            f"{group.any.wrapped.kind}, which came after the wrap, "
            f"{'differ' if len(late.names) > 1 else 'differs'} between ranks, seen at step "
            f"{late.steps[0]}",
            cause="each rank made its own (from other random numbers or its own data), and DDP "
            "copies only buffers that were there at the wrap",
            fix="make them before the wrap, from the same numbers on every rank (a generator with "
            "one seed for all), or send them: `dist.broadcast(buffer, src=0)`",
            fix_kind=FixKind.CHECK,
            evidence={
                LATE: len(late.names),
                "looks that differ": f"{len(late.steps)} of {late.looked}",
            },
            at=late.at,
        )

    def _judge(self, run: Run, group: Replicas) -> Iterator[Finding]:
        evaluated = _matters(group, divergence(group, "buffers", "eval"))
        if evaluated:
            spot = _evaluation(group)
            yield self._finding(run, group, evaluated, "when the model is evaluated", spot)
            return
        if part := _matters(group, divergence(group, "buffers", "part")):
            part.before = -1
            when, spot = "when a part of it is evaluated", _evaluation(group, "part")
            mild = Severity.NOTE if group.any.seen.broadcast else Severity.WARNING
            yield self._finding(run, group, part, when, spot, mild)
            return
        if group.any.seen.broadcast:
            return  # the next forward copies rank 0's: by design
        saves = _saves(group)
        for point in ("kept", "end"):
            found = _matters(group, divergence(group, "buffers", point, among=saves))
            if found:
                spot = saves[found.first]
                yield self._finding(run, group, found, "when its state is taken to be saved", spot)
                return
        found = _matters(group, divergence(group, "buffers", "end"))
        if found:
            yield self._finding(run, group, found, "at the end", None, Severity.NOTE)

    def _finding(
        self,
        run: Run,
        group: Replicas,
        found: Divergence,
        when: str,
        spot: Location | None,
        severity: Severity = Severity.WARNING,
    ) -> Finding:
        wrapped = causes.wrap_line(group)
        broadcast = group.any.seen.broadcast
        # The wrapper's own forward would have copied them before it evaluates.
        part = found.point == "part"
        around = broadcast and spot is not None and found.point in ("eval", "part")
        if around:
            location, label = spot, f"calls {'a part of ' * part}the model inside of the wrapper"
            related = (Related(group.any.wrapped.here, wrapped),) if wrapped else ()
        else:
            location, related = wrapped, (Related("they matter here", spot),) if spot else ()
            label = group.any.wrapped.here if broadcast else "buffers are not synchronised"
        cause = (
            "the buffers were updated from each rank's own data and not copied since"
            if broadcast
            else "DDP was told not to copy buffers, and each rank updates them from its own data"
        )
        alike = _made_alike(group, found.names)
        # `forward_sync_buffers=False` leaves `broadcast_buffers` at None and copies at the wrap.
        reported = group.any.wrapped.options.get("broadcast_buffers", False)
        never_copied = not broadcast and reported is False
        if never_copied and never_change(group, found.names):
            cause = "each rank made its own before the wrap (from other random numbers, say), DDP "
            cause += "was told not to copy buffers, not at the wrap either, and nothing changed "
            cause += "them since"
            alike = "make them from the same numbers on every rank, or send them once after the "
            alike += "wrap (`dist.broadcast(buffer, src=0)`)"
        return self.finding(
            severity=severity,
            ranks=tuple(sorted(r for g in found.split for r in g)),
            steps=_evaluated(group, found),
            subjects=tuple(found.names),
            location=location,
            label=label,
            related=related,
            summary=f"buffer{'s' if len(found.names) > 1 else ''} {some(found.names)} of "
            f"{group.any.wrapped.kind} "
            f"{causes.differ(len(found.names), found.split, run)} {when}",
            cause=cause,
            fix=alike
            if around and part
            else "call the wrapper itself on every rank, `model(x)`, which copies rank 0's buffers "
            f"first; or {alike}"
            if around
            else f"{alike}, or leave `broadcast_buffers` on",
            fix_kind=FixKind.CHECK,
            evidence=causes.evidence(group, found)
            | {"next_forward_repairs": "yes" if broadcast else "no"},
            at=found.at,
        )


def _evaluated(group: Replicas, found: Divergence) -> Steps | None:
    """The steps of the evaluations that differ, from the first while the training goes on; what
    follows the last step counts to that."""
    member = group.any
    steps = {
        event.keys[-1]: event.step
        for event in member.rank.of(Digests)
        if (event.model, event.kind, event.point) == (member.model, found.kind, found.point)
    }
    if found.point not in ("eval", "part") or not 0 < steps.get(found.first, 0) <= member.last_step:
        return None
    reported = Steps.of(min(steps[key], member.last_step) for key in found.keys if key in steps)
    equal = found.compared - len(found.keys)
    return reported and Steps(reported.first, reported.last, reported.count, reported.count + equal)


SYNC_NORM = "`nn.SyncBatchNorm.convert_sync_batchnorm(model)` before the wrap"
REDUCE = (
    "average the buffers over the ranks before they are used or saved "
    "(`dist.all_reduce(buffer); buffer /= world_size`)"
)


def _made_alike(group: Replicas, names: list[str]) -> str:
    """How to make these buffers equal: SyncBatchNorm does it for those of BatchNorm only, and not
    on the CPU."""
    if group.any.wrapped.device == "cpu":
        return REDUCE
    kinds = {m.name: m.kind for m in group.any.wrapped.modules}
    norm = [_of_batch_norm(kinds, name) for name in names]
    return (
        SYNC_NORM
        if all(norm)
        else f"{SYNC_NORM}; for the others, {REDUCE}"
        if any(norm)
        else REDUCE
    )


def _of_batch_norm(kinds: dict[str, str], name: str) -> bool:
    """By the kind of the module; of one that holds no parameters only the names are known."""
    module, _, leaf = name.rpartition(".")
    return leaf in ("running_mean", "running_var") and "BatchNorm" in kinds.get(module, "BatchNorm")


def _matters(group: Replicas, found: Divergence | None) -> Divergence | None:
    """Without counters and random states, which may be a rank's own."""
    if found is None:
        return None
    kinds = {b.name: b.dtype for b in group.any.wrapped.buffers}
    own = ("int", "uint", "bool")
    floating = [n for n in found.names if not kinds.get(n, "").startswith(own)]
    if not floating:
        return None
    found.names = floating
    return found


def _evaluation(group: Replicas, point: str = "eval") -> Location | None:
    """The line of the first evaluation."""
    for member in group.members.values():
        for event in member.rank.of(Digests):
            if event.point == point and event.model == member.model and event.site >= 0:
                return member.rank.location(event.site)
    return None


def _saves(group: Replicas) -> dict[int, Location | None]:
    """Where the state was last taken before a file was written, by the forwards with gradients
    before it. What follows the weights (an average of them, say) takes the state as well."""
    saves: dict[int, Location | None] = {}
    for member in group.members.values():
        files = [e for e in member.rank.of(FileWritten) if not e.path.endswith(_TEXTS)]
        for event in member.rank.of(StateTaken):
            trained = event.model == member.model and event.forwards > 0
            if trained and any(f.step == event.step and f.at >= event.at for f in files):
                saves[event.forwards] = member.rank.location(event.site)
    return saves


_TEXTS = (".json", ".jsonl", ".yaml", ".yml", ".txt", ".csv", ".log")


def _taken(group: Replicas) -> tuple[Rank | None, StateTaken | None]:
    """The first checkpoint after training began."""
    for member in group.members.values():
        for event in member.rank.of(StateTaken):
            if event.model == member.model and event.forwards > 0:
                return member.rank, event
    return None, None
