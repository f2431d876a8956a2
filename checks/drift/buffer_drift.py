"""DDP403."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.manual_sync import outer_modules
from ddpdoctor.analysis.models.wrapped_models import skipped_of
from ddpdoctor.analysis.replicas import causes
from ddpdoctor.analysis.replicas.overwritten_buffers import overwritten
from ddpdoctor.analysis.replicas.replica import Member
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
from ddpdoctor.events import Digests, FileWritten, LateBuffers, StateTaken, Tensor
from ddpdoctor.events.pack import unpack
from ddpdoctor.report.declarations import Condition, Effect
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, plural, some

LATE = "added-after-wrap"
BYPASSED = "wrapper-bypassed"
UNEQUAL_AT_WRAP = "unequal-at-wrap"
NOT_BROADCAST = "not-broadcast"
NOT_COPIED = "not-copied-since"
OVERWRITTEN = "overwritten-by-broadcast"


def _masks(mine: Finding, other: Finding) -> bool:
    """Pruning masks that differ leave parameters that differ, once they are made permanent."""
    return all(any(m.startswith(f"{s}_") for m in mine.subjects) for s in other.subjects)


class BufferDrift(Check):
    """Buffers differ between ranks where it matters

    ## What it finds
    Buffers (BatchNorm running statistics, codebooks, queues) that differ between ranks when the
    model or a submodule is evaluated, through the wrapper or not, or when its state is taken and a
    file is written. Also buffers registered after the wrap (pruning masks), at the steps compared,
    and those of modules outside of the wrapper that take part in training (the centre of a loss, a
    normaliser): where gradients flow through the module, or its state is saved. And buffers that
    each rank updates from its own data while DDP broadcasts those of rank 0, so that only its data
    counts (a codebook, a moving average that the forward uses).

    ## How it knows
    Each rank records digests (checksums) of all buffers at the first forward without gradients
    after training, in `eval()` mode, and at the end. For a submodule it does so when, after at
    least four training forwards, `eval()` is called on it and it is called on its own. Where DDP
    does not broadcast buffers, it also does before the forward after each step that
    `parameter-drift` compares. When `state_dict()` is taken, the next step is compared completely;
    it counts as saved if a file is written in the same step. Buffers registered after the wrap are
    examined before steps 0, 1, 2, 4, 9, 19, 49, 99 and so on; modules outside of the wrapper as by
    `parameter-drift`, and in up to eight evaluations, where a loader is read without gradients and
    they are then called: a warning needs ranks that read other samples there. The digests of one
    moment are compared between ranks, for floating-point buffers only. A difference proves the
    fault. What a broadcast is about to overwrite is sketched (a few random sums) before the third
    to ninth forward and before six later ones, for modules whose `forward`, as its source says,
    combines one of their buffers with its input and returns the result. After most updates another
    rank must be apart from rank 0 by a hundredth of the update or more, and the buffer must go on
    from its old value.

    ## Why it hurts
    Each rank evaluates a different model, and the checkpoint holds the statistics of one rank's
    data: what was measured during training is not what is loaded later.

    ## How to fix it
    Keep `broadcast_buffers=True` (newer: `forward_sync_buffers`), convert the model with
    `nn.SyncBatchNorm.convert_sync_batchnorm(model)`, or average the buffers before evaluation. All-
    reduce what goes into a codebook or a moving average before it is updated: a broadcast makes
    them equal, but undoes the updates of all ranks but one.

    ## When it stays quiet
    - The ordinary difference after each training forward: DDP repairs it by broadcasting rank 0's
      buffers at the next one, or the program does before it evaluates or saves.
    - Buffers of modules outside of the wrapper that only count (no gradient, not saved), or are
      equal again later. A note if only the wrapped model's input comes from them.
    - Buffers of a copy of the model (moving averages of the weights) that are equal whenever all
      ranks evaluate it; a note if that was not seen, or all ranks evaluate the same samples.
    - Of buffers that a broadcast overwrites: normalisation layers, torch's own modules, values
      that are only logged, that are written anew in each forward or used in evaluation only.
    - SyncBatchNorm, buffers that DDP ignores, counters and random states, and single numbers that
      are registered with `persistent=False`.
    - Buffers that are neither evaluated nor saved are a note at most, and so are those of an
      evaluated submodule if the model's next forward broadcasts them. A note also of constant
      buffers that are only saved, if no forward examined calls the module that holds them, and the
      source of no `forward` reads them outside of an `if` (noise that is kept for pictures).
    """

    code = "DDP403"
    name = "buffer-drift"
    family = "drift"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        BYPASSED: "the model or a submodule is evaluated without the wrapper, which broadcasts",
        NOT_BROADCAST: "DDP was told not to broadcast buffers, and each rank updates its own",
        UNEQUAL_AT_WRAP: "each rank made its own buffers, and DDP was told not to broadcast them",
        NOT_COPIED: "DDP broadcasts buffers, but has not since each rank updated its own",
        OVERWRITTEN: "each rank updates the buffers from its data, and DDP's broadcast undoes that",
        LATE: "the buffers were added after the wrap, and DDP does not know them",
        **outer_modules.RULES,
    }
    effects = (
        Effect(
            ("parameter-drift",),
            of=(LATE,),
            when=(Condition("of the parameters that these buffers mask", _masks),),
        ),
    )

    def unobserved(self, run: Run) -> str | None:
        groups = replicas(run)
        if not groups and not outer_modules.compared(run):
            return NO_COPIES
        buffers = any(g.any.wrapped.buffers for g in groups) or run.any(LateBuffers)
        if not buffers and not outer_modules.compared(run):
            return "the wrapped models have no buffers"
        return None

    def left_out(self, run: Run) -> str | None:
        return uncompared(run, "buffers")

    def examine(self, run: Run) -> Iterable[Finding]:
        judges = (self._judge, self._judge_late, self._judge_overwritten)
        told = [found for judge in judges for found in each_model(run, judge)]
        yield from told
        serious = [{*f.subjects} for f in told if f.severity is not Severity.NOTE]
        for outer in outer_modules.outer_modules(run):
            # What is copied from buffers that differ follows from them.
            follows = any(outer.originals and outer.originals <= names for names in serious)
            if not outer.parameters and not follows:
                yield self.finding(**outer.fields(run))

    def _judge_late(self, run: Run, group: Replicas) -> Iterator[Finding]:
        members = group.members.values()
        tables = [_late_digests(m) for m in members]
        common = sorted(set.intersection(*(set(t) for t in tables)))
        names = sorted(_differ([t[common[-1]] for t in tables])) if common else []
        if group.left_out or not names:
            return
        found = [k for k in common if _differ([t[k] for t in tables]) & {*names}]
        spot, taken = _evaluation(group), _taken(group)
        used = spot is not None or taken is not None
        saved = taken[0].location(taken[1].site) if taken else None
        yield self.finding(
            rule=LATE,
            severity=Severity.WARNING if used else Severity.NOTE,
            ranks=tuple(group.members),
            steps=Steps(found[0], found[-1], len(found), len(common)),
            subjects=tuple(names),
            location=causes.wrap_line(group),
            label="broadcasts only buffers registered before this line",
            related=tuple(Related(_used(names), s) for s in (spot or saved,) if s),
            summary=f"{_buffers(names)} of {group.any.wrapped.kind}, registered after the "
            f"wrap, {plural(len(names), 'differs', 'differ')} between ranks, first seen at "
            f"step {found[0]}",
            cause="each rank created its own (from other random numbers or its own data), and DDP "
            "broadcasts only buffers that were registered at the wrap",
            fix="register them before the wrap, from the same values on every rank (a generator "
            "with the same seed), or send them: `dist.broadcast(buffer, src=0)`",
            fix_kind=FixKind.CHECK,
            evidence={
                "differ_and_were_added_after_the_wrap": len(names),
                "comparisons_that_differ": f"{len(found)} of {len(common)}",
            },
            at=min(m.rank.wall(m.of(LateBuffers, step=found[0])[0].at) for m in members),
        )

    def _judge_overwritten(self, run: Run, group: Replicas) -> Iterator[Finding]:
        found = overwritten(group)
        if found is None:
            return
        spot, taken = _evaluation(group), _taken(group)
        saved = taken[0].location(taken[1].site) if taken else None
        names, wrapped = found.names, causes.wrap_line(group)
        first = min(group.any.seen.ranks)
        lines = (
            ("its value is used here", found.read),
            ("broadcasts buffers before each forward", wrapped),
            (_used(names), spot or saved),
        )
        yield self.finding(
            rule=OVERWRITTEN,
            severity=Severity.WARNING if spot or taken else Severity.NOTE,
            ranks=tuple(group.members),
            subjects=tuple(names),
            location=found.written or wrapped,
            label=f"lost on all ranks but rank {first}",
            related=tuple(
                Related(label, s) for label, s in lines if s and s != (found.written or wrapped)
            ),
            summary=f"{_buffers(names)} of {group.any.wrapped.kind} "
            f"{plural(len(names), 'is', 'are')} updated from rank {first}'s data only: DDP "
            "overwrites what the other ranks update",
            cause="each rank updates them from its own data, and before the next forward DDP "
            f"broadcasts those of rank {first}",
            fix="all-reduce what goes into the update (`dist.all_reduce(x)`, and divide by the "
            "world size where it is a mean), or gather what goes into a queue (`dist.all_gather`)",
            fix_kind=FixKind.CHECK,
            evidence={
                "updates_compared": found.forwards,
                "distance_between_ranks_over_size_of_update": f"{found.apart:.2g}",
            },
            at=found.at,
        )

    def _judge(self, run: Run, group: Replicas) -> Iterator[Finding]:
        evaluated = _matters(group, divergence(group, "buffers", "eval"))
        if evaluated:
            spot = _evaluation(group)
            yield self._finding(run, group, evaluated, "when the model is evaluated", spot)
            return
        if part := _matters(group, divergence(group, "buffers", "part")):
            part.before = -1
            when, spot = "when a submodule is evaluated", _evaluation(group, "part")
            mild = Severity.NOTE if group.any.seen.broadcast else Severity.WARNING
            yield self._finding(run, group, part, when, spot, mild)
            return
        if group.any.seen.broadcast:
            return  # the next forward broadcasts rank 0's: by design
        saves = _saves(group)
        for point in ("kept", "end"):
            found = _matters(group, divergence(group, "buffers", point, among=saves))
            if found:
                spot = saves[found.first]
                yield self._finding(run, group, found, "when its state is saved", spot)
                return
        found = _matters(group, divergence(group, "buffers", "end"))
        if found:
            yield self._finding(run, group, found, "at the end of the run", None, Severity.NOTE)

    def _finding(
        self,
        run: Run,
        group: Replicas,
        found: Divergence,
        when: str,
        spot: Location | None,
        severity: Severity = Severity.WARNING,
    ) -> Finding:
        """A finding about buffers that differ at one point, which is at `spot` where known."""
        wrapped = causes.wrap_line(group)
        rule = _rule(group, found, spot)
        unread = (
            rule == UNEQUAL_AT_WRAP and found.point in ("kept", "end") and _unread(group, found)
        )
        if rule == BYPASSED:
            location = spot
            what = "submodule" if found.point == "part" else "model"
            label = f"calls the {what}, not the wrapper"
            related = (Related(group.any.wrapped.here, wrapped),) if wrapped else ()
        else:
            location, related = wrapped, (Related(_used(found.names), spot),) if spot else ()
            broadcast = rule == NOT_COPIED
            label = group.any.wrapped.here if broadcast else "buffers are not synchronised"
        return self.finding(
            rule=rule,
            severity=Severity.NOTE if unread else severity,
            ranks=tuple(sorted(r for g in found.split for r in g)),
            steps=_evaluated(group, found),
            subjects=tuple(found.names),
            location=location,
            label=label,
            related=related,
            summary=f"{_buffers(found.names)} of {group.any.wrapped.kind} "
            f"{causes.differ(len(found.names), found.split, run)} {when}",
            cause=CAUSES[rule] + UNREAD * unread,
            fix=KEEP * unread + _fix(rule, group, found),
            fix_kind=FixKind.CHECK,
            evidence=causes.evidence(group, found)
            | {"next_forward_repairs": "yes" if group.any.seen.broadcast else "no"},
            at=found.at,
        )


Row = dict[tuple[str, tuple[int, ...]], int]
"""Digests by name and shape: buffers whose length depends on the rank's data cannot be compared."""


