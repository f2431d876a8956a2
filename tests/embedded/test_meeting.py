"""The ranks of one launch find the same folder, those of another launch another one."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from recordings import started

from ddpdoctor.embedded import shared_folder
from ddpdoctor.events import encode
from ddpdoctor.storage.run_folder import FolderError, RunFolder

TORCHRUN = {
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_ab/none_x/attempt_0/0/error.json",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_ranks_of_one_launch_agree_and_restarts_too() -> None:
    first = shared_folder.this_launch(TORCHRUN)
    other_rank = {
        **TORCHRUN,
        "RANK": "0",
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_ab/none_x/attempt_0/1/error.json",
    }
    again = {
        **TORCHRUN,
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_ab/none_x/attempt_1/1/error.json",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    assert shared_folder.this_launch(other_rank).key == first.key
    assert shared_folder.this_launch(again).key == first.key
    assert shared_folder.this_launch(again).attempt == 1
    assert (first.rank, first.world_size, first.local_size) == (1, 2, 2)


def test_a_restart_leaves_its_marks_and_is_still_the_same_launch(tmp_path: Path) -> None:
    def seen(attempt: int) -> shared_folder.Launch:
        folder = tmp_path / "none_x" / f"attempt_{attempt}" / "0"
        folder.mkdir(parents=True)
        return shared_folder.this_launch(
            {**TORCHRUN, "TORCHELASTIC_ERROR_FILE": f"{folder}/error.json"}
        )

    first = seen(0)
    time.sleep(1.1)  # to the second, folders are dated
    again = seen(1)
    assert (first.key, first.name) == (again.key, again.name)


def test_the_nodes_of_one_launch_agree_where_they_share_a_folder() -> None:
    nodes = {
        "TORCHELASTIC_RUN_ID": "job7",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
    }
    elsewhere = "/tmp/torchelastic_cd/job7_y/attempt_0/0/error.json"
    first = shared_folder.this_launch({**TORCHRUN, **nodes})
    other = shared_folder.this_launch({**TORCHRUN, **nodes, "TORCHELASTIC_ERROR_FILE": elsewhere})
    assert (first.key, first.name) == (other.key, other.name)
    assert first.key != shared_folder.this_launch({**TORCHRUN, **nodes, "MASTER_PORT": "29501"}).key


@pytest.mark.parametrize(
    "change",
    [
        {"TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_cd/none_x/attempt_0/0/error.json"},
        {"TORCHELASTIC_ERROR_FILE": "", "TORCHELASTIC_RUN_ID": "other"},
    ],
)
def test_another_launch_has_another_key(change: dict[str, str]) -> None:
    assert (
        shared_folder.this_launch({**TORCHRUN, **change}).key
        != shared_folder.this_launch(TORCHRUN).key
    )


def test_a_scheduler_s_step_says_who_we_are() -> None:
    launch = shared_folder.this_launch(SLURM)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.node_rank) == (1, 4, 1, 1)
    assert launch.key == shared_folder.this_launch({**SLURM, "SLURM_PROCID": "0"}).key
    assert launch.key != shared_folder.this_launch({**SLURM, "SLURM_STEP_ID": "4"}).key


def test_without_a_launcher_the_parent_tells_launches_apart() -> None:
    launch = shared_folder.this_launch({})
    assert launch.key == shared_folder.this_launch({"RANK": "1", "WORLD_SIZE": "2"}).key
    assert launch.rank == -1


def launches(count: int) -> list[shared_folder.Launch]:
    one = shared_folder.this_launch(TORCHRUN)
    return [dataclasses.replace(one, rank=rank, world_size=count) for rank in range(count)]


def test_many_ranks_at_once_end_in_one_folder(tmp_path: Path) -> None:
    found: list[Path] = []
    first: list[bool] = []

    def join(launch: shared_folder.Launch) -> None:
        folder = shared_folder.open_folder(
            tmp_path / "run", launch, stem=shared_folder.stem_of(launch)
        )
        found.append(folder.path)
        first.append(shared_folder.is_first_here(folder))

    threads = [threading.Thread(target=join, args=(launch,)) for launch in launches(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {(tmp_path / "run").resolve()}
    assert sum(first) == 1
    assert not list((tmp_path / "run").glob(".run-*"))


def test_a_run_that_is_there_already_is_left_alone(tmp_path: Path) -> None:
    zero, one = launches(2)
    folder = shared_folder.open_folder(tmp_path / "run", zero, stem=shared_folder.stem_of(zero))
    record(folder.path / "rank-0.jsonl", pid=a_dead_process())
    assert shared_folder.open_folder(tmp_path / "run", one, stem="rank-1").path == folder.path
    # The same shell starts the same ranks again.
    again = shared_folder.open_folder(tmp_path / "run", zero, stem=shared_folder.stem_of(zero))
    assert again.path.name == "run-2"
    foreign = dataclasses.replace(one, key="another")
    assert shared_folder.open_folder(tmp_path / "run", foreign, stem="rank-1").path.name == "run-3"


def record(path: Path, pid: int) -> None:
    """The first record of a rank that is that process."""
    said = started(0, 2, pid=pid, node=platform.node(), wall=time.time())
    path.write_bytes(encode(said))


def a_dead_process() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


@pytest.mark.parametrize(
    ("told", "joined"),
    [
        (TORCHRUN, True),
        (SLURM, True),
        ({"MASTER_PORT": "29500", "WORLD_SIZE": "2"}, True),
        ({"MASTER_PORT": "29500"}, False),
        ({"WORLD_SIZE": "2"}, False),
    ],
)
def test_two_that_take_themselves_for_one_rank(
    told: dict[str, str], joined: bool, tmp_path: Path
) -> None:
    """Of one launch; not of a shell that has started two programs, which are in their right."""
    launch = dataclasses.replace(shared_folder.this_launch(told), rank=0, world_size=1)
    folder = shared_folder.open_folder(tmp_path / "run", launch, stem="rank-0")
    record(folder.path / "rank-0.jsonl", pid=os.getpid())
    again = shared_folder.open_folder(tmp_path / "run", launch, stem="rank-0")
    assert (again.path == folder.path) is joined


def test_two_launches_of_one_shell_meet_elsewhere() -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    other = {**told, "MASTER_PORT": "2"}
    assert shared_folder.this_launch(told).key != shared_folder.this_launch(other).key


def test_what_the_launcher_said_outlives_the_script(tmp_path: Path) -> None:
    program = """
