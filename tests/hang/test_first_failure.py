"""DDP606 over literal events, and each of its traps."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from recordings import PID, WALL, make_run, site, started, steps
from tapes import START, stall
from torch._utils import ExceptionWrapper

from ddpdoctor.events import (
    Event,
    ExceptionRaised,
    Frame,
    GroupDestroyed,
    InitEntered,
    Loaded,
    Place,
    ProcessEnded,
    ProcessStarted,
    RankExiting,
    Relayed,
    Statement,
    Stopped,
    Unset,
    Wrapped,
)
from ddpdoctor.probe.recording.code_locations import Sites
from ddpdoctor.probe.watchers.process.worker_exceptions import relayed
from ddpdoctor.report.findings import Finding, Severity
from ddpdoctor.run import Run

CLOSED = "[../pair.cc:553] Connection closed by peer [127.0.0.1]:22410"
LINE = "raise ValueError('boom')"


def found(run: Run) -> list[Finding]:
    return list(FirstFailure().examine(run))


def raised(
    at: float, kind: str = "ValueError", message: str = "boom", line: int = 7
) -> list[Event]:
    frames = (Frame(file="/home/user/project/train.py", line=line, function="main", user=True),)
    return [
        site(1, "train.py", line, LINE),
        ExceptionRaised(at=START + at, kind=kind, message=message, frames=frames),
    ]


def test_the_earliest_of_its_own_and_the_victims_under_it() -> None:
    run = make_run(
        {
            0: raised(5.0, "RuntimeError", CLOSED),
            1: raised(5.2),
            2: raised(6, "RuntimeError", CLOSED),
        },
        ended={0: 1, 1: 1, 2: 1},
    )
    (finding,) = found(run)
    assert finding.rule == "exception"
    assert finding.ranks == (1,)
    assert finding.subjects == ("ValueError",)
    assert finding.location is not None
    assert (finding.location.file, finding.location.line) == ("train.py", 7)
    assert finding.location.source == LINE
    assert finding.evidence["message"] == "boom"
    assert [row["ranks"] for row in finding.evidence["consequences"]] == ["0,2"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("behind", "ranks"), [("RuntimeError", (1,)), ("KeyError", (0, 1))])
def test_an_exception_that_hides_another(behind: str, ranks: tuple[int, ...]) -> None:
    """Who only lost its peers may raise the same in its handler; another error is its own."""
    every = {0: raised(5.0, "TrainingFailed"), 1: raised(5.2, "TrainingFailed")}
    first = {0: (behind, CLOSED), 1: ("ValueError", "bad batch")}
    for rank, (kind, message) in first.items():
        (frame,) = every[rank][1].frames  # type: ignore[attr-defined]
        hidden = Relayed("", kind, message, (msgspec.structs.replace(frame, line=4),))
        every[rank][1] = msgspec.structs.replace(every[rank][1], first=hidden)
    (finding,) = found(make_run(every, ended={0: 1, 1: 1}))
    assert finding.rule == "exception"
    assert finding.ranks == ranks
    assert ("ValueError" in finding.summary) is (ranks == (1,))


def test_a_breakpoint_that_was_left_in() -> None:
    """The last frame is the line that called the debugger."""
    run = make_run(
        {0: raised(5.5, "RuntimeError", CLOSED), 1: raised(5.2, "bdb.BdbQuit", "", line=15)},
        ended={0: 1, 1: 1},
    )
    (finding,) = found(run)
    assert finding.rule == "exception"
    assert finding.location is not None
    assert (finding.ranks, finding.location.line) == ((1,), 15)


def test_a_text_that_is_no_python_fails_wherever_it_is_read() -> None:
    (finding,) = found(make_run({1: raised(5.2, "SyntaxError")}, ended={0: None, 1: 1}))
    assert finding.rule == "exception"
    assert finding.ranks == (1,)


def test_the_same_exception_everywhere_is_one_fault() -> None:
    (finding,) = found(
        make_run({r: raised(5 + r) for r in range(4)}, ended=dict.fromkeys(range(4), 1))
    )
    assert finding.rule == "exception"
    assert finding.ranks == (0, 1, 2, 3)


def test_a_quiet_exit_with_a_status() -> None:
    leaving = RankExiting(at=START + 4, how="sys.exit", status=7, site=1)
    quiet: list[Event] = [site(1, "train.py", 40, "sys.exit(7)"), leaving]
    (finding,) = found(
        make_run({0: raised(5, "RuntimeError", CLOSED), 1: quiet}, ended={0: 1, 1: 7})
    )
    assert finding.rule == "exit-status"
    assert finding.ranks == (1,)
    assert finding.location is not None
    assert finding.location.line == 40


def test_an_exception_that_was_caught_just_before_a_bad_exit() -> None:
    (where, event) = raised(4)
    assert isinstance(event, ExceptionRaised)
    caught = msgspec.structs.replace(event, caught=True)
    leaving = RankExiting(at=START + 4.1, how="sys.exit", status=7)
    victim = raised(5, "RuntimeError", CLOSED)
    run = make_run({0: victim, 1: [where, caught, leaving]}, ended={0: 1, 1: 7})
    (finding,) = found(run)
    assert finding.rule == "exception"
    assert finding.ranks == (1,)
    assert finding.location is not None
    assert finding.location.line == 7
    well = make_run({0: [], 1: [where, caught]})
    assert found(well) == []


def test_a_users_own_error_that_speaks_of_connections() -> None:
    (finding,) = found(make_run({0: raised(5, "MyError", "Connection closed by peer"), 1: []},
                                ended={0: 1}))  # fmt: skip
    assert finding.rule == "exception"
    assert finding.ranks == (0,)
    assert "message" in finding.evidence
    assert finding.rule != "lost-peers"


def test_a_tensor_that_the_backend_does_not_take_is_no_lost_connection() -> None:
    event = raised(5, "RuntimeError", "No backend type associated with device type cpu")
    (finding,) = found(make_run({0: event, 1: event}, ended={0: 1, 1: 1}))
    assert (finding.rule, finding.ranks) == ("exception", (0, 1))
    assert "cpu:gloo,cuda:nccl" in finding.fix


def test_only_victims_are_told_as_such() -> None:
    (finding,) = found(
        make_run({0: raised(5, "RuntimeError", CLOSED), 1: []}, ended={0: 1, 1: None})
    )
    assert finding.rule == "lost-peers"


def test_a_run_that_ends_well() -> None:
    caught = ExceptionRaised(at=START + 1, kind="ValueError", message="boom", caught=True)
    assert found(make_run({0: [caught], 1: []})) == []


def test_a_killed_rank_is_told_by_another_check() -> None:
    assert (
        found(make_run({0: raised(500, "RuntimeError", CLOSED), 1: []}, ended={0: 1, 1: -9})) == []
    )


def test_somebody_stopped_the_run() -> None:
    run = make_run({0: raised(5, "KeyboardInterrupt", ""), 1: []}, ended={0: 1, 1: -15},
                   stopped="interrupt")  # fmt: skip
    assert found(run) == []


@pytest.mark.parametrize("over", [True, False])
def test_a_signal_after_the_ranks_had_ended_stopped_nothing(over: bool) -> None:
    """It came while the doctor wrote its report."""
    stop = Stopped(at=START + (60 if over else 6), by="terminate", reason="SIGTERM")
    ends = [
        ProcessEnded(at=START + 7 + r, rank=r, pid=PID + r, wall=WALL, status=1) for r in range(2)
    ]
    starts = [
        ProcessStarted(at=START, rank=r, local_rank=r, pid=PID + r, wall=WALL, world_size=2)
        for r in range(2)
    ]
    run = make_run(
        {0: raised(5, "ValueError", "no such file"), 1: []},
        ended=None,
        nodes={0: [*starts, *ends, stop]},
    )
    assert [f.rule for f in found(run)] == (["exception"] if over else [])


@pytest.mark.parametrize("by", ["terminate", "interrupt", "launcher", "doctor"])
def test_what_failed_before_somebody_stopped_the_others(by: str) -> None:
    """A scheduler ends the whole job after a failure; of a hang, other checks tell the cause."""
    run = make_run(
        {0: raised(5, "RuntimeError", CLOSED), 1: raised(3)},
        ended={0: 1, 1: 1},
        nodes={0: [Stopped(at=START + 4.5, by=by, reason="SIGTERM")]},
    )
    assert [f.ranks for f in found(run)] == ([] if by == "doctor" else [(1,)])


@pytest.mark.parametrize(("since", "ranks"), [(3.2, [(1,)]), (1.0, [])])
def test_what_failed_before_the_run_stood_still(since: float, ranks: list[tuple[int, ...]]) -> None:
    """A rank raises, and its process does not end; until somebody stops the run."""
    stood_still = stall(START + since + 12, START + since)
    run = make_run(
        {0: [], 1: raised(3)},
        ended={0: -15, 1: 1},
        nodes={0: [stood_still, Stopped(at=START + 90, by="terminate", reason="SIGTERM")]},
    )
    assert [f.ranks for f in found(run)] == ranks


def test_one_rank_alone_is_interrupted() -> None:
    victim, interrupted = raised(5.1, "RuntimeError", CLOSED), raised(5, "KeyboardInterrupt", "")
    (finding,) = found(make_run({0: victim, 1: interrupted}, ended={0: 1, 1: -2}))
    assert finding.rule == "exception"
    assert finding.ranks == (1,)
    (everybody,) = found(make_run({0: interrupted, 1: interrupted}, ended={0: -2, 1: -2}))
    assert everybody.rule == "lost-peers"


def test_what_an_exit_said() -> None:
    leaving = RankExiting(at=START + 4, how="sys.exit", status=1, message="no more data\nat all")
    (finding,) = found(make_run({0: [], 1: [leaving]}, ended={0: 0, 1: 1}))
    assert finding.rule == "exit-status"
    assert finding.evidence["message"] == "no more data\nat all"


def test_the_step_stands_apart_from_the_message_and_only_where_there_is_one() -> None:
    leaving = RankExiting(at=START + 9, how="sys.exit", status=1, message="bye bye")
    over = GroupDestroyed(at=START + 8)

    def told(*before: Event) -> Finding:
        (finding,) = found(make_run({0: [], 1: [*before, leaving]}, ended={0: 0, 1: 1}))
        assert finding.rule == "exit-status"
        return finding

    training = told(*steps(8))
    assert training.steps is not None
    two = told(*steps(8), *steps(8, optimizer=1))
    assert two.rule == "exit-status"
    for finding in (told(*steps(8), over), two, told()):
        assert finding.steps is None


def test_the_step_of_two_optimizers_is_not_their_sum() -> None:
    both = [e for n in range(8) for o in range(2) for e in steps(1, first=n, optimizer=o)]
    error = ExceptionRaised(at=START + 9, kind="KeyError", message="'torus'", step=16)
    (finding,) = found(make_run({0: [], 1: [*both, error]}, ended={0: 0, 1: 1}))
    assert finding.rule == "exception"


@pytest.mark.parametrize(("at", "status", "own"), [(5, 3, True), (5, -253, True), (8, 3, False)])
def test_who_was_leaving_with_a_bad_status_as_the_launcher_came_failed_as_well(
    at: float, status: int, own: bool
) -> None:
    """Only where it left before the first process was gone: a handler of SIGTERM may exit."""
    left: list[Event] = [RankExiting(at=START + at, how="sys.exit", status=status)]
    ends = [
        ProcessEnded(at=START + 7, rank=1, pid=5001, wall=WALL, status=3),
        ProcessEnded(at=START + 9, rank=0, pid=5000, wall=WALL, signal=15, by_launcher=True),
    ]
    first: list[Event] = [RankExiting(at=START + 5, how="sys.exit", status=3)]
    run = make_run({0: left, 1: first}, nodes={0: ends}, ended=None)
    (finding,) = found(run)
    assert finding.rule == "exit-status"
    assert finding.ranks == ((0, 1) if own else (1,))
    assert run.ranks[0].state == ("failed" if own else "killed")


def test_an_abort_at_teardown_is_a_note(tmp_path: Path) -> None:
    over: list[Event] = [GroupDestroyed(at=START + 5), RankExiting(at=START + 6, how="return")]
    (finding,) = found(make_run({0: over, 1: over}, ended={1: -6}))
    assert finding.rule == "teardown-abort"
    assert finding.severity is Severity.NOTE


@pytest.mark.parametrize("done", [True, False])
def test_an_abort_at_teardown_for_which_others_were_told_to_end(done: bool) -> None:
    over: list[Event] = [GroupDestroyed(at=START + 5), RankExiting(at=START + 6, how="return")]
    run = make_run({0: over if done else [], 1: over}, ended={0: -15, 1: -6})
    (finding,) = found(run)
    assert finding.rule == "teardown-abort"
    assert (finding.severity, finding.ranks) == (Severity.NOTE, (1,))


class Awkward(Exception):
    """Cannot be made of a text alone."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number}:\n{text}")