def _late_digests(member: Member) -> dict[int, Row]:
    """The buffers that were added after the wrap, by step."""
    return {
        e.step: dict(zip(zip(e.names, e.shapes, strict=False), unpack(e.values), strict=False))
        for e in member.of(LateBuffers)
    }


def _differ(rows: list[Row]) -> set[str]:
    shared = set.intersection(*(set(row) for row in rows))
    return {key[0] for key in shared if len({row[key] for row in rows}) > 1}


def _buffers(names: list[str]) -> str:
    """`buffer a`, `buffers a and b`."""
    return f"{plural(len(names), 'buffer')} {some(names)}"


def _used(names: list[str]) -> str:
    """The label of a line that evaluates or saves buffers which differ."""
    many = len(names)
    return f"the differing {plural(many, 'buffer is', 'buffers are')} used here"


def _rule(group: Replicas, found: Divergence, spot: Location | None) -> str:
    """Why these buffers differ."""
    if group.any.seen.broadcast:
        # The wrapper's own forward would have broadcast them before it evaluates.
        around = spot is not None and found.point in ("eval", "part")
        return BYPASSED if around else NOT_COPIED
    # `forward_sync_buffers=False` leaves `broadcast_buffers` at None and broadcasts at the wrap.
    option = group.any.wrapped.options.get("broadcast_buffers", False)
    if option is False and never_change(group, found.names):
        return UNEQUAL_AT_WRAP
    return NOT_BROADCAST


