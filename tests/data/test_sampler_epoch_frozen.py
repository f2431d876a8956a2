"""sampler-epoch-frozen: the same order again, and the same number in the sampler."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ddpdoctor.checks.data.sampler_epoch_frozen import SamplerEpochFrozen, _sampler_name
from readers import found, loader, prologue, run_of
from recordings import make_run, site

from ddpdoctor.events import (
    ContentRead,
    EpochBegan,
    EpochEnded,
    Event,
    ForwardInput,
    Loaded,
    OptimizerSeen,
    StepDone,
    WorkerRandom,
    Wrapped,
)
from ddpdoctor.report.findings import Finding, Severity, Steps
from ddpdoctor.run import Location

FIRST = [7, 3, 9, 1, 5, 0, 2, 8]
OTHER = FIRST[::-1]


def epochs(*orders: list[int], numbers: list[int] | None = None, **more: object) -> list[Event]:
    fields: dict[str, object] = {"shuffle": True, "distributed": True, "sampler_site": 1, **more}
    numbers = numbers or [0] * len(orders)
    return loader(0, orders, began={"sampler_epoch": numbers}, **fields)  # type: ignore[arg-type]


def examine(events: list[Event]) -> list[Finding]:
    return found(SamplerEpochFrozen(), run_of(events, events))


def test_the_same_order_every_epoch() -> None:
    (finding,) = examine(epochs(FIRST, FIRST, FIRST))
    assert finding.ranks == (0, 1)
    assert finding.location is not None and finding.location.line == 10


def test_the_epoch_of_another_sampler_is_set() -> None:
    """One that was made for the call: `module.train_dataloader().sampler.set_epoch(epoch)`."""
    fields: dict[str, object] = {"shuffle": True, "distributed": True, "sampler_site": 1}
    began = {"sampler_epoch": 0, "set_elsewhere": 1}
    (finding,) = examine(loader(0, [FIRST] * 3, began=began, **fields))  # type: ignore[arg-type]
    assert "train.py:10 calls it on another one" in finding.cause
    assert finding.fix.startswith("make the loader once")


def test_the_step_since_which_the_order_is_the_same() -> None:
    fields: dict[str, object] = {"shuffle": True, "distributed": True, "sampler_site": 1}
    began = {"sampler_epoch": [0, 1, 1, 1], "step": [0, 0, 1, 1]}
    events = loader(0, [OTHER, FIRST, FIRST, FIRST], began=began, **fields)  # type: ignore[arg-type]
    (finding,) = examine(events)
    assert finding.steps == Steps(1, 1, 1)


def test_a_sampler_of_ones_own() -> None:
    own: dict[str, object] = {"shuffle": None, "own_order": True, "sampler": "Buckets"}
    own |= {"batch_size": 2}
    (finding,) = examine(epochs(FIRST, FIRST, FIRST, by_epoch=True, **own))
    assert finding.rule == "custom-sampler"
    assert not examine(epochs(FIRST, FIRST, FIRST, **own)), "its order is meant to be fixed"
    assert not examine(epochs(FIRST, FIRST, by_epoch=True, **own | {"shuffle": False}))
    assert not examine(epochs(FIRST, OTHER, numbers=[0, 1], by_epoch=True, **own))
    assert not examine(epochs(*[FIRST[:4]] * 3, by_epoch=True, **own)), "two batches, to overfit"


def test_a_sampler_that_forms_the_batches() -> None:
    own: dict[str, object] = {"shuffle": None, "own_order": True, "sampler": "Buckets",
                              "by_epoch": True, "sets_epoch": True, "batch_size": 2}  # fmt: skip
    (finding,) = examine(epochs(FIRST, FIRST, FIRST, batch_sampler="Buckets", **own))
    assert "`loader.batch_sampler.set_epoch(epoch)`" in finding.fix
    (finding,) = examine(epochs(FIRST, FIRST, FIRST, **own))
    assert "`sampler.set_epoch(epoch)`" in finding.fix


def test_a_sampler_of_ones_own_that_is_told_by_an_attribute() -> None:
    own: dict[str, object] = {"shuffle": None, "own_order": True, "sampler": "Buckets",
                              "by_epoch": True, "batch_size": 2}  # fmt: skip
    (finding,) = examine(epochs(FIRST, FIRST, epoch_name="epoch", sets_epoch=False, **own))
    (finding,) = examine(epochs(FIRST, FIRST, epoch_name="_epoch", **own))
    assert finding.rule == "custom-sampler"


def test_stages_of_two_epochs_each() -> None:
    (finding,) = examine(epochs(FIRST, FIRST, OTHER, OTHER, *[[*FIRST[2:], 7, 3]] * 2))
    assert finding.rule == "set-epoch-not-called"


def test_epochs_that_were_left_early_are_compared_by_how_they_begin() -> None:
    left = {"exhausted": False}
    assert examine(epochs(FIRST, FIRST[:5], FIRST[:6], ends=left))


def test_an_epoch_that_was_left_early_counts_among_the_others() -> None:
    left = {"exhausted": [True, True, False]}
    (finding,) = examine(epochs(FIRST, FIRST, FIRST[:5], ends=left))
    (finding,) = examine(epochs(FIRST, FIRST, OTHER[:5], numbers=[0, 0, 1], ends=left))
    assert finding.rule == "set-epoch-not-called"


def test_a_look_at_the_first_batch_before_training() -> None:
    peek = {"exhausted": [False, True, True]}
    assert not examine(epochs(FIRST[:4], FIRST, OTHER, numbers=[0, 0, 1], ends=peek))


def test_evaluation_over_the_training_data_in_between() -> None:
    used = {"backwards": [2, 0, 2, 0]}
    assert not examine(epochs(FIRST, FIRST, OTHER, OTHER, numbers=[0, 0, 1, 1], ends=used))
    assert examine(epochs(FIRST, FIRST, FIRST, FIRST, ends=used))


@pytest.mark.parametrize(("later", "severity"), [(6, Severity.WARNING), (12, Severity.NOTE)])
def test_a_search_before_the_training(later: int, severity: Severity) -> None:
    """Four epochs with the number 0, then each with its own."""
    fields: dict[str, object] = {"shuffle": True, "distributed": True, "sampler_site": 1}
    numbers = [0] * 4 + [*range(1, later)]
    orders = [[*FIRST[n:], *FIRST[:n]] for n in numbers]
    began = {"sampler_epoch": numbers, "epochs_set": [0] * 4 + [*range(1, later)]}
    (finding,) = examine(loader(0, orders, began=began, **fields))  # type: ignore[arg-type]
    assert (finding.rule, finding.severity) == ("epoch-number-repeated", severity)
    assert "never" not in finding.cause


@pytest.mark.parametrize(
    ("what", "epochs_set", "told"),
    [("weights", [1, 2, 3], False), ("weights", [1, 1, 1], True), ("optimizer", [1, 2, 3], True)],
    ids=["rolled back", "set once", "no weights"],
)
def test_epochs_that_are_run_again_from_an_earlier_state(
    what: str, epochs_set: list[int], told: bool
) -> None:
    events: list[Event] = []
    fields: dict[str, object] = {"shuffle": True, "distributed": True, "sampler_site": 1}
    began = {"sampler_epoch": 0, "epochs_set": epochs_set}
    for event in loader(0, [FIRST] * 3, began=began, **fields):  # type: ignore[arg-type]
        if isinstance(event, EpochBegan) and event.epoch:
            events.append(Loaded(at=0, what=what, model=0, step=1, site=-1))
        events.append(event)
    assert bool(examine(events)) is told


@pytest.mark.parametrize(
    ("numbers", "told"),
    [([0, 1, 1, 2], False), ([0, 1, 1, 1], True), ([0, 1, 1], True)],
    ids=["resumed", "twice", "of two"],
)
def test_one_epoch_of_several_that_comes_twice(numbers: list[int], told: bool) -> None:
    orders = [[*FIRST[n:], *FIRST[:n]] for n in numbers]
    assert bool(examine(epochs(*orders, numbers=numbers))) is told


def test_one_epoch() -> None:
    assert not examine(epochs(FIRST))


def test_set_epoch_was_called() -> None:
    assert not examine(epochs(FIRST, OTHER, numbers=[0, 1]))


def test_the_sampler_counts_itself() -> None:
    assert not examine(epochs(FIRST, OTHER))


def test_no_shuffle() -> None:
    assert not examine(epochs(sorted(FIRST), sorted(FIRST), shuffle=False))


def test_evaluation() -> None:
    assert not examine(epochs(FIRST, FIRST, trains=False))


def test_too_few_samples_to_tell_an_order() -> None:
    assert not examine(epochs([1, 0], [1, 0]))


def test_a_loader_made_anew_for_every_epoch() -> None:
    fields: dict[str, object] = {"shuffle": True, "distributed": True}
    events = [
        e
        for n in range(3)
        for e in loader(n, [FIRST], began={"sampler_epoch": 0}, made=n, **fields)  # type: ignore[arg-type]
    ]
    (finding,) = examine(events)
    assert finding.rule == "set-epoch-not-called"


def test_a_training_that_begins_anew_with_a_new_model() -> None:
    fields: dict[str, object] = {"shuffle": True, "distributed": True}
    trials = [
        [
            *loader(n, [FIRST, OTHER], began={"sampler_epoch": [0, 1]}, made=n, **fields),  # type: ignore[arg-type]
            Wrapped(at=0, model=n + 1, wrapper="DistributedDataParallel", kind="Net", group=0,
                    site=-1),
        ]
        for n in range(2)
    ]  # fmt: skip
    run = make_run({r: [*prologue(2), *trials[0], *trials[1]] for r in range(2)})
    assert not found(SamplerEpochFrozen(), run)


def searched(first: int, *, wrapped: bool, epochs: int = 1) -> list[Event]:
    """One of several trainings over one loader, whose sampler's epoch stays 0."""
    model = Wrapped(at=0, model=first, wrapper="DistributedDataParallel", kind="Net", group=0,
                    site=-1)  # fmt: skip
    optimizer = OptimizerSeen(at=0, optimizer=first, kind="SGD", site=-1)
    seen, *events = loader(0, [FIRST] * (first + epochs), began={"sampler_epoch": 0}, shuffle=True,
                           distributed=True)  # fmt: skip
    since = [i for i, e in enumerate(events) if isinstance(e, EpochBegan)][first]
    began, *rest = events[since:]
    steps = [msgspec.structs.replace(e, optimizer=first) if isinstance(e, StepDone) else e
             for e in rest]  # fmt: skip
    return [*([] if first else [seen]), *([model] if wrapped else []), began, optimizer, *steps]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_loader_for_several_trainings_of_one_epoch(wrapped: bool) -> None:
    trials = [e for n in range(3) for e in searched(n, wrapped=wrapped)]
    run = make_run({r: [*prologue(2, wrapped=False), *trials] for r in range(2)})
    assert not found(SamplerEpochFrozen(), run)
    longer = [*trials, *searched(3, wrapped=wrapped, epochs=2)]
    run = make_run({r: [*prologue(2, wrapped=False), *longer] for r in range(2)})
    (finding,) = found(SamplerEpochFrozen(), run)
    assert finding.rule == "set-epoch-not-called"


