"""What a run without the doctor left behind: dumps in the form of torch 2.13, error files, logs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.leftovers.failures import by_rank, error_file, exit_codes, last_traceback
from ddpdoctor.leftovers.folder import write_folder
from ddpdoctor.leftovers.search import Leftovers, is_run, search
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
    assert "no dump of rank 1: where they were is not known" in found.told()
    assert not [f for f in judged(tmp_path, found) if f.code in ("DDP601", "DDP604")]


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


TRACEBACK = f"""Traceback (most recent call last):
  File "{TRAIN}", line 9, in <module>
    main()
  File "{TRAIN}", line 5, in main
    raise ValueError("bad sample")
ValueError: bad sample
""".splitlines()


def test_the_last_traceback_of_each_rank_in_a_common_log(tmp_path: Path) -> None:
    marks = ("[rank1]: ", "[default1]:", " 1: ", "[1,1]<stderr>:")
    for mark in marks:
        mine = [line for rank, line in by_rank([mark + one for one in TRACEBACK]) if rank == 1]
        raised = last_traceback(mine)
        assert raised is not None
        assert (raised.kind, raised.message) == ("ValueError", "bad sample")
        assert raised.frames[-1] == (TRAIN, 5, "main")
    log = tmp_path / "job.out"
    log.write_text("\n".join(["step 1", *("[rank1]: " + line for line in TRACEBACK)]))
    (finding,) = judged(tmp_path, search([log]))
    assert (finding.code, finding.ranks) == ("DDP606", (1,))
    assert finding.location is not None and finding.location.line == 5


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
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing/notes.md").write_text("x")
    command[-1] = str(tmp_path / "nothing")
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, "")
