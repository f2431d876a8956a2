"""DDP510."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.forward_inputs import equal_inputs, inputs
from ddpdoctor.analysis.data.loader_check import LoaderCheck, no_loader, related, seeded_here
from ddpdoctor.analysis.data.loaders import Loader, Reader, loaders
from ddpdoctor.analysis.data.rng_state import (
    NAMES,
    EqualGenerators,
    equal_generators,
    seeded_alike,
    worker_states,
)
from ddpdoctor.analysis.data.sharing_ranks import partners
from ddpdoctor.events import StepDraws, WorkerRandom
from ddpdoctor.report.findings import Evidence, Finding, Severity, Steps
from ddpdoctor.run import Run, listed, whom

SHOWN_RANKS, SHOWN_WORKERS = 16, 8
FEWEST_STEPS = 2
"""Steps in which the draws of all ranks must be equal."""

AFTER_THE_MODEL = "call `torch.manual_seed(seed + rank)` after the model is built"

STEP_DRAWS = "equal-step-draws"
OF_DATASET = "equal-own-generators"


class IdenticalAugmentation(LoaderCheck):
    """Ranks draw the same random numbers for their data, or in their steps

    ## What it finds
    Random generators that are in the same state on several ranks when an epoch begins, and that
    loading batches then draws from. Also in worker processes, whether they get the state from the
    ranks or a `worker_init_fn` seeds them without the rank. Likewise generators that a data set or
    its transforms keep for themselves (`self.rng = np.random.RandomState(0)`). And torch's
    generator in the same state on all ranks while training steps draw from it (noise, timesteps)
    after they have their batch.

    ## How it knows
    When an epoch begins, each rank digests the states of torch's, numpy's and Python's generators,
    without drawing from them, and records the base seed of the workers. In the first two epochs of
    a loader without workers it compares the states before and after the second, third and fourth
    batch. Workers digest their generators after their first batch, and record which of them the
    first four batches advance; the generators that a data set keeps are compared after a batch.
    If workers cannot (they are not forked), the ranks' base seeds are
    compared, and digests of samples tell whether the second epoch has other content. The states of
    the first epoch are compared between the ranks. In steps 1, 2, 4, 8, 16 and 32 the state of
    torch's generator is also read when the batch is there and when the backward begins. The finding
    is proven.

    ## Why it hurts
    The n-th sample of every rank gets the same crop, flip or noise, so there is less variety. It is
    often harmless.

    ## How to fix it
    Seed by rank after the model is built: `torch.manual_seed(seed + rank)`, and likewise numpy and
    `random`; or give the loader `generator=torch.Generator().manual_seed(seed + rank)`. A framework
    that seeds again when training begins needs this in a hook (Lightning: `on_train_start`).

    ## When it stays quiet
    - Loading data draws no random numbers.
    - The generators differ between ranks, or those of their workers do; also where they begin in
      the same state, and the ranks then draw different numbers of values.
    - The ranks' inputs are equal as well (see `data-overlap`).
    - The model has dropout: what else a step draws is not told apart from it, unless every rank has
      restored the same state of torch's generator.
    - A stream is shuffled when it begins, equally on all ranks, which then shard it.
    - An iterable data set draws from a generator of its own (`self.rng`).
    """

    code = "DDP510"
    name = "identical-augmentation"
    severity = Severity.NOTE
    requires = ()
    rules: ClassVar[Mapping[str, str]] = {
        "equal-rank-generators": "the ranks themselves draw, from generators in the same state",
        "equal-worker-generators": "workers draw, and get the same seeds from their ranks",
        STEP_DRAWS: "training steps draw, from torch's generator in the same state on all ranks",
        OF_DATASET: "the data set draws from a generator of its own in the same state",
        "equal-worker-seeds": "workers draw, and are seeded with the same numbers on every rank, "
        "although the ranks' base seeds differ",
    }

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(StepDraws) else no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from self._in_steps(run)
        for loader in loaders(run):
            if loader.trains:
                for ranks in partners(run, loader):
                    yield from self._judge(run, loader, loader.of(ranks))

    def _in_steps(self, run: Run) -> Iterator[Finding]:
        ranks = {n: {e.step: e for e in r.of(StepDraws)} for n, r in run.ranks.items()}
        if len(ranks) < 2 or not all(ranks.values()):
            return
        steps = sorted(set.intersection(*(set(seen) for seen in ranks.values())))
        drawn = {s: {(seen[s].before, seen[s].after) for seen in ranks.values()} for s in steps}
        equal = [step for step, states in drawn.items() if len(states) == 1]
        first = next(iter(ranks.values()))[steps[0]] if steps else None
        if first is None or len(equal) < FEWEST_STEPS or len(equal) < len(steps):
            return
        seeding = seeded_alike([run.ranks[n] for n in ranks], ("torch",), first.at)
        if first.dropout and not (seeding is not None and seeding.restored):
            return
        if any(True for given in inputs(run) for _ in equal_inputs(run, given)):
            return  # reported by data-overlap
        rank = run.ranks[next(iter(ranks))]
        yield self.finding(
            rule=STEP_DRAWS,
            ranks=tuple(ranks),
            steps=Steps.of(equal),
            subjects=("torch's random generator",),
            location=rank.location(first.site),
            label="this forward's step draws the same random numbers on these ranks",
            related=seeded_here(seeding),
            summary=f"{whom(tuple(ranks), run.world_size)} draw the same random numbers in their "
            f"training steps: torch's generator is in the same state on all in {len(equal)} of "
            f"{len(steps)} steps looked at",
            cause=(seeding.cause if seeding else "the ranks use the same seed")
            + ", and a step draws from torch's generator after it has its batch (noise, timesteps, "
            "masks)",
            fix=(seeding.fix if seeding else AFTER_THE_MODEL)
            + "; not where the draw decides which layers run, which must be equal on all ranks",
            evidence={
                "steps looked at": steps,
                "random state before": {n: f"{s[equal[0]].before:08x}" for n, s in ranks.items()},
            },
            at=rank.wall(first.at),
        )

    def _judge(self, run: Run, loader: Loader, readers: list[Reader]) -> Iterator[Finding]:
        if (drawn := equal_generators(readers)) is None:
            return
        reader = readers[0]
        names, peers = list(drawn.names), [worker_states(r) for r in readers]
        what = f"the random state of {listed(names)}" if names else "the base seed of the workers"
        yield self.of_reader(
            reader,
            rule=_rule(drawn),
            ranks=tuple(r.rank.rank for r in readers),
            label="draws the same random numbers on these ranks",
            related=(*related(reader), *seeded_here(drawn.seeding)),
            summary=f"{what} is the same on {whom([r.rank.rank for r in readers], run.world_size)} "
            f"while {'their workers' if names and drawn.workers else 'they'} load "
            f"{reader.seen.dataset}, so random augmentation is identical",
            cause=_cause(drawn),
            fix=drawn.fix,
            evidence={
                "drawn while loading": names or "in the workers",
                **({} if drawn.of_dataset else _global_states(readers, peers)),
            },
        )


def _rule(drawn: EqualGenerators) -> str:
    if drawn.of_dataset:
        return OF_DATASET
    if drawn.self_seeded:
        return "equal-worker-seeds"
    return "equal-worker-generators" if drawn.workers else "equal-rank-generators"


def _cause(drawn: EqualGenerators) -> str:
    if drawn.of_dataset:
        return "the generator gets the same seed on every rank, and loading draws from it"
    if drawn.self_seeded:
        return (
            "the workers are seeded with the same numbers on every rank, and loading draws from "
            "their generators"
        )
    if drawn.own_generator:
        return (
            "the workers get the same seeds on every rank, from a generator of the loader's own, "
            "and loading draws from theirs"
        )
    why = drawn.seeding.cause if drawn.seeding else "the ranks use the same seed"
    return f"{why}, and loading draws from their generators"


def _digests(states: tuple[int, int, int]) -> dict[str, str]:
    return {n: f"{s:08x}" for n, s in zip(NAMES, states, strict=True)}


def _global_states(readers: list[Reader], peers: list[dict[int, WorkerRandom]]) -> Evidence:
    began = {r.rank.rank: r.epochs[0].began for r in readers[:SHOWN_RANKS]}
    found: Evidence = {
        "random states at the start of the epoch": {
            n: _digests(b.random) for n, b in began.items()
        },
        "base seeds": {n: b.base_seed for n, b in began.items()},
    }
    if all(peers):
        found["workers after a batch"] = {
            number: [_digests(w.states) for w in list(workers.values())[:SHOWN_WORKERS]]
            for number, workers in zip(began, peers, strict=False)
        }
    return found
