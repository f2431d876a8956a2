"""DDP606 over literal events, and each of its traps."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.checks.hang.first_failure import FirstFailure
from recordings import make_run, site
from tapes import START

from ddpdoctor.events import Event, ExceptionRaised, Frame, GroupDestroyed, RankExiting
from ddpdoctor.findings import Finding, Severity
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
    assert finding.ranks == (1,)
    assert finding.subjects == ("ValueError",)
    assert finding.location is not None
    assert (finding.location.file, finding.location.line) == ("train.py", 7)
    assert finding.location.source == LINE
    assert finding.evidence["message"] == "boom"
    assert [row["ranks"] for row in finding.evidence["consequences"]] == ["0,2"]  # type: ignore[attr-defined]


def test_the_same_exception_everywhere_is_one_fault() -> None:
    (finding,) = found(
        make_run({r: raised(5 + r) for r in range(4)}, ended=dict.fromkeys(range(4), 1))
    )
    assert finding.ranks == (0, 1, 2, 3)


def test_a_quiet_exit_with_a_status() -> None:
    leaving = RankExiting(at=START + 4, how="sys.exit", status=7, site=1)
    quiet: list[Event] = [site(1, "train.py", 40, "sys.exit(7)"), leaving]
    (finding,) = found(
        make_run({0: raised(5, "RuntimeError", CLOSED), 1: quiet}, ended={0: 1, 1: 7})
    )
    assert finding.ranks == (1,)
    assert "exit status 7" in finding.summary
    assert finding.location is not None
    assert finding.location.line == 40


def test_a_users_own_error_that_speaks_of_connections() -> None:
    (finding,) = found(make_run({0: raised(5, "MyError", "Connection closed by peer"), 1: []},
                                ended={0: 1}))  # fmt: skip
    assert finding.ranks == (0,)
    assert "message" in finding.evidence
    assert not finding.evidence.get("consequence")


def test_only_victims_are_told_as_such() -> None:
    (finding,) = found(
        make_run({0: raised(5, "RuntimeError", CLOSED), 1: []}, ended={0: 1, 1: None})
    )
    assert finding.evidence["consequence"] is True
    assert "another rank" in finding.cause


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


def test_an_abort_at_teardown_is_a_note(tmp_path: Path) -> None:
    over: list[Event] = [GroupDestroyed(at=START + 5), RankExiting(at=START + 6, how="return")]
    (finding,) = found(make_run({0: over, 1: over}, ended={1: -6}))
    assert finding.severity is Severity.NOTE