def test_one_iterator_for_all_epochs_whose_sampler_begins_anew() -> None:
    on = {"exhausted": False}
    (finding,) = examine(epochs(FIRST * 3, ends={**on, "again": 2}))
    assert finding.rule == "set-epoch-not-called"
    assert not examine(epochs(FIRST * 3, ends=on))
    assert not examine(epochs(FIRST * 3, ends={**on, "again": 2}, own_order=True))
    assert not examine(epochs(FIRST * 3, ends={**on, "again": 2, "backwards": 0}))


def cycled(
    *,
    line: str = "for batch in itertools.cycle(loader):",
    fields: dict[str, object] | None = None,
    more: Sequence[Event] = (),
    epochs: int = 1,
    exhausted: bool = True,
) -> list[Finding]:
    """A loader that is read once, and `more` after that."""
    given: dict[str, object] = {"shuffle": True, "distributed": True, "loop_site": 9}
    events = [
        site(9, "train.py", 30, line),
        ForwardInput(at=-1, model=0, forward=0, site=4, digest=7, numbers=20, rows=4, fed=True),
        *loader(0, [FIRST] * epochs, began={"sampler_epoch": [*range(epochs)]},
                exhausted=exhausted, **given | (fields or {})),  # type: ignore[arg-type]
        *more,
    ]  # fmt: skip
    return examine(events)


