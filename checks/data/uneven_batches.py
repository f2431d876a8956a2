"""DDP508."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from msgspec.structs import replace

from ddpdoctor.analysis.data.loaders import Epoch, Loader, Reader, loaders
from ddpdoctor.analysis.data.phrases import SHORTEST, dataset, no_loader, related
from ddpdoctor.analysis.data.sharing_ranks import partners
from ddpdoctor.events import ExceptionPassed, OptimizerSeen
from ddpdoctor.events.amp import told_at
from ddpdoctor.report.findings import Check, Confidence, Finding, Severity, Steps
from ddpdoctor.run import Rank, Run, equal_ranks, odd_ones, ranks_text

AHEAD = "steps before the next epoch"
PLAIN = ("RandomSampler", "SequentialSampler")
LOST = ("closed by peer", "Timed out", "reset by peer")

JOIN = (
    "train inside `with Join([model]):`, which covers no collective of your own and does not copy "
    "the optimizer's state"
)

FIRST = (
    "stop all ranks where the first has no more (before each batch, `all_reduce` with "
    "`ReduceOp.MIN` whether there is one)"
)
"""Where the number of batches may be another one in each epoch."""

AFTERWARDS = (
    "communicate nothing in the loop: add up totals and counts, `all_reduce` them once after it, "
    "and call `model.module` in place of the wrapped model; or give every rank equally many batches"
)


class UnevenBatches(Check):
    """Ranks have different numbers of batches

    ## What it finds
    A loop that trains, or communicates for every batch, and in which the loaders of the ranks
    deliver different numbers of batches.

    ## How it knows
    As an iteration begins, each rank records the length of its loader; then how many batches it
    delivered, and whether it ran dry. The lengths are compared between the ranks (of iterable data
    sets they are estimates, and left out), or else what was delivered where one rank ran dry and
    another went on. The finding is proven once a rank ran dry; before that, by the lengths alone,
    suspected.

    ## Why it hurts
    The rank with more batches waits in its backward for the others, which have left the loop. It
    hangs, or fails with `Connection closed by peer`, which names the wrong rank.

    ## How to fix it
    Give every rank equally many samples (`DistributedSampler` pads or drops) and the same
    `batch_size`. Where each rank reads a shard of its own, stop all ranks after the shortest
    (`all_reduce` of `len(loader)` with `ReduceOp.MIN`), or train inside `with Join([model]):`.
    `Join` covers no collective of your own, and does not copy the optimizer's state from the rank
    with more batches to the others. In evaluation, `all_reduce` once after the loop.

    ## When it stays quiet
    Equal counts; loops inside `Join`, or that all ranks leave after equally many batches, since
    they tell each other; evaluation of each rank by itself; any run that ends well, as that of a
    loop that counts steps and begins the loader anew when it runs dry.
    """

    code = "DDP508"
    name = "uneven-batches"
    family = "data"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        if run.outcome() == "completed":
            return
        for loader in loaders(run):
            if loader.trains or _communicates(loader):
                for ranks in partners(run, loader, begun=True):
                    yield from self._judge(run, loader, loader.of(ranks, begun=True))

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check == "hyperparameter-skew":
            return _by_another_epoch(mine, other)
        late = mine.at <= other.at
        follows = (
            "rank-missing",
            "rank-exited-early",
            "stall",
            "collective-mismatch",
            "data-stall",
        )
        if other.check == "first-failure":
            # What others reported after a failure of its own says nothing of its cause.
            return any(text in str(other.evidence.get("message")) for text in LOST)
        return late and other.check in follows

    def _judge(self, run: Run, loader: Loader, readers: list[Reader]) -> Iterator[Finding]:
        over = run.outcome() in ("hung", "failed", "killed")
        if over and not any(r.epochs[-1].exhausted for r in readers):
            return  # all ranks were still at it when something else ended the run
        numbers = range(max((len(r.epochs) for r in readers), default=0))
        if any(_stopped_together(readers, number) for number in numbers):
            return
        for number in numbers:
            epochs = {r.rank.rank: e for r in readers if (e := r.epoch(number)) is not None}
            if len(epochs) < 2 or any(e.began.joined for e in epochs.values()):
                continue
            counts = _known(epochs) or _consumed(epochs)
            if counts:
                reported = self._report(run, loader, readers, number, epochs, counts)
                yield replace(reported, steps=_steps(loader, readers, number, counts))
                return

    def _report(
        self,
        run: Run,
        loader: Loader,
        readers: list[Reader],
        number: int,
        epochs: dict[int, Epoch],
        counts: dict[int, int],
    ) -> Finding:
        most, least = max(counts.values()), min(counts.values())
        longest = tuple(r for r, n in counts.items() if n == most)
        shortest = tuple(r for r, n in counts.items() if n == least)
        over = any(e.exhausted for e in epochs.values())
        reported = {r: n if _known(epochs) else _reached(epochs[r], n) for r, n in counts.items()}
        undivided = _undivided(epochs)
        reader = next(r for r in readers if not undivided or r.rank.rank in undivided)
        unlike = reader.seen.length >= 0 and len({e.seen.length for e in epochs.values()}) > 1
        lengths = {r: e.seen.length for r, e in epochs.items() if e.seen.length >= 0}
        lost = "" if unlike or _known(epochs) else _lost([run.ranks[r] for r in shortest])
        sizes = _sizes(epochs, counts)
        ahead = _ahead(readers, shortest, number + 1)
        began = next(iter(epochs.values())).began
        which = f"the epoch from step {began.step} on" if reader.turn.before else f"epoch {number}"
        if sizes:
            cause = f"the ranks' batches differ in size: batch_size {_listed(sizes)}"
            fix = "the same batch_size on every rank"
        elif undivided:
            share = next(e.seen.sampler for r, e in epochs.items() if r not in undivided)
            cause = f"{_giver(reader)} gives all of {reader.seen.dataset} to "
            cause += f"{ranks_text(undivided)}, and {share} a share of it to the others"
            fix = f"`sampler={share}(...)` on every rank"
        elif lost:
            cause = lost
            fix = (
                "let no rank go on alone after an exception: give another sample in its place "
                "(`__getitem__`), or let it end the run"
            )
        else:
            cause = _cause(reader, lengths if unlike else {})
            fix = _fix(reader, least, unlike=unlike) if loader.trains else AFTERWARDS
        return self.finding(
            confidence=Confidence.PROVEN if over else Confidence.SUSPECTED,
            ranks=odd_ones(equal_ranks(sizes)) if sizes else undivided or shortest,
            subjects=(reader.seen.dataset,),
            location=reader.made_at,
            label="the batch size differs between ranks"
            if sizes
            else f"reads the whole data set on {ranks_text(undivided)}"
            if undivided
            else "not equally many batches on each rank",
            related=related(reader),
            summary=f"ranks have different numbers of batches in {which}: {least} on rank "
            f"{shortest[0]}, {reported[longest[0]]} on rank {longest[0]}",
            cause=cause,
            fix=fix,
            evidence={
                "batches": reported,
                **({"delivered": _delivered(epochs)} if _known(epochs) else {}),
                "ran dry": {r: e.exhausted for r, e in epochs.items()},
                "data set": dataset(reader),
                **({"lengths": lengths} if lengths else {}),
                **({"batch sizes": sizes} if sizes else {}),
                "ranks that wait": list(longest),
                **({AHEAD: ahead} if ahead else {}),
            },
            at=reader.rank.wall(max(e.began.at for e in epochs.values())),
        )


def _stopped_together(readers: list[Reader], number: int) -> bool:
    """Whether the ranks left the loop after equally many batches although some had more: they tell
    each other, or know it from the start."""
    epochs = [(r, e) for r in readers if (e := r.epoch(number)) is not None]
    left = [(r, e) for r, e in epochs if not e.exhausted]
    least = min((e.batches for _, e in epochs if e.exhausted), default=-1)
    return (
        0 < len(left) < len(epochs) == len(readers)
        and len({e.trained for _, e in epochs}) == 1
        and all(e.ended and e.batches <= least + 1 and _went_on(r, number) for r, e in left)
    )


def _went_on(reader: Reader, number: int) -> bool:
    """Whether the rank left the loop by itself, not since it had lost the others."""
    raised = reader.rank.exception
    lost = raised is not None and any(text in raised.message for text in LOST)
    return not lost or reader.epoch(number + 1) is not None


def _ahead(readers: list[Reader], ranks: tuple[int, ...], number: int) -> dict[int, int]:
    """Optimizer steps before the epoch, of the ranks that have begun it."""
    epochs = {r.rank.rank: r.epoch(number) for r in readers if r.rank.rank in ranks}
    return {n: e.began.step for n, e in epochs.items() if e is not None}


def _steps(
    loader: Loader, readers: list[Reader], number: int, counts: dict[int, int]
) -> Steps | None:
    """The step in which a rank with fewer batches is through with the epoch, and others go on."""
    for reader in readers:
        epoch, after = reader.epoch(number), reader.epoch(number + 1)
        fewest = counts.get(reader.rank.rank) == min(counts.values())
        # Of several optimizers the steps are counted together where an epoch begins.
        if epoch and epoch.exhausted and fewest and len(reader.rank.of(OptimizerSeen)) < 2:
            begun = epoch.began.step
            step = after.began.step if after else reader.rank.steps
            if not loader.trains or begun <= step <= begun + epoch.batches:
                return Steps.of([step if loader.trains else begun])
    return None


def _by_another_epoch(mine: Finding, other: Finding) -> bool:
    """Whether the options differ since the ranks with fewer batches are in the next epoch."""
    ahead = mine.evidence.get(AHEAD)
    if not isinstance(ahead, dict) or not ahead or other.steps is None:
        return False
    begun: int = min(ahead.values())
    return other.steps.first == next(s for s in count(begun) if told_at(s))


def _undivided(epochs: dict[int, Epoch]) -> tuple[int, ...]:
    """Ranks for which torch's own sampler reads the whole data set of which others take shares."""
    seen = {r: e.seen for r, e in epochs.items()}
    if len({(s.dataset, s.length) for s in seen.values()}) > 1:
        return ()
    whole = tuple(r for r, s in seen.items() if s.sampler in PLAIN and s.replicas < 2)
    shares = all(s.replicas > 1 for r, s in seen.items() if r not in whole)
    return whole if shares and len(whole) < len(seen) else ()