def read(kind: str) -> None:
    try:
        {}["x"]
    except KeyError as error:
        if kind == "awkward":
            raise Awkward(7, "  two lines") from error
        raise ValueError() from None if kind == "empty" else error


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [("awkward", f"{__name__}.Awkward", "7:\n  two lines"), ("empty", "ValueError", "")],
)
def test_an_exception_that_torch_carried_from_a_worker(kind: str, name: str, message: str) -> None:
    try:
        read(kind)
    except Exception:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 3")
    with pytest.raises(Exception, match="Caught") as again:
        wrapper.reraise()
    met: list[Event] = []
    found = relayed(str(again.value), Sites(met.append), 100)
    assert found is not None
    assert (found.where, found.kind) == ("DataLoader worker process 3", name)
    assert found.message == message
    assert [f.function for f in found.frames][-1] == "read"
    assert found.frames[-1].user
    assert any(f"line={found.frames[-1].line}," in repr(e) for e in met)


def test_texts_that_are_no_workers() -> None:
    sites = Sites(lambda event: None)
    assert relayed("Caught ValueError in DataLoader worker process 0.", sites, 100) is None
    assert relayed("boom", sites, 100) is None


def by_worker() -> list[Event]:
    home = "/home/user/project/"
    original = Relayed(
        where="DataLoader worker process 0",
        kind="ValueError",
        message="no number: 'n/a'",
        frames=(
            Frame(file=home + "data.py", line=14, function="__getitem__", user=True),
            Frame(file=home + "data.py", line=12, function="parse", user=True),
        ),
    )
    frames = (Frame(file=home + "train.py", line=30, function="main", user=True),)
    return [
        site(1, "train.py", 30, "for x, y in loader:"),
        site(2, "data.py", 12, "return float(word)"),
        ExceptionRaised(
            at=START + 5, kind="ValueError", message="Caught ValueError in ...", frames=frames,
            step=5, relayed=original,
        ),
    ]  # fmt: skip