def step(at: float, count: int = 1) -> Event:
    return StepDone(at=at, optimizer=0, step=9, site=4, wall_s=0.1, count=count)


def test_batches_that_cycle_keeps() -> None:
    (finding,) = cycled(more=[step(1, 6)])
    assert finding.location is not None and finding.location.line == 30


def test_steps_after_a_cycle_on_other_data() -> None:
    assert not cycled(), "no steps since"
    assert not cycled(more=[step(1, 6)], line="for batch in loader:")
    assert not cycled(more=[step(1, 6)], epochs=2), "a `cycle` of one's own, that reads it anew"
    assert not cycled(more=[step(1, 6)], exhausted=False)
    assert not cycled(more=[step(1, 6)], fields={"shuffle": False})
    other = EpochEnded(at=2, loader=1, epoch=0, batches=6, samples=24, backwards=6, exhausted=True)
    assert not cycled(more=[step(1, 6), other])
    seen = ForwardInput(at=2, model=0, forward=5, site=4, digest=7, numbers=20, rows=4, fed=True)
    assert cycled(more=[step(1, 6), other, seen]), "beside another loader, on inputs of before"


def epochs_of_stream(
    *orders: list[int], numbers: list[int] | None = None, **more: object
) -> list[Event]:
    """A stream that shuffles by an epoch; the entries of its orders stand for content."""
    fields: dict[str, object] = {"iterable": True, "length": -1, "shuffle": None, "content": 1}
    fields |= {"by_epoch": True, "epoch_name": "epoch", "batch_size": 2, "dataset": "Lines"} | more
    numbers = numbers or [0] * len(orders)
    events = loader(0, orders, began={"sampler_epoch": numbers}, **fields)  # type: ignore[arg-type]
    return [msgspec.structs.replace(e, indices="") if isinstance(e, ContentRead) else e
            for e in events]  # fmt: skip


