"""DDP503."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.content import rows
from ddpdoctor.analysis.data.loader_check import LoaderCheck, dataset, related, spelled, steps_from
from ddpdoctor.analysis.data.loaders import Epoch, Loader, Reader, in_order, loaders, same_order
from ddpdoctor.analysis.data.repeated_epochs import begins_anew, end_of, goes_back, read_on
from ddpdoctor.analysis.data.streams import examined_epochs, repeated_order
from ddpdoctor.analysis.data.thresholds import FEWEST_REPEATED, OVERFITTED_BATCHES
from ddpdoctor.events import EpochEnded, ForwardInput, RankStarted, StepDone
from ddpdoctor.report.findings import Finding, FixKind, Severity
from ddpdoctor.run import Run, counted, listed, whom

NUMBERS_OF_A_LOOP = 3
"""Different epoch numbers after which one that comes twice is no fault of the loop."""

REPEATED = "epoch-number-repeated"
_BEGUN = re.compile(r"\biter\(([A-Za-z_][\w.]*)\)")
"""What begins a pass over a loader that no `for` goes through."""
_LOOPED = re.compile(rf"\bin (?:[\w.]+\()*([A-Za-z_][\w.]*)(?=[,):])|{_BEGUN.pattern}")
"""What a loop goes through: `loader` in `for n, batch in enumerate(loader):`."""
GOES_ON = "resumed-in-another-epoch"
FEW = 0.25
"""Where fewer of the epochs than that repeat the order of the one before, it is a note: what is
tried before the training, such as the search for a learning rate."""

CYCLE = re.compile(r"\bcycle\(")

SHARED = (
    "let the epoch reach the workers: keep it in shared memory (`self.epoch = torch.zeros(1, "
    "dtype=torch.long).share_memory_()`, `self.epoch.fill_(epoch)` in `set_epoch`, "
    "`int(self.epoch)` in `__iter__`), or leave out `persistent_workers=True`"
)
"""The fix where each worker has its own copy of the epoch."""


ITERATED = (
    "make the loader once and keep it: what makes a new one makes a new sampler, whose epoch is 0; "
    "then `loader.sampler.set_epoch(epoch)` before each pass over that loader"
)


class SamplerEpochFrozen(LoaderCheck):
    """`set_epoch` is not called: every epoch has the same order

    ## What it finds
    A shuffling distributed sampler that yields the same order in one epoch after another, each with
    the same epoch number. Also if one iterator of the loader spans all epochs and only the sampler
    restarts; custom samplers and iterable datasets that use what `set_epoch` stores, or seed their
    generator with an `epoch`; batches of the first epoch that `itertools.cycle(loader)` repeats
    forever. For iterable datasets also an epoch that is set, but does not reach the copies of the
    dataset in persistent workers, and a random generator that the dataset keeps: workers that are
    started anew in every epoch get it in the same state each time.

    ## How it knows
    When an iteration begins, each rank records the sampler's `epoch`, and how often `set_epoch` was
    called; during it, whether torch's sampler restarts with the same number; of the indices
    delivered, the first 16 and a digest of all in order. Training epochs are compared with the one
    before on the same rank: by the digest, or by their first indices if one was left early. A
    stream has no indices: of its epochs 0, 1, 2, 4, 8 and so on, digests of the first samples (some
    256) are compared, and all of them have to be equal. A generator that a stream keeps is told by
    its state when workers are started, in the first two epochs, and by what these workers then draw
    from it. Where a run goes on within an epoch, the samples that are left of it are looked for in
    the next epochs: of a proper shuffle every rank gets others each time. The finding is proven.

    ## Why it hurts
    `DistributedSampler` shuffles by `seed + epoch`, and only `set_epoch` changes that. The batches
    are the same in every epoch, and so is each rank's share of the data.

    ## How to fix it
    `sampler.set_epoch(epoch)` at the start of every epoch, before the loader is iterated. Instead
    of `cycle(loader)`, iterate the loader anew in every epoch. Where persistent workers read a
    stream, its epoch must be in shared memory: `torch.zeros(1, dtype=torch.long).share_memory_()`.
    Where workers draw from a generator of the dataset, `persistent_workers=True`, or a generator
    made in `__iter__` from the seed and an epoch that the program sets.

    ## When it stays quiet
    - An epoch that is run again from an earlier state: weights are loaded before it, or it is the
      only one of several that comes twice.
    - `shuffle=False`, a single epoch, or evaluation.
    - Only a note: fewer than a quarter of the epochs repeat the order of the one before.
    - The orders differ although the number does not (samplers that count epochs themselves).
    - A custom sampler or a stream whose order does not depend on the epoch, or that has one or two
      batches; a stream whose `shuffle` is off.
    - A stream that makes or seeds its generator anew for each epoch: its order may be fixed on
      purpose. Likewise where nothing is drawn, or where `worker_init_fn` seeds it.
    - Training restarts with a new model.
    - The rest of an epoch has fewer than 16 samples on a rank, or each rank has the same share of
      the data in every epoch.
    """

    code = "DDP503"
    name = "sampler-epoch-frozen"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        "set-epoch-not-called": "`set_epoch` is never called on torch's sampler",
        REPEATED: "`set_epoch` is called, but epochs repeat the number before",
        "custom-sampler": "a custom sampler shuffles by an epoch number that never changes",
        "stream-epoch-not-set": "an iterable dataset shuffles by an epoch that never changes",
        "stream-epoch-not-in-workers": "the epoch of an iterable dataset is set, but persistent "
        "workers keep their own copy of it",
        "stream-generator-copied": "each new worker draws from a copy of the generator that an "
        "iterable dataset keeps, in the same state in every epoch",
        GOES_ON: "the rest of an epoch with which a run goes on has the shuffle of a later epoch",
        "cycled-loader": "`itertools.cycle` repeats the batches of the first epoch",
    }

    def examine(self, run: Run) -> Iterable[Finding]:
        for loader in loaders(run):
            if loader.trains:
                yield from self._judge(run, loader)

    def _judge(self, run: Run, loader: Loader) -> Iterator[Finding]:
        cycled = {r: n for r, reader in loader.readers.items() if (n := _cycled(reader))}
        if cycled:
            yield self._report_cycle(run, loader, cycled)
            return
        if loader.first.seen.iterable:
            yield from self._judge_stream(run, loader)
            yield from self._judge_generators(run, loader)
            return
        frozen = {
            r: n
            for r, reader in loader.readers.items()
            if (n := _repeats(reader)) and not _resumed(reader, n)
        }
        if not frozen:
            yield from self._judge_resumed(run, loader)
            return
        reader = loader.readers[min(frozen)]
        repeats = frozen[min(frozen)]
        trained = sum(e.trained > 0 for e in reader.epochs) + _restarts(reader)
        always = repeats + 1 >= trained
        which = "both epochs" if always and trained == 2 else f"all {trained} epochs"
        what = "have the same order"
        if not always:
            which = f"{repeats} of {counted(trained, 'epoch')}"
            what = "repeat the order of the one before"
        called = max(e.began.epochs_set for e in reader.epochs)
        name = reader.seen.epoch_name or "epoch"
        rule, why = "set-epoch-not-called", "`set_epoch` is never called on the sampler"
        if elsewhere := reader.rank.location(reader.epochs[-1].began.set_elsewhere):
            why += f" that is iterated ({elsewhere} calls it on another one of the same dataset)"
        if not reader.seen.shuffle:  # calls are only seen on torch's own
            number = reader.epochs[0].began.sampler_epoch
            rule, why = "custom-sampler", f"{reader.seen.sampler} shuffles by its `{name}`, which "
            why += f"stays {number}: "
            why += "`set_epoch` is not called" if reader.seen.sets_epoch else "nothing sets it"
        elif called:
            rule = REPEATED
            why = f"`set_epoch` is called {counted(called, 'time')}, but {repeats} of the epochs "
            why += "have the number of the one before"
        # What is given as `batch_sampler` is its own sampler here.
        batches = reader.seen.sampler == reader.seen.batch_sampler
        holder = "loader.batch_sampler" if batches else _sampler_name(reader)
        never, orders = "never changes", "every shuffle gives the same order"
        if rule == REPEATED:
            never, orders = "is sometimes that of the one before", "these have the same order"
        yield self.of_reader(
            reader,
            rule=rule,
            severity=Severity.NOTE
            if rule == REPEATED and repeats < FEW * trained
            else self.severity,
            ranks=tuple(frozen),
            steps=steps_from(reader, _first_repeat(reader)),
            location=reader.sampler_at,
            label=f"shuffles by seed + epoch, but the epoch {never}"
            if reader.seen.shuffle
            else f"the sampler shuffles by the epoch, which {never}",
            related=related(reader, sampler=False),
            summary=f"{which} over {dataset(reader)} {what} on {whom(frozen, run.world_size)}",
            cause=f"{why}, so {orders}",
            fix=ITERATED
            if elsewhere
            else _fix(reader, holder, name, numbered=rule == REPEATED)
            + (": `loader.sampler` is not what orders here" if batches else ""),
            fix_kind=FixKind.CHECK if elsewhere else FixKind.SAFE,
            evidence={
                "epoch numbers of the sampler": [e.began.sampler_epoch for e in reader.epochs[:20]],
                "first indices": {
                    f"epoch {e.number}": spelled(e.ended.head[:8])
                    for e in reader.epochs[:3]
                    if e.ended
                },
                **({"set_epoch calls": called} if reader.seen.shuffle else {}),
            },
            at=reader.rank.wall(reader.epochs[-1 if _restarts(reader) else 1].began.at),
        )

    def _judge_stream(self, run: Run, loader: Loader) -> Iterator[Finding]:
        """The finding about an iterable dataset."""
        frozen = {r: same for r, reader in loader.readers.items() if (same := _alike(reader))}
        if not frozen:
            return
        reader, same = loader.readers[min(frozen)], frozen[min(frozen)]
        seen, epochs = reader.seen, examined_epochs(reader)
        numbers = [e.began.sampler_epoch for e in epochs]
        name = f"`{seen.epoch_name or 'epoch'}`"
        told = "set_epoch(epoch)" if seen.sets_epoch else f"{seen.epoch_name or 'epoch'} = epoch"
        told = f"call `{told}` on the dataset at the start of every epoch, before the loader is "
        told += "iterated"
        unset = any(old.began.sampler_epoch == new.began.sampler_epoch for old, new in same)
        rule, label = "stream-epoch-not-set", "shuffles by its epoch, which never changes"
        why = f"{seen.dataset} shuffles by its {name}, which stays "
        why += f"{same[0][0].began.sampler_epoch}: "
        why += "`set_epoch` is not called" if seen.sets_epoch else "nothing sets it in this process"
        fix = f"{told}; and {SHARED}" if seen.epoch_copied else told
        if not unset:
            rule, fix = "stream-epoch-not-in-workers", SHARED
            label = "its workers never get the new epoch"
            why = f"{name} is set in this process ({', '.join(map(str, numbers[:6]))}), but each "
            why += "persistent worker keeps the copy of the dataset that it was started with"
        always = len(same) + 1 == len(epochs)
        which = "both epochs" if always and len(epochs) == 2 else f"all {len(epochs)} epochs"
        what = f"{which} compared have the same order"
        if not always:
            what = (
                f"{len(same)} of {len(epochs)} epochs compared repeat the order of the one before"
            )
        yield self.of_reader(
            reader,
            rule=rule,
            ranks=tuple(frozen),
            steps=steps_from(reader, same[0][1]),
            location=reader.made_at,
            label=label,
            related=related(reader, sampler=False),
            summary=f"in training on {dataset(reader)}, {what} on {whom(frozen, run.world_size)}",
            cause=f"{why}, so every shuffle gives the same order",
            fix=fix,
            fix_kind=FixKind.CHECK,
            evidence={
                "epochs compared": [e.number for e in epochs],
                "epoch numbers of the dataset": numbers,
                "samples compared in each": min(len(rows(e)) for pair in same for e in pair),
            },
            at=reader.rank.wall(same[0][1].began.at),
        )

    def _judge_generators(self, run: Run, loader: Loader) -> Iterator[Finding]:
        """The finding about a generator that an iterable dataset keeps."""
        copied = {r: own for r, reader in loader.readers.items() if (own := _copied(reader))}
        if not copied:
            return
        reader, own = loader.readers[min(copied)], copied[min(copied)]
        epochs = examined_epochs(reader)
        which = "both epochs" if len(epochs) == 2 else f"all {len(epochs)} epochs"
        yield self.of_reader(
            reader,
            rule="stream-generator-copied",
            ranks=tuple(copied),
            steps=steps_from(reader, epochs[1]),
            location=reader.made_at,
            label="its workers are started anew in every epoch",
            related=related(reader, sampler=False),
            summary=f"in training on {dataset(reader)}, {which} compared have the same order on "
            f"{whom(copied, run.world_size)}",
            cause=f"the workers draw from {listed([f'`{name}`' for name in own])}, but each draws "
            "from a copy that ends with the worker: in this process the generator never advances, "
            "so the workers of every epoch get it in the same state",
            fix="`persistent_workers=True`, so that the workers keep their copies; or make the "
            "generator in `__iter__`, seeded by an epoch that the program sets before each "
            "iteration over the loader",
            fix_kind=FixKind.CHECK,
            evidence={
                "epochs compared": [e.number for e in epochs],
                "state of the generator when workers were started": own,
                "samples compared in each": min(len(rows(e)) for e in epochs),
            },
            at=reader.rank.wall(epochs[1].began.at),
        )

    def _judge_resumed(self, run: Run, loader: Loader) -> Iterator[Finding]:
        """The finding about the rest of an epoch that is of the shuffle of a later one."""
        resumed = {
            r: two for r, reader in loader.readers.items() if (two := read_on(run, r, reader))
        }
        if resumed.keys() != loader.readers.keys():
            return
        reader = loader.readers[min(resumed)]
        rest, later = resumed[min(resumed)]
        number = later.began.sampler_epoch
        numbered = "" if number is None else f", that of epoch number {number}"
        set_back = (
            "the epoch's number was counted from 0 again when the run went on, did not advance at "
            "the end of the resumed epoch (a loader made for its rest counts for itself), or what "
            "was set is overwritten before the order is drawn"
        )
        if reader.seen.shuffle and not number and not later.began.epochs_set:
            set_back = "`set_epoch` is not called on the sampler"
        yield self.of_reader(
            reader,
            rule=GOES_ON,
            ranks=tuple(resumed),
            steps=steps_from(reader, later, only=True),
            location=reader.loop_at,
            label=f"goes on in the middle of an epoch, and reads these samples again after "
            f"{counted(later.began.step - rest.began.step, 'step')}",
            related=related(reader, loop=False),
            summary=f"the {rest.samples} samples with which training on {dataset(reader)} goes on "
            f"in the middle of an epoch are read again in a later one, on "
            f"{whom(resumed, run.world_size)}",
            cause=f"both are of the same shuffle{numbered}: {set_back}",
            fix="from the resumed epoch on, set the number of each epoch right before its loop, on "
            "what the loop iterates where that has a `set_epoch` (`loader.set_epoch(epoch)`: it "
            "may set its sampler's back), else on the sampler (`sampler.set_epoch(epoch)`)",
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "samples read in the rest of the epoch": rest.samples,
                "of these in the later epoch": rest.samples,
                "samples of the later epoch": later.samples,
                "epoch numbers of the sampler": [e.began.sampler_epoch for e in reader.epochs[:20]],
            },
            at=reader.rank.wall(later.began.at),
        )

    def _report_cycle(self, run: Run, loader: Loader, cycled: dict[int, int]) -> Finding:
        """The finding about `itertools.cycle`; `cycled` are the steps since, by rank."""
        reader = loader.readers[min(cycled)]
        first, later = reader.epochs[0], cycled[min(cycled)]
        return self.of_reader(
            reader,
            rule="cycled-loader",
            ranks=tuple(cycled),
            location=reader.loop_at,
            label="repeats the batches of the first epoch",
            related=related(reader, loop=False),
            summary=f"the {first.batches} batches of the first epoch over {dataset(reader)} are "
            f"repeated in the same order for {counted(later, 'more step')} on "
            f"{whom(cycled, run.world_size)}",
            cause="`itertools.cycle` keeps every batch and reads the loader only once, so nothing "
            "is shuffled or augmented again, and all batches stay in memory",
            fix="iterate the loader anew in every epoch: `while True:` around "
            "`sampler.set_epoch(epoch)` and `for batch in loader:`, in a generator if the loop "
            "calls `next`",
            fix_kind=FixKind.CHECK,
            evidence={
                "iterations over the loader": len(reader.epochs),
                "batches that it delivered": first.batches,
                "steps since": later,
            },
            at=reader.rank.wall(end_of(first)),
        )


def _cycled(reader: Reader) -> int:
    """Steps since a loader that `itertools.cycle` iterates was exhausted, once and for all; 0 where
    these steps may be on other batches."""
    first, spot, rank = reader.epochs[0], reader.loop_at, reader.rank
    named = spot is not None and CYCLE.search(spot.source)
    if not named or not reader.seen.shuffle or len(reader.epochs) > 1 or not first.exhausted:
        return 0
    end, steps = end_of(first), Counter[int]()
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


def _alike(reader: Reader) -> list[tuple[Epoch, Epoch]]:
    """Examined epochs of a stream in the order of the examined epoch before, where that is because
    the epoch that the stream shuffles by did not change, or did so in this process only."""
    if not reader.seen.by_epoch or reader.seen.shuffle is False:
        return []
    return [
        (old, new)
        for old, new in itertools.pairwise(examined_epochs(reader))
        if old.began.sampler_epoch is not None
        and (old.began.sampler_epoch == new.began.sampler_epoch or reader.seen.epoch_copied)
        and not begins_anew(reader.rank, old, new)
        and repeated_order(old, new)
    ]


def _copied(reader: Reader) -> dict[str, int]:
    """The generators of a stream that new workers got in the same state in the first two epochs and
    drew from, where all examined epochs have the same order."""
    seen, epochs = reader.seen, examined_epochs(reader)
    if seen.by_epoch or seen.persistent or seen.shuffle is False or len(epochs) < 2:
        return {}
    if [e.number for e in epochs[:2]] != [0, 1]:
        return {}
    first, second = (_drawn_by_workers(e) for e in epochs[:2])
    same = all(
        repeated_order(old, new) and not begins_anew(reader.rank, old, new)
        for old, new in itertools.pairwise(epochs)
    )
    return {n: state for n, state in first.items() if second.get(n) == state} if same else {}


def _drawn_by_workers(epoch: Epoch) -> dict[str, int]:
    workers = epoch.ended.workers if epoch.ended else ()
    return {name: state for worker in workers for name, state in worker.own.items()}


def _repeats(reader: Reader) -> int:
    """How many epochs had the order of the one before with the same epoch number."""
    own = reader.seen.shuffle is None and reader.seen.by_epoch
    if not reader.seen.shuffle and not own:
        return 0
    trained = [e for e in reader.epochs if e.ended is not None and e.ended.backwards]
    whole = [e for e in trained if e.exhausted]
    left = [e for e in trained if not e.exhausted]
    repeats = sum(_same(reader, a, b) for a, b in itertools.pairwise(whole))
    again = sum(_same(reader, a, b) for a, b in itertools.pairwise(left))
    if own and not any(e.batches > OVERFITTED_BATCHES for e in trained):
        return 0  # few batches are repeated on purpose, to test whether a model can overfit them
    # A single batch taken twice may only serve to see its shape.
    repeats += again if again > 1 or any(e.batches > 1 for e in left) else 0
    beneath = _restarts(reader)
    in_turn = (e for e in trained if e.exhausted or e.batches > 1)
    most = max(repeats, sum(_same(reader, a, b) for a, b in itertools.pairwise(in_turn)))
    return most + beneath if repeats or beneath else 0


def _first_repeat(reader: Reader) -> Epoch | None:
    """The first epoch that had the order of the one before it; None where the sampler only
    restarted within an epoch."""
    trained = [e for e in reader.epochs if e.ended is not None and e.ended.backwards]
    return next((b for a, b in itertools.pairwise(trained) if _same(reader, a, b)), None)


def _restarts(reader: Reader) -> int:
    """How often torch's sampler restarted its order within an iteration over the loader."""
    if not reader.seen.shuffle or reader.seen.own_order:
        return 0
    ended = [e.ended for e in reader.epochs if e.ended and e.trained]
    return sum(e.again for e in ended if e.samples > FEWEST_REPEATED * e.again)