def test_an_exception_of_a_worker_is_told_by_its_own_text_and_line() -> None:
    (finding,) = found(make_run({0: raised(5.5, "RuntimeError", CLOSED), 1: by_worker()},
                                ended={0: 1, 1: 1}))  # fmt: skip
    assert finding.rule == "worker-exception"
    assert finding.ranks == (1,)
    assert str(finding.location) == "data.py:12"
    assert [str(r.location) for r in finding.related] == ["train.py:30"]
    assert finding.evidence["message"] == "no number: 'n/a'"
    assert finding.evidence["called_by"] == ["data.py:14 in __getitem__"]
    assert by_worker()[-1].describe() == "raised ValueError: no number: 'n/a'"


def test_a_worker_that_lost_a_connection_failed_on_its_own() -> None:
    *sites, event = by_worker()
    assert isinstance(event, ExceptionRaised)
    lost = msgspec.structs.replace(event, kind="ConnectionError", message=f"Caught ... {CLOSED}")
    (finding,) = found(make_run({0: [], 1: [*sites, lost]}, ended={0: None, 1: 1}))
    assert finding.rule == "worker-exception"
    assert finding.ranks == (1,)
    assert finding.rule != "lost-peers"


def test_the_advice_says_more_than_the_line() -> None:
    victim = raised(5.5, "RuntimeError", CLOSED)
    (one,) = found(make_run({0: victim, 1: raised(5)}, ended={0: 1, 1: 1}))
    assert one.rule == "exception"
    (all_,) = found(make_run({r: raised(5) for r in range(2)}, ended={0: 1, 1: 1}))
    assert all_.rule == "exception"


