"""The commands: what they print, how they exit, how they refuse."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from recordings import make_run, site, started, steps, write_folder
from toys import ToyQuiet, ToyStep, only_toys  # noqa: F401

from ddpdoctor import launch
from ddpdoctor.cli import COMMANDS, main
from ddpdoctor.comparison import compare
from ddpdoctor.config import Options
from ddpdoctor.diagnose import diagnose

pytestmark = pytest.mark.usefixtures("only_toys")

Caught = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, without doctor variables."""
    for name in [n for n in os.environ if n.startswith(("DDPDOCTOR_", "PET_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    events = [site(1, "train.py", 88, "optimizer.step()"), *steps(10, site=1)]
    return write_folder(tmp_path / "good", {0: events, 1: events}).path


def refused(caught: Caught, *argv: object) -> str:
    """The one line on stderr; nothing on stdout, status 2."""
    assert main([str(a) for a in argv]) == 2
    out, err = caught.readouterr()
    assert out == ""
    assert err.startswith("ddpdoctor: ")
    assert err.count("\n") == 1
    return err


# -- every command


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: Caught) -> None:
    status: object
    try:
        status = main([command, "--help"])
    except SystemExit as stop:
        status = stop.code
    out = capsys.readouterr().out
    assert status == 0
    assert out.startswith(f"Usage: ddpdoctor {command}")
    assert max(len(line) for line in out.split("\n")) <= 100


def test_version_and_overview(capsys: Caught) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == "ddpdoctor 0.1.0\n"
    assert main([]) == 2
    overview = capsys.readouterr().out
    assert all(f"  {name} " in overview for name in COMMANDS)


def test_unknown_command(capsys: Caught) -> None:
    assert "did you mean report?" in refused(capsys, "reprot")


# -- run and exec


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Options, list[str]]]:
    """What would have been launched; the launch itself ends with 7."""
    calls: list[tuple[Options, list[str]]] = []

    def record(options: Options, words: list[str]) -> int:
        calls.append((options, words))
        return 7

    monkeypatch.setattr(launch, "run", record)
    monkeypatch.setattr(launch, "exec_command", record)
    return calls


def test_run_hands_over(launched: list[tuple[Options, list[str]]], somewhere: Path) -> None:
    (somewhere / "train.py").touch()
    line = "run --nnodes 1 --every 5 --fail-on error train.py --json x"
    assert main(line.split()) == 7
    ((options, words),) = launched
    assert options == Options(every=5, fail_on="error")
    assert words == ["--nnodes", "1", "train.py", "--json", "x"]


def test_run_takes_modules_and_programs(launched: list[tuple[Options, list[str]]]) -> None:
    assert main(["run", "-m", "pkg.train"]) == 7
    assert main(["run", "--no-python", "prog"]) == 7
    assert len(launched) == 2


def test_exec_hands_over(launched: list[tuple[Options, list[str]]]) -> None:
    assert main(["exec", "--quiet", "--", sys.executable, "a.py", "--quiet"]) == 7
    assert launched == [(Options(quiet=True), [sys.executable, "a.py", "--quiet"])]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run", "no script to run"),
        ("run --standalone", "no script to run"),
        ("run nope.py", "no such script: nope.py"),
        ("run pkg", "type -m before it"),
        ("run .", "is a folder"),
        ("run --select nothing setup.py", "no check is called 'nothing'"),
        ("run --ignore DDP9,zz setup.py", "no check is called 'zz'"),
        ("run --budget lots setup.py", "--budget: 'lots' is not"),
        ("exec", "no command to run"),
        ("exec -- no-such-program-here", "no such program"),
    ],
)
def test_run_refuses(
    line: str,
    expected: str,
    capsys: Caught,
    somewhere: Path,
    launched: list[tuple[Options, list[str]]],
) -> None:
    (somewhere / "setup.py").touch()
    assert expected in refused(capsys, *line.split())
    assert not launched


# -- report