def _fix(reader: Reader, holder: str, name: str, *, numbered: bool) -> str:
    """What sets the number of each epoch, where its pass over the loader begins: at the head of a
    loop, or by `iter` within one; `numbered`: the program does set it, but not for each pass."""
    spot = reader.loop_at
    begun = _BEGUN.search(spot.source) if spot and spot.function != "__iter__" else None
    number = "n" if begun or numbered else "epoch"
    call = (
        f"`{holder}.{f'set_epoch({number})' if reader.seen.sets_epoch else f'{name} = {number}'}`"
    )
    if number == "epoch":
        return f"{call} at the start of every epoch, before the loader is iterated"
    where = f"before every `{begun[0]}`" if begun else "before every pass over the loader"
    return f"{call} {where}, where `n` is one more each time"


def _sampler_name(reader: Reader) -> str:
    """What the loop can call the sampler: its variable, where that is made in the same function, or
    in the script while the loop is in a helper of another file; or else by the loader that the loop
    iterates."""
    made, loop = reader.sampler_at, reader.loop_at
    if made is None or loop is None:
        return "sampler"
    name, _ = made.named(reader.seen.sampler)
    started = reader.rank.first(RankStarted)
    script = started.argv[0] if started and started.argv else ""
    helps = made.file != loop.file and f"/{script}".endswith(f"/{made.file.rpartition('/')[2]}")
    if made.function == loop.function or helps:
        return name or "sampler"
    looped = _LOOPED.search(loop.source)
    named = looped[1] or looped[2] if looped else ""
    if loop.function == "__iter__":
        named = "loader"  # the helper may iterate others, too, which have no such sampler
    return f"{named}.sampler" if named and not reader.seen.batch_sampler else "sampler"


def _resumed(reader: Reader, repeats: int) -> bool:
    """Whether one epoch out of several with numbers of their own was run twice, as where a program
    goes on from a checkpoint."""
    numbers = {e.began.sampler_epoch for e in reader.epochs}
    return repeats == 1 and len(numbers) >= NUMBERS_OF_A_LOOP and not _restarts(reader)


def _same(reader: Reader, old: Epoch, new: Epoch) -> bool:
    """Whether two epochs had the same order and the same epoch number."""
    a, b = old.ended, new.ended
    if a is None or b is None or old.began.sampler_epoch is None:
        return False
    if begins_anew(reader.rank, old, new):
        return False
    if old.began.sampler_epoch != new.began.sampler_epoch or in_order(a):
        return False
    if new.began.epochs_set > old.began.epochs_set and goes_back(reader.rank, old, new):
        return False
    return len(a.head) >= FEWEST_REPEATED and same_order(a, b, FEWEST_REPEATED)
