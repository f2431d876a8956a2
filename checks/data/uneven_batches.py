"""DDP508."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import ClassVar

from msgspec.structs import replace

from ddpdoctor.analysis.control_flow.loop_rounds import keeps_no_state
from ddpdoctor.analysis.data.loader_check import (
    SHORTEST,
    LoaderCheck,
    Words,
    dataset,
    on_each_rank,
    when,
)
from ddpdoctor.analysis.data.loaders import Epoch, Loader, Reader, loaders
from ddpdoctor.analysis.data.sharing_ranks import partners
from ddpdoctor.analysis.models.wrap_options import equal_batches
from ddpdoctor.events import ExceptionPassed, LoaderSeen, OptimizerSeen, Wrapped
from ddpdoctor.events.amp import told_at
from ddpdoctor.report.declarations import WAITING, Condition, Effect, When
from ddpdoctor.report.errors import LOST_PEER, error_kinds
from ddpdoctor.report.findings import Confidence, Finding, Severity, Steps
from ddpdoctor.run import Phase, Rank, Run, equal_ranks, odd_ones, ranks_text

PLAIN = ("RandomSampler", "SequentialSampler")
"""torch's own samplers that read the whole dataset."""

JOIN = ", or use `with Join([model]):` (it covers no other collectives)"
"""Where the optimizer keeps no state, in which the ranks with more batches would go ahead."""

FIRST = (
    "stop all ranks when the first one has no more batches (`all_reduce` with `ReduceOp.MIN`, "
    "before each batch, whether there is one)"
)
"""The fix where the number of batches may change from epoch to epoch."""

AFTERWARDS = (
    "use no collective in the loop: sum totals and counts, `all_reduce` them once after it, and "
    "call `model.module` instead of the wrapped model; or give every rank the same number of "
    "batches"
)


SHARES = ("batch-sampler", "dataset-length", "unequal-shares")
"""Rules for ranks that have different amounts of data."""


def _by_another_epoch(mine: Finding, other: Finding) -> bool:
    """Whether hyperparameters differ because the ranks with fewer batches are in the next epoch:
    from the first recorded step after the one in which they finished this epoch."""
    if mine.steps is None or other.steps is None:
        return False
    return other.steps.first == next(s for s in count(mine.steps.first) if told_at(s))