def test_the_split_sizes_of_an_all_to_all() -> None:
    message = "[enforce fail at alltoallv.cc:138] inLengthPerRank[myRank] == outLengthPerRank[myRa"
    (finding,) = found(make_run({0: raised(5, "RuntimeError", message), 1: []}, ended={0: 1, 1: 0}))
    assert finding.rule == "exception"


def test_ranks_that_fail_at_one_line_by_numbers_of_their_own() -> None:
    run = make_run(
        {r: raised(5, "KeyError", text) for r, text in enumerate(("97", "45"))}, ended={0: 1, 1: 1}
    )
    (finding,) = found(run)
    assert finding.rule == "exception"
    addresses = ("<Net at 0x7f01>", "<Net at 0x7f02>")
    run = make_run(
        {r: raised(5, "KeyError", text) for r, text in enumerate(addresses)}, ended={0: 1, 1: 1}
    )
    (finding,) = found(run)
    assert finding.rule == "exception"


@pytest.mark.parametrize("further", [False, True])
def test_the_others_had_not_come_as_far(further: bool) -> None:
    entered = InitEntered(
        at=START + 1, backend="gloo", init_method="", rank=-1, world_size=-1, env_rank=1,
        env_world_size=2, env_local_rank=1, timeout_s=60, site=-1,
    )  # fmt: skip
    cleaned = ProcessEnded(at=START + 3, rank=1, pid=PID + 1, signal=15, by_launcher=True,
                           wall=WALL + 3)  # fmt: skip
    run = make_run(
        {0: raised(2, "ModuleNotFoundError"), 1: [entered] if further else []},
        ended=None,
        nodes={0: [cleaned]},
    )
    (finding,) = found(run)
    assert finding.rule == "exception"


