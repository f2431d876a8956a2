"""Two nodes with folders of their own, through the real command: one verdict on both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sampling import LIMIT_S, SAMPLES, inherited

DOCTOR = [sys.executable, "-m", "ddpdoctor"]
ELSEWHERE = [
    "unshare",
    "--uts",
    "--time",
    "--monotonic",
    "500000",
    "--boottime",
    "500000",
    "--fork",
]
"""Begins a command on a host of another name, which was booted at another time."""


def elsewhere() -> list[str]:
    """`ELSEWHERE` with a name for the host; empty where that is not allowed."""
    asked = [*ELSEWHERE, "sh", "-c", 'hostname other && exec "$@"', "sh"]
    try:
        allowed = subprocess.run([*asked, "true"], capture_output=True).returncode == 0
    except OSError:
        allowed = False
    return asked if allowed else []


def nodes(place: Path, script: Path, *options: str, each: int = 1) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for number in range(2):
        (place / str(number)).mkdir()
        ranks = ["--nnodes", "2", "--nproc-per-node", str(each), "--node-rank", str(number)]
        address = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        command = [*DOCTOR, "run", "--out", "out", "--no-live", *options, *ranks, *address]
        started.append(
            subprocess.Popen(
                [*(elsewhere() if number else ()), *command, str(script)],
                cwd=place / str(number),
                env=inherited(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    return started


def ended(started: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        return [(node.communicate(timeout=LIMIT_S)[0], node.returncode)[::-1] for node in started]
    finally:
        for node in started:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)


def findings(place: Path, node: int) -> Any:
    return json.loads((place / str(node) / "out" / "findings.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "options", "status", "finds"),
    [
        ("hang/rank_missing", ["--hang-after", "3", "--on-hang", "stop"], 4, ("DDP603", [1])),
        ("data/sampler_missing", [], 0, ("DDP501", [0, 1])),
    ],
)
def test_both_nodes_have_the_verdict(
    sample: str, options: list[str], status: int, finds: tuple[str, list[int]], tmp_path: Path
) -> None:
    ends = ended(nodes(tmp_path, SAMPLES / f"{sample}.py", *options))
    assert [end for end, _ in ends] == [status, status], ends[0][1]
    first, second = (findings(tmp_path, node) for node in range(2))
    assert first["findings"] == second["findings"], ends[1][1]
    assert [(f["code"], f["ranks"]) for f in first["findings"]] == [finds]
    assert [rank["rank"] for rank in first["ranks"]] == [0, 1]
    if elsewhere():
        assert [rank["node"] for rank in second["ranks"]] == [socket.gethostname(), "other"]
    if status == 4:
        stops = [
            line for _, text in ends for line in text.splitlines() if "stopping the run" in line
        ]
        assert len(set(stops)) == 1 and len(stops) == 2 and "rank 1 has not reached" in stops[0]
    said = subprocess.run(
        [*DOCTOR, "report", str(tmp_path / "0" / "out"), "--format", "json"],
        capture_output=True, text=True,
    )  # fmt: skip
    again = json.loads(said.stdout)
    assert [(f["code"], f["ranks"]) for f in again["findings"]] == [finds]
    alone = subprocess.run(
        [*DOCTOR, "report", str(tmp_path / "1" / "out")], capture_output=True, text=True
    )
    assert "rank 0 was not observed" in " ".join((alone.stdout + alone.stderr).split())


STARTER = """
import os, subprocess, sys
node, command = int(sys.argv[1]), sys.argv[2:]
started = []
for local in range(2):
    own = {"RANK": str(2 * node + local), "LOCAL_RANK": str(local), "WORLD_SIZE": "4",
           "LOCAL_WORLD_SIZE": "2"}
    started.append(subprocess.Popen([sys.executable, *command], env={**os.environ, **own}))
sys.exit(max(p.wait() for p in started))
"""
"""Starts the ranks of one node without torchrun."""

INSIDE = """
import sys, runpy, ddpdoctor
with ddpdoctor.examine(out="out"):
    runpy.run_path(sys.argv[1], run_name="__main__")
"""

APART = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if dist.get_rank() == 3 else 0.1)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    if FAILS == step and dist.get_rank() == 0:
        raise ValueError("a bad sample")
    if HANGS == step:
        dist.barrier() if dist.get_rank() == 3 else dist.broadcast(torch.ones(4), 0)
dist.destroy_process_group()
"""


