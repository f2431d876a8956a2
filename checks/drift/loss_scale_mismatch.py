"""DDP410."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.models.gathered_losses import gathered_losses
from ddpdoctor.analysis.models.loss_weights import (
    UNEQUAL,
    by_count,
    by_element,
    dispersion,
    spread,
    spreads,
    weighs_unequally,
)
from ddpdoctor.analysis.models.wrap_options import counted
from ddpdoctor.analysis.rank_differences import Series, series
from ddpdoctor.analysis.replicas.divergence_window import own_step
from ddpdoctor.analysis.replicas.optimizer_options import takes_out_factors
from ddpdoctor.analysis.replicas.replica import Member
from ddpdoctor.analysis.replicas.replicas import Replicas, needs_copies, replicas, sharded_models
from ddpdoctor.events import (
    BatchSeen,
    Edited,
    GatheredInGraph,
    GatheredWithoutGradient,
    LossMeans,
    ReducedInGraph,
    ShardedModel,
)
from ddpdoctor.report.declarations import seen, unless
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Run

VALID = "valid-elements"
MEANS = "unequal-means"
REDUCED = "reduced-in-graph"
GATHERED = "gathered-in-graph"
CUT = "gathered-without-gradient"
OTHERS = "gradient-of-other-ranks-dropped"

FEWEST = 4
"""How many forwards must be compared: some in which elements weigh unequally average out."""

BY_CHANCE = 4.0
"""How many times as large the variance of the ranks' counts is, relative to their mean, as that of
elements that each count or not at random, from which on it is no chance."""


DIFFERENTIABLE = (
    "`from torch.distributed.nn.functional import all_gather`, and "
    "`torch.cat(all_gather(tensor))`, whose backward sums over the ranks"
)


class LossScaleMismatch(Check):
    """The loss weighs samples, or elements, by the rank that they are on

    ## What it finds
    - A loss reduced with `sum` while the ranks' batches of one step have different sizes (a note).
    - A mean over the elements that count (`ignore_index`, a mask), of which the ranks have unequal
      numbers in most steps (a warning): an element on a rank with few of them counts more.
    - The same for a mean over all elements, such as the atoms or words of samples of unequal sizes
      (a note), also as one term of several.
    - A tensor that the loss is computed from and that is all-reduced in place (a warning): autograd
      does not see the collective, so that the gradient through it is too small by the world size.
    - A tensor that is gathered from all ranks, a loss that all ranks compute from it alike, and a
      backward that gives each rank its own part of the gradient (a warning), which is too small by
      the world size as well: an `autograd.Function`, or `gathered[rank] = tensor`.
    - The same where each rank computes the loss of its own rows against those of all ranks (a
      warning; a note for `gathered[rank] = tensor`): what the others' losses say of this rank's
      tensor is dropped.
    - A tensor that is gathered for the loss and gets no gradient at all (a warning): what is
      gathered has none, and the tensor itself has no other part in the loss.

    ## How it knows
    Each rank reads the reduction from the autograd graph, and the batch size from the input of the
    wrapped forward whose samples are summed: in the first six backwards of a line, then in one of
    17, and whenever the loss is computed in a new way (in the first 32 where some elements of it do
    not count). After about forty backwards of known lines
    no more sizes are read, so that a short last batch of a long epoch is missed. The sizes of the
    same forward are compared between ranks. A difference proves the fault. How many elements count
    is read from the node of `cross_entropy` or `nll_loss`, or from the count that a sum is divided
    by, or the size of what a mask selects, on the CPU. In most of at least four forwards an element
    must count more than 1.1 times as much on one rank as on another, and the variance of the counts
    between ranks must be four times that of random masks. In the first backwards after an
    `all_reduce` (`SUM`, with gradients enabled, in DDP's group) of a tensor that has a `grad_fn`,
    the graph between the loss and that tensor is searched, and the graph below it for parameters of
    the model: that a gradient flows there proves the fault. torch itself warns of it once ("an
    autograd kernel was not registered"). In the first backwards after an `all_gather` by an
    `autograd.Function`, or of which this rank's part was put back into what was joined, the
    gradient of all parts is compared with what the node gives back: it must be this rank's part
    to the bit. A projection of the gradient of all parts must agree between all ranks (2 %) in at
    least three forwards: then each computes the same loss, and each part is used by all.

    ## Why it hurts
    DDP averages over ranks, not over samples: the gradient is the sum over all samples divided by
    the number of ranks. Its size follows the number of samples, and a short last batch takes a
    short step.

    ## How to fix it
    Divide the local sum by the global number of samples and multiply by the world size: `loss =
    local_sum * world_size / global_count`. Where elements count, reduce with `sum`, all-reduce the
    number of elements that count, and divide by it in the same way. For a tensor that the loss is
    computed from: `from torch.distributed.nn.functional import all_reduce` and `tensor =
    all_reduce(tensor)`, whose backward sums over the ranks as well; `all_gather` of that module in
    the same way, or all-reduce the gradient in the function's backward.

    ## When it stays quiet
    - A note where tensors are gathered without the gradient of other ranks and the optimizer takes
      out a common factor (Adam and others).
    - Means over whole batches, and batches of equal size.
    - Means over elements of which all ranks have about as many (masks drawn at random), or that are
      weighted so that each counts the same on every rank.
    - Sums over anything but samples, such as the losses of several tasks.
    - Losses, or gradients before the step, that the program itself scales by a factor that may
      follow the count. A constant factor does not where the counts vary.
    - Tensors all-reduced for logging, detached, with `AVG` (DDP's mean is right then), or of one
      number; losses that are linear in the sum; losses that are multiplied by the world size.
    - Functions whose backward sums over the ranks or scales; sums over what was gathered.
    - Of models of `fully_shard` and `FullyShardedDataParallel` only the numbers of elements are
      compared, where one such model is trained and averages its gradients.
    """

    code = "DDP410"
    name = "loss-scale-mismatch"
    family = "drift"
    severity = Severity.NOTE
    rules: ClassVar[Mapping[str, str]] = {
        "loss-scale-mismatch": "the loss is a sum, and batches have unequal sizes",
        VALID: "the loss is a mean over unequal numbers of elements that count",
        MEANS: "the loss is a mean over all elements, of which the ranks have unequal numbers",
        REDUCED: "a tensor that the loss is computed from is all-reduced in place",
        GATHERED: "a loss of all ranks' tensors, whose gradient reaches this rank's part only",
        CUT: "a tensor is gathered for the loss, and gets no gradient",
        OTHERS: "a loss of all ranks' tensors, of which each drops the gradient of the others",
    }
    requires = (
        unless(needs_copies, ShardedModel),
        seen(
            BatchSeen,
            LossMeans,
            ReducedInGraph,
            GatheredInGraph,
            GatheredWithoutGradient,
            otherwise="no loss was seen whose reduction is known",
        ),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        reported: set[int] = set()
        for group in [*replicas(run), *sharded_models(run)]:
            if group.any.model not in reported:
                reported.add(group.any.model)
                yield from self._judge(group)
                valid = [*self._judge_valid(group)]
                yield from valid or self._judge_means(group)
                yield from self._judge_reduced(group)
                yield from self._judge_gathered(group)
                yield from self._judge_cut(run, group)

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
        yield self.finding(
            ranks=tuple(group.members),
            steps=_steps(group, unequal, known),
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

    def _judge_valid(self, group: Replicas) -> Iterator[Finding]:
        known = _counted(group)
        unequal = {f: row for f, row in known.items() if weighs_unequally(row)}
        if len(known) < FEWEST or 2 * len(unequal) <= len(known) or _edited(group):
            return
        if dispersion([[e.valid for e in row.values()] for row in known.values()]) < BY_CHANCE:
            return
        factors = {f: spread(map(by_element, row.values())) for f, row in unequal.items()}
        worst = max(factors, key=lambda f: factors[f])
        middle = statistics.median(factors.values())
        event = next(iter(unequal[worst].values()))
        spelled = ", ".join(f"{e.valid} on rank {n}" for n, e in list(unequal[worst].items())[:4])
        yield self.finding(
            rule=VALID,
            severity=Severity.WARNING,
            ranks=tuple(group.members),
            steps=_steps(group, unequal, known),
            subjects=(group.any.wrapped.kind,),
            location=group.any.rank.location(event.site),
            label="each rank divides by its own number of elements",
            summary="the loss is a mean over the elements that count on each rank, and the ranks "
            f"have numbers of them that differ by more than a tenth in {len(unequal)} of "
            f"{len(known)} forwards compared (in the worst {spelled})",
            cause=f"{_averager(group)} averages the ranks' means, whatever each is a mean of: an "
            f"element of one rank counts {middle:.2g} times as much as one of another (median of "
            f"these; at most {factors[worst]:.2g})",
            fix=_fix(group, known),
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "elements that count": [
                    {"forward": f, **{f"rank {n}": e.valid for n, e in row.items()}}
                    for f, row in list(unequal.items())[:8]
                ]
            },
            at=group.any.rank.wall(event.at),
        )

    def _judge_means(self, group: Replicas) -> Iterator[Finding]:
        known = _means(group)
        unequal = {f: row for f, row in known.items() if max(spreads(row), default=0) > UNEQUAL}
        if len(known) < FEWEST or 2 * len(unequal) <= len(known) or _edited(group):
            return
        worst = max(unequal, key=lambda f: max(spreads(unequal[f])))
        event = next(iter(unequal[worst].values()))
        term = spreads(unequal[worst]).index(max(spreads(unequal[worst])))
        numbers = [(n, e.elements[term]) for n, e in unequal[worst].items()]
        spelled = ", ".join(f"{count} on rank {n}" for n, count in numbers[:4])
        yield self.finding(
            rule=MEANS,
            ranks=tuple(group.members),
            steps=_steps(group, unequal, known),
            subjects=(group.any.wrapped.kind,),
            location=group.any.rank.location(event.site),
            label="each rank divides by its own number of elements",
            summary=f"a mean in the loss is taken over numbers of elements that differ by more "
            f"than a tenth in {len(unequal)} of {len(known)} forwards compared (in the worst "
            f"{spelled})",
            cause=f"{_averager(group)} averages the ranks' means, whatever each is a mean of: an "
            "element of a rank with few of them counts more",
            fix=_fix(group, known) + "; where each sample is to count the "
            "same, whatever its size, take the mean of each sample first",
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "elements of the mean": [
                    {"forward": f, **{f"rank {n}": e.elements[term] for n, e in row.items()}}
                    for f, row in list(unequal.items())[:8]
                ]
            },
            at=group.any.rank.wall(event.at),
        )

    def _judge_reduced(self, group: Replicas) -> Iterator[Finding]:
        seen = {
            n: e for n, m in group.members.items() for e in m.of(ReducedInGraph, linear=False)[:1]
        }
        if not seen or group.left_out or not group.any.seen.averages or _edited(group):
            return
        number, event = next(iter(seen.items()))
        member, size = group.members[number], event.size
        backward = member.rank.location(event.backward_site)
        first = own_step(member, event.step)
        last = max(first, member.last_step)
        shape = " x ".join(map(str, event.shape))
        yield self.finding(
            rule=REDUCED,
            severity=Severity.WARNING,
            ranks=tuple(seen),
            steps=Steps(first, last, last - first + 1),
            subjects=(member.wrapped.kind,),
            location=member.rank.location(event.site),
            label="autograd does not see this sum",
            related=(Related("its backward", backward),) if backward else (),
            summary=f"a tensor ({shape}) that the loss is computed from is all-reduced in place: "
            f"the gradient that flows through it is {size} times too small",
            cause="each rank gets the gradient of its own part of the sum only, and DDP adds these "
            f"up and divides them by {size}",
            fix="`from torch.distributed.nn.functional import all_reduce`, and `tensor = "
            "all_reduce(tensor)`, whose backward sums over the ranks as well; or multiply what the "
            "loss computes from it by the world size",
            fix_kind=FixKind.TEMPLATE,
            evidence={"shape": shape, "ranks": size},
            at=member.rank.wall(event.at),
        )

    def _judge_gathered(self, group: Replicas) -> Iterator[Finding]:
        if group.left_out or not group.any.seen.averages or _edited(group):
            return
        same, apart = gathered_losses({n: m.of(GatheredInGraph) for n, m in group.members.items()})
        if not (found := same or apart):
            return
        number, member = next(iter(group.members.items()))
        forwards = next(iter(found.values()))
        event = forwards[0][number]
        size, shape = event.size, " x ".join(map(str, event.shape)) or "one number"
        own = f"the backward of `{event.function}`" if event.function else "autograd"
        given = member.rank.location(event.gives_back)
        calls = [member.rank.location(rows[0][number].site) for rows in found.values()]
        calls = calls if given else calls[1:]
        backward = member.rank.location(event.backward_site)
        first = own_step(member, event.step)
        last = max(first, member.last_step)
        scaled = takes_out_factors(member)
        if same:
            severity = Severity.NOTE if scaled else Severity.WARNING
            summary = (
                f"all ranks compute the same loss from a gathered tensor ({shape} of each), and "
                f"{own} gives each rank its own part of the gradient: what flows through it is "
                f"{size} times too small"
            )
            cause = (
                f"DDP adds up the parts of the {size} ranks and divides them by {size}; each would "
                "have to be the sum over the losses of all ranks"
            )
            if scaled:
                cause += f"; {scaled} takes out a factor that all gradients have in common"
        else:
            severity = Severity.WARNING if event.function else Severity.NOTE
            share = 100 * event.dropped / event.norm
            summary = (
                f"each rank's loss depends on a tensor gathered from all ranks ({shape} of each), "
                f"and {own} drops the gradient of the other ranks' parts: {share:.0f} % of it, by "
                "its norm"
            )
            cause = (
                "what the losses of the other ranks say of this rank's tensor never reaches it: "
                "the gradients are not those of the mean loss over all ranks"
            )
        yield self.finding(
            rule=GATHERED if same else OTHERS,
            severity=severity,
            ranks=tuple(group.members),
            steps=Steps(first, last, last - first + 1),
            subjects=(member.wrapped.kind,),
            location=given or member.rank.location(event.site),
            label="this rank's part of the gradient only"
            if given
            else "its gradient does not reach the other ranks",
            related=(
                *(Related("gathered here", place) for place in calls if place),
                *((Related("its backward", backward),) if backward else ()),
            ),
            summary=summary,
            cause=cause,
            fix=f"{DIFFERENTIABLE}; or `dist.all_reduce` the gradient in the function's own "
            "backward before its part is taken",
            fix_kind=FixKind.TEMPLATE,
            evidence={"shape": shape, "ranks": size, "forwards compared": len(forwards)},
            at=member.rank.wall(event.at),
        )

    def _judge_cut(self, run: Run, group: Replicas) -> Iterator[Finding]:
        if group.left_out:
            return
        model = group.any.model
        for line, every in run.by_line(GatheredWithoutGradient).items():
            events = {n: e for n, e in every.items() if n in group.members and e.model == model}
            if not events:
                continue
            number, event = next(iter(events.items()))
            member = group.members[number]
            backward = member.rank.location(event.backward_site)
            shape = " x ".join(map(str, event.shape)) or "one number"
            first = max(0, own_step(member, event.step) - event.backwards + 1)
            last = max(first, member.last_step)
            yield self.finding(
                rule=CUT,
                severity=Severity.WARNING,
                ranks=tuple(events),
                steps=Steps(first, last, last - first + 1),
                subjects=(member.wrapped.kind,),
                location=line,
                label="the gradient ends here",
                related=(Related("its backward", backward),) if backward else (),
                summary=f"the loss is computed from a tensor gathered from all ranks ({shape} of "
                "each), which has no gradient: nothing that made this rank's part learns from it",
                cause="the collective writes into tensors that autograd does not follow, and this "
                "rank's own tensor has no other part in the loss",
                fix=DIFFERENTIABLE,
                fix_kind=FixKind.TEMPLATE,
                evidence={"shape": shape, "ranks": event.size, "backwards seen": event.backwards},
                at=member.rank.wall(event.at),
            )


def _averager(group: Replicas) -> str:
    """What averages the gradients."""
    return "DDP" if group.any.model >= 0 else "FSDP"


def _fix(group: Replicas, known: Iterable[int]) -> str:
    last = group.any.last_step
    backwards = Counter(s for s in _optimizer_steps(group, known).values() if s < last)
    accumulates = max(backwards.values(), default=1) > 1
    return by_count(counted(group.any.wrapped.by), accumulates=accumulates)


def _steps(group: Replicas, unequal: Iterable[int], known: Iterable[int]) -> Steps:
    """The optimizer steps of the forwards that are unequal, among those of the known ones."""
    step = _optimizer_steps(group, known)
    steps = sorted({step[f] for f in unequal})
    since = sum(s >= steps[0] for s in {*step.values()})
    return Steps(steps[0], steps[-1], len(steps), since)


def _optimizer_steps(group: Replicas, forwards: Iterable[int]) -> dict[int, int]:
    """By forward, the optimizer step it belongs to."""
    member = group.any
    last = max(0, member.last_step)
    total = {e.forward: e.step for e in member.of(LossMeans)}
    total |= {e.forward: e.step for e in member.of(BatchSeen) if e.step >= 0}
    return {f: min(last, own_step(member, total[f]) if f in total else f) for f in forwards}


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


def _edited(group: Replicas) -> bool:
    """Whether the program changes gradients itself, maybe by the counts."""
    return any(_edits(m) for m in group.members.values())


def _edits(member: Member) -> list[Edited]:
    """The modifications of gradients by anything but torch's own functions."""
    edits = member.of(Edited, kind="gradients", changed=True, counted=False)
    return [e for e in edits if e.beside or not e.functions]


def _sums(member: Member) -> Series[BatchSeen]:
    """The batches by forward; none where the loss is not always a sum."""
    sums = series(member.rank, BatchSeen, "forward", model=member.model)
    return sums if all(e.reduction == "sum" for e in member.of(BatchSeen)) else Series({})


def _counted(group: Replicas) -> dict[int, dict[int, BatchSeen]]:
    """By forward that all ranks recorded with how many elements count, their records."""
    tables = [
        {e.forward: e for e in m.of(BatchSeen) if e.valid and e.weight}
        for m in group.members.values()
    ]
    common = set.intersection(*map(set, tables)) if tables else set()
    return {
        f: {n: t[f] for n, t in zip(group.members, tables, strict=True)} for f in sorted(common)
    }


def _means(group: Replicas) -> dict[int, dict[int, LossMeans]]:
    """By forward of which all ranks have the same terms of the loss on record, their records."""
    tables = [series(m.rank, LossMeans, "forward", model=m.model) for m in group.members.values()]
    found: dict[int, dict[int, LossMeans]] = {}
    for forward in sorted({f for table in tables for f in table}):
        row = {n: t.at(forward) for n, t in zip(group.members, tables, strict=True)}
        known = {n: e for n, e in row.items() if e is not None}
        if len(known) == len(row) and len({len(e.elements) for e in known.values()}) == 1:
            found[forward] = known
    return found
