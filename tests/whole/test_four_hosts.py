"""Four hosts of two ranks each, without a shared disk: the verdict that one host gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, hosts, why_not
from sampling import LIMIT_S, SAMPLES, inherited

DOCTOR = [sys.executable, "-m", "ddpdoctor", "run", "--out", "out", "--no-live"]
HOSTS = 4
WHY_NOT = why_not()

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(12 * LIMIT_S),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "possible"),
]

ENDLESS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(4000):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
dist.destroy_process_group()
"""


def start(host: Host, first: Host, script: Path, *options: str) -> subprocess.Popen[str]:
    place = ["--nnodes", str(HOSTS), "--nproc-per-node", "2", "--node-rank", str(host.number)]
    address = ["--master-addr", first.address, "--master-port", "29511"]
    return subprocess.Popen(
        host.command(*DOCTOR, *options, *place, *address, str(script)),
        cwd=host.folder,
        env={**inherited(), "GLOO_SOCKET_IFNAME": "eth0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(started: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        return [(n.communicate(timeout=4 * LIMIT_S)[0], n.returncode)[::-1] for n in started]
    finally:
        for node in started:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)


def findings(folder: Path) -> Any:
    return json.loads((folder / "out" / "findings.json").read_text())["findings"]


def verdict(folder: Path) -> list[tuple[str, str, list[int]]]:
    return [(f["code"], f["rule"], f["ranks"]) for f in findings(folder)]


def going_on(made: list[Host]) -> None:
    """Wait until the first host has the records of all others, and two seconds longer."""
    lead = made[0].folder / "out" / "nodes"
    deadline = time.monotonic() + 4 * LIMIT_S
    while len(list(lead.glob("*/rank-*.ring"))) < 2 * (HOSTS - 1) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2)


@pytest.mark.parametrize(
    ("sample", "options"),
    [
        ("hang/rank_missing", ("--hang-after", "5", "--on-hang", "stop")),
        ("hang/first_failure", ()),
        ("hang/collective_shape_mismatch", ("--hang-after", "5", "--on-hang", "stop")),
        ("drift/parameter_drift", ()),
        ("data/sampler_missing", ()),
    ],
)
def test_the_verdict_of_one_host(sample: str, options: tuple[str, ...], tmp_path: Path) -> None:
    script = SAMPLES / f"{sample}.py"
    with hosts(HOSTS, tmp_path) as made:
        ends = ended([start(host, made[0], script, *options) for host in made])
    (tmp_path / "one").mkdir()
    alone = subprocess.run(
        [*DOCTOR, *options, "--nproc-per-node", str(2 * HOSTS), str(script)],
        cwd=tmp_path / "one", env=inherited(), capture_output=True, timeout=4 * LIMIT_S,
    )  # fmt: skip
    one = verdict(tmp_path / "one")
    for host in made:
        assert verdict(host.folder) == one, ends[host.number][1]
    assert {status for status, _ in ends} == {alone.returncode}


def test_a_link_is_cut_and_healed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDLESS.replace("4000", "1500"))
    with hosts(HOSTS, tmp_path) as made:
        started = [start(host, made[0], script) for host in made]
        going_on(made)
        made[2].cut()
        time.sleep(12)
        made[2].heal()
        ends = ended(started)
    assert {status for status, _ in ends} == {0}, ends[0][1]
    assert "node 2 (host2, ranks 4-5) has not been heard of since" in ends[0][1]
    assert "node 2 (host2, ranks 4-5) is heard of again" in ends[0][1]
    assert all(not findings(host.folder) for host in made), ends[2][1]


def test_the_first_host_dies(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDLESS)
    with hosts(HOSTS, tmp_path) as made:
        started = [start(host, made[0], script) for host in made]
        going_on(made)
        gone = subprocess.run(
            ["ip", "netns", "pids", made[0].name], capture_output=True, text=True
        ).stdout.split()
        for pid in map(int, gone):
            os.kill(pid, signal.SIGKILL)
        ends = ended(started)
    for host in made[1:]:
        status, text = ends[host.number]
        assert status == 1 and "the first node's verdict did not arrive" in text, text
