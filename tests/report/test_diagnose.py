"""Joining what checks say: one fault is told once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from recordings import PID, make_run, started, steps

from ddpdoctor.events import GroupReady, ProbeCost, ProcessEnded, Stopped
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Check, Finding, Severity
from ddpdoctor.run import Location, Run


class Says(Check):
    """A check that finds itself and explains the checks of some names."""

    def __init__(
        self,
        name: str,
        *explained: str,
        fails: bool = False,
        told: tuple[str, ...] = ("",),
        at: Location | None = None,
        family: str = "model",
        severity: Severity = Severity.ERROR,
    ) -> None:
        self.family = family  # type: ignore[misc]
        self.severity = severity  # type: ignore[misc]
        self.name = name  # type: ignore[misc]
        self.code = f"DDP9{ord(name[0])}"  # type: ignore[misc]
        self.explained = explained
        self.fails = fails
        self.told = told
        self.at = at

    def examine(self, run: Run) -> Iterable[Finding]:
        if self.fails:
            raise RuntimeError("broken")
        for summary in self.told:
            about = tuple(summary.split()[:1])
            yield self.finding(summary=summary, subjects=about, location=self.at, cause="", fix="")

    def explains(self, mine: Finding, other: Finding) -> bool:
        return other.check in self.explained


@pytest.mark.parametrize(
    ("checks", "roots"),
    [
        ([Says("a", "b"), Says("b")], {"a": ["b"]}),
        ([Says("c", "d"), Says("b", "c"), Says("d")], {"b": ["c", "d"]}),
        ([Says("a", "b"), Says("b", "a")], {"a": ["b"]}),
        ([Says("a", "b"), Says("b", "c"), Says("c", "a")], {"a": ["b", "c"]}),
        ([Says("a"), Says("b")], {"a": [], "b": []}),
    ],
)
def test_every_effect_stands_under_the_root_of_its_cause(
    checks: list[Check], roots: dict[str, list[str]]
) -> None:
    report = diagnose(make_run({0: [started(0, 1)]}), checks)
    assert {f.check: [c.check for c in f.consequences] for f in report.findings} == roots


@pytest.mark.parametrize(
    ("family", "severity", "told"),
    [("hang", Severity.ERROR, "error"), ("hang", Severity.NOTE, "warning"),
     ("drift", Severity.ERROR, "warning")],
)  # fmt: skip
def test_what_a_run_broke_off_of_is_an_error(family: str, severity: Severity, told: str) -> None:
    cause = Says("a", "b", "c", severity=Severity.WARNING)
    (finding,) = diagnose(
        make_run({0: steps(1)}),
        [cause, Says("b", family=family, severity=severity), Says("c", severity=severity)],
    ).findings
    assert finding.severity.value == told


@pytest.mark.parametrize(
    ("effect", "others", "cause"),
    [
        (Says("b"), [Says("a", "b", told=("lr differs",))],
         "this follows from a (DDP997), which --select or --ignore excludes: lr differs (t.py:3)"),
        (Says("b"), [Says("a", "c"), Says("d", "b", fails=True)], ""),
        (Says("b", "a"), [Says("a", "b")], ""),
        (Says("b", told=()), [Says("a", "b")], None),
    ],
)  # fmt: skip
def test_a_cause_that_was_not_asked_for_is_still_the_cause(
    effect: Check, others: list[Says], cause: str | None
) -> None:
    for check in others:
        check.at = Location("t.py", 3)
    found = diagnose(make_run({0: [started(0, 1)]}), [effect], others=others).findings
    assert [(f.check, f.cause) for f in found] == ([] if cause is None else [("b", cause)])


def test_what_is_said_of_one_line_again_and_again_is_told_once() -> None:
    says = Says("a", told=("not divided", "not divided", "divided twice"))
    report = diagnose(make_run({0: [started(0, 1)]}), [says])
    assert [f.summary for f in report.findings] == ["not divided", "divided twice"]


def test_what_one_line_does_to_several_things_is_one_fault() -> None:
    told = ("train is not divided", "val is not divided", "train is not divided")
    says = Says("a", told=told, at=Location("train.py", 3, "main", "loader(data)"))
    (finding,) = diagnose(make_run({0: [started(0, 1)]}), [says]).findings
    assert (finding.summary, finding.subjects) == (told[0], ("train", "val"))
    assert finding.evidence == {"from the same line also": [told[1]]}


def test_a_broken_check_hides_nothing() -> None:
    report = diagnose(make_run({0: [started(0, 1)]}), [Says("a", fails=True), Says("b")])
    assert {f.check for f in report.findings} == {"check-failed", "b"}
    assert report.coverage.skipped[0].check == "a"


def test_overhead_after_the_first_steps_is_told_apart() -> None:
    told = [(0.5, 5.0, 60), (0.6, 6.0, 129), (0.7, 16.0, 800), (0.8, 26.0, 1600)]
    costs = [ProbeCost(at=w, own_s=own, wall_s=w, steps=n) for own, w, n in told]
    report = diagnose(make_run({0: [started(0, 1), *costs]}), [])
    assert (report.overhead.measured_percent, report.overhead.later_percent) == (3.077, 1.0)
    old = [ProbeCost(at=w, own_s=own, wall_s=w) for own, w, _ in told]
    assert diagnose(make_run({0: [started(0, 1), *old]}), []).overhead.later_percent is None


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("by", ["launcher", "interrupt"])
def test_a_launcher_that_was_killed_is_named(nodes: int, by: str) -> None:
    stops = [Stopped(at=0, by="launcher", reason="SIGKILL to torchrun itself")]
    if by != "launcher":  # who did so first is told
        stops.insert(0, Stopped(at=0, by=by, reason="SIGINT"))
    swept = [
        ProcessEnded(at=0, rank=r, pid=PID + r, wall=0.0, signal=15, by_launcher=True)
        for r in range(2)
    ]
    seen = {n: [*stops, *swept] if n + 1 == nodes else [] for n in range(nodes)}
    run = make_run({0: [], 1: []}, ended=None, nodes=seen, outcome="killed")
    where = " (node 1)" if nodes == 2 else ""
    said = f"SIGKILL to torchrun itself{where}" if by == "launcher" else "Ctrl-C"
    assert diagnose(run, []).run.stopped_by == said


def test_a_group_is_told_on_a_rank_that_is_no_member() -> None:
    group = GroupReady(at=0, group=2, name="", backend="", ranks=(1, 3), member=False, site=-1)
    assert group.describe() == "group without this rank ready: ranks 1, 3"