def test_report(good: Path, capsys: Caught) -> None:
    assert main(["report", str(good)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "completed after 60 s: 2 ranks, torch 2.13.0" in out
    assert "error[DDP997] toy-step" in out
    assert out.rstrip().endswith("the doctor's own time was not measured")


def test_report_formats(good: Path, capsys: Caught, tmp_path: Path) -> None:
    extra = ["--json", str(tmp_path / "f.json"), "--html", str(tmp_path / "f.html")]
    assert main(["report", str(good), "--format", "json", *extra]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [f["code"] for f in told["findings"]] == ["DDP997"]
    assert json.loads((tmp_path / "f.json").read_text()) == told
    assert "DDP997" in (tmp_path / "f.html").read_text()
    assert main(["report", str(good), "--format", "html"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    assert main(["report", str(good), "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("## `ddpdoctor 0.1.0: ddpdoctor run train.py`")


def test_report_fails_on_request(good: Path, capsys: Caught) -> None:
    assert main(["report", str(good), "--fail-on", "warning"]) == 3
    assert main(["report", str(good), "--fail-on", "warning", "--ignore", "toy-step"]) == 0
    assert main(["report", str(good), "--fail-on", "note", "--select", "toy-quiet"]) == 0


def test_report_refuses_what_is_no_run(tmp_path: Path, good: Path, capsys: Caught) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    bare = write_folder(tmp_path / "bare", {}).path
    assert "no such folder" in refused(capsys, "report", tmp_path / "nope")
    assert f"ddpdoctor report {good}" in refused(capsys, "report", good / "run.json")
    assert "is empty" in refused(capsys, "report", tmp_path / "empty")
    assert "neither run.json nor rank-" in refused(capsys, "report", tmp_path / "other")
    assert "no rank left a record" in refused(capsys, "report", bare)
    assert f"give one of them: {good}" in refused(capsys, "report", tmp_path)
    assert "both hold rank 0" in refused(
        capsys, "report", good, write_folder(tmp_path / "b", {0: []}).path
    )
    assert "cannot write" in refused(capsys, "report", good, "--json", good / "run.json" / "x")
    assert "no check is called" in refused(capsys, "report", good, "--select", "nothing")
    assert "--format" in refused(capsys, "report", good, "--format", "pdf")


def test_report_refuses_newer_records(tmp_path: Path, capsys: Caught) -> None:
    newer = write_folder(tmp_path / "n", {0: []}, schema_version=99, tool_version="9.0").path
    assert "written by ddpdoctor 9.0" in refused(capsys, "report", newer)
    rank = write_folder(tmp_path / "r", {0: [started(0, 1, schema=99)]}).path
    assert "pip install -U ddpdoctor" in refused(capsys, "report", rank)


def test_report_joins_nodes(tmp_path: Path, capsys: Caught) -> None:
    a = write_folder(tmp_path / "a", {0: steps(3)}, world_size=2).path
    b = write_folder(tmp_path / "b", {1: steps(3)}, world_size=2).path
    assert main(["report", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "no record of ranks" not in out
    assert main(["report", str(a)]) == 0
    assert "missing: no record of rank 1" in capsys.readouterr().out


def test_report_tells_what_the_records_lack(good: Path, capsys: Caught) -> None:
    first, second = sorted(good.glob("rank-*.jsonl"))
    second.write_bytes(second.read_bytes()[:-5])
    first.write_bytes(first.read_bytes() + b"garbage\n\xff\xfe\n")
    assert main(["report", str(good)]) == 0
    out = capsys.readouterr().out
    assert "2 unreadable lines in the records of rank 0" in out
    assert "the last line in the records of rank 1 is cut short" in out


def test_report_shows_earlier_attempts(tmp_path: Path, capsys: Caught) -> None:
    write_folder(tmp_path / "run", {0: steps(3)}, ended={0: 1})
    folder = write_folder(tmp_path / "run", {0: []}, attempt=1).path
    assert main(["report", str(folder), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(f["code"], f["attempt"]) for f in told["findings"]] == [("DDP997", 0)]
    assert told["findings"][0]["summary"].startswith("in attempt 0: ")
    assert told["ranks"][0]["state"] == "finished"


def test_report_of_one_rank(good: Path, capsys: Caught) -> None:
    (good / "rank-1.stacks.txt").write_text("Thread 0x1\n  File train.py, line 88 \x1b[31m")
    assert main(["report", str(good), "--rank", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rank 1 of 2 on host\nfinished (exit 0) after 10 steps")
    assert "steps 0-9 at train.py:88, 0.1 s each" in out
    assert "last step at train.py:88" in out
    assert "rank-1.stacks.txt\n  Thread 0x1\n    File train.py, line 88" in out
    assert "\x1b" not in out
    assert "there are ranks 0-1" in refused(capsys, "report", good, "--rank", "5")


def test_defaults_from_the_file(good: Path, somewhere: Path, capsys: Caught) -> None:
    (somewhere / "pyproject.toml").write_text('[tool.ddpdoctor]\nfail-on = "error"\n')
    assert main(["report", str(good)]) == 3


# -- explain


def test_explain(capsys: Caught) -> None:
    assert main(["explain", "ddp997"]) == 0
    page = capsys.readouterr().out
    assert main(["explain", "toy-step"]) == 0
    assert capsys.readouterr().out == page
    lines = page.split("\n")
    assert lines[0] == "DDP997 toy-step   error   drift"
    for heading in ("What it finds", "Why it hurts", "How to fix it", "When it stays quiet"):
        assert heading in lines
    code = "    if (i + 1) % accumulate == 0 and this_line_of_code_is_much_longer_than"
    assert any(line.startswith(code) for line in lines)
    assert "    optimizer.step()" in page
    prose = [line for line in lines if not line.startswith("    ")]
    assert max(len(line) for line in prose) <= 80
    assert (
        "- the models drift apart, which is an item that is longer than a line of the\n  " in page
    )


def test_explain_lists_all(capsys: Caught) -> None:
    assert main(["explain"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.split("\n") if "DDP" in line] == [
        "DDP996",
        "DDP997",
        "DDP999",
    ]
    assert main(["explain", "drift"]) == 0
    assert "DDP999" not in capsys.readouterr().out


def test_explain_unknown(capsys: Caught) -> None:
    assert "near it: toy-step" in refused(capsys, "explain", "toystep")
    assert "ddpdoctor explain lists all" in refused(capsys, "explain", "qqqqq")


# -- compare


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


# -- watch


def test_watch_without_a_terminal_prints_once(tmp_path: Path, capsys: Caught) -> None:
    mine = {"pid": os.getpid(), "node": platform.node(), "wall": time.time(), "at": 0.0}
    there = {r: [started(r, 2, **mine), *steps(3 - r)] for r in range(2)}
    folder = write_folder(tmp_path / "run", there, ended=None).path
    assert main(["watch", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: running, 2 ranks" in out
    assert "0     running      3" in out
    assert "1     running      2" in out


def test_watch_tells_a_run_that_is_gone(tmp_path: Path, capsys: Caught) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(3), 1: steps(2)}, ended=None).path
    assert main(["watch", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: incomplete, 2 ranks" in out
    assert "0     lost       3" in out
    assert "no such folder" in refused(capsys, "watch", tmp_path / "nope")


# -- the process


def in_process(code: str, *argv: object, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


WITHOUT_TORCH = """
    import sys
    sys.modules["torch"] = None
    from ddpdoctor.cli import main
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["report", "watch", "compare", "explain", "run"])
def test_without_torch(command: str, good: Path) -> None:
    argv = {"compare": [good, good], "explain": [], "run": ["--help"]}.get(command, [good])
    status, out, err = in_process(WITHOUT_TORCH, command, *argv)
    assert (status, err) == (0, "")
    assert out


def test_starts_fast(good: Path) -> None:
    # Processor time: other tests run beside this one, and would be measured with it.
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def once() -> float:
        before = spent()
        assert in_process(WITHOUT_TORCH, "report", good)[0] == 0
        return spent() - before

    assert min(once() for _ in range(6)) < 0.5


def test_a_reader_that_leaves_is_no_error(good: Path) -> None:
    code = f"{sys.executable} -m ddpdoctor report {good} --format json | head -c 10"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {code}"], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.returncode == 0


# -- what users get wrong, and odd places


def test_names_that_are_nearly_right(capsys: Caught) -> None:
    assert "did you mean toy-step?" in refused(capsys, "report", "x", "--select", "toy-stpe")
    assert "did you mean DDP997?" in refused(capsys, "report", "x", "--ignore", "997")


def test_explain_takes_the_beginning_of_a_code(capsys: Caught) -> None:
    assert main(["explain", "ddp99"]) == 0
    assert "toy-step" in capsys.readouterr().out


def test_report_refuses_files_that_cannot_be_written_before_the_run(
    tmp_path: Path, capsys: Caught
) -> None:
    (tmp_path / "train.py").write_text("")
    assert "is a folder" in refused(capsys, "run", "--json", tmp_path, "train.py")
    assert "may not be written" in refused(capsys, "run", "--html", "train.py/x.html", "train.py")


def test_no_processes_is_refused(tmp_path: Path, capsys: Caught) -> None:
    (tmp_path / "train.py").write_text("")
    assert "1 or more" in refused(capsys, "run", "--nproc-per-node=0", "train.py")


def test_one_attempt_of_a_run_is_no_run(tmp_path: Path, capsys: Caught) -> None:
    write_folder(tmp_path / "run", {0: steps(1)})
    write_folder(tmp_path / "run", {0: steps(1)}, attempt=1)
    told = refused(capsys, "report", tmp_path / "run" / "restart-1")
    assert f"type ddpdoctor report {tmp_path / 'run'}" in told


def test_a_folder_that_was_deleted_under_us(tmp_path: Path, capsys: Caught) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert "deleted" in refused(capsys, "report", tmp_path)


def test_output_that_nobody_takes(good: Path) -> None:
    code = """
        import os, sys
        {0}
        from ddpdoctor.cli import main
        sys.exit(main(["report", sys.argv[1]]))
    """
    full = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    status, _, err = in_process(code.format(full), good)
    assert (status, err) == (2, "ddpdoctor: no space left on device\n")
    status, _, err = in_process(code.format("sys.stdout = None"), good)
    assert (status, err) == (0, "")


def test_a_defect_of_ours_is_one_line(
    good: Path, capsys: Caught, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpdoctor.cli.report.open_run", lambda _: 1 / 0)
    assert main(["report", str(good)]) == 70
    assert capsys.readouterr().err.startswith("ddpdoctor: a defect in ddpdoctor itself")


def test_names_that_are_not_utf8(tmp_path: Path, capsys: Caught) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(1)}, command=["train-\udcff.py"])
    assert main(["report", str(folder.path), "--json", "a.json"]) == 0
    assert "train-\ufffd.py" in capsys.readouterr().out