LINES = [*FIRST, *range(20, 30)]
SHUFFLED = LINES[::-1]


def test_a_stream_whose_epoch_nobody_sets() -> None:
    (finding,) = examine(epochs_of_stream(LINES, LINES, LINES))
    assert finding.rule == "stream-epoch-not-set"
    assert finding.location is not None and finding.location.line == 11
    assert "share_memory_" not in finding.fix
    (finding,) = examine(epochs_of_stream(LINES, LINES, epoch_copied=True))
    assert finding.rule == "stream-epoch-not-set"
    assert "share_memory_" in finding.fix
    (finding,) = examine(epochs_of_stream(LINES, LINES, SHUFFLED, sets_epoch=False))
    assert "`epoch = epoch`" in finding.fix
    assert "1 of 3 epochs" in finding.summary


def test_a_stream_whose_workers_keep_their_copy_of_the_epoch() -> None:
    numbers = [0, 1, 2]
    (finding,) = examine(epochs_of_stream(*[LINES] * 3, numbers=numbers, epoch_copied=True))
    assert finding.rule == "stream-epoch-not-in-workers"
    assert not examine(epochs_of_stream(LINES, SHUFFLED, numbers=[0, 1], epoch_copied=True))
    assert not examine(epochs_of_stream(*[LINES] * 3, numbers=numbers)), "it may have one shard"


def test_streams_whose_order_is_meant_to_be_the_same() -> None:
    assert not examine(epochs_of_stream(LINES, LINES, by_epoch=False))
    assert not examine(epochs_of_stream(LINES, LINES, shuffle=False))
    assert not examine(epochs_of_stream(LINES[:4], LINES[:4])), "two batches, to overfit"
    assert not examine(epochs_of_stream([1] * 18, [1] * 18)), "samples that cannot be told apart"
    assert not examine(epochs_of_stream(LINES, LINES, trains=False))
    assert not examine(epochs_of_stream(LINES, LINES, numbers=None, content=None))


def of_generators(
    *states: int, orders: int = 3, last: list[int] = LINES, **more: object
) -> list[Finding]:
    """A stream without an epoch, and the states in which its workers got its generator."""
    fields: dict[str, object] = {"by_epoch": False, "workers": 2, **more}
    handed = [
        tuple(WorkerRandom(n, (n, 2, 3), (), {"Lines.rng": state} if state else {}) for n in (0, 1))
        for state in states
    ]
    return examine(
        [
            msgspec.structs.replace(e, workers=handed[e.epoch])
            if isinstance(e, EpochEnded) and e.epoch < len(handed)
            else e
            for e in epochs_of_stream(*[LINES] * (orders - 1), last, **fields)
        ]
    )