def started_otherwise(
    place: Path, *, inside: bool, hangs: int = -1, fails: int = -1
) -> list[subprocess.Popen[str]]:
    """Two nodes of two ranks each, under `exec` or examined inside the program, that hang or fail
    after a step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    for name, text in (
        ("start", STARTER),
        ("inside", INSIDE),
        ("train", f"HANGS, FAILS = {hangs}, {fails}{APART}"),
    ):
        (place / f"{name}.py").write_text(text)
    exec_ = [*DOCTOR, "exec", "--out", "out", "--no-live", "--hang-after", "5", "--"]
    started = []
    for node in range(2):
        (place / str(node)).mkdir()
        script = [str(place / f"{name}.py") for name in ("inside",) * inside + ("train",)]
        command = [sys.executable, str(place / "start.py"), str(node), *script]
        started.append(
            subprocess.Popen(
                [*([] if inside else exec_), *command], cwd=place / str(node),
                env={**inherited(), **address}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )
        )  # fmt: skip
    return started


@pytest.mark.exhaustive
@pytest.mark.parametrize("hangs_at", [-1, 0, 20])
@pytest.mark.parametrize("inside", [False, True])
def test_ranks_that_another_launcher_starts(hangs_at: int, inside: bool, tmp_path: Path) -> None:
    """They meet in the store of `init_process_group`, under `exec` and inside the program."""
    hangs = hangs_at >= 0
    started = started_otherwise(tmp_path, inside=inside, hangs=hangs_at)
    ends = ended(started)
    deadline = time.monotonic() + LIMIT_S / 2
    while not all((tmp_path / str(n) / "out" / "findings.json").exists() for n in range(2)):
        assert time.monotonic() < deadline, ends
        time.sleep(0.2)
    first, second = (findings(tmp_path, node) for node in range(2))
    codes = [f["code"] for f in first["findings"] if f["severity"] == "error"]
    assert ("DDP601" if hangs else "DDP405") in codes, ends
    assert [rank["rank"] for rank in first["ranks"]] == [0, 1, 2, 3]
    (told,) = [f for f in first["findings"] if f["code"] == ("DDP601" if hangs else "DDP405")]
    assert told["ranks"] == [3]
    if hangs and not inside:
        assert [status for status, _ in ends] == [4, 4]
    elif not hangs:
        assert [status for status, _ in ends] == [0, 0]
    assert (first["findings"], first["ranks"]) == (second["findings"], second["ranks"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("fails_at", [0, 30])
@pytest.mark.parametrize("inside", [False, True])
def test_the_first_rank_fails_and_takes_the_store_with_it(
    fails_at: int, inside: bool, tmp_path: Path
) -> None:
    """The other node still brings its last records, and gets the verdict."""
    ends = ended(started_otherwise(tmp_path, inside=inside, fails=fails_at))
    deadline = time.monotonic() + LIMIT_S / 2
    while not all((tmp_path / str(n) / "out" / "findings.json").exists() for n in range(2)):
        assert time.monotonic() < deadline, ends
        time.sleep(0.2)
    first, second = (findings(tmp_path, node) for node in range(2))
    (error,) = [f for f in first["findings"] if f["severity"] == "error" and f["code"] != "DDP405"]
    assert (error["code"], error["ranks"]) == ("DDP606", [0]), ends
    assert {rank["state"] for rank in first["ranks"]} == {"failed"}
    assert (first["findings"], first["ranks"]) == (second["findings"], second["ranks"])
    assert all(status == 1 for status, _ in ends)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gone", [0, 1])
def test_a_node_that_vanishes(gone: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(3000):\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    time.sleep(0.02)\n"
    )
    started = nodes(tmp_path, script, each=2)
    lead = tmp_path / "0" / "out" / "nodes" / "1"
    deadline = time.monotonic() + LIMIT_S
    while not list(lead.glob("rank-*.ring")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)
    found = subprocess.run(["pgrep", "-f", str(script)], capture_output=True, text=True)
    folder = str(tmp_path / str(gone))
    for pid in map(int, found.stdout.split()):
        if os.path.exists(f"/proc/{pid}") and os.readlink(f"/proc/{pid}/cwd") == folder:
            os.kill(pid, signal.SIGKILL)
    ends = ended(started)
    status, text = ends[1 - gone]
    assert status == 1, text
    (error,) = [f for f in findings(tmp_path, 1 - gone)["findings"] if f["severity"] == "error"]
    if gone == 1:
        assert "node 1 (" in error["cause"] and "has not been heard of since" in error["cause"]
        assert "ranks 2-3" in error["cause"]
    else:
        assert "the first node's verdict did not arrive" in text