def leaves(rank: int, at: float, ended: float, by_launcher: bool) -> tuple[list[Event], Event]:
    """A rank that leaves with status 2 after its work, and its end."""
    before: list[Event] = [
        site(1, "train.py", 79, "sys.exit(2)"),
        *steps(3),
        GroupDestroyed(at=START + 4),
        RankExiting(at=START + at, how="sys.exit", status=2, site=1),
    ]
    end = ProcessEnded(at=START + ended, rank=rank, pid=PID + rank, status=2, wall=WALL + ended,
                       by_launcher=by_launcher)  # fmt: skip
    return before, end


@pytest.mark.parametrize(("at", "ranks"), [(5.1, (0, 1)), (8.1, (1,))])
def test_all_leave_alike_and_one_is_gone_first(at: float, ranks: tuple[int, ...]) -> None:
    """Who leaves once the first is gone may do so because the launcher told it to end."""
    last, end = leaves(0, at, 9, by_launcher=True)
    early, gone = leaves(1, 5, 8, by_launcher=False)
    (finding,) = found(make_run({0: last, 1: early}, ended=None, nodes={0: [gone, end]}))
    assert finding.rule == "exit-status"
    assert finding.ranks == ranks


def test_the_others_are_ended_before_they_come_to_where_the_first_left() -> None:
    early, gone = leaves(1, 5, 8, by_launcher=False)
    cleaned = ProcessEnded(at=START + 9, rank=0, pid=PID, signal=15, by_launcher=True,
                           wall=WALL + 9)  # fmt: skip
    run = make_run({0: steps(3), 1: early}, ended=None, nodes={0: [gone, cleaned]})
    (finding,) = found(run)
    assert finding.rule == "exit-status"
    assert finding.ranks == (1,)