def test_workers_that_draw_from_copies_of_one_generator() -> None:
    (finding,) = of_generators(7, 7)
    assert finding.rule == "stream-generator-copied"
    assert finding.location is not None and finding.location.line == 11
    assert "`Lines.rng`" in finding.cause


def test_generators_that_may_be_copied() -> None:
    assert not of_generators(7, 8), "the main process draws from it as well"
    assert not of_generators(0, 0), "nothing is drawn, or it is seeded on purpose"
    assert not of_generators(7), "only one epoch is known"
    assert not of_generators(7, 7, orders=1)
    assert not of_generators(7, 7, last=SHUFFLED)
    assert not of_generators(7, 7, persistent=True)
    assert not of_generators(7, 7, shuffle=False)


def test_a_stream_that_restarts_with_a_new_model() -> None:
    old, new = epochs_of_stream(LINES, LINES, epoch_copied=True), []
    for number, event in enumerate(old):
        new.append(msgspec.structs.replace(event, at=number))
        if isinstance(event, EpochEnded) and event.epoch == 0:
            new.append(Wrapped(at=number + 0.5, model=1, wrapper="DistributedDataParallel",
                               kind="Net", group=0, site=-1))  # fmt: skip
    assert not examine(new)


def shuffle(number: int) -> list[int]:
    """A rank's share of one shuffle of 100 samples."""
    return random.Random(number).sample(range(100), 50)


SHUFFLES = [shuffle(n) for n in range(3)]
SHARES: dict[str, object] = {"shuffle": True, "distributed": True, "replicas": 2, "sampler_site": 1}


def goes_on(rest: list[int], *later: list[int], **more: object) -> list[Finding]:
    """A loader for the rest of an epoch, and another one, of torch's sampler."""
    own: dict[str, object] = {"sampler": "Rest", "own_order": True, "site": 4}
    began: dict[str, object] = {"sampler_epoch": [*range(len(later))]}
    if len(later) > 1:
        began["epochs_set"] = 3
    return examine(
        [
            *loader(0, [rest], **own),  # type: ignore[arg-type]
            *loader(1, later, began=began, **SHARES | more),  # type: ignore[arg-type]
        ]
    )


def test_the_rest_of_an_epoch_that_is_of_the_shuffle_of_a_later_one() -> None:
    (finding,) = goes_on(SHUFFLES[0][20:], *SHUFFLES)
    assert finding.rule == "resumed-in-another-epoch"
    assert "epoch number 0" in finding.cause
    (finding,) = goes_on(SHUFFLES[0][20:], *SHUFFLES, shuffle=None, replicas=-1)
    (finding,) = epochs_of_one(SHUFFLES[1][20:], *SHUFFLES[1:])
    assert "epoch number 2" in finding.cause


def test_the_rest_of_an_epoch_where_the_epoch_is_never_set() -> None:
    (finding,) = goes_on(SHUFFLES[0][20:], SHUFFLES[0])
    assert "`set_epoch` is not called" in finding.cause
    began = {"sampler_epoch": 0}
    rest = loader(0, [SHUFFLES[0][20:]], own_order=True, site=4)
    (finding,) = examine([*rest, *loader(1, [SHUFFLES[0]] * 2, began=began, **SHARES)])  # type: ignore[arg-type]
    assert finding.rule == "set-epoch-not-called"


def epochs_of_one(*orders: list[int]) -> list[Finding]:
    began = {"sampler_epoch": [*range(1, len(orders) + 1)]}
    return examine(loader(0, orders, began=began, **SHARES))  # type: ignore[arg-type]


def test_the_rest_of_an_epoch_that_does_not_come_again() -> None:
    assert not goes_on(shuffle(3)[20:], *SHUFFLES)
    assert not goes_on(SHUFFLES[0][40:], *SHUFFLES), "too few samples to tell"
    assert not goes_on(SHUFFLES[0][:30], *SHUFFLES), "left early, and begun anew"
    assert not goes_on(sorted(SHUFFLES[0])[20:], sorted(SHUFFLES[0]), shuffle=False)
    share = SHUFFLES[0]
    again = [share[n:] + share[:n] for n in (5, 9)]
    assert not goes_on(share[20:], *again, shuffle=None, replicas=-1), "always the same share"


