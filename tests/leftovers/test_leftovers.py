"""What a run without the doctor left behind: dumps in the form of torch 2.13, error files, logs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from commands import Caught, refused

from ddpdoctor.leftovers import search as searching
from ddpdoctor.leftovers.failures import (
    by_rank,
    error_file,
    exit_codes,
    last_traceback,
    without_leads,
)
from ddpdoctor.leftovers.folder import write_folder
from ddpdoctor.leftovers.search import Leftovers, is_run, search
from ddpdoctor.render import FORMATS, text, timeline
from ddpdoctor.report.findings import Finding
from ddpdoctor.report.postmortem import open_run
from ddpdoctor.report.registry import all_checks
from ddpdoctor.storage.flight_dumps import DumpError, read_dump

TRAIN = "/home/user/train.py"


def entry(
    number: int, op: str, line: int, *, done: bool = True, backend: str = "gloo", **more: Any
) -> dict[str, Any]:
    return {
        "frames": [
            {"name": "wrapper", "filename": "/x/site-packages/torch/c10d_logger.py", "line": 8},
            {"name": "main", "filename": TRAIN, "line": line},
        ],
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "python",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"{backend}:{op}",
        "time_created_ns": 1_795_000_000_000_000_000 + number * 10**9,
        "input_sizes": [[4]] if op != "barrier" else [],
        "input_dtypes": ["Float"] if op != "barrier" else [],
        "state": "completed" if done else "scheduled",
        "retired": done,
        "timeout_ms": 1_800_000,
        "is_p2p": False,
        **more,
    }


def dump(*entries: dict[str, Any], world: int = 2) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)}


def write(folder: Path, *dumps: dict[str, Any] | None, text: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, one in enumerate(dumps):
        if one is not None:
            path = folder / f"nccl_trace_rank_{rank}"
            path.write_bytes(json.dumps(one).encode() if text else pickle.dumps(one))
            last = max(e["time_created_ns"] for e in one["entries"]) / 1e9
            os.utime(path, (last + 1800, last + 1800))
    return folder


def judged(tmp_path: Path, found: Leftovers) -> list[Finding]:
    folder = write_folder(tmp_path / "made", found)
    return list(open_run([folder.path]).report(all_checks()).findings)


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_in_different_collectives(tmp_path: Path, text: bool, backend: str) -> None:
    made = [
        dump(
            *(entry(n, "all_reduce", 10, backend=backend) for n in (1, 2)),
            entry(3, op, line, done=False, backend=backend),
        )
        for op, line in (("barrier", 14), ("all_reduce", 10))
    ]
    found = search([write(tmp_path / "dumps", *made, text=text)])
    (finding, *_) = judged(tmp_path, found)
    assert finding.code == "DDP601"
    lines = {finding.location, *(r.location for r in finding.related)}
    assert {spot.line for spot in lines if spot} == {10, 14}


def test_a_rank_that_issued_fewer_is_missing(tmp_path: Path) -> None:
    whole = [entry(n, "all_reduce", 10) for n in (1, 2)]
    made = [dump(*whole, entry(3, "all_reduce", 10, done=False)), dump(*whole)]
    (finding, *_) = judged(tmp_path, search([write(tmp_path / "dumps", *made)]))
    assert (finding.code, finding.ranks) == ("DDP603", (1,))


def test_ranks_without_a_dump_are_not_guessed(tmp_path: Path) -> None:
    found = search([write(tmp_path / "dumps", dump(entry(1, "all_reduce", 10, done=False)), None)])
    assert "no dump of rank 1: where it was is not known" in found.told()
    assert not [f for f in judged(tmp_path, found) if f.code in ("DDP601", "DDP604")]
    (lost,) = open_run([tmp_path / "made"]).report(all_checks()).coverage.lost
    assert "rank 1 was not observed: nothing that it left behind" in lost


def test_a_dump_of_an_earlier_run_is_named_and_not_used(tmp_path: Path) -> None:
    old = entry(1, "all_reduce", 10, done=False)
    old["time_created_ns"] -= 86_400 * 10**9
    now = entry(1, "barrier", 14, done=False)
    found = search([write(tmp_path / "dumps", dump(now), dump(old))])
    assert list(found.dumps) == [0]
    assert "of another run" in found.told()[-1]


def test_dumps_that_cannot_be_used(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.system, ("touch /tmp/ran",)

    bad = {"evil": pickle.dumps({"entries": [Runs()]}), "cut": pickle.dumps(dump())[:-20]}
    bad |= {"other": b"hello", "list": json.dumps([1]).encode(), "empty": b""}
    for name, content in bad.items():
        path = tmp_path / f"trace_{name}"
        path.write_bytes(content)
        with pytest.raises(DumpError):
            read_dump(path)
    (tmp_path / "nccl_trace_rank_0").write_bytes(bad["cut"])
    found = search([tmp_path])
    assert not found.anything
    assert [why for _, why in found.ignored] == ["it is cut short or damaged"]


def of_a_job(began: float, *, hangs: bool = True, world: int = 2) -> dict[str, Any]:
    """A dump of a job that began so many seconds later, and hangs in its fourth call."""
    entries = [entry(n, "all_reduce", 10) for n in (1, 2, 3)]
    entries += [entry(4, "barrier", 14, done=False)] if hangs else []
    for one in entries:
        one["time_created_ns"] += int(began * 1e9)
    return dump(*entries, world=world)


@pytest.mark.parametrize(("others", "used"), [
    pytest.param([of_a_job(30), of_a_job(0)], [0, 2], id="most"),
    pytest.param([of_a_job(0), of_a_job(0)], [0, 1, 2], id="all"),
    pytest.param([of_a_job(2), of_a_job(4)], [0, 1, 2], id="clocks-differ"),
    pytest.param([of_a_job(0), of_a_job(0, world=4)], [0, 1], id="other-size"),
])  # fmt: skip
def test_dumps_of_jobs_that_ran_one_after_the_other(
    tmp_path: Path, others: list[dict[str, Any]], used: list[int]
) -> None:
    found = search([write(tmp_path / "dumps", of_a_job(0), *others)])
    assert sorted(found.dumps) == used
    left = sorted({0, 1, 2} - set(used))
    assert [path.name for path, _ in found.ignored] == [f"nccl_trace_rank_{n}" for n in left]
    assert all("of another run" in why for _, why in found.ignored)


def test_a_rank_that_is_late_for_its_first_call_is_of_the_same_run(tmp_path: Path) -> None:
    late = of_a_job(0)
    first = of_a_job(0)
    first["entries"][0]["time_created_ns"] -= 300 * 10**9
    assert sorted(search([write(tmp_path / "dumps", first, late)]).dumps) == [0, 1]


def test_the_later_dump_of_a_rank_is_used(tmp_path: Path) -> None:
    for folder in (("a", "b"), ("c", "d")):
        old = write(tmp_path / folder[0], of_a_job(0, hangs=False))
        new = write(tmp_path / folder[1], of_a_job(0))
        for order in ((old, new), (new, old)):
            found = search(order)
            assert [path.parent for path, _ in found.ignored] == [old]
            assert not found.dumps[0].entries[-1].done


def test_no_seconds_are_told_that_no_dump_says(tmp_path: Path) -> None:
    """The times of files are those of their copies."""
    whole = [entry(n, "all_reduce", 10) for n in (1, 2)]
    stands = dump(*whole, entry(3, "all_reduce", 10, done=False))
    folder = write(tmp_path / "dumps", stands, dump(*whole))
    outputs = []
    for later in (20, 4000):
        for n, path in enumerate(sorted(folder.iterdir())):
            os.utime(path, (1_795_000_000 + later + n,) * 2)
        made = write_folder(tmp_path / f"made{later}", search([folder]))
        report = open_run([made.path]).report(all_checks())
        outputs.append([msgspec.structs.replace(f, at=0.0) for f in report.findings])
        (finding, *_) = report.findings
        assert not {"time_to_verdict_s", "hang_after_s", "waited_s"} & finding.evidence.keys()
        assert " s;" not in finding.summary
        assert [rank.last for rank in report.ranks] == [
            f"in all_reduce at {TRAIN}:10", "in its own code"
        ]  # fmt: skip
    assert outputs[0] == outputs[1]


def test_what_is_not_known_is_not_invented(tmp_path: Path) -> None:
    hangs = [
        dump(entry(1, op, line, done=False)) for op, line in (("barrier", 14), ("broadcast", 9))
    ]
    made = write_folder(tmp_path / "made", search([write(tmp_path / "dumps", *hangs)]))
    report = open_run([made.path]).report(all_checks())
    run = report.run
    assert (run.outcome, run.exit_code, run.torch, run.machine) == ("hung", None, "unknown", ())
    for rank in report.ranks:
        assert (rank.state, rank.exit_code, rank.signal) == ("hung", None, None)
        assert (rank.pid, rank.local_rank, rank.steps) == (None, None, None)
        assert (rank.node, rank.device) == ("unknown", "unknown")
    assert run.started_at == "unknown"
    assert "startTimeUtc" not in FORMATS["sarif"](report)
    assert 'timestamp="1970' in FORMATS["junit"](report)
    story = timeline.render([open_run([made.path]).last], 0, [], 80, styled=False)
    assert story.splitlines()[:2] == ["rank 0 of 2 on unknown", "hung"]
    assert "cores" not in story and "pid" not in story
    shown = text(report)
    assert "hung: 2 ranks, gloo\n" in shown and "unknown" not in shown.replace(str(tmp_path), "")


def test_exit_codes_are_those_that_torchrun_lists(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    listed = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n"
    log.write_text("\n".join("[rank0]: " + line for line in TRACEBACK) + "\n" + listed)
    made = write_folder(tmp_path / "made", search([log]))
    ranks = open_run([made.path]).report(all_checks()).ranks
    assert [(r.state, r.exit_code, r.signal) for r in ranks] == [
        ("failed", None, None), ("killed", None, "SIGKILL"),
    ]  # fmt: skip


def test_finished_dumps_are_no_hang(tmp_path: Path) -> None:
    folder = write(tmp_path / "dumps", *(of_a_job(0, hangs=False) for _ in range(2)))
    made = write_folder(tmp_path / "made", search([folder]))
    report = open_run([made.path]).report(all_checks())
    assert (report.run.outcome, [r.state for r in report.ranks]) == ("incomplete", ["lost"] * 2)
    assert not [f for f in report.findings if f.code in ("DDP603", "DDP609")]


TRACEBACK = f"""Traceback (most recent call last):
  File "{TRAIN}", line 9, in <module>
    main()
  File "{TRAIN}", line 5, in main
    raise ValueError("bad sample")