@pytest.mark.parametrize(
    ("spawned", "environment", "named"),
    [(0, {"TORCHELASTIC_RUN_ID": "x"}, True), (2, {"TORCHELASTIC_RUN_ID": "x"}, False),
     (2, {}, False), (0, {}, False)],
)  # fmt: skip
def test_torchrun_names_a_rank_only_where_it_ran(
    spawned: int, environment: dict[str, str], named: bool
) -> None:
    first = started(0, 2, spawned=spawned, environment=environment)
    victim = [first, *raised(5.5, "RuntimeError", CLOSED)]
    (finding,) = found(make_run({0: victim, 1: raised(5)}, ended={0: 1, 1: 1}))
    assert finding.rule == "exception"
    assert ("torchrun_names" in finding.evidence) is named


def test_a_long_message_is_cut_at_the_end_of_a_word() -> None:
    (finding,) = found(make_run({0: raised(1, message="wordy " * 80), 1: []}, ended={0: 1}))
    assert finding.rule == "exception"
    told = finding.summary.partition("ValueError: ")[2]
    assert told.startswith("wordy wordy")
    assert set(told.split()) <= {"wordy", "…"}
    assert "…" in told


def without_a_record(status: int | None, at: float, rank_0: list[Event]) -> Run:
    """Rank 1 left no record, and the launcher then ended rank 0."""
    ends = [
        ProcessEnded(at=START + at, rank=1, pid=PID + 1, status=status, wall=WALL + at),
        ProcessEnded(at=START + 9, rank=0, pid=PID, signal=15, by_launcher=True, wall=WALL + 9),
    ]
    started_both = [
        ProcessStarted(at=START, rank=r, local_rank=r, pid=PID + r, wall=WALL, world_size=2)
        for r in range(2)
    ]
    nodes = {0: [*started_both, *ends]}
    return make_run({0: rank_0}, ended=None, nodes=nodes, world_size=2)


def test_a_rank_without_a_record_ended_first() -> None:
    (finding,) = found(without_a_record(1, 5.5, raised(5, "RuntimeError", CLOSED)))
    assert finding.rule == "unrecorded"
    assert finding.ranks == (1,)
    assert [row["ranks"] for row in finding.evidence["consequences"]] == ["0"]  # type: ignore[attr-defined]
    (before,) = found(without_a_record(1, 4.5, raised(5)))
    assert before.rule == "unrecorded"
    assert before.ranks == (1,)


def test_a_rank_without_a_record_that_was_not_first() -> None:
    (own,) = found(without_a_record(1, 5.5, raised(5)))
    assert own.rule == "exception"
    assert own.ranks == (0,)
    (lost,) = found(without_a_record(0, 5.5, raised(5, "RuntimeError", CLOSED)))
    assert lost.rule == "lost-peers"


def test_the_words_in_which_the_ranks_differ_are_not_cut_off() -> None:
    said = f"[enforce fail at {'/pytorch' * 12}/context.cc:23] rank <\nsize. {{}} vs 2"
    ranks = {r: raised(5.0 + r, "RuntimeError", said.format(r)) for r in (2, 3)}
    run = make_run({0: [], 1: [], **ranks}, ended={0: -15, 1: -15, 2: 1, 3: 1})
    (finding,) = found(run)
    assert finding.rule == "exception"


