"""Several worlds side by side, and worlds that count otherwise than the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
from recordings import make_run

from ddpdoctor.events import (
    Event,
    GroupReady,
    InitEntered,
    Replica,
    Signature,
    ThreadsSeen,
    Wrapped,
)
from ddpdoctor.probe.collectives.process_groups import _place_of
from ddpdoctor.storage.call_ring import RingWriter, read_ring


def joined(claimed: int, size: int, place: str) -> list[Event]:
    entered = InitEntered(at=0, backend="gloo", init_method="", rank=claimed, world_size=size,
                          env_rank=-1, env_world_size=-1, env_local_rank=-1, timeout_s=-1.0,
                          site=-1, rendezvous=place)  # fmt: skip
    everyone = tuple(range(size))
    ready = GroupReady(at=1, group=0, name="0", backend="gloo", ranks=everyone, member=True, site=0)
    copies = Replica(at=2, model=0, optimizer=0, ranks=everyone, parameters=b"")
    return [entered, ready, copies]


def groups(*events: list[Event]) -> list[tuple[int, ...]]:
    run = make_run(dict(enumerate(events)))
    for rank in run.ranks.values():
        assert [c.ranks for c in rank.of(Replica)] == [g.ranks for g in rank.of(GroupReady)]
    return [rank.default_group.ranks for rank in run.ranks.values() if rank.default_group]


def test_two_worlds_side_by_side() -> None:
    even, odd = ("file:///even", "file:///odd")
    every = joined(0, 2, even), joined(0, 2, odd), joined(1, 2, even), joined(1, 2, odd)
    assert groups(*every) == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_ranks_in_another_order() -> None:
    assert groups(*(joined(2 - n, 3, "here") for n in range(3))) == [(2, 1, 0)] * 3


def test_of_whom_nothing_is_known() -> None:
    """Each was given a store of its own making: who is behind the other rank cannot be told."""
    every = [joined(n // 2, 2, f"store of process {n}") for n in range(4)]
    assert groups(*every) == [(0,), (1,), (2,), (3,)]


def test_what_agrees_or_cannot_be_right_is_left() -> None:
    assert groups(joined(0, 2, "a"), joined(1, 2, "b")) == [(0, 1)] * 2
    assert groups(joined(0, 2, "a"), joined(0, 2, "a")) == [(0, 1)] * 2


def test_where_a_store_is(tmp_path: Path) -> None:
    dist = pytest.importorskip("torch.distributed")
    file = dist.FileStore(str(tmp_path / "meeting"), 1)
    assert _place_of(dist.PrefixStore("a", dist.PrefixStore("b", file))) == f"file://{file.path}"
    assert _place_of(dist.HashStore()).startswith("store of process")


def test_the_other_side_of_a_message(tmp_path: Path) -> None:
    """Of two worlds side by side, each counts its ranks from 0: rank 1 of the second is 3."""
    call = Signature(at=3, id=0, op="batch", root=1, sends=(1,), receives=(0, 1))
    every = [[*joined(n % 2, 2, f"file:///{n // 2}"), call] for n in range(4)]
    run = make_run(dict(enumerate(every)))
    told = [(s.root, s.sends, s.receives) for r in run.ranks.values() for s in r.of(Signature)]
    assert told == [(1, (1,), (0, 1))] * 2 + [(3, (3,), (2, 3))] * 2
    assert [rank.numbers for rank in run.ranks.values()][2:] == [{0: 2, 1: 3}] * 2

    writer = RingWriter(tmp_path / "rank-2.ring")
    for peer in (1, -1):
        writer.begin(0, -1, 0, 0, peer)
    for numbers, peers in ((None, [1, -1]), ({0: 2, 1: 3}, [3, -1])):
        ring = read_ring(tmp_path / "rank-2.ring", numbers)
        assert ring is not None
        assert [c.peer for c in ring.calls] == peers
        assert [c.peer for c in ring.last_calls][:2] == peers


def test_what_has_no_rank_keeps_saying_so() -> None:
    told = [Signature(at=3, id=0, op="all_reduce"), Signature(at=3, id=1, op="send", root=9)]
    run = make_run({n: [*joined(1 - n, 2, "here"), *told] for n in range(2)})
    assert [s.root for s in run.ranks[0].of(Signature)] == [-1, -1]


@pytest.mark.parametrize(
    ("device", "backend", "unseen"),
    [
        ("cuda", "nccl", True),
        ("cuda", "cpu:gloo,cuda:nccl", True),
        ("npu", "cpu:gloo,npu:hccl", True),
        ("xpu", "xccl", True),
        ("cuda", "gloo", False),
        ("cuda", "fake", False),
        ("cpu", "cpu:gloo,cuda:nccl", False),
    ],
)
def test_where_the_host_does_not_see_the_waiting(device: str, backend: str, unseen: bool) -> None:
    """On any device; with a wrapper or, as in FSDP2 and by hand, without."""
    group = GroupReady(at=0, group=0, name="0", backend=backend, ranks=(0, 1), member=True, site=1)
    threads = ThreadsSeen(at=0, compute=1, alive=2, asked=False, device=device)
    wrapped = Wrapped(at=0, model=0, wrapper="DistributedDataParallel", kind="Net", group=0,
                      site=-1, device=f"{device}:0" if device != "cpu" else device)  # fmt: skip
    for events in ([group, threads], [group, wrapped]):
        (rank,) = make_run({0: [*events]}).ranks.values()
        assert rank.waits_on_gpu is unseen