class UnevenBatches(LoaderCheck):
    """Ranks have different numbers of batches

    ## What it finds
    A loop that trains, or communicates for every batch, in which the ranks' loaders deliver
    different numbers of batches.

    ## How it knows
    When an iteration begins, each rank records the length of its loader; then how many batches it
    delivered, and whether it was exhausted. The lengths are compared between the ranks, except
    those of iterable datasets, which are estimates. Otherwise the delivered batches are compared,
    once one rank is exhausted and another one continues. The finding is proven once a rank is
    exhausted, and suspected before that, by the lengths alone.

    ## Why it hurts
    The rank with more batches waits in its backward for the others, which have left the loop. It
    hangs, or fails with `Connection closed by peer`, which names the wrong rank.

    ## How to fix it
    Give every rank the same number of samples (`DistributedSampler` pads or drops) and the same
    `batch_size`. If each rank reads its own shard, stop all ranks after the shortest one
    (`all_reduce` of `len(loader)` with `ReduceOp.MIN`). With plain SGD `with Join([model]):` does,
    too: it covers only DDP's collectives, and does not copy the optimizer's state (of Adam, say)
    from the rank with more batches to the others. In evaluation, `all_reduce` once after the loop.
    In Lightning, set `Trainer(limit_train_batches=N)` with no more batches than every rank has.

    ## When it stays quiet
    - The ranks have the same number of batches.
    - The loop is inside `Join`, or all ranks leave it after the same number of batches, because
      they agree on it.
    - Each rank evaluates by itself.
    - The run ends well, as where a loop counts steps and restarts an exhausted loader.
    """

    code = "DDP508"
    name = "uneven-batches"
    severity = Severity.ERROR
    words: ClassVar[Mapping[str, Words]] = {
        "batch-size": Words(
            "only the batch size differs between ranks",
            "the ranks have different batch sizes: {sizes}",
            "use the same batch_size on every rank",
            "the batch size differs between ranks",
        ),
        "partly-sharded": Words(
            "some ranks read the whole dataset, others a share of it",
            "{source} yields all of {dataset} on {whole}, but {share} yields a share of it on the "
            "others",
            "use `sampler={share}(...)` on every rank",
            "reads the whole dataset on {whole}",
        ),
        "caught-exception": Words(
            "the loader of a rank raised, and the program continued",
            "{caught}",
            "no rank may continue alone after an exception: return another sample from "
            "`__getitem__`, or let the exception end the run",
        ),
        "batch-sampler": Words(
            "a custom batch sampler makes another number of batches on each rank",
            "{batch_sampler} makes more batches on some ranks than on others",
            "either let {batch_sampler} make the same number of batches on every rank, from what "
            f"all ranks know; or {FIRST}{{join}}",
        ),
        "dataset-length": Words(
            "the datasets have different lengths",
            "the datasets differ in length ({lengths})",
            "{cut}",
        ),
        "unequal-shares": Words(
            "the sampler, or an iterable dataset, yields more on some ranks",
            "{source} yields more samples on some ranks than on others",
            "either give every rank the same number of samples{instead}{join}",
        ),
    }
    rules = when(words)
    effects = (
        Effect(("hyperparameter-skew",), when=(Condition("of the next epoch", _by_another_epoch),)),
        Effect(("first-failure",), errors=LOST_PEER),
        Effect((*WAITING, "collective-mismatch", "data-stall"), when=(When.NOT_BEFORE,)),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        if run.outcome() == "completed":
            return
        for loader in loaders(run):
            if loader.trains or _communicates(loader):
                for ranks in partners(run, loader, begun=True):
                    yield from self._judge(run, loader, loader.of(ranks, begun=True))

    def _judge(self, run: Run, loader: Loader, readers: list[Reader]) -> Iterator[Finding]:
        over = run.outcome() in ("hung", "failed", "killed")
        if over and not any(_has_all(r.rank, r.epochs[-1]) for r in readers):
            return  # something else ended the run while all ranks were within the loop
        numbers = range(max((len(r.epochs) for r in readers), default=0))
        if any(_stopped_together(readers, number) for number in numbers):
            return
        for number in numbers:
            epochs = {r.rank.rank: e for r in readers if (e := r.epoch(number)) is not None}
            if len(epochs) < 2 or any(e.began.joined for e in epochs.values()):
                continue
            counts = _known(epochs) or _consumed(run, epochs)
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
        over = any(_has_all(run.everyone[r], e) for r, e in epochs.items())
        reported = {r: n if _known(epochs) else _reached(epochs[r], n) for r, n in counts.items()}
        whole = _unsharded(epochs)
        reader = next(r for r in readers if not whole or r.rank.rank in whole)
        unequal = reader.seen.length >= 0 and len({e.seen.length for e in epochs.values()}) > 1
        lengths = {r: e.seen.length for r, e in epochs.items() if e.seen.length >= 0}
        caught = None if unequal or _known(epochs) else _caught([run.everyone[r] for r in shortest])
        sizes = _sizes(epochs, counts)
        ahead = _ahead(readers, shortest, number + 1)
        began = next(iter(epochs.values())).began
        which = f"the epoch from step {began.step} on" if reader.turn.before else f"epoch {number}"
        seen = reader.seen
        # What explains the counts on its own comes before what is usual: shards of unequal length.
        reasons = (
            ("batch-size", sizes),
            ("partly-sharded", whole),
            ("caught-exception", caught),
            ("batch-sampler", seen.batch_sampler),
            ("dataset-length", unequal),
        )
        rule = next((name for name, fits in reasons if fits), "unequal-shares")
        facts = {
            "sizes": on_each_rank(sizes.items()),
            "source": seen.dataset if seen.iterable else seen.sampler or "the dataset",
            "dataset": seen.dataset,
            "whole": ranks_text(whole),
            "share": next((e.seen.sampler for r, e in epochs.items() if r not in whole), ""),
            "caught": caught,
            "batch_sampler": seen.batch_sampler,
            "lengths": on_each_rank(lengths.items()),
            "join": (join := JOIN if keeps_no_state(reader.rank) else ""),
            "cut": _same_length(seen, join),
            "instead": f" (`DistributedSampler`); or stop all ranks after {least} batches"
            if seen.sampler in PLAIN
            else f"; or {FIRST}",
        }
        _, cause, fix, label, _ = (text.format_map(facts) for text in self.words[rule])
        made = reader.rank.first(Wrapped)
        framework = equal_batches(made.by, least) if made is not None else ""
        if rule in SHARES and framework and loader.trains:
            what = "dataset" if unequal and seen.distributed else "number of samples"
            fix = f"give every rank the same {what}; or {framework}"
        if not loader.trains and rule in SHARES:
            fix = AFTERWARDS
        return self.of_reader(
            reader,
            rule=rule,
            confidence=Confidence.PROVEN if over else Confidence.SUSPECTED,
            ranks=odd_ones(equal_ranks(sizes)) if sizes else whole or shortest,
            label=label or "the ranks have different numbers of batches",
            summary=f"ranks have different numbers of batches in {which}: {least} on rank "
            f"{shortest[0]}, {reported[longest[0]]} on rank {longest[0]}",
            cause=cause,
            fix=fix,
            evidence={
                "batches": reported,
                **({"delivered": _delivered(epochs)} if _known(epochs) else {}),
                "exhausted": {r: e.exhausted for r, e in epochs.items()},
                "dataset": dataset(reader),
                **({"lengths": lengths} if lengths else {}),
                **({"batch sizes": sizes} if sizes else {}),
                "waiting": ranks_text(longest),
                **({"steps before the next epoch": ahead} if ahead else {}),
            },
            at=reader.rank.wall(max(e.began.at for e in epochs.values())),
        )


def _has_all(rank: Rank, epoch: Epoch) -> bool:
    """Whether the rank got as many batches as there are: one that counts them asks for no more, and
    the iteration has no end on record where the rank is stopped after that. Steps of several
    optimizers do not tell of batches."""
    if epoch.ended is not None or len(rank.of(OptimizerSeen)) > 1:
        return epoch.exhausted
    return 0 < epoch.began.batches <= epoch.batches


def _stopped_together(readers: list[Reader], number: int) -> bool:
    """Whether the ranks left the loop after the same number of batches although some had more: they
    communicate that, or know it from the start."""
    epochs = [(r, e) for r in readers if (e := r.epoch(number)) is not None]
    left = [(r, e) for r, e in epochs if not e.exhausted]
    least = min((e.batches for _, e in epochs if e.exhausted), default=-1)
    return (
        0 < len(left) < len(epochs) == len(readers)
        and len({e.trained for _, e in epochs}) == 1
        and all(e.ended and e.batches <= least + 1 and _went_on(r, number) for r, e in left)
    )


def _went_on(reader: Reader, number: int) -> bool:
    """Whether the rank left the loop by itself, not because its connection to others failed."""
    raised = reader.rank.exception
    lost = raised is not None and not set(LOST_PEER).isdisjoint(error_kinds(raised.message))
    return not lost or reader.epoch(number + 1) is not None


def _ahead(readers: list[Reader], ranks: tuple[int, ...], number: int) -> dict[int, int]:
    """Optimizer steps before an epoch, for those of the ranks that have begun it."""
    epochs = {r.rank.rank: r.epoch(number) for r in readers if r.rank.rank in ranks}
    return {n: e.began.step for n, e in epochs.items() if e is not None}


def _steps(
    loader: Loader, readers: list[Reader], number: int, counts: dict[int, int]
) -> Steps | None:
    """The step at which a rank with fewer batches has finished the epoch, and others have not."""
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


def _unsharded(epochs: dict[int, Epoch]) -> tuple[int, ...]:
    """Ranks whose sampler reads the whole dataset, while others read shares of it."""
    seen = {r: e.seen for r, e in epochs.items()}
    if len({(s.dataset, s.length) for s in seen.values()}) > 1:
        return ()
    whole = tuple(r for r, s in seen.items() if s.sampler in PLAIN and s.replicas < 2)
    shares = all(s.replicas > 1 for r, s in seen.items() if r not in whole)
    return whole if shares and len(whole) < len(seen) else ()


def _sizes(epochs: dict[int, Epoch], counts: dict[int, int]) -> dict[int, int]:
    """Batch sizes by rank, if they differ and the numbers of samples do not; empty otherwise."""
    sizes = {r: e.seen.batch_size or 0 for r, e in epochs.items()}
    samples = [counts[r] * size for r, size in sizes.items()]
    # the last batch may be smaller, or be dropped
    equal = max(samples) - min(samples) < max(sizes.values())
    return sizes if equal and 0 not in sizes.values() and len(set(sizes.values())) > 1 else {}


def _caught(ranks: list[Rank]) -> str | None:
    """The exception that the loaders of all these ranks raised and the program caught, as a cause;
    None where there is none."""
    found = [(r, e) for r in ranks for e in r.of(ExceptionPassed) if e.where == "data"]
    if {r.rank for r, _ in found} != {r.rank for r in ranks} or any(r.exception for r in ranks):
        return None
    rank, event = found[0]
    spot = rank.location(event.site)
    at = f" ({spot})" if spot else ""
    return f"the loader of rank {rank.rank} raised {event.text}{at}, which the program caught"


def _communicates(loader: Loader) -> bool:
    """Whether some iteration over the loader issues a collective for every batch."""
    ended = [e.ended for r in loader.readers.values() for e in r.epochs if e.ended]
    return any(e.collectives >= e.batches > 0 for e in ended)


def _same_length(seen: LoaderSeen, join: str) -> str:
    """What to do about datasets of different lengths."""
    if seen.distributed:
        return (
            f"give {seen.sampler} the same dataset on every rank; if each rank reads its own "
            f"shard, remove {seen.sampler} and {SHORTEST}{join}"
        )
    return (
        f"either {SHORTEST}, or cut the shards to one length{join}. A `DistributedSampler` "
        "does not help: it would shard each rank's shard again"
    )


def _known(epochs: dict[int, Epoch]) -> dict[int, int]:
    """Lengths of the loaders when the iteration began, by rank, if all are known and they differ;
    empty otherwise."""
    lengths = {r: e.began.batches for r, e in epochs.items() if e.began.batches >= 0}
    # An iterable dataset only estimates its length.
    exact = not any(e.seen.iterable for e in epochs.values())
    differ = exact and len(lengths) == len(epochs) and len(set(lengths.values())) > 1
    short = min(lengths.values(), default=0)
    # A rank that left the loop before the end of the shortest never reached the difference.
    reached = all(e.batches >= short for e in epochs.values() if e.ended is not None)
    return lengths if differ and reached else {}


def _consumed(run: Run, epochs: dict[int, Epoch]) -> dict[int, int]:
    """Batches delivered, by rank, if one rank is exhausted and another continues; empty
    otherwise. No rank waits in one more than its loader has, where the others had as many as
    theirs."""
    exhausted = {r: e.batches for r, e in epochs.items() if e.exhausted}
    if not exhausted:
        return {}
    several = any(e.steps > e.batches for e in epochs.values() if e.ended is not None)
    if several and any(e.ended is None for e in epochs.values()):
        return {}  # steps do not tell of batches
    least = min(exhausted.values())
    planned = all(epochs[r].began.batches == n for r, n in exhausted.items())
    counts = {
        # a rank without an end on record that took as many steps waits in one more
        r: e.batches
        + (
            e.ended is None
            and e.batches >= least
            and not (planned and e.batches == e.began.batches)
            and _in_a_batch(run.everyone[r])
        )
        for r, e in epochs.items()
    }
    behind = [r for r, n in counts.items() if n < least]
    return counts if len(set(counts.values())) > 1 and not behind else {}


def _in_a_batch(rank: Rank) -> bool:
    """False where it asks for the next batch, of which nobody knows whether it would come."""
    return rank.ring is None or rank.ring.phase not in (Phase.DATA, Phase.OPTIMIZER)


def _reached(epoch: Epoch, count: int) -> int | str:
    """The number of batches of a rank, as far as it is known: it may have more to come."""
    return count if epoch.exhausted else f"at least {count}"


def _delivered(epochs: dict[int, Epoch]) -> dict[int, int | str]:
    return {
        r: e.batches if e.ended is not None else f"at least {e.batches}"
        for r, e in epochs.items()
        if e.batches
    }
