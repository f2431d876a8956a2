"""sampler-rank-mismatch: from what the samplers were told, against the groups that exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from ddpdoctor.checks.data.sampler_rank_mismatch import SamplerRankMismatch
from readers import SITES, found, loader, prologue, run_of
from recordings import make_run

from ddpdoctor.events import (
    CallBlock,
    CallRun,
    Event,
    ExceptionRaised,
    GroupReady,
    Payload,
    SamplerRefused,
    ShardedOver,
    Signature,
)
from ddpdoctor.report.findings import Finding, Severity

EVERYTHING = list(range(100))


def sampled(replicas: int, rank: int, **more: object) -> list[Event]:
    return loader(
        0,
        [EVERYTHING[rank::replicas]],
        distributed=True,
        replicas=replicas,
        sampler_rank=rank,
        sampler_site=1,
        total_size=100,
        **{"sampler": "DistributedSampler", **more},  # type: ignore[arg-type]
    )


def examine(*ranks: Sequence[Event]) -> list[Finding]:
    return found(SamplerRankMismatch(), run_of(*ranks))


def test_a_constant_rank() -> None:
    (finding,) = examine(sampled(2, 0), sampled(2, 0))
    assert finding.severity is Severity.ERROR
    assert finding.location is not None and finding.location.line == 10


def test_a_sampler_of_one_s_own_is_told_the_numbers() -> None:
    """It need not ask the group where they are left out."""
    (finding,) = examine(*(sampled(2, 0, sampler="Mine", own_order=True) for _ in range(2)))
    assert finding.rule == "wrong-group"


def test_the_devices_of_one_node_instead_of_the_world() -> None:
    (finding,) = examine(*(sampled(2, r % 2) for r in range(4)))
    assert finding.ranks == (0, 1, 2, 3)


def test_more_replicas_than_ranks_leave_samples_unread() -> None:
    (finding,) = examine(sampled(4, 0), sampled(4, 1))
    assert finding.rule == "wrong-group"


def test_a_world_of_one() -> None:
    (finding,) = examine(sampled(1, 0), sampled(1, 0))
    assert finding.rule == "wrong-group"


def test_a_world_of_one_over_parts_made_by_hand() -> None:
    def shard(rank: int, content: int) -> list[Event]:
        ids = Payload(name="ids", kind="choice", length=100, order=rank + 1, content=content)
        return sampled(1, 0, payloads=(ids,))

    assert not examine(shard(0, 5), shard(1, 6))
    assert examine(shard(0, 5), shard(1, 5)), "the same entries in another order"


def test_ranks_that_share_one_model_share_its_data() -> None:
    events = {r: [*prologue(2, wrapped=False), *sampled(1, 0)] for r in range(2)}
    assert not found(SamplerRankMismatch(), make_run(events))


def test_the_right_ranks_also_in_another_order() -> None:
    assert not examine(sampled(2, 0), sampled(2, 1))
    assert not examine(sampled(2, 1), sampled(2, 0))


def test_a_sub_group() -> None:
    """Two groups of two train models of their own, each over the whole data set."""
    events = {
        r: [*prologue(4, group=(0, 1) if r < 2 else (2, 3)), *sampled(2, r % 2)] for r in range(4)
    }  # fmt: skip
    assert not found(SamplerRankMismatch(), make_run(events))


def test_the_group_that_averages_is_shown() -> None:
    teams = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    events = {
        r: [
            msgspec.structs.replace(e, site=2 - e.group) if isinstance(e, GroupReady) else e
            for e in (*prologue(4, group=team), *sampled(2, r % 2 if r < 2 else 0))
        ]
        for r, team in teams.items()
    }
    (finding,) = found(SamplerRankMismatch(), make_run(events))
    (group, _) = finding.related
    assert (group.label, group.location.line) == ("group of 2 made here", 10)


def test_data_parallel_ranks_of_a_mesh() -> None:
    """Tensor-parallel pairs (0, 1) and (2, 3) share their part; gradients are averaged over all."""
    events = {}
    for r in range(4):
        pair = (0, 1) if r < 2 else (2, 3)
        events[r] = [*prologue(4, group=pair)[:-1], *prologue(4)[-1:], *sampled(2, r // 2)]
    assert not found(SamplerRankMismatch(), make_run(events))


def test_the_world_instead_of_the_data_parallel_ranks_of_a_mesh() -> None:
    """Gradients are averaged over (0, 2) and (1, 3); (0, 1) and (2, 3) share a model each."""
    events = {}
    for r in range(4):
        pair = (0, 1) if r < 2 else (2, 3)
        split = GroupReady(
            at=0, group=2, name="2", backend="gloo", ranks=pair, member=True, site=-1
        )
        alone = sampled(4, r, ends={"collectives": 0})  # in the groups, none over all ranks
        events[r] = [*prologue(4, group=(r % 2, r % 2 + 2)), split, *alone]
    (finding,) = found(SamplerRankMismatch(), make_run(events))
    assert finding.rule == "wrong-group"


def towers(numel: int, *, trains: bool = True) -> list[Finding]:
    """Gradients are averaged over (0, 2) and (1, 3), the data divided over all, and so many numbers
    are summed over all in every step."""
    events = {}
    for r in range(4):
        calls = [
            Signature(at=0, id=0, op="all_reduce", numel=numel),
            Signature(at=0, id=1, op="DDP backward"),
            CallBlock(at=0, id=0, codes=(0, 0)),
            CallBlock(at=0, id=1, codes=(1, 0)),
            CallRun(at=0, group=0, first=0, block=0, repeat=6),
            CallRun(at=0, group=1, first=0, block=1, repeat=6),
        ]
        read = sampled(4, r, trains=trains)
        events[r] = [*prologue(4, group=(r % 2, r % 2 + 2)), *calls, *read]
    return found(SamplerRankMismatch(), make_run(events))


def test_groups_that_only_tell_each_other_their_losses() -> None:
    (finding,) = towers(2)
    assert finding.rule == "wrong-group"


def test_groups_that_share_gradients_or_samples_may_share_one_division() -> None:
    assert not towers(4096)
    assert not towers(-1)  # objects of any size


def test_results_of_an_evaluation_are_added_up_over_all_groups() -> None:
    assert not towers(2, trains=False)


def sharded_over_a_mesh(place: Callable[[int], int], *, sharing: int = 0) -> list[Finding]:
    """Four ranks of one model: replicated over (0, 2) and (1, 3), sharded over (0, 1) and (2, 3).
    `sharing`: groups of the same ranks as the shards that are made for something else."""
    events = {}
    for r in range(4):
        copies, shards = (r % 2, r % 2 + 2), (r // 2 * 2, r // 2 * 2 + 1)
        groups = [
            prologue(4, wrapped=False, group=ranks)[-1]
            for ranks in (copies, *[shards] * (1 + sharing))
        ]
        mesh = ShardedOver(at=0, ranks=(0, 1, 2, 3), groups=(copies, shards))
        events[r] = [*prologue(4, wrapped=False), *groups, mesh, *sampled(2, place(r))]
    return found(SamplerRankMismatch(), make_run(events))


def test_sharded_and_replicated_ranks_are_all_to_read_data_of_their_own() -> None:
    assert [f.ranks for f in sharded_over_a_mesh(lambda r: r % 2)] == [(0, 1, 2, 3)]
    assert [f.ranks for f in sharded_over_a_mesh(lambda r: r // 2)] == [(0, 1, 2, 3)]


def test_shards_that_are_sequence_parallel_too() -> None:
    assert not sharded_over_a_mesh(lambda r: r // 2, sharing=1)


def test_every_rank_evaluates_everything_on_purpose() -> None:
    assert not examine(sampled(1, 0, trains=False), sampled(1, 0, trains=False))


def test_swapped_arguments_that_torch_refused() -> None:
    texts = [f"Invalid rank 2, rank should be in the interval [0, {n}]" for n in (-1, 0)]
    events = {
        r: [
            *SITES,
            SamplerRefused(
                at=0, site=1, error=texts[r], replicas=r, rank=2, world_size=2, group_rank=r
            ),
            ExceptionRaised(at=0, kind="ValueError", message=texts[r], frames=()),
        ]
        for r in range(2)
    }  # fmt: skip
    (finding,) = found(SamplerRankMismatch(), make_run(events, ended={0: 1, 1: 1}))
    assert finding.location is not None and finding.location.line == 10
    for text in texts:  # of whichever rank was the first to end
        effect = msgspec.structs.replace(finding, check="first-failure", evidence={"said": text})
        assert SamplerRankMismatch().explains(finding, effect)


def test_a_refusal_that_the_program_caught() -> None:
    refused = SamplerRefused(at=0, site=1, error="Invalid rank", replicas=1, rank=2)
    assert not found(SamplerRankMismatch(), make_run({0: [refused], 1: [refused]}))