def _unread(group: Replicas, found: Divergence) -> bool:
    """Whether no forward examined called the modules that hold these buffers, on any rank, and no
    other module's `forward` always reads them."""
    holders = {name.rpartition(".")[0] for name in found.names}
    looks = [skipped_of(m.rank, m.model) for m in group.members.values()]
    return all(looks) and all(holders <= {*e.unread} for told in looks for e in told)


CAUSES = {
    BYPASSED: "each rank updated the buffers from its own data, and nothing has broadcast them "
    "since",
    NOT_COPIED: "each rank updated the buffers from its own data, and nothing has broadcast them "
    "since",
    NOT_BROADCAST: "DDP was told not to broadcast buffers, and the ranks do not update them alike "
    "(each from its own data, most likely)",
    UNEQUAL_AT_WRAP: "each rank created its own buffers before the wrap (for example from other "
    "random numbers), DDP was told not to broadcast buffers, which includes the wrap, and nothing "
    "changed them since",
}
UNREAD = (
    ". Training does not seem to use them: no forward that was examined called the module that "
    "holds them"
)
KEEP = "nothing has to be changed unless a forward reads them. If one does, "
SEND = (
    "create them from the same values on every rank, or send them once after the wrap "
    "(`dist.broadcast(buffer, src=0)`)"
)


