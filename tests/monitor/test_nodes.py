"""Nodes without a shared disk: records reach the first node, its verdict reaches the others."""

from __future__ import annotations

import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ddpdoctor.config import Options
from ddpdoctor.events import (
    MonitorStarted,
    NodeSilent,
    ProcessStarted,
    RankExiting,
    RankStarted,
    StallSeen,
    StepDone,
)
from ddpdoctor.launch import other_nodes
from ddpdoctor.launch.other_nodes import OtherNodes
from ddpdoctor.launch.outcome import examine
from ddpdoctor.nodes import link as linking
from ddpdoctor.nodes.desk import ALONE, FOLLOWS, LEADS, SHARES, Desk, Heard, Standing
from ddpdoctor.nodes.last_words import Had, LastWords, ask
from ddpdoctor.nodes.link import Link
from ddpdoctor.nodes.messages import (
    MOST_BYTES,
    MessageError,
    Orders,
    Parcel,
    Piece,
    packed,
    unpacked,
)
from ddpdoctor.nodes.mirror import Inbox, Outbox
from ddpdoctor.nodes.rank_meeting import RankMeeting
from ddpdoctor.run import Recording, load
from ddpdoctor.storage.call_ring import RingWriter, read_ring
from ddpdoctor.storage.run_folder import EventWriter, RunFolder

HEAD = packed(Orders()).split(b"\n")[0] + b"\n"


class MemoryStore:
    """As `torch.distributed.HashStore`, without torch; `broken` makes every call fail."""

    def __init__(self, kept: dict[str, bytes] | None = None, lock: Any = None) -> None:
        self.kept: dict[str, Any] = {} if kept is None else kept
        self.lock = lock or threading.Lock()
        self.broken = False

    def clone(self) -> MemoryStore:
        self._check()
        copy = MemoryStore(self.kept, self.lock)
        copy.__dict__["_original"] = self
        return copy

    def _check(self) -> None:
        if getattr(self, "_original", self).broken:
            raise RuntimeError("connection reset")

    def set(self, key: str, value: bytes) -> None:
        self._check()
        with self.lock:
            self.kept[key] = value

    def get(self, key: str) -> bytes:
        self._check()
        return self.kept[key]

    def add(self, key: str, amount: int) -> int:
        self._check()
        with self.lock:
            self.kept[key] = self.kept.get(key, 0) + amount
            return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        self._check()
        return all(key in self.kept for key in keys)

    def delete_key(self, key: str) -> bool:
        self._check()
        with self.lock:
            return self.kept.pop(key, None) is not None

    def set_timeout(self, timeout: Any) -> None:
        pass


def started(rank: int, at: float, wall: float, node: str = "a") -> RankStarted:
    return RankStarted(
        at=at, schema=1, wall=wall, rank=rank, world_size=2, local_rank=0, pid=rank + 10,
        argv=("t.py",), cwd="/", python="3.11", node=node,
    )  # fmt: skip


def monitored(at: float, wall: float, node: str = "a") -> MonitorStarted:
    return MonitorStarted(at=at, schema=1, wall=wall, node=node, node_rank=0, pid=1)


