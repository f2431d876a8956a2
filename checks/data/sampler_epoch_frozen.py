"""DDP503."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.data.loaders import Epoch, Loader, Reader, in_order, loaders
from ddpdoctor.analysis.data.phrases import dataset, no_loader, related, spelled, steps_from
from ddpdoctor.events import EpochEnded, ForwardInput, OptimizerSeen, StepDone, Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run, counted, whom

FEWEST = 4
"""Samples in an epoch whose order can hardly repeat by chance."""

FEWEST_BATCHES = 2
"""Batches in an epoch up to which a sampler of one's own may mean to repeat them."""

CYCLE = re.compile(r"\bcycle\(")


class SamplerEpochFrozen(Check):
    """`set_epoch` is not called: every epoch has the same order

    ## What it finds
    A distributed sampler that is to shuffle, hands out the very same order in one epoch after
    another, and began each of them with the same epoch number, also where one iterator of the
    loader goes on over all epochs and only the sampler begins anew. So for samplers of one's own
    whose code goes by what `set_epoch` stores, or seeds its generator by an `epoch`. And batches of
    a first epoch that `itertools.cycle(loader)` keeps and hands out for ever.

    ## How it knows
    As an iteration begins, each rank records the sampler's `epoch`, and how often `set_epoch` was
    called; meanwhile, whether torch's sampler begins anew beneath it by the same number; of what is
    delivered, a digest of all indices in their order and the first 16. Epochs that train are
    compared with the one before on the same rank: by the digest, or by their first indices where
    one was left early. The finding is proven.

    ## Why it hurts
    `DistributedSampler` shuffles by `seed + epoch`, and only `set_epoch` changes that: the batches
    are the same in every epoch, and so is each rank's share of the data.

    ## How to fix it
    `sampler.set_epoch(epoch)` at the top of every epoch, before the loader is iterated. Instead of
    `cycle(loader)`, a loop that iterates the loader anew.

    ## When it stays quiet
    `shuffle=False`; a single epoch; evaluation; orders that differ although the number does not
    (samplers that keep count themselves); samplers of one's own whose order does not depend on the
    epoch, or of one or two batches; a training that begins anew with a new model.
    """

    code = "DDP503"
    name = "sampler-epoch-frozen"
    family = "data"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        return no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        for loader in loaders(run):
            if loader.trains:
                yield from self._judge(run, loader)

    def _judge(self, run: Run, loader: Loader) -> Iterator[Finding]:
        kept = {r: n for r, reader in loader.readers.items() if (n := _cycled(reader))}
        if kept:
            yield self._report_cycle(run, loader, kept)
            return
        frozen = {r: n for r, reader in loader.readers.items() if (n := _repeats(reader))}
        if not frozen:
            return
        reader = loader.readers[min(frozen)]
        repeats = frozen[min(frozen)]
        trained = sum(e.trained > 0 for e in reader.epochs) + _again(reader)
        always = repeats + 1 >= trained
        reported = f"{trained} of {trained}" if always else f"{repeats} of {trained}"
        what = "had the same order" if always else "had the order of the one before"
        called = max(e.began.epochs_set for e in reader.epochs)
        name = reader.seen.epoch_name or "epoch"
        why = "`set_epoch` is never called on the sampler"
        if not reader.seen.shuffle:  # calls are only seen on torch's own
            number = reader.epochs[0].began.sampler_epoch
            why = f"{reader.seen.sampler} goes by its `{name}`, which stays {number}: "
            why += "`set_epoch` is not called" if reader.seen.sets_epoch else "nothing sets it"
        elif called:
            why = f"`set_epoch` was called {called} times, but {repeats} of the epochs had the "
            why += "number of the one before"
        yield self.finding(
            ranks=tuple(frozen),
            steps=steps_from(reader, _first_repeat(reader)),
            subjects=(reader.seen.dataset,),
            location=reader.sampler_at,
            label="shuffles by seed + epoch, and the epoch never changes"
            if reader.seen.shuffle
            else "its sampler goes by the epoch, which never changes",
            related=related(reader, sampler=False),
            summary=f"{reported} epochs over {dataset(reader)} {what} on "
            f"{whom(frozen, run.world_size)}",
            cause=f"{why}, so it shuffles alike every time",
            fix=f"`sampler.{'set_epoch(epoch)' if reader.seen.sets_epoch else f'{name} = epoch'}` "
            "at the top of every epoch, before the loader is iterated",
            fix_kind=FixKind.SAFE,
            evidence={
                "epoch numbers of the sampler": [e.began.sampler_epoch for e in reader.epochs[:20]],
                "first indices": {
                    f"epoch {e.number}": spelled(e.ended.head[:8])
                    for e in reader.epochs[:3]
                    if e.ended
                },
                **({"set_epoch calls": called} if reader.seen.shuffle else {}),
            },
            at=reader.rank.wall(reader.epochs[-1 if _again(reader) else 1].began.at),
        )

    def _report_cycle(self, run: Run, loader: Loader, kept: dict[int, int]) -> Finding:
        reader = loader.readers[min(kept)]
        first, later = reader.epochs[0], kept[min(kept)]
        return self.finding(
            ranks=tuple(kept),
            subjects=(reader.seen.dataset,),
            location=reader.loop_at,
            label="keeps the batches of the first epoch, and repeats these",
            related=related(reader, loop=False),
            summary=f"the {first.batches} batches of the first epoch over {dataset(reader)} are "
            f"trained on again and again on {whom(kept, run.world_size)}, in the same order, for "
            f"{counted(later, 'step')} more",
            cause="`itertools.cycle` keeps all that it was handed: the loader is read once only, "
            "so nothing is shuffled or augmented again, and every batch stays in memory",
            fix="iterate the loader itself in every epoch: `while True:` around "
            "`sampler.set_epoch(epoch)` and `for batch in loader:`, in a generator where `next` is "
            "called on it",
            fix_kind=FixKind.CHECK,
            evidence={
                "iterations over the loader": len(reader.epochs),
                "batches that it delivered": first.batches,
                "steps since": later,
            },
            at=reader.rank.wall(_end(first)),
        )