import os
from ddpdoctor.probe.recording.environment import launchers_environment
os.environ.update(RANK="0", WORLD_SIZE="1", OMP_NUM_THREADS="3")
told = launchers_environment()
print(told["RANK"], told["WORLD_SIZE"], told["OMP_NUM_THREADS"])
"""
    printed = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "RANK": "1", "WORLD_SIZE": "2"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert printed.stdout.split() == ["1", "2", "3"]


def test_an_ended_run_is_not_joined(tmp_path: Path) -> None:
    zero, one = launches(2)
    folder = shared_folder.open_folder(tmp_path / "run", zero)
    info = folder.read_info()
    assert info is not None
    folder.write_info(msgspec.structs.replace(info, ended_at="2026-01-01T00:00:00+0000"))
    assert shared_folder.open_folder(tmp_path / "run", one, stem="rank-1").path.name == "run-2"


def test_where_the_current_folder_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ddpdoctor-runs").write_text("in the way")
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    zero, _ = launches(2)
    folder = shared_folder.open_folder(None, zero)
    assert folder.path.is_relative_to(tmp_path / "tmp")
    assert isinstance(folder, RunFolder)
    with pytest.raises(FolderError, match="out="):
        shared_folder.open_folder(tmp_path / "ddpdoctor-runs", zero)


def test_the_mark_tells_when_the_report_is_there(tmp_path: Path) -> None:
    folder = shared_folder.open_folder(tmp_path / "run", launches(1)[0])
    assert shared_folder.is_first_here(folder)
    assert not shared_folder.is_reported(folder)
    shared_folder.reported(folder)
    assert shared_folder.is_reported(folder)
    assert os.listdir(folder.path) == ["run.json"]


OF_A_CHILD = """
import os, sys
sys.path.insert(0, os.getcwd())
from ddpdoctor.embedded import shared_folder
print(shared_folder.this_launch().key, flush=True)
sys.stdin.read()
"""


def test_a_rank_that_starts_the_others_as_lightning_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has chosen the port, and is the parent of the others."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29517")
    alone = shared_folder.this_launch().key
    with subprocess.Popen(
        [sys.executable, "-c", OF_A_CHILD],
        env={**os.environ, "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        its_key = child.stdout.readline().strip()
        assert shared_folder.this_launch().key == its_key != alone
        monkeypatch.setenv("MASTER_PORT", "29518")
        assert shared_folder.this_launch().key != its_key
        child.stdin.close()
