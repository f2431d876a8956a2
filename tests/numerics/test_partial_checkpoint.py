"""DDP805 on literal events, and what is recorded of a save."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ddpdoctor.checks.numerics.partial_checkpoint import PartialCheckpoint
from recordings import make_run, site, steps
from replicas import digests, run_of

from ddpdoctor.events import Event, SavedPart
from ddpdoctor.probe.watchers.process import saved_parts
from ddpdoctor.probe.watchers.process.saved_parts import SavedParts
from ddpdoctor.report.findings import Finding

PATH = "/out/last.pt"
LINE = site(5, "train.py", 33, "torch.save(state, path)")


def saved(step: int = 3, *, shards: int = 0, lacking: int = 0) -> SavedPart:
    return SavedPart(
        at=3, path=PATH, step=step, site=5, shards=shards, tensors=9, lacking=lacking,
        ranks=(0, 1) if shards else (), parameters=4,
    )  # fmt: skip


def found(*ranks: list[Event]) -> list[Finding]:
    events = {n: [LINE, *steps(5), *mine] for n, mine in enumerate(ranks)}
    return list(PartialCheckpoint().examine(make_run(events)))


def test_one_rank_saves_its_shards() -> None:
    (finding,) = found([saved(shards=6)], [])
    assert (finding.rule, finding.ranks) == ("shards-of-some-ranks", (0,))
    assert finding.location is not None and finding.location.line == 33
    assert "6 of 9 tensors are parts, and rank 1 holds the rest" in finding.summary


def test_the_same_line_is_told_once() -> None:
    assert len(found([saved(1, shards=6), saved(3, shards=6)], [])) == 1


@pytest.mark.parametrize("ranks", [
    [[saved(shards=6)], [saved(shards=6)]],
    [[], []],
    [[saved(lacking=2)], []],  # which the other ranks lack, too, as far as is known
])  # fmt: skip
def test_nothing_is_lost(ranks: list[list[Event]]) -> None:
    assert not found(*ranks)


@pytest.mark.parametrize(("first", "second", "rule"), [
    ([1, 2, 0, 0], [0, 0, 3, 4], "state-of-some-ranks"),
    ([1, 2, 0, 0], [1, 2, 0, 0], ""),  # the last two have none anywhere
    ([1, 2, 0, 0], [1, 2, 3, 0], ""),  # rank 1 has all that there is: nothing is divided
    ([1, 2, 0, 0], [1, 0, 3, 0], "state-of-some-ranks"),
])  # fmt: skip
@pytest.mark.parametrize("all_save", [False, True])
def test_one_rank_saves_the_state_that_it_keeps(
    first: list[int], second: list[int], rule: str, all_save: bool
) -> None:
    rows = {n: digests("state:momentum_buffer", {2: row}) for n, row in enumerate((first, second))}
    run = run_of({n: [saved(lacking=2)] * (all_save or not n) + [rows[n]] for n in range(2)})
    told = list(PartialCheckpoint().examine(run))
    assert [f.rule for f in told] == ([rule] if rule and not all_save else [])
    for finding in told:
        assert "without that of 2 of 4 parameters" in finding.summary
        assert "`momentum_buffer`" in finding.cause


@pytest.mark.parametrize(("gradients", "parameters", "told"), [
    (([1, 0, 3, 4], [1, 2, 0, 4]), ([5, 6, 7, 8], [5, 9, 9, 8]), False),
    (([1, 0, 3, 4], [1, 2, 0, 4]), ([5, 6, 7, 8], [5, 6, 7, 8]), True),  # sent by who keeps it
    (([1, 2, 3, 4], [1, 2, 3, 4]), ([5, 6, 7, 8], [5, 9, 9, 8]), True),
])  # fmt: skip
def test_a_state_that_is_lacking_for_want_of_a_gradient(
    gradients: tuple[list[int], ...], parameters: tuple[list[int], ...], told: bool
) -> None:
    states = [[1, 0, 3, 0], [1, 2, 0, 0]]
    run = run_of({
        n: [
            *[saved(lacking=2)] * (n == 0),
            digests("state:exp_avg", {2: states[n]}),
            digests("gradients", {1: gradients[n], 2: [1, 2, 3, 4]}),
            digests("parameters", {2: parameters[n]}),
        ]
        for n in range(2)
    })  # fmt: skip
    assert bool(list(PartialCheckpoint().examine(run))) is told


class Shard:
    """What is read of a DTensor."""

    def __init__(self, *placements: bool, ranks: Any, own: tuple[int, ...]) -> None:
        self.placements = [SimpleNamespace(is_shard=lambda p=p: p) for p in placements]
        mesh = torch.tensor(ranks)
        self.device_mesh = SimpleNamespace(mesh=mesh, get_coordinate=lambda: list(own))


@pytest.mark.parametrize(("placements", "ranks", "own", "over"), [
    ((True,), [0, 1], (0,), {0, 1}),
    ((False,), [0, 1], (0,), set()),
    ((False, True), [[0, 1], [2, 3]], (1, 0), {2, 3}),  # replicas of the shards
    ((True, True), [[0, 1], [2, 3]], (1, 0), {0, 1, 2, 3}),
    ((True,), [0], (0,), set()),
])  # fmt: skip
def test_which_ranks_hold_the_shards(
    placements: tuple[bool, ...], ranks: Any, own: tuple[int, ...], over: set[int]
) -> None:
    assert saved_parts._sharded_over(Shard(*placements, ranks=ranks, own=own)) == over


def recorded(monkeypatch: pytest.MonkeyPatch, *states: object) -> list[SavedPart]:
    told: list[SavedPart] = []
    recorder: Any = SimpleNamespace(
        step=7, site=lambda: 5, emit=lambda event, vital: told.append(event)
    )
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    tensors = Shard, torch.Tensor
    monkeypatch.setattr(saved_parts, "_is_tensor", lambda value: isinstance(value, tensors))
    watcher = SavedParts()
    for state in states:
        watcher._saves(recorder, (state, PATH), {})
    return told


def test_what_is_recorded_of_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(True, ranks=[0, 1], own=(0,))
    momentum = {0: {"momentum_buffer": torch.ones(2)}, 1: {}}
    groups = [{"params": [0, 1, 2]}]
    model = {"model": {"a": shard, "b": torch.ones(2)}, "epoch": 3}
    (sharded,) = recorded(monkeypatch, model)
    assert (sharded.shards, sharded.tensors, sharded.ranks) == (1, 2, (0, 1))
    assert (sharded.path, sharded.step, sharded.site, sharded.lacking) == (PATH, 7, 5, 0)
    (state,) = recorded(monkeypatch, [{"state": momentum, "param_groups": groups}])
    assert (state.lacking, state.parameters, state.shards) == (2, 3, 0)
    assert not recorded(
        monkeypatch,
        {"model": {"a": torch.ones(2)}},
        {"state": {}, "param_groups": groups},  # SGD
        {"state": {0: momentum[0]}, "param_groups": [{"params": [0]}]},
        shard,
    )


def test_saves_of_one_line_are_looked_at_ever_less(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = {"a": Shard(True, ranks=[0, 1], own=(0,))}
    assert len(recorded(monkeypatch, *[shard] * 40)) == 8 + 3
