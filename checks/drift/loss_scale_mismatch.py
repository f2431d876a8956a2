"""DDP410."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.rank_differences import Series, series
from ddpdoctor.analysis.replicas.replica import Member
from ddpdoctor.analysis.replicas.replicas import Replicas, needs_copies, replicas
from ddpdoctor.events import BatchSeen, Edited
from ddpdoctor.report.declarations import seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Run


class LossScaleMismatch(Check):
    """The loss is a sum over local batches of unequal size

    ## What it finds
    A loss reduced with `sum` while the ranks' batches of one step have different sizes.

    ## How it knows
    Each rank reads the reduction from the autograd graph, and the batch size from the input of the
    wrapped forward whose samples are summed: in the first six backwards of a line, then in one of
    17, and whenever the loss is computed in a new way. After about forty backwards of known lines
    no more sizes are read, so that a short last batch of a long epoch is missed. The sizes of the
    same forward are compared between ranks. A difference proves the fault.

    ## Why it hurts
    DDP averages over ranks, not over samples: the gradient is the sum over all samples divided by
    the number of ranks. Its size follows the number of samples, and a short last batch takes a
    short step.

    ## How to fix it
    Divide the local sum by the global number of samples and multiply by the world size: `loss =
    local_sum * world_size / global_count`.

    ## When it stays quiet
    - Mean-reduced losses, and batches of equal size.
    - Sums over anything but samples, such as the losses of several tasks.
    - Losses, or gradients before the step, that the program itself scales by a factor that may
      follow the count. A constant factor does not where the counts vary.
    """

    code = "DDP410"
    name = "loss-scale-mismatch"
    family = "drift"
    severity = Severity.NOTE
    requires = (
        needs_copies,
        seen(BatchSeen, otherwise="no loss was seen whose reduction is known"),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        reported: set[int] = set()
        for group in replicas(run):
            if group.any.model not in reported:
                reported.add(group.any.model)
                yield from self._judge(group)

    def _judge(self, group: Replicas) -> Iterator[Finding]:
        tables = {n: _sums(m) for n, m in group.members.items()}
        if not all(tables.values()):
            return
        forwards = sorted({f for table in tables.values() for f in table})
        moments = {f: {n: table.at(f) for n, table in tables.items()} for f in forwards}
        known: dict[int, dict[int, BatchSeen]] = {
            f: {n: e for n, e in row.items() if e is not None}
            for f, row in moments.items()
            if None not in row.values()
        }
        unequal = {
            f: sizes
            for f, row in known.items()
            if len(set((sizes := {n: e.size for n, e in row.items()}).values())) > 1
        }
        if not unequal or _rescaled(group, unequal) or _weighted(known.values()):
            return
        sizes = next(iter(unequal.values()))
        event = group.any.of(BatchSeen)[0]
        spelled = ", ".join(f"{size} on rank {n}" for n, size in list(sizes.items())[:4])
        last = max(0, group.any.last_step)
        steps, compared = (sorted({min(f, last) for f in some}) for some in (unequal, known))
        yield self.finding(
            ranks=tuple(group.members),
            steps=Steps(steps[0], steps[-1], len(steps), sum(s >= steps[0] for s in compared)),
            subjects=(group.any.wrapped.kind,),
            location=group.any.rank.location(event.site),
            label="the loss is a sum over the local batch",
            summary=f"the loss is a sum, and the batches of a step have different sizes: {spelled}",
            cause="DDP averages the ranks' sums; with unequal batches that is not proportional to "
            "the mean over samples",
            fix="`loss = local_sum * world_size / global_count`",
            fix_kind=FixKind.TEMPLATE,
            evidence={"sizes": [{"forward": f, **_row(s)} for f, s in list(unequal.items())[:8]]},
            at=group.any.rank.wall(event.at),
        )


def _row(sizes: dict[int, int]) -> dict[str, int]:
    return {f"rank {n}": size for n, size in sizes.items()}


def _rescaled(group: Replicas, unequal: dict[int, dict[int, int]]) -> bool:
    """Whether the program itself may divide the gradients by the sample count of all ranks."""
    ratios = {e.ratio for m in group.members.values() for e in _edits(m)}
    counts = {sum(sizes.values()) for sizes in unequal.values()}
    constant = len(ratios) == 1 and 0 not in ratios
    return bool(ratios) and not (constant and len(counts) > 1)


def _weighted(moments: Iterable[dict[int, BatchSeen]]) -> bool:
    """Whether the program may divide the loss by a sample count, its own or that of all ranks."""
    counts = {sum(e.size for e in row.values()) for row in moments}
    weights = {e.weight for row in moments for e in row.values()}
    return len(weights) > 1 or 0 in weights or (len(counts) == 1 and weights != {1})


def _edits(member: Member) -> list[Edited]:
    """The modifications of gradients by anything but torch's own functions."""
    edits = member.of(Edited, kind="gradients", changed=True, counted=False)
    return [e for e in edits if e.beside or not e.functions]


def _sums(member: Member) -> Series[BatchSeen]:
    """The batches by forward; none where the loss is not always a sum."""
    sums = series(member.rank, BatchSeen, "forward", model=member.model)
    return sums if all(e.reduction == "sum" for e in member.of(BatchSeen)) else Series({})
