"""`ddpdoctor compare`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from commands import Caught, refused
from recordings import make_run, steps, write_folder
from toys import ToyStep

from ddpdoctor.cli import main
from ddpdoctor.events import Event, GroupReady, MemorySample, Pace, ProbeCost, Wrapped
from ddpdoctor.report.comparison import compare
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Coverage


def test_compare(tmp_path: Path, capsys: Caught) -> None:
    fast = write_folder(tmp_path / "fast", {0: steps(9), 1: steps(9)}).path
    slow = write_folder(tmp_path / "slow", {0: steps(9, wall_s=0.25), 1: steps(9, wall_s=0.25)})
    idle = write_folder(tmp_path / "idle", {0: [], 1: []}, ended={0: 1}).path
    assert main(["compare", str(fast), str(slow.path)]) == 0
    out = capsys.readouterr().out
    assert "stayed (1)" in out
    assert "+150.0 %" in out
    assert main(["compare", str(idle), str(fast)]) == 0
    out = capsys.readouterr().out
    assert "appeared (1)" in out
    assert "differs outcome: failed before, completed after" in out
    assert main(["compare", str(fast), str(idle)]) == 0
    assert "went (1)" in capsys.readouterr().out
    assert "no such folder" in refused(capsys, "compare", fast, tmp_path / "nope")


def test_what_makes_runs_hard_to_compare(tmp_path: Path, capsys: Caught) -> None:
    whole = write_folder(tmp_path / "whole", {0: steps(9), 1: steps(9)}).path
    part = write_folder(tmp_path / "part", {0: steps(9)}, world_size=2, command=()).path
    assert main(["compare", str(part), str(whole)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "command unknown" in out
    assert "differs records before: " in out and "records after" not in out


def test_what_was_not_examined_before_need_not_be_new() -> None:
    toy = ToyStep()
    before = diagnose(make_run({0: []}), checks=())
    after = diagnose(make_run({0: steps(9)}), checks=(toy,))
    change = compare(before, after)
    assert [f.check for f in change.appeared] == [toy.name]
    assert f"not examined before, and may have been there: {toy.name}" in change.unlike
    assert not any("not examined" in reason for reason in compare(after, after).unlike)


def held(mib: int, waited_s: float) -> list[Event]:
    return [
        MemorySample(at=0, step=3, rss_bytes=1, peak_rss_bytes=mib << 20),
        Pace(at=0, optimizer=0, step=3, count=4, wall_s=0.1, waited_s=waited_s, own_s=(0.08,)),
    ]


def test_memory_and_waiting_are_compared_where_they_were_seen(
    tmp_path: Path, capsys: Caught
) -> None:
    told = [steps(9), [*steps(9), *held(200, 0.02)], [*steps(9), *held(300, 0.01)]]
    bare, before, after = (
        str(write_folder(tmp_path / str(n), {0: events}).path) for n, events in enumerate(told)
    )
    assert main(["compare", before, after]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["waiting", "in", "step", "20", "ms", "10", "ms", "-50.0", "%"] in rows
    assert ["host", "memory", "peak", "200", "MiB", "300", "MiB", "+50.0", "%"] in rows
    assert main(["compare", bare, after]) == 0
    out = capsys.readouterr().out
    assert "waiting in step" not in out and "memory peak" not in out


def test_waiting_on_the_gpu_is_not_seen() -> None:
    on_gpu = [
        GroupReady(at=0, group=0, name="0", backend="nccl", ranks=(0,), member=True, site=-1),
        Wrapped(at=0, model=0, wrapper="DistributedDataParallel", kind="M", group=0, site=-1,
                device="cuda:0"),
    ]  # fmt: skip
    run = make_run({0: [*steps(3), *held(200, 0.02)], 1: [*on_gpu, *held(200, 0.02)]})
    assert [run.ranks[r].waiting() for r in (0, 1)] == [0.02, None]


def test_a_moved_line_is_the_same_fault() -> None:
    import msgspec

    report = diagnose(make_run({0: steps(3)}), [ToyStep()])
    (finding,) = report.findings
    assert finding.location
    lower = msgspec.structs.replace(
        finding, location=msgspec.structs.replace(finding.location, line=99)
    )
    other = msgspec.structs.replace(finding, subjects=("another",))
    change = compare(report, msgspec.structs.replace(report, findings=(lower,)))
    assert (change.appeared, change.went, change.stayed) == ((), (), (lower,))
    change = compare(report, msgspec.structs.replace(report, findings=(other,)))
    assert (change.appeared, change.went, change.stayed) == ((other,), (finding,), ())


def figures(capsys: Caught, *folders: Path) -> dict[str, list[str]]:
    """The rows of the table by their names."""
    assert main(["compare", *map(str, folders)]) == 0
    lines = capsys.readouterr().out.split("median over ranks")[1].splitlines()[1:]
    cells = (re.split(r" {2,}", line.strip()) for line in lines)
    return {name: rest for name, *rest in cells}


def test_what_is_many_times_as_much_is_told_so(tmp_path: Path, capsys: Caught) -> None:
    few = write_folder(tmp_path / "few", {0: [*steps(11), *held(100, 1e-7)]}).path
    many = write_folder(tmp_path / "many", {0: [*steps(12_000, wall_s=1.2), *held(640, 0.05)]}).path
    rows = figures(capsys, few, many)
    assert rows["steps"] == ["11", "12 000", "+11 989"]
    assert rows["step time"][2] == "x 12"
    assert rows["host memory peak"] == ["100 MiB", "640 MiB", "x 6.4"]
    assert rows["waiting in step"][2] == "x 1000 or more"
    rows = figures(capsys, many, few)
    assert rows["steps"] == ["12 000", "11", "-11 989"]
    assert rows["step time"][2] == "-91.7 %"


def test_what_differs_in_digits_that_are_not_shown_is_the_same(
    tmp_path: Path, capsys: Caught
) -> None:
    before, after = (
        write_folder(
            tmp_path / str(n), {r: [*steps(9), *held(m, 0.02)] for r, m in enumerate(told)}
        )
        for n, told in enumerate([(40_000, 40_001), (40_001, 40_002)])
    )
    rows = figures(capsys, before.path, after.path)
    assert rows["host memory peak"] == ["39.1 GiB", "39.1 GiB", "same"]
    assert "largest" not in rows


def test_the_doctors_share_is_compared_in_points(tmp_path: Path, capsys: Caught) -> None:
    before, after = (
        write_folder(tmp_path / str(n), {0: [*steps(9), ProbeCost(at=9, own_s=own, wall_s=9.0)]})
        for n, own in enumerate([0.0009, 1.8])
    )
    assert figures(capsys, before.path, after.path)["the doctor's share"] == [
        "0.01 %", "20 %", "+20.0 points",
    ]  # fmt: skip


def test_what_was_not_examined_after_need_not_be_gone() -> None:
    before = diagnose(make_run({0: steps(9)}), checks=(ToyStep(),))
    after = diagnose(make_run({0: []}), checks=())
    change = compare(before, after)
    assert [f.check for f in change.went] == ["toy-step"]
    assert "not examined after, and may still be there: toy-step" in change.unlike
    assert not any(reason.startswith("examined before") for reason in change.unlike)


def test_many_checks_are_not_all_named() -> None:
    after = diagnose(make_run({0: steps(9)}), checks=())
    examined = Coverage(examined=tuple(f"check-{n}" for n in range(9)))
    (reason,) = compare(msgspec.structs.replace(after, coverage=examined), after).unlike
    named = ", ".join(f"check-{n}" for n in range(6))
    assert reason == f"examined before, not after: {named} and 3 more"


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ("2025-06-15T15:06:40+00:00", "completed after less than 1 s: 1 rank"),
        ("2025-06-15T15:06:39+00:00", "completed: 1 rank"),
        ("soon", "completed: 1 rank"),
        ("2025-06-15T15:06:41+00:00", "completed after 1 s: 1 rank"),
    ],
)
def test_how_long_it_took_by_times_of_whole_seconds(
    tmp_path: Path, capsys: Caught, ended: str, told: str
) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(9)})
    info = json.loads((folder.path / "run.json").read_text())
    info |= {"started_at": "2025-06-15T15:06:40+00:00", "ended_at": ended}
    (folder.path / "run.json").write_text(json.dumps(info))
    assert main(["report", str(folder.path)]) == 0
    assert told in capsys.readouterr().out


def test_compare_for_a_pull_request_and_as_a_page(tmp_path: Path, capsys: Caught) -> None:
    idle = write_folder(tmp_path / "idle<script>", {0: [], 1: []}, ended={0: 1}).path
    fast = write_folder(tmp_path / "fast", {0: steps(9), 1: steps(9, wall_s=0.25)}).path
    assert main(["compare", "--format", "markdown", str(idle), str(fast)]) == 0
    text = capsys.readouterr().out
    assert "### appeared (1)" in text and "- differs: outcome: failed before" in text
    assert main(["compare", "--format", "html", str(idle), str(fast)]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>") and "<script" not in page
    assert "Findings that appeared (1)" in page
    assert main(["compare", "--format", "markdown", str(fast), str(fast)]) == 0
    assert "| steps | 9 | 9 | same |" in capsys.readouterr().out
    assert main(["compare", "--format", "html", str(fast), str(fast)]) == 0
    page = capsys.readouterr().out
    assert "appeared" not in page and "<td>steps</td>" in page
