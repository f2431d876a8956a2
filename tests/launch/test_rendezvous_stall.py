"""DDP102 over literal events, and each of its traps."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from ddpdoctor.checks.launch.rendezvous_stall import RendezvousStall
from msgspec.structs import replace
from recordings import CWD, PID, START, make_run, site, started

from ddpdoctor.events import (
    Event,
    ExceptionRaised,
    GroupDestroyed,
    GroupReady,
    InitEntered,
    RankExiting,
    RankStood,
    StackFrame,
    StallSeen,
    Stopped,
)
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Confidence, Finding
from ddpdoctor.run import Run


def found(run: Run) -> list[Finding]:
    return list(RendezvousStall().examine(run))


def entered(rank: int, world: int = 2, meets_at: str = "") -> list[Event]:
    return [
        site(1, "train.py", 7, 'dist.init_process_group("gloo")'),
        InitEntered(at=START + 2, backend="gloo", init_method="", rank=-1, world_size=-1,
                    env_rank=rank, env_world_size=world, env_local_rank=rank, timeout_s=-1, site=1,
                    rendezvous=meets_at),
    ]  # fmt: skip


def seen() -> list[Event]:
    frame = StackFrame(file=f"{CWD}/train.py", line=3, function="main", user=True, text="login()")
    return [
        RankStood(at=START + 40, rank=1, pid=PID + 1, frames=(frame,)),
        StallSeen(at=START + 40, since=START + 2, hang_after=30),
    ]


def test_one_rank_is_elsewhere() -> None:
    run = make_run({0: entered(0), 1: []}, nodes={0: seen()}, ended={0: -15, 1: -15},
                   stopped="interrupt")  # fmt: skip
    (finding,) = found(run)
    assert finding.ranks == (1,)
    assert finding.confidence is Confidence.SUSPECTED
    assert finding.location is not None
    assert (finding.location.line, finding.location.source) == (3, "login()")
    assert finding.evidence["waiting"] == "rank 0"


def test_one_rank_left_before_it() -> None:
    left = [
        site(2, "train.py", 5, "sys.exit(0)"),
        RankExiting(at=START + 1, how="sys.exit", status=0, site=2),
    ]
    run = make_run({0: entered(0), 1: left}, nodes={0: seen()[1:]}, ended={0: -15, 1: 0})
    (finding,) = found(run)
    assert finding.ranks == (1,)
    assert finding.location is not None and finding.location.line == 5


@pytest.mark.parametrize(
    ("leaves", "past", "line"),
    [
        ("sys.exit(main())", 1, 4),
        ("sys.exit(main())", 2, 30),
        ("sys.exit(main())", 0, 30),
        ("sys.exit(0)", 1, 30),  # that is where it left
        ("", 1, 4),
    ],
)
def test_the_statement_by_which_a_rank_left(leaves: str, past: int, line: int) -> None:
    ifs = [site(20 + n, "train.py", 4 + n, "if not files:") for n in range(past)]
    *sites, came = entered(0)
    came = replace(came, past=tuple(s.id for s in ifs))
    how = RankExiting(at=START + 1, how="sys.exit" if leaves else "return", status=0,
                      site=2 if leaves else -1)  # fmt: skip
    left = [site(2, "train.py", 30, leaves, function="<module>"), how]
    run = make_run({0: [*sites, *ifs, came], 1: left}, nodes={0: seen()[1:]}, ended={0: -15, 1: 0})
    (finding,) = found(run)
    assert finding.location is not None and finding.location.line == line
    assert finding.rule == "rank-exited-before"
    ways = [r.location.line for r in finding.related if r.location.line != 7]
    assert ways == ([4, 5] if past > 1 else [])


def test_torch_gave_up() -> None:
    raised = ExceptionRaised(
        at=START + 9, kind="torch.distributed.DistStoreError", message="Timed out after 7 seconds"
    )
    run = make_run({0: [*entered(0), raised], 1: []}, ended={0: 1, 1: -15})
    (finding,) = found(run)
    assert finding.ranks == (1,)


@pytest.mark.parametrize(("stopped", "told"), [(8, False), (10, True)])
def test_ranks_that_lost_the_others_since_the_user_stopped_a_node(stopped, told) -> None:  # type: ignore[no-untyped-def]
    raised = ExceptionRaised(
        at=START + 9, kind="torch.distributed.DistNetworkError",
        message="Failed to recv, got 0 bytes. Connection was likely closed.",
    )  # fmt: skip
    stops = [Stopped(at=START + stopped, by="terminate", reason="Ctrl-C (node 0)")]
    run = make_run({0: [*entered(0), raised], 1: []}, ended={0: 1, 1: -15}, nodes={0: stops})
    assert bool(found(run)) is told


@pytest.mark.parametrize("launcher", ["run", "exec", "checkup"])
def test_more_ranks_are_waited_for_than_there_are(launcher: str) -> None:
    """torchrun has started all that it will; a program may be about to start the next one."""
    run = make_run({0: entered(0)}, nodes={0: seen()[1:]}, ended={0: -15}, stopped="interrupt",
                   world_size=1, launcher=launcher)  # fmt: skip
    (finding,) = found(run)
    proven = launcher == "run"
    assert finding.confidence is (Confidence.PROVEN if proven else Confidence.SUSPECTED)


@pytest.mark.parametrize("told", [False, True])
def test_a_program_that_starts_its_ranks_itself(told: bool) -> None:
    """Whether there is another one that is late nobody knows; a launcher says so."""
    environment = {"WORLD_SIZE": "3"} if told else {}
    ranks = {r: [started(r, 3, environment=environment), *entered(r, 3)] for r in range(2)}
    run = make_run(ranks, nodes={0: seen()[1:]}, ended={0: -15, 1: -15}, stopped="interrupt",
                   world_size=3, launcher="exec")  # fmt: skip
    (finding,) = found(run)
    assert finding.confidence is Confidence.SUSPECTED
    assert finding.rule == ("rank-not-arrived" if told else "processes-not-seen")
    assert finding.evidence.get("processes_launched") == (3 if told else None)
    assert finding.evidence.get("processes_seen") == (None if told else 2)


def test_the_group_formed() -> None:
    ready = GroupReady(
        at=START + 3, group=0, name="0", backend="gloo", ranks=(0, 1), member=True, site=1
    )
    run = make_run({r: [*entered(r), ready] for r in range(2)}, nodes={0: seen()}, ended=None)
    assert found(run) == []


def test_slow_but_no_stall() -> None:
    assert found(make_run({0: entered(0), 1: []}, ended=None)) == []


TOLD = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("at", "inside", "timeout_s", "proven", "stuck"),
    [
        ("tcp://127.0.0.1:29715", "_create_c10d_store", -1, True, True),
        ("tcp://127.0.0.1:29715", "_create_c10d_store", 60, True, False),
        ("tcp://127.0.0.1:29715", "_new_process_group_helper", -1, False, None),
        ("tcp://node-0:29715", "_create_c10d_store", -1, False, None),
    ],
)
def test_nobody_will_ever_listen(
    at: str, inside: str, timeout_s: float, proven: bool, stuck: bool | None
) -> None:
    ranks: dict[int, list[Event]] = {}
    for rank in range(2):
        line, came = entered(rank, meets_at=at)
        assert isinstance(came, InitEntered)
        came = replace(came, timeout_s=timeout_s)
        ranks[rank] = [started(rank, 2, environment=TOLD), line, came]
    stood: list[Event] = [
        RankStood(at=START + 40, rank=rank, pid=PID + rank,
                  frames=(StackFrame(file="rendezvous.py", line=190, function=inside),))
        for rank in range(2)
    ]  # fmt: skip
    run = make_run(ranks, nodes={0: [*stood, seen()[1]]}, ended=None, launcher="run")
    (finding,) = found(run)
    assert (finding.confidence is Confidence.PROVEN) is proven
    assert finding.evidence.get("stuck") is stuck


def test_what_torch_raises_when_nobody_listened_follows() -> None:
    at = "tcp://127.0.0.1:29715"
    gave_up = ExceptionRaised(
        at=START + 50,
        kind="torch.distributed.DistNetworkError",
        message="The client socket has timed out after 60000ms while trying to connect",
    )
    ranks = {r: [started(r, 2, environment=TOLD), *entered(r, meets_at=at)] for r in range(2)}
    ranks[0].append(gave_up)
    run = make_run(ranks, nodes={0: seen()}, ended={0: 1, 1: None})
    report = diagnose(run, [RendezvousStall(), FirstFailure()])
    assert [f.code for f in report.findings] == ["DDP102"]


@pytest.mark.parametrize(
    ("places", "apart"),
    [
        (("127.0.0.1:4001", "127.0.0.1:4002"), True),
        (("tcp://10.0.0.1:4001", "tcp://10.0.0.1:4002"), True),
        (("file:///tmp/a-17", "file:///tmp/a-18"), True),
        (("127.0.0.1:4001", "localhost:4001"), False),  # two names of one machine
        (("127.0.0.1:4001", "127.0.0.1:4001"), False),
        (("127.0.0.1:4001", "HashStore of process 7"), False),
    ],
)
def test_each_rank_waits_at_an_address_of_its_own(places: tuple[str, str], apart: bool) -> None:
    run = make_run({r: entered(r, meets_at=places[r]) for r in (0, 1)},
                   nodes={0: seen()}, ended={0: -15, 1: -15}, stopped="interrupt")  # fmt: skip
    (finding,) = found(run)
    assert (finding.rule == "different-addresses") is apart
    assert not apart or (finding.confidence is Confidence.PROVEN and finding.deadlocked)
    assert not apart or all(place in finding.summary for place in places)


def test_ranks_that_also_got_other_numbers() -> None:
    def rank(number: int) -> list[Event]:
        given = {"RANK": str(number), "WORLD_SIZE": "2"}
        line, event = entered(0, 1, f"localhost:400{number}")
        return [started(number, 2, environment=given), line, replace(event, set_at={"RANK": 1})]

    run = make_run({n: rank(n) for n in (0, 1)}, nodes={0: seen()}, ended={0: -15, 1: -15},
                   stopped="interrupt")  # fmt: skip
    (finding,) = found(run)
    assert "of 2 waits as rank 0 of 1" in finding.cause
    assert "sets RANK" in {r.label for r in finding.related}


def test_torch_gave_up_at_addresses_of_their_own() -> None:
    gave_up = ExceptionRaised(at=START + 60, kind="torch.distributed.DistNetworkError",
                              message="The client socket has timed out")  # fmt: skip
    run = make_run({r: [*entered(r, meets_at=f"10.0.0.1:{4000 + r}"), gave_up] for r in (0, 1)})
    (finding,) = found(run)
    assert (finding.rule, finding.deadlocked) == ("different-addresses", False)


def test_all_are_there_and_nobody_listens() -> None:
    told = TOLD
    at = "tcp://127.0.0.1:29715"
    ranks = {r: [started(r, 2, environment=told), *entered(r, meets_at=at)] for r in range(2)}
    run = make_run(ranks, nodes={0: seen()}, ended={0: -15, 1: -15}, stopped="interrupt")
    (finding,) = found(run)
    assert finding.ranks == (0, 1)
    assert found(make_run(ranks, ended=None)) == []


@pytest.mark.parametrize(("backend", "rule"), [
    ("nccl", "device-group-not-formed"), ("gloo", "address-unreachable"),
])  # fmt: skip
def test_the_ranks_have_met_and_their_devices_do_not_connect(backend: str, rule: str) -> None:
    inside = StackFrame(file="/x/torch/distributed/distributed_c10d.py", line=2,
                        function="_new_process_group_helper", user=False, text="")  # fmt: skip
    looks = [RankStood(at=START + 40, rank=r, pid=PID + r, frames=(inside,)) for r in range(2)]
    came = {r: entered(r, meets_at="tcp://node-0:29715") for r in range(2)}
    came = {r: [line, replace(init, backend=backend)] for r, (line, init) in came.items()}
    run = make_run(came, nodes={0: [*looks, seen()[1]]}, ended={0: -15, 1: -15})
    (finding,) = found(run)
    assert finding.rule == rule


def again(rank: int, *, formed: bool, told: str = "True", second: str = "h:1") -> list[Event]:
    """A rank whose first group was destroyed, in its second `init_process_group`."""
    line, first = entered(rank, meets_at="h:1")
    assert isinstance(first, InitEntered)
    ready = GroupReady(
        at=START + 3, group=0, name="0", backend="gloo", ranks=(0, 1), member=True, site=1
    )
    return [
        started(rank, 2, environment={"TORCHELASTIC_USE_AGENT_STORE": told}),
        line,
        first,
        ready,
        GroupDestroyed(at=START + 5, site=1),
        replace(first, at=START + 6, rendezvous=second),
        *([replace(ready, at=START + 7)] if formed else []),
    ]


@pytest.mark.parametrize("formed", [False, True])
def test_a_group_that_does_not_form_again_in_its_old_store(formed: bool) -> None:
    ranks = {0: again(0, formed=formed), 1: again(1, formed=False)}
    (finding,) = found(make_run(ranks, nodes={0: seen()}, ended=None))
    assert finding.ranks == ((1,) if formed else (0, 1))
    assert finding.location is not None and finding.location.line == 7
    assert found(make_run(ranks, ended=None)) == []  # no stall


@pytest.mark.parametrize(("message", "follows"), [
    ("Gloo connectFullMesh failed: Connection refused", True),
    ("CUDA error: invalid device ordinal", False),
])  # fmt: skip
def test_what_ranks_raise_that_find_nobody_in_the_old_store(message: str, follows: bool) -> None:
    raised = ExceptionRaised(at=START + 9, kind="RuntimeError", message=message)
    ranks = {rank: [*again(rank, formed=False), raised] for rank in (0, 1)}
    run = make_run(ranks, ended={0: 1, 1: 1})
    report = diagnose(run, [RendezvousStall(), FirstFailure()])
    assert [f.code for f in report.findings] == (["DDP102"] if follows else ["DDP606"])


@pytest.mark.parametrize("second", [
    pytest.param([], id="not-there"),
    pytest.param(again(1, formed=False, second="h:2"), id="another-store"),
    pytest.param(again(1, formed=False, told="False"), id="a-store-that-ends-with-the-group"),
])  # fmt: skip
def test_a_group_that_does_not_form_again_for_another_reason(second: list[Event]) -> None:
    second = second or again(1, formed=False)[:-1]
    assert found(make_run({0: again(0, formed=False), 1: second}, nodes={0: seen()})) == []
    ranks = {0: again(0, formed=True), 1: again(1, formed=True)}
    assert found(make_run(ranks, nodes={0: seen()}, ended=None)) == []


def test_a_restart_that_finds_the_addresses_of_the_attempt_before() -> None:
    told = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    ready = GroupReady(
        at=START + 3, group=0, name="0", backend="gloo", ranks=(0, 1), member=True, site=1
    )
    refused = ExceptionRaised(
        at=START + 9, kind="RuntimeError", message="connectFullMesh failed: Connection refused"
    )
    ranks: dict[int, list[Event]] = {
        0: [started(0, 2, environment=told), *entered(0), refused],
        1: [started(1, 2, environment=told), *entered(1), ready],
    }
    run = make_run(ranks, ended={0: 1, 1: -15})
    assert found(run) == []
    run.attempt = 1
    (finding,) = found(run)
    assert finding.ranks == (0,)


def left(rank: int, seconds: float) -> list[Event]:
    """A rank that lost the connection in a group over a file, last written that long before."""
    line, event = entered(rank, meets_at="file:///job/init")
    assert isinstance(event, InitEntered)
    began = started(rank, 2)
    written = began.wall - seconds if seconds else 0.0
    return [began, line, replace(event, store_written=written)]


REFUSED = ExceptionRaised(
    at=START + 9, kind="RuntimeError", message="connectFullMesh failed: Connection refused"
)


def test_a_file_that_an_earlier_run_left_behind() -> None:
    # Rank 1 came later, when rank 0 had written its own address.
    run = make_run({0: [*left(0, 90), REFUSED], 1: left(1, -1)}, ended={0: 1, 1: -15})
    report = diagnose(run, [RendezvousStall(), FirstFailure()])
    assert [f.rule for f in report.findings] == ["stale-store-file"]
    assert "90 s before this run began" in report.findings[0].cause


@pytest.mark.parametrize("seconds", [0, 0.5, -1])
def test_a_file_of_this_run(seconds: float) -> None:
    run = make_run({0: [*left(0, seconds), REFUSED], 1: left(1, -1)}, ended={0: 1, 1: -15})
    assert [f.rule for f in found(run)] != ["stale-store-file"]