def _fix(rule: str, group: Replicas, found: Divergence) -> str:
    equal = SEND if rule == UNEQUAL_AT_WRAP else _make_equal(group, found.names)
    if rule != BYPASSED:
        # A broadcast makes them equal, but undoes the updates of all ranks but one.
        keeps = rule == UNEQUAL_AT_WRAP or all(_of_norms(group, found.names))
        wrapper = ", and evaluate through the wrapper" if rule == NOT_BROADCAST else ""
        return f"{equal}, or keep `broadcast_buffers=True`{wrapper}" if keeps else equal
    if found.point == "part":
        return equal
    return (
        "call the wrapper on every rank, `model(x)`, which broadcasts rank 0's buffers first; or "
        f"{equal}"
    )


def _evaluated(group: Replicas, found: Divergence) -> Steps | None:
    """The steps of the evaluations that differ, if the first comes before training ends. What
    follows the last step counts as that step."""
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
    "average the buffers over the ranks, on every rank, before they are used or saved "
    "(`for b in model.buffers(): if b.is_floating_point(): dist.all_reduce(b); b /= world_size`)"
)


def _make_equal(group: Replicas, names: list[str]) -> str:
    """How to make these buffers equal: SyncBatchNorm does it for those of BatchNorm only, and does
    not run on the CPU."""
    norm = _of_norms(group, names)
    rest = REDUCE if all(norm) else outer_modules.UPDATE
    if group.any.wrapped.device == "cpu" or not any(norm):
        return rest
    return SYNC_NORM if all(norm) else f"{SYNC_NORM}; for the others, {rest}"