ValueError: bad sample
""".splitlines()


def test_the_last_traceback_of_each_rank_in_a_common_log(tmp_path: Path) -> None:
    marks = ("[rank1]: ", "[default1]:", " 1: ", "[1,1]<stderr>:", "[default1]:[rank1]: ",
             "[trainer1]:", "1: [rank1]: ", "[default0]:[rank1]: ",
             "2026-11-29 12:00:07 node3 | [rank1]: ", "[1795000000.25] INFO 1: ")  # fmt: skip
    for mark in marks:
        lines = without_leads([mark + one for one in TRACEBACK])
        mine = [line for rank, line in by_rank(lines) if rank == 1]
        raised = last_traceback(mine)
        assert raised is not None
        assert (raised.kind, raised.message) == ("ValueError", "bad sample")
        assert raised.frames[-1] == (TRAIN, 5, "main")
    log = tmp_path / "job.out"
    log.write_text("\n".join(["step 1", *("[rank1]: " + line for line in TRACEBACK)]))
    (finding,) = judged(tmp_path, search([log]))
    assert (finding.code, finding.ranks) == ("DDP606", (1,))
    assert finding.location is not None and finding.location.line == 5


def test_the_times_before_each_line_differ(tmp_path: Path) -> None:
    lines = [f"12:00:{n:02} host{n % 2} [default{r}]:[rank{r}]: {line}"
             for n, line in enumerate(TRACEBACK) for r in (0, 1)]  # fmt: skip
    log = tmp_path / "job.log"
    log.write_text("\n".join(["12:00:00 host0 begin", *lines]))
    assert sorted(search([log]).raised) == [0, 1]


def test_what_a_line_only_looks_like() -> None:
    lines = ["[rank1]: 3: x", "[epoch3] x", "[W1129 12:00] x"]
    assert list(by_rank(lines)) == [(1, "3: x"), (-1, lines[1]), (-1, lines[2])]
    listed = ["  traceback : " + TRACEBACK[0], *TRACEBACK[1:]]
    assert without_leads(listed) == listed


def test_the_log_folder_of_torchrun(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"logs/run_x/attempt_0/{rank}").mkdir(parents=True)
    told = {"py_callstack": "\n".join(TRACEBACK), "timestamp": "1795000000"}
    error = {"message": {"message": "ValueError: bad sample", "extraInfo": told}}
    path = tmp_path / "logs/run_x/attempt_0/1/error.json"
    path.write_text(json.dumps(error))
    later = tmp_path / "logs/run_x/attempt_0/0/stderr.log"
    later.write_text("\n".join(TRACEBACK).replace("ValueError", "RuntimeError"))
    os.utime(later, (1_795_000_003, 1_795_000_003))
    assert error_file(path) is not None
    (finding, *_) = judged(tmp_path, search([tmp_path / "logs"]))
    assert (finding.code, finding.ranks) == ("DDP606", (1,))
    path.write_text("{")
    assert error_file(path) is None
    assert [(p, "cut short" in why) for p, why in search([tmp_path]).ignored] == [(path, True)]


def test_the_exit_codes_that_torchrun_lists() -> None:
    text = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n"
    assert exit_codes(text) == {1: (-9, 77)}


def test_the_command(tmp_path: Path) -> None:
    made = [
        dump(entry(1, op, line, done=False)) for op, line in (("barrier", 14), ("all_reduce", 10))
    ]
    folder = write(tmp_path / "dumps", *made)
    assert not is_run(folder)
    command = [sys.executable, "-m", "ddpdoctor", "report", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0
    assert "DDP601" in ran.stdout
    assert "not examined by the doctor" in ran.stderr
    assert "(exit" not in ran.stdout
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing/notes.md").write_text("x")
    command[-1] = str(tmp_path / "nothing")
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, "")


def test_paths_with_nothing_to_report_on(tmp_path: Path, capsys: Caught) -> None:
    log, junk = tmp_path / "job.log", tmp_path / "junk.bin"
    log.write_text("\n".join("[rank1]: " + line for line in TRACEBACK))
    junk.write_bytes(b"\x01")
    os.mkfifo(tmp_path / "pipe")
    assert "no such folder or file: /nonexistent;" in refused(capsys, "report", log, "/nonexistent")
    assert "an empty path" in refused(capsys, "report", "")
    assert "it is no file to read" in refused(capsys, "report", "/dev/null")
    assert "it is no file to read" in refused(capsys, "report", tmp_path / "pipe")
    line = refused(capsys, "report", junk)
    assert "no record of a run" in line and "folder" not in line
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/error.json").write_text("{")
    assert "cut/error.json: it is cut short" in refused(capsys, "report", tmp_path / "cut")


def test_folders_that_may_not_be_read_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(path: Path, onerror: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        onerror(PermissionError(13, "Permission denied", str(path / "attempt_0/1")))
        yield str(path), [], ["job.log"]

    (tmp_path / "job.log").write_text("\n".join("[rank1]: " + line for line in TRACEBACK))
    monkeypatch.setattr(searching.os, "walk", walk)
    found = search([tmp_path])
    assert found.anything
    assert "attempt_0/1: it cannot be read (Permission denied)" in found.told()[-1]