def _cycled(reader: Reader) -> int:
    """Steps since a loader, which `itertools.cycle` iterates, ran dry for the first and last time;
    0 where these need not be on the batches of before."""
    first, spot, rank = reader.epochs[0], reader.loop_at, reader.rank
    named = spot is not None and CYCLE.search(spot.source)
    if not named or not reader.seen.shuffle or len(reader.epochs) > 1 or not first.exhausted:
        return 0
    end, steps = _end(first), Counter[int]()
    for step in rank.of(StepDone):
        steps[step.optimizer] += step.count if step.at > end else 0
    others = (
        e.batches for e in rank.of(EpochEnded) if e.at > end and e.loader != first.seen.loader
    )
    inputs = [e for e in rank.of(ForwardInput) if e.digest and e.rows]
    before = {e.digest for e in inputs if e.at <= end}
    again = any(e.digest in before for e in inputs if e.at > end)
    count = max(steps.values(), default=0)
    return count if first.batches > 1 and (again or count > sum(others)) else 0


def _end(epoch: Epoch) -> float:
    return epoch.ended.at if epoch.ended is not None else epoch.began.at


def _repeats(reader: Reader) -> int:
    """How many epochs had the order of the one before and the same number in the sampler."""
    own = reader.seen.shuffle is None and reader.seen.by_epoch
    if not reader.seen.shuffle and not own:
        return 0
    trained = [e for e in reader.epochs if e.ended is not None and e.ended.backwards]
    whole = [e for e in trained if e.exhausted]
    left = [e for e in trained if not e.exhausted]
    repeats = sum(_same(reader, a, b) for a, b in itertools.pairwise(whole))
    again = sum(_same(reader, a, b) for a, b in itertools.pairwise(left))
    if own and not any(e.batches > FEWEST_BATCHES for e in trained):
        return 0  # the same again and again, to see whether a model can learn it
    # A single batch taken twice may be a look at its shape.
    repeats += again if again > 1 or any(e.batches > 1 for e in left) else 0
    beneath = _again(reader)
    in_turn = (e for e in trained if e.exhausted or e.batches > 1)
    most = max(repeats, sum(_same(reader, a, b) for a, b in itertools.pairwise(in_turn)))
    return most + beneath if repeats or beneath else 0


def _first_repeat(reader: Reader) -> Epoch | None:
    """The first epoch that had the order of the one before it, where it is one by itself."""
    trained = [e for e in reader.epochs if e.ended is not None and e.ended.backwards]
    return next((b for a, b in itertools.pairwise(trained) if _same(reader, a, b)), None)


def _again(reader: Reader) -> int:
    """How often the sampler began its order anew beneath an iteration over the loader."""
    if not reader.seen.shuffle or reader.seen.own_order:
        return 0
    ended = [e.ended for e in reader.epochs if e.ended and e.trained]
    return sum(e.again for e in ended if e.samples > FEWEST * e.again)


def _begins_anew(rank: Rank, old: Epoch, new: Epoch) -> bool:
    """Whether another model is trained in `new`: one was wrapped since; where none ever is, all
    optimizers that step took their first step there."""
    start, wrapped = new.began.at, rank.of(Wrapped)
    if wrapped:
        return any(old.began.at < e.at < start for e in wrapped)
    first = {e.optimizer: e.at for e in rank.of(OptimizerSeen)}
    steps = (e.optimizer for e in rank.of(StepDone) if start < e.at <= _end(new))
    taken = [first.get(optimizer, 0.0) for optimizer in steps]
    return min(taken, default=0.0) > start


def _same(reader: Reader, old: Epoch, new: Epoch) -> bool:
    a, b = old.ended, new.ended
    if a is None or b is None or old.began.sampler_epoch is None:
        return False
    if _begins_anew(reader.rank, old, new):
        return False
    if old.began.sampler_epoch != new.began.sampler_epoch or in_order(a):
        return False
    if a.samples == b.samples:
        return a.order == b.order and len(a.head) >= FEWEST
    shorter = min(len(a.head), len(b.head))  # one was left early: compare how they begin
    return shorter >= FEWEST and a.head[:shorter] == b.head[:shorter]
