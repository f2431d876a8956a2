"""The commands: what all have in common, and what users get wrong."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from commands import Caught, refused
from ddpdoctor.checks.hang.data_stall import DataStall
from ddpdoctor.checks.hang.rank_missing import RankMissing
from recordings import steps, write_folder

from ddpdoctor.cli import COMMANDS, main
from ddpdoctor.report import registry

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


# -- explain


def test_explain(capsys: Caught) -> None:
    assert main(["explain", "ddp997"]) == 0
    page = capsys.readouterr().out
    assert main(["explain", "toy-step"]) == 0
    assert capsys.readouterr().out == page
    lines = page.split("\n")
    assert lines[0] == "DDP997 toy-step   error   drift"
    headings = ["What it finds", "How it knows", "Why it hurts", "How to fix it"]
    for heading in (*headings, "When it stays quiet"):
        assert heading in lines
    code = "    if (i + 1) % accumulate == 0 and this_line_of_code_is_much_longer_than"
    assert any(line.startswith(code) for line in lines)
    assert "    optimizer.step()" in page
    prose = [line for line in lines if not line.startswith("    ")]
    assert max(len(line) for line in prose) <= 80
    assert (
        "- the models drift apart, which is an item that is longer than a line of the\n  " in page
    )


def test_explain_names_causes_and_consequences(
    capsys: Caught, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "all_checks", lambda: (DataStall(), RankMissing()))
    assert main(["explain", "data-stall"]) == 0
    page = capsys.readouterr().out
    assert page.endswith("What follows from it\n- rank-missing, stall, first-failure\n")
    assert main(["explain", "rank-missing"]) == 0
    page = capsys.readouterr().out
    assert "What follows from it\n- stall, first-failure\n- rank-died: on other ranks\n" in page
    assert page.endswith("What it may follow from\n- data-stall\n")


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
    assert "similar: toy-step" in refused(capsys, "explain", "toystep")
    assert "ddpdoctor explain lists all" in refused(capsys, "explain", "qqqqq")
    assert "similar: DDP999" in refused(capsys, "explain", "999")
    assert "type ddpdoctor explain DDP997" in refused(capsys, "explain", "DDP997,DDP999")


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


def test_starts_fast(good: Path, tmp_path: Path) -> None:
    # Processor time: other tests run beside this one, and would be measured with it. As after an
    # installation, the modules are compiled: the first round does it.
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def once() -> float:
        before = spent()
        assert in_process(WITHOUT_TORCH, "report", good, env=compiled)[0] == 0
        return spent() - before

    assert min(once() for _ in range(6)) < 0.8


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
    assert "no permission to write" in refused(
        capsys, "run", "--html", "train.py/x.html", "train.py"
    )


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
    assert capsys.readouterr().err.startswith("ddpdoctor: internal error")


def test_names_that_are_not_utf8(tmp_path: Path, capsys: Caught) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(1)}, command=["train-\udcff.py"])
    assert main(["report", str(folder.path), "--json", "a.json"]) == 0
    assert "train-\ufffd.py" in capsys.readouterr().out