def _sizes(epochs: dict[int, Epoch], counts: dict[int, int]) -> dict[int, int]:
    """Batch sizes, where they differ and nothing else does: the samples are equally many."""
    sizes = {r: e.seen.batch_size or 0 for r, e in epochs.items()}
    samples = [counts[r] * size for r, size in sizes.items()]
    # the last batch may be smaller, or be dropped
    equal = max(samples) - min(samples) < max(sizes.values())
    return sizes if equal and 0 not in sizes.values() and len(set(sizes.values())) > 1 else {}


def _lost(ranks: list[Rank]) -> str:
    """What made the loaders of all of these give no batch, and was caught."""
    found = [(r, e) for r in ranks for e in r.of(ExceptionPassed) if e.where == "data"]
    if {r.rank for r, _ in found} != {r.rank for r in ranks} or any(r.exception for r in ranks):
        return ""
    rank, event = found[0]
    spot = rank.location(event.site)
    at = f" ({spot})" if spot else ""
    return f"rank {rank.rank} got no batch but {event.text}{at}, which it caught"


def _communicates(loader: Loader) -> bool:
    """An evaluation in which something is communicated for every batch."""
    ended = [e.ended for r in loader.readers.values() for e in r.epochs if e.ended]
    return any(e.collectives >= e.batches > 0 for e in ended)