def write(path: Path, *events: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = EventWriter(path, shared=True)
    for event in events:
        writer.write(event)
    writer.close()


def sent(outbox: Outbox, inbox: Inbox) -> int:
    pieces = outbox.pieces()
    inbox.take([unpacked(packed(p), Piece) for p in pieces])
    return len(pieces)


def test_records_arrive_as_they_are_written(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write(here / "rank-1.jsonl", started(1, 5.0, 100.0))
    write(here / "restart-1" / "rank-1.jsonl", started(1, 6.0, 101.0))
    (here / "secret.txt").write_text("x")
    (here / "rank-2.jsonl").symlink_to("/etc/passwd")
    ring = RingWriter(here / "rank-1.ring")
    outbox, inbox = Outbox(here), Inbox(there)
    sent(outbox, inbox)
    assert sent(outbox, inbox) == 0
    for step in range(3):
        write(here / "rank-1.jsonl", StepDone(at=7.0, optimizer=0, step=step, site=0, wall_s=0.1))
        ring.step = step
        ring.begin(0, step, 0, 0, -1)
        assert sent(outbox, inbox) in (2, 3)  # what was appended, and the blocks that changed
    names = {str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()}
    assert names == {"rank-1.jsonl", "rank-1.ring", "restart-1/rank-1.jsonl"}
    for name in names:
        assert (there / name).read_bytes() == (here / name).read_bytes()


@pytest.mark.parametrize(
    "name",
    ["../rank-0.jsonl", "/etc/passwd", "rank-0.jsonl/x", "findings.json", "nodes/1/rank-0.jsonl",
     "restart-1/../../rank-0.jsonl", "rank-0.jsonl\0", ""],
)  # fmt: skip
def test_what_is_no_record_is_not_written(name: str, tmp_path: Path) -> None:
    Inbox(tmp_path / "in").take([Piece(name, 0, b"x")])
    assert list(tmp_path.rglob("*")) == []


def test_a_record_does_not_grow_without_limit(tmp_path: Path) -> None:
    Inbox(tmp_path / "in").take([Piece("rank-0.jsonl", 1 << 40, b"x")])
    assert list(tmp_path.rglob("*")) == []


def test_a_link_in_the_place_of_a_record_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        Inbox(tmp_path).take([Piece("rank-0.jsonl", 0, b"x")])
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "data", [b"", b"x", packed(Orders()), HEAD + zlib.compress(b"\0" * (2 * MOST_BYTES))]
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        unpacked(data, Parcel)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "PERIOD_S": 0.01, "HEARTBEAT_S": 0.05, "AGAIN_S": 0.05, "LOST_S": 0.1, "SILENT_S": 0.5,
        "LAST_PARCELS_S": 1.0, "VERDICT_S": 1.0, "READ_S": 1.0, "SETTLED_S": 0.1,
    }.items():  # fmt: skip
        monkeypatch.setattr(linking, name, seconds)


def link(
    store: MemoryStore, folder: Path, node: int, origin: str = "", attempt: int = 0,
    places: dict[str, int] | None = None,
) -> Link:  # fmt: skip
    folder.mkdir(exist_ok=True)
    made = Link(
        store, folder, node=node, nodes=2, attempt=attempt, places={} if places is None else places,
        origin=origin or f"n{node}", host=f"h{node}", version="1",
    )  # fmt: skip
    made.start()
    return made


def until(condition: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def both(store: MemoryStore, tmp_path: Path) -> tuple[Link, Link, Desk, Desk]:
    first, second = tmp_path / "first", tmp_path / "second"
    return link(store, first, 0), link(store, second, 1), Desk(first), Desk(second)


def test_two_nodes_meet(quick: None, tmp_path: Path) -> None:
    store = MemoryStore()
    lead, other, here, there = both(store, tmp_path)
    write(there.folder / "rank-1.jsonl", started(1, 5.0, 100.0))
    arrived = here.node_folder(1) / "rank-1.jsonl"
    until(arrived.exists)
    until(lambda: there.standing() and there.standing().role == FOLLOWS)
    assert here.standing() and here.standing().role == LEADS
    here.write_orders(Orders(notices=("rank 1 is late",)))
    until(lambda: there.orders() == Orders(notices=("rank 1 is late",)))

    def judge() -> None:
        until(lambda: here.standing() and here.standing().complete)
        here.write_orders(Orders(report=b"{}"))

    judging = threading.Thread(target=judge)
    judging.start()
    write(there.folder / "rank-1.jsonl", StepDone(at=7.0, optimizer=0, step=0, site=0, wall_s=0.1))
    other.ranks_ended(0)
    lead.close(0)
    other.close(0)
    judging.join()
    assert arrived.read_bytes() == (there.folder / "rank-1.jsonl").read_bytes()
    orders = there.orders()
    assert orders is not None and orders.report == b"{}"


def test_a_store_that_fails_for_a_while(quick: None, tmp_path: Path) -> None:
    store = MemoryStore()
    lead, other, here, there = both(store, tmp_path)
    until(lambda: here.standing() and here.standing().heard)
    store.broken = True
    until(lambda: "connection reset" in here.standing().why)
    write(there.folder / "rank-1.jsonl", started(1, 5.0, 100.0))
    time.sleep(0.1)
    store.broken = False
    arrived = here.node_folder(1) / "rank-1.jsonl"
    until(arrived.exists)
    assert arrived.read_bytes() == (there.folder / "rank-1.jsonl").read_bytes()
    lead.close(None)
    other.close(None)


def test_an_announcement_that_never_comes_does_not_hold_up_others(
    quick: None, tmp_path: Path
) -> None:
    store = MemoryStore()
    store.add("ddpdoctor/0/posted", 1)  # by a node that died before it wrote what it had counted
    lead, other, here, there = both(store, tmp_path)
    write(there.folder / "rank-1.jsonl", started(1, 5.0, 100.0))
    until((here.node_folder(1) / "rank-1.jsonl").exists)
    lead.close(None)
    other.close(None)


def test_a_parcel_that_comes_late_fills_its_place(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    held: dict[str, bytes] = {}

    def slow(self: MemoryStore, key: str, value: bytes) -> None:
        if key.startswith("ddpdoctor/0/parcel/") and len(held) < 2:
            held[key] = value  # on its way: the link was cut after the parcel was counted
        else:
            self.kept[key] = value

    monkeypatch.setattr(MemoryStore, "set", slow)
    write(tmp_path / "second" / "rank-1.jsonl", started(1, 5.0, 100.0))
    ring = RingWriter(tmp_path / "second" / "rank-1.ring")
    lead, other, here, there = both(store, tmp_path)
    until(lambda: len(held) == 2)
    step = StepDone(at=7.0, optimizer=0, step=0, site=0, wall_s=0.1)
    write(there.folder / "rank-1.jsonl", step)
    ring.step = 7
    ring.begin(0, 3, 0, 0, -1)
    arrived = here.node_folder(1) / "rank-1.jsonl"
    until(lambda: arrived.exists())
    time.sleep(0.3)
    store.kept.update(held)
    for name in ("rank-1.jsonl", "rank-1.ring"):
        sent_file = there.folder / name
        late = name.endswith("ring")  # the blocks that came late are older than what is there
        if not late:
            until(lambda: (here.node_folder(1) / name).read_bytes() == sent_file.read_bytes())  # noqa: B023
    got = read_ring(here.node_folder(1) / "rank-1.ring")
    assert got is None or got.step == 7
    lead.close(None)
    other.close(None)


def test_a_node_with_another_version_is_told(quick: None, tmp_path: Path) -> None:
    store = MemoryStore()
    lead = link(store, tmp_path / "first", 0)
    here = Desk(tmp_path / "first")
    store.set("ddpdoctor/0/parcel/1", b"1\nddpdoctor 99 7.1.0\n" + zlib.compress(b"x"))
    store.add("ddpdoctor/0/posted", 1)
    until(lambda: here.standing() and here.standing().heard)
    standing = here.standing()
    assert standing is not None and standing.heard[1].version == "7.1.0"
    lead.close(0)
    monitor = SimpleNamespace(record=lambda event: None, settle=lambda: None, unheard=False)
    others = OtherNodes(RunFolder(tmp_path / "first"), monitor, lambda status, by: None)
    assert "node 1, which has ddpdoctor 7.1.0" in others.shortfall()


def test_a_first_node_with_another_version_leaves_each_alone(quick: None, tmp_path: Path) -> None:
    store = MemoryStore()
    store.set("ddpdoctor/0/token", b"x")
    store.set("ddpdoctor/0/orders/1", b"ddpdoctor 99 7.1.0\n")
    store.add("ddpdoctor/0/orders", 1)
    other = link(store, tmp_path / "second", 1)
    there = Desk(tmp_path / "second")
    until(lambda: there.standing() and "7.1.0" in there.standing().why)
    standing = there.standing()
    assert standing is not None and standing.role == ALONE
    other.close(None)


def test_nodes_of_a_large_run_send_more_rarely(tmp_path: Path) -> None:
    made = [
        Link(MemoryStore(), tmp_path, node=1, nodes=n, attempt=0, places={}, origin="", host="",
             version="1")
        for n in (2, 1024)
    ]  # fmt: skip
    assert [m.send_s for m in made] == [linking.PERIOD_S, 1024 / linking.PARCELS_A_SECOND]
    assert [m._standing.beat_s for m in made] == [linking.HEARTBEAT_S, 2 * made[1].send_s]


def test_a_node_of_a_large_run_is_not_called_silent_early(place: SimpleNamespace) -> None:
    at = time.monotonic() - other_nodes.SILENT_S - 1
    standing_of(place.desk, role=LEADS, heard={1: Heard("h1", at)}, beat_s=16.0)
    assert place.others.look([], None) == ([], None)
    at = time.monotonic() - other_nodes.SILENT_S - 30
    standing_of(place.desk, role=LEADS, heard={1: Heard("h1", at)}, beat_s=16.0)
    assert "has not been heard of" in place.others.look([], None)[0][0]


def test_nodes_that_share_a_folder_send_nothing(quick: None, tmp_path: Path) -> None:
    store = MemoryStore()
    lead, other = link(store, tmp_path, 0), link(store, tmp_path, 1)
    until(lambda: other._standing.role == SHARES)
    write(tmp_path / "rank-1.jsonl", started(1, 5.0, 100.0))
    time.sleep(0.1)
    assert not [key for key in store.kept if "parcel" in key]
    lead.close(None)
    other.close(None)


def test_a_first_node_that_is_gone_is_not_waited_for(quick: None, tmp_path: Path) -> None:
    store = MemoryStore()
    lead, other, _, there = both(store, tmp_path)
    until(lambda: there.standing() and there.standing().role == FOLLOWS)
    lead.close(None)
    began = time.monotonic()
    other.close(1)
    assert time.monotonic() - began < 1.5
    standing = there.standing()
    assert standing is not None and "not been heard of" in standing.why


def test_a_node_with_another_number_after_a_restart_keeps_its_place(
    quick: None, tmp_path: Path
) -> None:
    store, here = MemoryStore(), Desk(tmp_path / "first")
    places: dict[str, int] = {}
    for attempt, order in enumerate((["one", "two"], ["two", "one"])):
        links = [link(store, tmp_path / "first", 0, attempt=attempt, places=places)]
        for node, name in enumerate(order, 1):
            links.append(link(store, tmp_path / name, node, name, attempt))
            records = f"restart-{attempt}/rank-{node}.jsonl"
            write(tmp_path / name / records, started(node, 5, 9))
            until(lambda: any(here.path.rglob(records)))  # noqa: B023
        for each in links:
            each.close(None)
    expected = {
        f"{n}/restart-{a}/rank-{n if a == 0 else 3 - n}.jsonl" for n in (1, 2) for a in (0, 1)
    }
    assert {str(p.relative_to(here.path)) for p in here.path.rglob("rank-*")} == expected


def test_ranks_meet_the_others_where_the_launcher_does_not(quick: None, tmp_path: Path) -> None:
    store = MemoryStore()
    made = [
        RankMeeting(store, tmp_path / name, rank=rank, world=4, attempt=0, come_s=1.0)
        for name, rank in (("first", 0), ("second", 2), ("second", 3))
    ]
    for rank in (0, 1, 3):  # rank 2 begins its record later
        name = "first" if rank < 2 else "second"
        write(tmp_path / name / f"rank-{rank}.jsonl", started(rank, 5.0, 100.0))
    for meeting in made:
        meeting.start()
    write(tmp_path / "second" / "rank-2.jsonl", started(2, 5.0, 100.0))
    here, there = Desk(tmp_path / "first"), Desk(tmp_path / "second")
    until(lambda: there.standing() and there.standing().role == FOLLOWS)
    left = RankExiting(at=6.0, how="return", status=0)
    for rank in (2, 3):
        write(tmp_path / "second" / f"rank-{rank}.jsonl", started(rank, 5.0, 100.0), left)
    write(tmp_path / "first" / "rank-0.jsonl", started(0, 5.0, 100.0))
    assert there.ranks_have_ended() and not here.ranks_have_ended()
    for meeting in reversed(made):
        meeting.close()
    standing = here.standing()
    assert standing is not None and standing.by_rank and standing.role == LEADS
    assert standing.nodes == 2 and standing.heard[1].over and standing.status == -1
    for rank in (2, 3):
        name = f"rank-{rank}.jsonl"
        kept = (here.node_folder(1) / name).read_bytes()
        assert kept == (tmp_path / "second" / name).read_bytes()


def test_ranks_whose_examination_begins_right_before_the_end_meet_too(
    quick: None, tmp_path: Path
) -> None:
    store = MemoryStore()
    first, second = (
        RankMeeting(store, tmp_path / name, rank=rank, world=2, attempt=0, come_s=1.0)
        for rank, name in enumerate(("first", "second"))
    )
    for rank, name in enumerate(("first", "second")):
        write(tmp_path / name / f"rank-{rank}.jsonl", started(rank, 5.0, 100.0))
    ending = threading.Thread(target=first.close)
    first.start()
    ending.start()
    time.sleep(0.5)
    second.start()
    second.close()
    ending.join()
    standing = Desk(tmp_path / "first").standing()
    assert standing is not None and standing.nodes == 2 and standing.heard[1].over


# What a supervisor makes of it.


def test_a_first_node_that_meets_by_a_rank_hands_on_the_verdict_before_it_stops(
    place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = {1: Heard("h1", time.monotonic())}
    standing_of(place.desk, role=LEADS, heard=heard, by_rank=True)
    monkeypatch.setattr(other_nodes, "HANDED_ON_S", 0.3)
    began = time.monotonic()
    assert place.others.look([], "a reason") == ([], "a reason")
    orders = place.desk.orders()
    assert orders is not None and (orders.stop, orders.report) == ("a reason", b"{}")
    place.others.hand_on()
    assert time.monotonic() - began >= 0.3


def test_nothing_is_concluded_before_the_ranks_have_met(place: SimpleNamespace) -> None:
    for role in (ALONE, FOLLOWS, LEADS):  # the first one not heard of yet, nor the others by it
        standing_of(place.desk, role=role, by_rank=True, began=time.monotonic())
        assert place.others.look([f"a line of {role}"], "a reason") == ([], None)
    standing_of(place.desk, by_rank=True, began=time.monotonic() - other_nodes.MEET_S)
    lines, reason = place.others.look([], "a reason")
    assert reason == "a reason" and len(lines) == 3


def test_the_verdict_comes_after_the_end_of_the_store(
    place: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = examine(RunFolder(tmp_path), Options(), None)
    standing_of(place.desk, role=LEADS, by_rank=True, heard={1: Heard("h1", 0.0, over=True)})
    place.others.look([], None)
    told = place.desk.orders()
    second = RunFolder(tmp_path / "second")
    other = OtherNodes(second, place.monitor, lambda status, by: report)
    desk = Desk(second.path)
    standing_of(desk, role=FOLLOWS, node=1, by_rank=True, lead="127.0.0.1")
    desk.write_orders(told)
    asking = threading.Thread(target=other.verdict)
    asking.start()
    place.others.tell(report)
    asking.join(10)
    verdict = other.verdict()
    assert verdict.findings == report.findings and verdict.run.folder == str(second.path)
    assert other.shortfall() == ""
    late = OtherNodes(second, place.monitor, lambda status, by: report)
    assert late.verdict() is None and "could not be asked" in late.shortfall()


def test_the_end_of_the_first_node_by_its_user_is_told_once(
    place: SimpleNamespace, tmp_path: Path
) -> None:
    standing_of(place.desk, role=LEADS, heard={1: Heard("h1", time.monotonic())})
    place.others.tell_end("Ctrl-C")
    told: list[tuple[str, str]] = []
    monitor = SimpleNamespace(
        record=lambda event: None, settle=lambda: None, unheard=False,
        stopped=lambda by, reason: told.append((by, reason)),
    )  # fmt: skip
    second = RunFolder(tmp_path / "second")
    other, desk = OtherNodes(second, monitor, lambda status, by: None), Desk(second.path)
    standing_of(desk, role=FOLLOWS, node=1, at=time.monotonic())
    desk.write_orders(place.desk.orders())
    lines, reason = other.look([], None)
    assert (lines, reason) == (["the first node was stopped: Ctrl-C (node 0)"], None)
    assert other.look([], None) == ([], None)
    assert told == [("terminate", "Ctrl-C (node 0)")]


class Kept:
    """Keeps what nodes bring in memory."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}

    def had(self, node: int) -> Had:
        return Had("mark", {"rank-2.jsonl": 7})

    def keep(self, node: int, records: bytes) -> None:
        self.records[node] = records


def test_the_verdict_is_told_to_those_who_know_the_token() -> None:
    words = LastWords(kept := Kept())
    here = msgspec.structs.replace(words.address, host="127.0.0.1")
    seen: list[Had] = []

    def records(had: Had) -> bytes:
        seen.append(had)
        return b"the rest"

    with pytest.raises(OSError):
        ask(msgspec.structs.replace(here, token="0" * 32), 1, records, 1.0)
    assert (seen, kept.records) == ([], {})
    words.say(b"x", nodes=0, most_s=0.0)
    assert ask(here, 1, records, 5.0) == b"x"
    assert ask(here, 2, lambda had: b"", 5.0) == b"x"
    words.close()
    assert seen == [Had("mark", {"rank-2.jsonl": 7})] and kept.records == {1: b"the rest"}
    assert words.brought == {1, 2}


def test_the_last_records_come_after_the_end_of_the_store(
    place: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank fails, and the others notice once it has ended."""
    report = examine(RunFolder(tmp_path), Options(), None)
    standing_of(place.desk, role=LEADS, by_rank=True, heard={1: Heard("h1", time.monotonic())})
    place.others.look([], None)
    second = RunFolder(tmp_path / "second")
    other = OtherNodes(second, place.monitor, lambda status, by: report)
    desk = Desk(second.path)
    standing_of(desk, role=ALONE, node=1, by_rank=True, lead="127.0.0.1")
    desk.write_orders(place.desk.orders())
    (second.path / "rank-1.jsonl").write_text("all that the rank wrote")
    kept = Inbox(place.desk.node_folder(1))
    kept.take([Piece("rank-1.jsonl", 0, b"all that")])
    asking = threading.Thread(target=other.verdict)
    asking.start()
    place.others.gather(SimpleNamespace(missing=[]))
    assert (place.desk.node_folder(1) / "rank-1.jsonl").read_text() == "all that the rank wrote"
    assert place.others.shortfall() == ""
    place.others.tell(report)
    asking.join(10)
    assert other.verdict() is not None


def test_nodes_that_were_silent_before_are_not_waited_for(
    place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = Heard("h1", time.monotonic() - 2 * other_nodes.SILENT_S)
    standing_of(place.desk, role=LEADS, by_rank=True, heard={1: silent})
    place.others.look([], None)
    began = time.monotonic()
    place.others.gather(SimpleNamespace(missing=[]))
    assert time.monotonic() - began < 1
    assert "node 1" in place.others.shortfall()
    monkeypatch.setattr(other_nodes, "RECORDS_S", 0.3)
    standing_of(place.desk, role=LEADS, by_rank=True)
    place.others.gather(SimpleNamespace(missing=[2]))  # it ended before it was heard of
    assert 0.3 <= time.monotonic() - began < 3
    place.others.tell(SimpleNamespace(to_json=lambda: b"{}"))


@pytest.mark.parametrize("node", [0, 2, -1])
def test_records_of_a_node_that_is_not_there_are_not_kept(
    place: SimpleNamespace, node: int
) -> None:
    standing_of(place.desk, role=LEADS, by_rank=True)
    with pytest.raises(ValueError, match="no node"):
        place.others.keep(node, packed(Parcel("", "0", "h", 0.0), "0"))


def test_a_node_that_shares_the_folder_brings_nothing(place: SimpleNamespace) -> None:
    place.desk.mark("mark")
    assert place.others._last_records(Had("mark")) == b""
    assert place.others._last_records(Had("another")) != b""


def standing_of(desk: Desk, **given: Any) -> None:
    desk.write_standing(Standing(nodes=2, **given))


@pytest.fixture
def place(tmp_path: Path) -> SimpleNamespace:
    recorded: list[Any] = []
    monitor = SimpleNamespace(record=recorded.append, settle=lambda: None, unheard=False)
    report = SimpleNamespace(to_json=lambda: b"{}", findings=())
    folder = RunFolder(tmp_path)
    others = OtherNodes(folder, monitor, lambda status, by: report)
    return SimpleNamespace(
        others=others, desk=Desk(tmp_path), recorded=recorded, monitor=monitor, folder=folder
    )


def test_alone_a_node_says_what_it_sees(place: SimpleNamespace) -> None:
    assert place.others.look(["a line"], "a reason") == (["a line"], "a reason")


def test_the_first_node_tells_the_others(place: SimpleNamespace) -> None:
    heard = {1: Heard("h1", time.monotonic())}
    standing_of(place.desk, role=LEADS, heard=heard)
    assert place.others.look(["a line"], None) == (["a line"], None)
    assert place.others.look([], "a reason") == ([], "a reason")
    assert place.desk.orders() == Orders(notices=("a line",), stop="a reason")
    standing_of(place.desk, role=LEADS, heard=heard, status=1, complete=True)
    place.others.look([], None)
    assert place.desk.orders() == Orders(("a line",), "a reason", b"{}")
    assert place.desk.settled()


def test_the_others_say_what_the_first_one_says(place: SimpleNamespace) -> None:
    standing_of(place.desk, role=FOLLOWS, node=1, at=time.monotonic())
    assert place.others.look(["my own"], None) == ([], None)
    place.desk.write_orders(Orders(notices=("a line",)))
    assert place.others.look([], None) == (["a line"], None)
    assert place.others.look([], None) == ([], None)
    place.desk.write_orders(Orders(notices=("a line",), stop="a reason"))
    assert place.others.look([], None) == ([], "a reason")


def test_a_reason_of_its_own_counts_where_the_first_one_is_silent(
    place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing_of(place.desk, role=FOLLOWS, node=1, at=time.monotonic())
    assert place.others.look([], "my own")[1] is None
    monkeypatch.setattr(other_nodes, "OWN_S", 0.0)
    assert place.others.look([], None)[1] == "my own"
    standing_of(place.desk, role=FOLLOWS, node=1, at=time.monotonic() - other_nodes.FRESH_S)
    assert place.others.look(["my own"], "again") == (["my own"], "again")


def test_a_node_that_is_silent_is_named_once(place: SimpleNamespace) -> None:
    write(place.folder.path / "nodes" / "1" / "rank-2.jsonl", started(2, 5.0, 100.0))
    long = time.monotonic() - other_nodes.SILENT_S - 1
    standing_of(place.desk, role=LEADS, heard={1: Heard("h1", long)})
    (line,) = place.others.look([], None)[0]
    assert line.startswith("node 1 (h1, rank 2) has not been heard of since ")
    assert place.others.look([], None)[0] == []
    standing_of(place.desk, role=LEADS, heard={1: Heard("h1", time.monotonic())})
    assert place.others.look([], None)[0] == ["node 1 (h1, rank 2) is heard of again"]
    assert [(e.node, e.over) for e in place.recorded] == [(1, False), (1, True)]


def test_nothing_is_concluded_from_late_records(place: SimpleNamespace) -> None:
    late = time.monotonic() - (other_nodes.LATE_S + other_nodes.SILENT_S) / 2
    standing_of(place.desk, role=LEADS, heard={1: Heard("h1", late)})
    place.others.look([], None)
    assert place.monitor.unheard
    standing_of(place.desk, role=LEADS, heard={1: Heard("h1", late, over=True)})
    place.others.look([], None)
    assert not place.monitor.unheard


def test_what_is_missing_is_said(place: SimpleNamespace) -> None:
    assert place.others.shortfall() == ""
    standing_of(place.desk, role=FOLLOWS, node=1, why="connection reset")
    assert "verdict did not arrive (connection reset)" in place.others.shortfall()
    place.desk.write_orders(Orders(report=b"no report"))
    assert place.others.verdict() is None
    standing_of(place.desk, role=LEADS)
    assert "(node 1)" in place.others.shortfall()
    standing_of(place.desk, role=LEADS, heard={1: Heard("h1", 0.0, over=True)})
    assert place.others.shortfall() == ""


# What is read back.


def test_records_of_other_nodes_are_part_of_the_run(tmp_path: Path) -> None:
    write(tmp_path / "node-0.jsonl", monitored(10.0, 1000.0))
    write(tmp_path / "rank-0.jsonl", started(0, 11.0, 1001.0))
    inside = tmp_path / "nodes" / "1"
    write(inside / "node-0.jsonl", monitored(500_010.0, 1000.0, "b"))
    stall = StallSeen(at=500_015.0, since=500_012.0, hang_after=1.0)
    write(inside / "node-0.jsonl", stall)
    write(inside / "rank-1.jsonl", started(1, 500_011.0, 1001.0, "b"))
    write(inside / "restart-1" / "rank-1.jsonl", started(1, 500_021.0, 1011.0, "b"))
    folder = RunFolder(tmp_path)
    assert folder.attempts() == [0, 1]
    run = Recording(folder).refresh()
    assert sorted(run.ranks) == [0, 1] and sorted(run.nodes) == [0, 1]
    # All times are on the clock of the first node.
    assert run.ranks[1].started == msgspec.structs.replace(started(1, 11.0, 1001.0, "b"), at=11.0)
    (seen,) = run.nodes[1].of(StallSeen)
    assert (seen.at, seen.since) == (15.0, 12.0)


def test_folders_of_several_nodes_have_one_clock(tmp_path: Path) -> None:
    for node, boot in enumerate((0.0, 70_000.0)):
        folder = tmp_path / str(node)
        write(folder / "node-0.jsonl", monitored(boot + 10, 1000.0))
        write(folder / f"rank-{node}.jsonl", started(node, boot + 11, 1001.0))
    run = load([RunFolder(tmp_path / "0"), RunFolder(tmp_path / "1")])
    assert [rank.started.at for rank in run.ranks.values()] == [11.0, 11.0]
    assert [rank.wall(11.0) for rank in run.ranks.values()] == [1001.0, 1001.0]


def test_a_node_whose_copy_is_there_counts_once(tmp_path: Path) -> None:
    ranks = [ProcessStarted(at=10.0, rank=1, local_rank=0, pid=11, wall=1000.0)]
    for folder in (tmp_path / "0" / "nodes" / "1", tmp_path / "1"):
        write(folder / "node-1.jsonl", monitored(10.0, 1000.0), *ranks)
        write(folder / "rank-1.jsonl", started(1, 11.0, 1001.0))
    write(tmp_path / "0" / "node-0.jsonl", monitored(10.0, 1000.0))
    write(tmp_path / "0" / "rank-0.jsonl", started(0, 11.0, 1001.0))
    for order in ("01", "10"):
        run = load([RunFolder(tmp_path / number) for number in order])
        assert sorted(run.ranks) == [0, 1] and len(run.nodes) == 2


def test_a_wall_clock_that_is_minutes_ahead_is_set_back(tmp_path: Path) -> None:
    write(tmp_path / "node-0.jsonl", monitored(10.0, 1000.0))
    inside = tmp_path / "nodes" / "1"
    Inbox(inside).set_clock(300.0)
    write(inside / "rank-1.jsonl", started(1, 11.0, 1301.0))
    run = Recording(RunFolder(tmp_path)).refresh()
    assert (run.ranks[1].started.at, run.ranks[1].started.wall) == (11.0, 1001.0)


def test_clocks_of_one_machine_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "node-0.jsonl", monitored(10.0, 1000.0))
    write(tmp_path / "rank-0.jsonl", started(0, 11.0, 1001.2))
    run = Recording(RunFolder(tmp_path)).refresh()
    assert run.ranks[0].started == started(0, 11.0, 1001.2)


def test_ranks_of_a_silent_node_are_known_until_it_is_heard_of_again(tmp_path: Path) -> None:
    write(tmp_path / "nodes" / "1" / "rank-2.jsonl", started(2, 11.0, 1001.0))
    silent = NodeSilent(at=20.0, node=1, host="h1", ranks=(2,), wall=1010.0)
    write(tmp_path / "node-0.jsonl", monitored(10.0, 1000.0), silent)
    recording = Recording(RunFolder(tmp_path))
    assert recording.refresh().ranks[2].silent == silent
    write(tmp_path / "node-0.jsonl", msgspec.structs.replace(silent, over=True))
    assert recording.refresh().ranks[2].silent is None