def test_the_rest_of_an_epoch_that_is_run_again() -> None:
    rest = loader(0, [SHUFFLES[0][20:]], own_order=True, site=4)
    later = loader(1, SHUFFLES, began={"sampler_epoch": [0, 1, 2]}, **SHARES)  # type: ignore[arg-type]
    events = [msgspec.structs.replace(e, at=n) for n, e in enumerate([*rest, *later])]
    assert examine(events)
    back = Loaded(at=len(rest) - 0.5, what="weights", model=0, step=1, site=-1)
    assert not examine([*events[: len(rest)], back, *events[len(rest) :]])


@pytest.mark.parametrize(
    ("line", "numbers", "fix"),
    [
        ("for x in loader:", [0, 0, 0], "set_epoch(epoch)` at the start of every epoch"),
        ("for x in loader:", [0, 1, 1], "set_epoch(n)` before every pass over the loader"),
        ("it = iter(loader)", [0, 0, 0], "set_epoch(n)` before every `iter(loader)`"),
    ],
)
def test_where_the_epoch_is_to_be_set(line: str, numbers: list[int], fix: str) -> None:
    """Passes that begin in the middle of an epoch of the program need a number each."""
    called = sum(a != b for a, b in itertools.pairwise(numbers))
    began = {"sampler_epoch": numbers, "epochs_set": [0, 0, called]}
    fields: dict[str, object] = {"shuffle": True, "distributed": True, "sampler_site": 1}
    events = loader(0, [FIRST] * 3, began=began, **fields, loop_site=9)  # type: ignore[arg-type]
    (finding,) = examine([site(9, "train.py", 30, line), *events])
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("made", "function", "loop", "name"),
    [
        ("sampler = DistributedSampler(data)", "main", "for x in loader:", "sampler"),
        ("own = DistributedSampler(data)", "main", "for x in loader:", "own"),
        ("own = DistributedSampler(data)", "data", "for x in loader:", "loader.sampler"),
        ("DataLoader(d, sampler=DistributedSampler(d))", "data", "for n, x in enumerate(a.b, 1):",
         "a.b.sampler"),
        ("own = DistributedSampler(data)", "data", "for x in tqdm(enumerate(a)):", "a.sampler"),
        ("own = DistributedSampler(data)", "data", "for x in self.batches():", "sampler"),
        ("own = DistributedSampler(data)", "data", "batch = next(batches)", "sampler"),
        ("own = DistributedSampler(data)", "data", "it = iter(loader)", "loader.sampler"),
    ],
)  # fmt: skip
def test_what_the_loop_can_call_the_sampler(made: str, function: str, loop: str, name: str) -> None:
    reader: Any = SimpleNamespace(
        sampler_at=Location("train.py", 3, function, made),
        loop_at=Location("train.py", 9, "main", loop),
        seen=SimpleNamespace(sampler="DistributedSampler", batch_sampler=""),
        rank=SimpleNamespace(first=lambda kind: None),
    )
    assert _sampler_name(reader) == name


@pytest.mark.parametrize(("script", "name"), [
    ("/home/me/train.py", "own"),  # the script goes through what a helper yields
    ("/home/me/main.py", "batches.sampler"),
])  # fmt: skip
def test_a_loop_in_a_helper_of_another_file(script: str, name: str) -> None:
    reader: Any = SimpleNamespace(
        sampler_at=Location("train.py", 3, "main", "own = DistributedSampler(data)"),
        loop_at=Location("helpers/logging.py", 9, "every", "for x in batches:"),
        seen=SimpleNamespace(sampler="DistributedSampler", batch_sampler=""),
        rank=SimpleNamespace(first=lambda kind: SimpleNamespace(argv=(script, "-v"))),
    )
    assert _sampler_name(reader) == name


def test_an_iterator_that_shows_progress() -> None:
    """It goes through anything, and begins once for each epoch of the program."""
    fields: dict[str, object] = {"shuffle": True, "distributed": True, "sampler_site": 1}
    events = loader(0, [FIRST] * 3, began={"sampler_epoch": 0}, **fields, loop_site=9)  # type: ignore[arg-type]
    line = msgspec.structs.replace(site(9, "log.py", 30, "it = iter(self.it)"), function="__iter__")
    (finding,) = examine([line, *events])
    assert "set_epoch(epoch)` at the start of every epoch" in finding.fix
    assert "self" not in finding.fix