def _giver(reader: Reader) -> str:
    """What decides how many batches there are: torch's own sampler of an iterable has no end."""
    seen = reader.seen
    return seen.dataset if seen.iterable else seen.sampler or "the data set"


def _cause(reader: Reader, lengths: dict[int, int]) -> str:
    """Why ranks have different numbers of batches; `lengths` of data sets that differ in that."""
    if reader.seen.batch_sampler:
        return f"{reader.seen.batch_sampler} makes more batches on some ranks than on others"
    if lengths:
        return f"the data sets differ in length ({_listed(lengths)})"
    return f"{_giver(reader)} gives some ranks more than others"


def _fix(reader: Reader, least: int, *, unlike: bool) -> str:
    """What to change in a training; `unlike`: the data sets differ in length."""
    seen = reader.seen
    if seen.batch_sampler:
        return (
            f"let {seen.batch_sampler} make equally many on every rank, by what all ranks know, "
            f"{FIRST}, or {JOIN}"
        )
    if unlike and seen.distributed:
        return (
            f"let {seen.sampler} divide the same data set on every rank; where each rank reads a "
            f"shard of its own, leave {seen.sampler} out and {SHORTEST}, or {JOIN}"
        )
    if unlike:
        return (
            f"{SHORTEST}, cut the shards of the ranks to one length, or {JOIN}; a "
            "`DistributedSampler` would divide each shard once more"
        )
    if seen.iterable:
        return f"give every rank equally many samples, {FIRST}, or {JOIN}"
    return (
        "give every rank equally many samples (`DistributedSampler`), stop all after "
        f"{least} batches, or {JOIN}"
    )


def _known(epochs: dict[int, Epoch]) -> dict[int, int]:
    """Lengths that the loaders gave when the iteration began, where they differ."""
    lengths = {r: e.began.batches for r, e in epochs.items() if e.began.batches >= 0}
    # An iterable data set only estimates its length.
    exact = not any(e.seen.iterable for e in epochs.values())
    differ = exact and len(lengths) == len(epochs) and len(set(lengths.values())) > 1
    short = min(lengths.values(), default=0)
    # Who left the loop before the shortest was over never came to the difference.
    reached = all(e.batches >= short for e in epochs.values() if e.ended is not None)
    return lengths if differ and reached else {}


def _consumed(epochs: dict[int, Epoch]) -> dict[int, int]:
    """What was delivered, where one rank ran dry and another went on."""
    dry = {r: e.batches for r, e in epochs.items() if e.exhausted}
    if not dry:
        return {}
    counts = {
        # without an end on record, a rank that did all its steps was asked for more
        r: e.batches + (e.ended is None and e.batches >= min(dry.values()))
        for r, e in epochs.items()
    }
    least = min(dry.values())
    behind = [r for r, n in counts.items() if n < least]
    return counts if len(set(counts.values())) > 1 and not behind else {}


def _reached(epoch: Epoch, count: int) -> int | str:
    """What is known of the number of batches of a rank that may have more to come."""
    return count if epoch.exhausted else f"at least {count}"


def _delivered(epochs: dict[int, Epoch]) -> dict[int, int | str]:
    return {
        r: e.batches if e.ended is not None else f"at least {e.batches}"
        for r, e in epochs.items()
        if e.batches
    }


def _listed(lengths: dict[int, int]) -> str:
    return ", ".join(f"{n} on rank {r}" for r, n in list(lengths.items())[:4])
