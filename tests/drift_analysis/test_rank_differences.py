"""What ranks recorded differently, whatever the event, and what may differ without being it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from recordings import START, WALL, make_run, site, started, steps

import ddpdoctor.events
from ddpdoctor.analysis.rank_differences import (
    COMPARED,
    NOT_COMPARED,
    Difference,
    differences,
    extra_by_line,
    series,
)
from ddpdoctor.events import (
    BatchSeen,
    Clipped,
    Edited,
    EpochBegan,
    EpochEnded,
    Event,
    ExceptionPassed,
    FileRead,
    FileWritten,
    GroupReady,
    Hyperparameters,
    InitEntered,
    Loaded,
    LoaderSeen,
    OptimizerSeen,
    ScalerStep,
    StepDone,
    SyncPattern,
    Tensor,
    TorchLoaded,
    Wrapped,
)

LINE, OTHER = 1, 2
SITES = (site(LINE, "train.py", 10), site(OTHER, "train.py", 20))


def event(kind: type[Event], /, **fields: Any) -> Event:
    return kind(at=0, **fields)


def found(*ranks: Sequence[Event], count: int = 20, **options: Any) -> list[Difference]:
    run = make_run({n: [*SITES, *mine, *steps(count)] for n, mine in enumerate(ranks)})
    return differences(run, **options)


def init(**fields: Any) -> Event:
    more = {"env_rank": -1, "env_world_size": -1, "env_local_rank": -1, "site": LINE}
    values = {"backend": "gloo", "init_method": "", "rank": 0, "world_size": 2, "timeout_s": 1800.0}
    return event(InitEntered, **{**values, **more, **fields})


def loader(**fields: Any) -> Event:
    values = {"loader": 0, "site": LINE, "loop_site": LINE, "dataset": "D", "length": 8}
    return event(LoaderSeen, **{**values, "sampler": "S", **fields})


def wrapped(**fields: Any) -> Event:
    values = {"model": 0, "wrapper": "DDP", "kind": "Net", "group": 0, "site": LINE}
    return event(Wrapped, **{**values, **fields})


def options(step: int, **groups: float) -> Event:
    return event(Hyperparameters, optimizer=0, step=step, groups=({**groups},))


def scaler(call: int, scale: float) -> Event:
    return event(
        ScalerStep, scaler=0, optimizer=0, call=call, step=call, scale=scale, skipped=False
    )


def epoch(kind: type[Event], number: int, /, **fields: Any) -> Event:
    return event(kind, loader=0, epoch=number, **fields)


def pattern(step: int, synced: int) -> Event:
    return event(SyncPattern, model=0, optimizer=0, step=step, synced=synced)


def edit(step: int, changed: bool = True) -> Event:
    return event(Edited, model=0, optimizer=0, kind="gradients", step=step, changed=changed)


def batch(forward: int, size: int) -> Event:
    return event(BatchSeen, model=0, forward=forward, size=size, reduction="mean")


def weights(**fields: Any) -> Event:
    return event(Loaded, what="weights", model=0, step=0, site=LINE, **fields)


TENSORS = (Tensor(name="w", shape=(2, 3), dtype="float32"),)
ENDED = {"samples": 8, "backwards": 4, "exhausted": True}

CASES: dict[str, tuple[Event, Event, str, tuple[object, object], int]] = {
    "torch": (
        event(TorchLoaded, torch="2.13.0"), event(TorchLoaded, torch="2.12.0"),
        "torch", ("2.13.0", "2.12.0"), 0,
    ),
    "port": (
        init(rendezvous="127.0.0.1:29500"), init(rendezvous="127.0.0.1:29501"),
        "rendezvous", ("127.0.0.1:29500", "127.0.0.1:29501"), 0,
    ),
    "line": (init(), init(site=OTHER), "site", ("train.py:10", "train.py:20"), 0),
    "group": (
        event(GroupReady, group=1, name="a", backend="", ranks=(0,), member=True, site=LINE),
        event(GroupReady, group=1, name="b", backend="", ranks=(1,), member=True, site=LINE),
        "ranks", ((0,), (1,)), 0,
    ),
    "model": (
        wrapped(parameters=TENSORS), wrapped(parameters=(*TENSORS, *TENSORS)),
        "parameters[1]", (None, TENSORS[0].look), 0,
    ),
    "option": (options(4, lr=0.1), options(4, lr=0.2), "groups[0].lr", (0.1, 0.2), 4),
    "loss scale": (scaler(3, 8.0), scaler(3, 16.0), "scale", (8.0, 16.0), 3),
    "sampler": (loader(sampler_length=4), loader(sampler_length=5), "sampler_length", (4, 5), 0),
    "batches": (
        epoch(EpochEnded, 2, batches=4, **ENDED), epoch(EpochEnded, 2, batches=5, **ENDED),
        "batches", (4, 5), 2,
    ),
    "micro-batches": (pattern(5, 1), pattern(5, 2), "synced", (1, 2), 5),
    "seed": (
        epoch(EpochBegan, 0, step=0, site=LINE, seed=1),
        epoch(EpochBegan, 0, step=0, site=LINE, seed=2), "seed", (1, 2), 0,
    ),
    "exception": (
        event(ExceptionPassed, where="data", kind="OSError", message="a", step=3),
        event(ExceptionPassed, where="data", kind="ValueError", message="a", step=3),
        "kind", ("OSError", "ValueError"), 0,
    ),
    "optimizer": (
        event(OptimizerSeen, optimizer=0, kind="SGD", site=LINE, parameters=2),
        event(OptimizerSeen, optimizer=0, kind="SGD", site=LINE, parameters=3),
        "parameters", (2, 3), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_found_with_its_values_and_lines(case: str) -> None:
    here, there, field, values, moment = CASES[case]
    (first,) = found([here], [there])
    assert (first.kind, first.field, first.moment) == (type(here), field, moment)
    assert tuple(first.values.values()) == values
    assert {str(spot) for spot in first.lines.values()} <= {"train.py:10", "train.py:20"}
    assert not found([here], [here])


def test_batches_may_differ_in_size() -> None:
    assert not found([batch(6, 32)], [batch(6, 17)])
    (first,) = found([batch(6, 32)], [batch(6, 17)], usual=True)
    assert (first.field, first.moment) == ("size", 6)


ON_SOME: dict[str, Event] = {
    "load": weights(),
    "clipping": event(Clipped, function="clip_grad_norm_", step=0, call=0, site=LINE),
    "edit": edit(3),
    "read": event(FileRead, path="/data/state.pt", site=LINE, how="load", step=0),
}


@pytest.mark.parametrize("case", ON_SOME)
def test_what_only_some_ranks_do_is_found(case: str) -> None:
    (first,) = found([ON_SOME[case]], [])
    assert (first.field, dict(first.values)) == ("", {0: True, 1: None})
    assert not found([ON_SOME[case]], [ON_SOME[case]])


def test_the_earliest_difference_comes_first_and_each_only_once() -> None:
    ours = [options(0, lr=0.1), options(3, lr=0.2), options(5, lr=0.4), weights()]
    theirs = [options(0, lr=0.1), options(3, lr=0.3), options(5, lr=0.5)]
    every = found(ours, theirs)
    assert [d.kind for d in every] == [Hyperparameters, Loaded]
    assert every[0].moment == 3
    assert found(ours, theirs, before=every[1].at) == every[:1]
    assert not found(ours, theirs, before=every[0].at)


def test_a_record_holds_until_the_next_one() -> None:
    assert not found(
        [options(0, lr=0.1), options(4, lr=0.2)], [options(0, lr=0.1), options(4, lr=0.2)]
    )
    (changed,) = found([options(0, lr=0.1), options(4, lr=0.2)], [options(0, lr=0.1)])
    assert (changed.moment, dict(changed.values)) == (4, {0: 0.2, 1: 0.1})


def test_joined_steps_are_not_compared() -> None:
    one = event(StepDone, optimizer=1, step=9, site=LINE, wall_s=1.0, count=4, synced=4)
    other = event(StepDone, optimizer=1, step=9, site=LINE, wall_s=1.0, count=7, synced=7)
    assert not found([one], [other])


def test_what_each_rank_has_for_itself_is_not_reported() -> None:
    """Its rank and device, paths and names with the rank in them, lines that are not known, and
    values that were broadcast in another precision."""
    own = []
    for rank in (0, 1):
        path = f"/data/part-{rank}.pt"
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": "29500",
            "PMI_FD": str(9 + rank),
        }  # fmt: skip
        given = (f"--local-rank={4 + rank}", "--node_rank", str(7 + rank))
        argv = ("train.py", f"--out=logs/{rank}", *given)
        own.append(
            [
                started(rank, 2, environment=environment, argv=argv),
                wrapped(device=f"cuda:{rank}", site=LINE if rank else -1),
                loader(sampler_rank=rank),
                options(0, lr=0.1 if rank else 0.10000000149),
                event(FileRead, path=path, site=LINE, how="load", step=0),
            ]
        )
    assert not found(*own)


def test_a_name_that_happens_to_hold_the_number_of_a_rank_is_the_same() -> None:
    read = event(FileRead, path="/runs/1/config.json", site=LINE, how="open", step=0)
    assert not found([read], [read])


def test_a_rank_that_did_not_get_there_lacks_nothing() -> None:
    run = make_run(
        {0: [*steps(9), *SITES, weights()], 1: steps(3)}, ended={1: -9}, outcome="failed"
    )
    assert not [d for d in differences(run) if d.kind is Loaded]


def test_what_ranks_usually_do_differently_is_left_out_unless_asked_for() -> None:
    wrote = event(FileWritten, path="/c.pt", site=LINE, how="save", step=4)
    assert not found([wrote], [])
    assert [d.kind for d in found([wrote], [], usual=True)] == [FileWritten]


def test_only_the_ranks_asked_for_are_compared() -> None:
    ranks = ([options(0, lr=0.1)], [options(0, lr=0.1)], [options(0, lr=0.3)])
    assert not found(*ranks, ranks=(0, 1))
    (first,) = found(*ranks)
    assert dict(first.values) == {0: 0.1, 1: 0.1, 2: 0.3}
    assert first.at == pytest.approx(WALL, abs=1) and START < WALL


def test_every_event_is_compared_or_says_why_it_is_not() -> None:
    every = {
        kind
        for kind in vars(ddpdoctor.events).values()
        if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
    }
    left_out = [kind for kinds in NOT_COMPARED.values() for kind in kinds]
    assert {*COMPARED, *left_out} == every
    assert not {*COMPARED} & {*left_out}


@pytest.mark.parametrize("kind", COMPARED, ids=lambda kind: kind.__name__)
def test_what_is_compared_exists(kind: type[Event]) -> None:
    row = COMPARED[kind]
    names = {*row.fields, *row.key, *([row.moment] if row.moment else [])}
    assert names <= {f.name for f in msgspec.structs.fields(kind)}


def test_series() -> None:
    run = make_run({0: [options(0, lr=0.1), options(4, lr=0.2), *steps(9)]})
    table = series(run.ranks[0], Hyperparameters, "step", optimizer=0)
    assert [e and e.groups[0]["lr"] for e in map(table.at, (-1, 0, 3, 4, 9))] == [
        None, 0.1, 0.1, 0.2, 0.2,
    ]  # fmt: skip
    assert [(first, last) for _, first, last in table.spans(8)] == [(0, 3), (4, 8)]
    assert not series(run.ranks[0], Hyperparameters, "step", optimizer=1)


def test_lines_at_which_some_ranks_do_more() -> None:
    assert extra_by_line({0: ["a", "b"], 1: ["a"]}) == {"b": (0,)}
    assert extra_by_line({0: ["a", "a"], 1: ["a"], 2: ["a"]}) == {"a": (0,)}
    # The other rank does it at another line.
    assert extra_by_line({0: ["a"], 1: ["b"]}) == {}
    assert extra_by_line({0: ["a"], 1: ["b"]}, whole=False) == {"a": (0,), "b": (1,)}


def test_a_difference_as_text() -> None:
    (first,) = found([options(0, lr=0.1)], [options(0, lr=0.2)])
    assert first.text == "options groups[0].lr is 0.1 on rank 0, 0.2 on rank 1"
    (first,) = found([ON_SOME["clipping"]], [])
    assert first.text == "clipping on rank 0 only (train.py:10)"


def test_nodes_that_hold_the_same_script_in_folders_of_their_own() -> None:
    def run(*digests: str) -> list[str]:
        ranks: dict[int, list[Event]] = {
            n: [started(n, 2, argv=(f"{home}/train.py", "--lr=1"), cwd=home, script_digest=digest)]
            for n, (home, digest) in enumerate(zip(("/home/a", "/srv/b"), digests, strict=True))
        }  # fmt: skip
        return [d.field.partition("[")[0] for d in differences(make_run(ranks))]

    assert run("abc", "abc") == []
    assert run("abc", "abd") == ["script_digest"]


def test_loaders_that_ranks_iterate_in_another_order_are_the_same() -> None:
    """Ranks number the loaders that they iterate."""
    rows = [
        [
            loader(loader=small, length=8, site=LINE),
            loader(loader=1 - small, length=96, site=OTHER),
            event(EpochEnded, loader=small, epoch=0, batches=2, samples=8, backwards=0,
                  exhausted=True),
            event(EpochEnded, loader=1 - small, epoch=0, batches=24, samples=96, backwards=24,
                  exhausted=True),
        ]
        for small in (0, 1)
    ]  # fmt: skip
    assert not found(*rows)
    (differs,) = found(rows[0], [*rows[1][:1], loader(loader=0, length=99, site=OTHER)])[:1]
    assert (differs.field, {*differs.values.values()}) == ("length", {96, 99})
