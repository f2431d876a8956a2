"""Ranks that left before `init_process_group`: what proves that nobody comes, and what does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from ddpdoctor.checks.launch.rendezvous_stall import RendezvousStall
from msgspec.structs import replace
from recordings import START, make_run, site, started

from ddpdoctor.events import Event, InitEntered, NodeSample, RankExiting, StallSeen
from ddpdoctor.report.findings import Confidence, Finding

ELASTIC = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2",
           "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0"}  # fmt: skip
ENTERED = InitEntered(
    at=START + 2, backend="gloo", init_method="", rank=-1, world_size=-1, env_rank=0,
    env_world_size=2, env_local_rank=0, timeout_s=-1, site=1, rendezvous="localhost:29500",
)  # fmt: skip
LEFT = RankExiting(at=START + 1, how="sys.exit", status=0, site=2)
STALL = StallSeen(at=START + 70, since=START + 2, hang_after=30)
ALONE = NodeSample(at=START + 61, available_bytes=1, orphans=0)

SITES = [
    site(1, "train.py", 19, 'dist.init_process_group("gloo")'),
    site(2, "train.py", 32, "sys.exit(main())", "<module>"),
    site(3, "train.py", 18, "return 0"),
    site(4, "train.py", 11, "return None"),
]


def found(
    entered: InitEntered = ENTERED,
    left: RankExiting = LEFT,
    node: Sequence[Event] = (ALONE, STALL),
    environment: dict[str, str] = ELASTIC,
    status: int | None = 0,
    sites: Sequence[Event] = SITES,
    launcher: str = "run",
    most_nodes: int = 1,
) -> Finding:
    ranks = {
        rank: [started(rank, 2, environment={**environment, "RANK": str(rank)}), *sites, event]
        for rank, event in enumerate((entered, left))
    }
    run = make_run(ranks, nodes={0: node}, ended={0: -15, 1: status}, launcher=launcher)
    run.info = replace(run.info, nodes=most_nodes)
    (finding,) = RendezvousStall().examine(run)
    return finding


def test_nobody_comes_in_its_place() -> None:
    finding = found()
    assert finding.confidence is Confidence.PROVEN
    assert finding.evidence["stuck"] is True
    assert finding.ranks == (1,)


@pytest.mark.parametrize("orphans", [1, -1])
def test_a_process_it_started_may_come_in_its_place(orphans: int) -> None:
    finding = found(node=[replace(ALONE, orphans=orphans), STALL])
    assert finding.confidence is Confidence.SUSPECTED
    assert "stuck" not in finding.evidence


def test_nobody_looked_since_it_ended() -> None:
    finding = found(node=[replace(ALONE, at=START + 59), STALL])
    assert finding.confidence is Confidence.SUSPECTED


@pytest.mark.parametrize("status", [None, 1])
def test_its_end_is_not_on_record_or_was_bad(status: int | None) -> None:
    assert found(status=status).confidence is Confidence.SUSPECTED


def test_another_launcher_may_start_it_again() -> None:
    assert found(launcher="exec").confidence is Confidence.SUSPECTED


def test_another_node_may_come() -> None:
    assert found(most_nodes=2).confidence is Confidence.SUSPECTED


def test_a_restart_is_left() -> None:
    again = {**ELASTIC, "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert found(environment=again).confidence is Confidence.SUSPECTED
    last = {**again, "TORCHELASTIC_RESTART_COUNT": "3"}
    assert found(environment=last).confidence is Confidence.PROVEN


@pytest.mark.parametrize(
    "claim", [{"rank": 0, "world_size": 3}, {"rendezvous": "tcp://10.0.0.7:4000"}]
)
def test_it_waits_for_others_than_were_launched(claim: dict[str, object]) -> None:
    assert found(replace(ENTERED, **claim)).confidence is Confidence.SUSPECTED


def test_the_program_does_not_wait_long() -> None:
    finding = found(replace(ENTERED, timeout_s=60.0))
    assert finding.confidence is Confidence.PROVEN
    assert finding.evidence["stuck"] is False
    assert found(replace(ENTERED, timeout_s=7200.0)).evidence["stuck"] is True


ADOPTING = """
import ctypes, os, subprocess
from ddpdoctor.monitor import system as machine
print(machine.orphans())
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
child = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; exec sleep 60"], stdout=subprocess.PIPE)
orphan = int(child.stdout.readline())
print(machine.orphans())
child.kill()
child.wait()
left = subprocess.Popen(["sleep", "60"])
print(machine.orphans())
left.kill()
os.kill(orphan, 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_orphans_of_those_it_started() -> None:
    told = subprocess.run(
        [sys.executable, "-c", ADOPTING], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.split() == ["-1", "0", "1"]