def _of_norms(group: Replicas, names: list[str]) -> list[bool]:
    kinds = {m.name: m.kind for m in group.any.wrapped.modules}
    return [_of_batch_norm(kinds, name) for name in names]


def _of_batch_norm(kinds: dict[str, str], name: str) -> bool:
    """Whether a buffer belongs to BatchNorm: known from the module's class, or for a module that
    holds no parameters from the buffer's name."""
    module, _, leaf = name.rpartition(".")
    return leaf in ("running_mean", "running_var") and "BatchNorm" in kinds.get(module, "BatchNorm")


def _matters(group: Replicas, found: Divergence | None) -> Divergence | None:
    """The divergence without counters, random states and single numbers that are in no checkpoint
    (figures for a progress bar), which may differ between ranks; None where nothing else differs.
    """
    if found is None:
        return None
    known = {b.name: b for b in group.any.wrapped.buffers}
    floating = [n for n in found.names if n not in known or not _rank_s_own(known[n])]
    if not floating:
        return None
    found.names = floating
    return found


def _rank_s_own(buffer: Tensor) -> bool:
    number = buffer.dtype.startswith(("int", "uint", "bool"))
    return number or (not buffer.kept and math.prod(buffer.shape) == 1)


def _evaluation(group: Replicas, point: str = "eval") -> Location | None:
    """The line of the first evaluation of the model, or of a `part`."""
    events = (
        (m.rank, e)
        for m in group.members.values()
        for e in m.rank.of(Digests)
        if (e.point, e.model) == (point, m.model) and e.site >= 0
    )
    return next((rank.location(event.site) for rank, event in events), None)


def _saves(group: Replicas) -> dict[int, Location | None]:
    """Where the state was last taken before a file was written, by the number of forwards with
    gradients before it. Other code takes the state as well (a moving average of the weights)."""
    saves: dict[int, Location | None] = {}
    for member in group.members.values():
        files = [e for e in member.rank.of(FileWritten) if not e.path.endswith(_TEXTS)]
        for event in member.of(StateTaken):
            if event.forwards > 0 and any(f.step == event.step and f.at >= event.at for f in files):
                saves[event.forwards] = member.rank.location(event.site)
    return saves


_TEXTS = (".json", ".jsonl", ".yaml", ".yml", ".txt", ".csv", ".log")


def _taken(group: Replicas) -> tuple[Rank, StateTaken] | None:
    """The first checkpoint after training began."""
    taken = ((m.rank, e) for m in group.members.values() for e in m.of(StateTaken))
    return next(((rank, event) for rank, event in taken if event.forwards > 0), None)
