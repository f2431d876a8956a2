"""DDP510."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.data.loaders import Loader, Reader, loaders
from ddpdoctor.analysis.data.phrases import no_loader, related
from ddpdoctor.analysis.data.rng_state import NAMES, in_step, noted
from ddpdoctor.analysis.data.sharing_ranks import partners
from ddpdoctor.events import WorkerRandom
from ddpdoctor.report.findings import Check, Finding, Severity
from ddpdoctor.run import Run, whom


class IdenticalAugmentation(Check):
    """Ranks draw the same random numbers for their data

    ## What it finds
    Random generators that stand alike on several ranks when an epoch begins, and from which loading
    batches then really drew; the same in worker processes, whether they inherit that from the ranks
    or a `worker_init_fn` seeds them without the rank.

    ## How it knows
    As an epoch begins, each rank digests the states of torch's, numpy's and Python's generators
    without drawing from them, and notes the base seed of the workers. In the first two epochs it
    compares the states before and after the second, third and fourth batch, where there are no
    workers. Workers digest their generators after their first batch and note which of them the
    first four advanced; where they cannot (they are not forked), the ranks' base seeds are compared
    and digests of samples tell whether the second epoch has other content. What the ranks had in
    the first epoch is compared between them. The finding is proven.

    ## Why it hurts
    The n-th sample of every rank gets the same crop, flip or noise: less variety than there could
    be. It is often no harm.

    ## How to fix it
    Seed by rank after the model was made: `torch.manual_seed(seed + rank)`, the same for numpy and
    `random`; or give the loader `generator=torch.Generator().manual_seed(seed + rank)`.

    ## When it stays quiet
    Nothing random happens while data is loaded; a stream is shuffled as it begins, alike on all
    ranks, which then share it out; the ranks' generators differ, or their workers'.
    """

    code = "DDP510"
    name = "identical-augmentation"
    family = "data"
    severity = Severity.NOTE

    def unobserved(self, run: Run) -> str | None:
        return no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        for loader in loaders(run):
            if loader.trains:
                for ranks in partners(run, loader):
                    yield from self._judge(run, loader, loader.of(ranks))

    def _judge(self, run: Run, loader: Loader, readers: list[Reader]) -> Iterator[Finding]:
        if (drawn := in_step(readers)) is None:
            return
        reader = readers[0]
        names, workers, peers = list(drawn.names), drawn.workers, [noted(r) for r in readers]
        what = f"the state of {' and '.join(names)}" if names else "their workers' base seed"
        yield self.finding(
            ranks=tuple(r.rank.rank for r in readers),
            subjects=(reader.seen.dataset,),
            location=reader.made_at,
            label="draws the same random numbers on these ranks",
            related=related(reader),
            summary=f"{whom([r.rank.rank for r in readers], run.world_size)} share {what} while "
            f"{'their workers' if names and workers else 'they'} load {reader.seen.dataset}, so "
            "they augment alike",
            cause="the workers seed their generators with numbers that are the same on every rank, "
            "and loading draws from them"
            if drawn.alone
            else "the ranks seed their generators with the same number, and loading draws from "
            "them",
            fix=drawn.fix,
            evidence={
                "states at the begin": {r.rank.rank: _states(r) for r in readers[:16]},
                "base seeds": {r.rank.rank: r.epochs[0].began.base_seed for r in readers[:16]},
                "drawn while loading": names or "in the workers",
                **({"workers after a batch": _of_workers(readers, peers)} if all(peers) else {}),
            },
            at=reader.rank.wall(reader.epochs[0].began.at),
        )


def _states(reader: Reader) -> dict[str, str]:
    return _words(reader.epochs[0].began.random)


def _words(states: tuple[int, int, int]) -> dict[str, str]:
    return {n: f"{s:08x}" for n, s in zip(NAMES, states, strict=True)}


def _of_workers(
    readers: list[Reader], peers: list[dict[int, WorkerRandom]]
) -> dict[int, list[dict[str, str]]]:
    return {
        reader.rank.rank: [_words(w.states) for w in list(workers.values())[:8]]
        for reader, workers in zip(readers[:16], peers, strict=False)
    }