def joining(spawned: int = 0) -> list[Event]:
    return [
        started(0, 2, spawned=spawned),
        InitEntered(at=START + 1, backend="gloo", init_method="", rank=0, world_size=2, env_rank=0,
                    env_world_size=2, env_local_rank=0, timeout_s=-1, site=1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "kind", "fix"),
    [
        (joining(), "torch.distributed.DistNetworkError", "--standalone"),
        (joining(spawned=2), "torch.distributed.DistNetworkError", "MASTER_PORT"),
        (joining(), "OSError", "port + rank"),  # of a server of its own
        (
            [started(0, 2)],
            "torch.distributed.DistNetworkError",
            "port + rank",
        ),  # a store of its own
    ],
)
def test_whose_port_is_in_use(before: list[Event], kind: str, fix: str) -> None:
    failed = raised(5, kind, "[Errno 98] Address already in use")
    (finding,) = found(make_run({0: [*before, *failed], 1: []}, ended={0: 1, 1: None}))
    assert fix in finding.fix
    assert ("MASTER_PORT" in finding.fix) is (fix == "MASTER_PORT")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("UnboundLocalError", "cannot access local variable 'best'"),
        ("AttributeError", "'NoneType' object has no attribute 'write'"),
    ],
)
def test_a_name_that_is_set_under_a_condition_only(kind: str, message: str) -> None:
    only = Statement(line=3, text="if rank == 0:", kind="if", test="rank == 0")
    *sites, error = raised(5.0, kind, message)
    unset = Unset(name="best", site=2, under=only)
    error = msgspec.structs.replace(error, unset=unset)
    lines = [*sites, site(2, "train.py", 4, "best = 1")]
    (finding,) = found(make_run({0: raised(6, "RuntimeError", CLOSED), 1: [*lines, error]}))
    assert (finding.rule, finding.ranks) == ("never-set", (1,))
    assert [r.location.line for r in finding.related] == [4]
    assert "only under `if rank == 0:`, which did not hold on rank 1" in finding.cause
    assert ("None here" in finding.cause) is (kind == "AttributeError")
    assert "before or out of `if rank == 0:`" in finding.fix


RESUMED = "if state is not None and rank == 0:"
ON_RANK_0 = Statement(line=4, text=RESUMED, kind="if", test="state is not None and rank == 0")
SCHEDULER = "scheduler = ExponentialLR(optimizer, 0.9, last_epoch=epoch)"


def resumed(*loads: int, line: int = 5, wrapped: int = 1, under: bool = True) -> list[Finding]:
    """Rank 1 raises at line 7, where it uses the optimizer whose state these ranks load."""
    events = {0: raised(6, "RuntimeError", CLOSED), 1: raised(5, "KeyError")}
    places = (Place(site=2, inside=(ON_RANK_0,) * under),)
    ddp = Wrapped(at=START, model=0, wrapper="DistributedDataParallel", kind="Net", group=0, site=1)
    load = Loaded(
        at=START + 1, what="optimizer", model=0, step=0, site=2, made=3, places=places
    )  # fmt: skip
    for n, (_, error) in events.items():
        events[n] = [
            site(1, "train.py", 7, SCHEDULER),
            site(2, "train.py", line, "optimizer.load_state_dict(state)"),
            site(3, "train.py", 2, "optimizer = SGD(net.parameters())"),
            *([ddp] * wrapped),
            *([load] if n in loads else []),
            msgspec.structs.replace(error, optimizers=(3,) * n, step=0),
        ]
    return found(make_run(events))


def test_an_optimizer_that_another_rank_loaded() -> None:
    (finding,) = resumed(0)
    assert (finding.rule, finding.ranks) == ("optimizer-not-loaded", (1,))
    assert [r.location.line for r in finding.related] == [5, 4]
    assert "put it under `if state is not None:`, without `rank == 0`" in finding.fix
    (finding,) = resumed(0, under=False)
    assert [r.location.line for r in finding.related] == [5]


@pytest.mark.parametrize("loads", [(0, 1), (1,), ()])
def test_an_optimizer_that_every_rank_or_none_loaded(loads: tuple[int, ...]) -> None:
    assert [f.rule for f in resumed(*loads)] == ["exception"]


def test_loads_that_the_rank_may_not_have_come_to_or_that_are_not_on_record_yet() -> None:
    assert [f.rule for f in (*resumed(0, line=9), *resumed(0, wrapped=0))] == ["exception"] * 2
