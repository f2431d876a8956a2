"""`ddpdoctor compare`."""

from __future__ import annotations

from pathlib import Path

from commands import Caught, refused
from recordings import make_run, steps, write_folder
from toys import ToyStep

from ddpdoctor.cli import main
from ddpdoctor.comparison import compare
from ddpdoctor.diagnose import diagnose


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
