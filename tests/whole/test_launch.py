"""Real runs: whatever torchrun does alone, it does under the doctor."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ddpdoctor.events import Event, ProcessEnded, ProcessStarted, Stopped
from ddpdoctor.launch.environment import PACKAGE
from ddpdoctor.run import Recording, Run
from ddpdoctor.storage.run_folder import Lines, RunFolder, RunInfo

LIMIT_S = 90
TWO = ("--standalone", "--nproc-per-node=2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", *TWO)
DOCTOR = (sys.executable, "-m", "ddpdoctor")

LONG = """
    import os, pathlib, time
    pathlib.Path(f"up-{os.environ['RANK']}").touch()
    time.sleep(120)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; nothing that was started in it outlives the test."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    left = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    for process in left:
        if process.pid != os.getpid():
            process.kill()


def script(text: str, name: str = "train.py") -> str:
    lines = text.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    Path(name).write_text("\n".join(line[indent:] for line in lines) + "\n")
    return name


def call(*command: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command, capture_output=True, timeout=LIMIT_S, env={**os.environ, **environ}, check=False
    )


def doctor(*args: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return call(*DOCTOR, "run", "--out", "out", *args, **environ)


def info() -> RunInfo:
    found = RunFolder("out").read_info()
    assert found is not None
    return found


def node_events(kind: type[Event]) -> list[Event]:
    return [e for e in Lines(Path("out/node-0.jsonl")).events() if isinstance(e, kind)]


def ends() -> dict[tuple[int, int], ProcessEnded]:
    found = [e for e in node_events(ProcessEnded) if isinstance(e, ProcessEnded)]
    assert len({(e.attempt, e.rank) for e in found}) == len(found), "an end was written twice"
    return {(e.attempt, e.rank): e for e in found}


def recorded(attempt: int = 0) -> Run:
    return Recording(RunFolder("out")).refresh(attempt)


ENDINGS = {
    "well": ("pass", 0, "completed"),
    "exit": (
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)",
        1,
        "failed",
    ),
    "killed": (
        "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)",
        1,
        "killed",
    ),
    "syntax": ("def (", 1, "failed"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_status_is_torchruns(place: Path, ending: str) -> None:
    text, status, outcome = ENDINGS[ending]
    Path("train.py").write_text(text + "\n")
    plain = call(*TORCHRUN, "train.py")
    ours = doctor(*TWO, "train.py")
    said = ours.stderr.decode()
    assert ours.returncode == plain.returncode == status, said
    assert "launch/agent.py" not in said
    assert "ChildFailedError" not in said
    assert ("Root Cause (first observed failure)" in said) == bool(status)
    assert info().outcome == outcome
    assert info().exit_code == status
    assert json.loads(Path("out/findings.json").read_bytes())["run"]["outcome"] == outcome


def test_ends_of_ranks_are_told_apart(place: Path) -> None:
    Path("train.py").write_text(ENDINGS["exit"][0] + "\n")
    doctor(*TWO, "train.py")
    first, other = ends()[0, 1], ends()[0, 0]
    assert (first.status, first.signal, first.by_launcher) == (7, None, False)
    assert (other.status, other.signal, other.by_launcher) == (None, signal.SIGTERM, True)
    assert first.at < other.at


def test_first_death_is_first_even_within_one_look(place: Path) -> None:
    # torchrun looks every five seconds here and finds both ranks gone.
    name = script("""
        import os, pathlib, sys, time
        going = pathlib.Path("going")
        if os.environ["RANK"] == "1":
            going.touch()
        else:
            while not going.exists():
                time.sleep(0.01)
            time.sleep(0.3)
        sys.exit(3)
    """)
    doctor(*TWO, "--monitor-interval=5", name)
    assert ends()[0, 0].status == ends()[0, 1].status == 3
    assert ends()[0, 0].at - ends()[0, 1].at > 0.15


def test_arguments_and_output_pass_through(place: Path) -> None:
    name = script(r"""
        import os, sys
        if os.environ["RANK"] == "0":
            sys.stdout.buffer.write(repr(sys.argv).encode() + b"\xff\x00\r no newline")
    """)
    args = (name, "--out", "x", "--select=nothing", "--", "-m", "a b", "")
    plain, ours = call(*TORCHRUN, *args), doctor(*TWO, *args)
    assert plain.stdout
    assert ours.stdout == plain.stdout


def test_ranks_see_torchruns_environment_and_little_more(place: Path) -> None:
    name = script("""
        import json, os, sys
        if os.environ["RANK"] == "0":
            print(json.dumps({"env": dict(os.environ), "path": sys.path}))
    """)
    plain, ours = (json.loads(r.stdout) for r in (call(*TORCHRUN, name), doctor(*TWO, name)))
    added = {n for n in ours["env"].keys() - plain["env"].keys() if not n.startswith("DDPDOCTOR_")}
    assert added <= {
        "PYTHONPATH", "TORCH_FR_BUFFER_SIZE", "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    }  # fmt: skip
    assert "DDPDOCTOR_AGENT" not in ours["env"]
    assert "PYTHONSAFEPATH" not in ours["env"]
    assert set(ours["path"]) - set(plain["path"]) <= {str(PACKAGE / "shim")}
    assert not plain["env"].keys() - ours["env"].keys()


def test_a_module_of_the_user_does_not_break_torchrun(place: Path) -> None:
    Path("random.py").write_text("raise ImportError('the wrong random')\n")
    Path("sub").mkdir()
    program = str(Path(sys.executable).with_name("ddpdoctor"))  # `-m` would break us the same way
    assert call(program, "run", *TWO, script("print('fine')", "sub/train.py")).returncode == 0


def test_restart_keeps_both_attempts(place: Path) -> None:
    name = script("""
        import os, sys
        sys.exit(5 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
    """)
    result = doctor(*TWO, "--max-restarts=1", "--fail-on=error", name)
    assert result.returncode == 0, result.stderr.decode()
    assert "in attempt 0: " in result.stderr.decode()
    assert ends()[0, 0].status == 5 or ends()[0, 1].status == 5
    assert ends()[1, 0].status == ends()[1, 1].status == 0
    assert info().outcome == "completed"
    assert {r.state for r in recorded(0).ranks.values()} <= {"failed", "killed"}
    assert {r.state for r in recorded(1).ranks.values()} == {"finished"}


def test_what_torchrun_refuses_is_one_line(place: Path) -> None:
    result = doctor("--nproc-per-node=many", script("pass"))
    assert result.returncode == 1
    said = result.stderr.decode()
    assert "torchrun: ValueError: Unsupported nproc_per_node value: many\n" in said
    assert "Traceback" not in said
    assert "torchrun started no rank" in said


def test_ranks_out_of_reach_are_named(place: Path) -> None:
    result = doctor(*TWO, "--no-python", sys.executable, "-I", script("print(1)"))
    assert result.returncode == 0
    report = json.loads(Path("out/findings.json").read_bytes())
    assert any("ranks 0-1 were not observed" in s for s in report["coverage"]["lost"])


def test_a_wrapper_around_the_rank(place: Path) -> None:
    name = script("import sys; sys.exit(6)")
    Path("wrapper.sh").write_text(f"#!/bin/sh\n{sys.executable} {name}\nexit $?\n")
    Path("wrapper.sh").chmod(0o755)
    doctor("--standalone", "--nproc-per-node=1", "--no-python", "./wrapper.sh")
    rank = recorded().ranks[0]
    assert (rank.state, rank.exit_code) == ("failed", 6)


def _started(command: tuple[str, ...], ready: Callable[[], bool]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + LIMIT_S
    while not ready():
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def _both_up() -> bool:
    return Path("up-0").exists() and Path("up-1").exists()


def _ranks_are_gone() -> bool:
    """Also those that are about to be."""
    pids = [e.pid for e in node_events(ProcessStarted) if isinstance(e, ProcessStarted)]
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], 20)
    return bool(pids) and not alive


@pytest.mark.parametrize(
    ("number", "by"), [(signal.SIGINT, "interrupt"), (signal.SIGTERM, "terminate")]
)
def test_a_stopped_run_is_reported(place: Path, number: signal.Signals, by: str) -> None:
    process = _started((*DOCTOR, "run", "--out", "out", *TWO, script(LONG)), _both_up)
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1  # as torchrun's own after a signal
    assert info().outcome == "killed"
    assert next(e.by for e in node_events(Stopped) if isinstance(e, Stopped)) == by
    assert Path("out/findings.json").exists()
    assert _ranks_are_gone()


def test_an_interrupt_reaches_the_ranks_as_such(place: Path) -> None:
    """`except KeyboardInterrupt: save()` is what many programs have."""
    saving = script("""
        import os, pathlib, time
        rank = os.environ["RANK"]
        try:
            pathlib.Path(f"up-{rank}").touch()
            time.sleep(100)
        except KeyboardInterrupt:
            pathlib.Path(f"saved-{rank}").touch()
    """)
    process = _started((*DOCTOR, "run", "--out", "out", *TWO, saving), _both_up)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert Path("saved-0").exists() and Path("saved-1").exists()


def test_second_interrupt_ends_stubborn_ranks(place: Path) -> None:
    stubborn = script(
        "import signal\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\n"
        + "\n".join(line[4:] for line in LONG.strip("\n").splitlines())
    )
    process = _started((*DOCTOR, "run", "--out", "out", *TWO, stubborn), _both_up)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)
    assert process.returncode == 128 + signal.SIGKILL
    assert Path("out/findings.json").exists()
    assert _ranks_are_gone()


def test_nothing_survives_a_killed_doctor(place: Path) -> None:
    process = _started((*DOCTOR, "run", "--out", "out", *TWO, script(LONG)), _both_up)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert _ranks_are_gone()
    assert info().outcome is None
    assert call(*DOCTOR, "report", "out").returncode == 0
    (stop,) = (e for e in node_events(Stopped) if isinstance(e, Stopped))
    assert (stop.by, stop.reason) == ("launcher", "the end of ddpdoctor itself")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_a_killed_agent(place: Path, number: signal.Signals) -> None:
    process = _started((*DOCTOR, "run", "--out", "out", *TWO, script(LONG)), _both_up)
    (agent,) = psutil.Process(process.pid).children()
    agent.send_signal(number)
    said = process.communicate(timeout=LIMIT_S)[1].decode()
    assert process.returncode == (128 + number if number == signal.SIGKILL else 1)
    assert _ranks_are_gone()
    assert f"killed by {number.name} to torchrun itself" in said


SPAWN = """
    import os, sys
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def work(rank):
        store = "file://" + sys.argv[1]
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        dist.barrier()
        if rank == 1 and len(sys.argv) > 2:
            os.kill(os.getpid(), 9)
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(work, nprocs=2)
"""


@pytest.mark.parametrize("bad", [False, True])
def test_exec_examines_spawned_ranks(place: Path, bad: bool) -> None:
    words = [sys.executable, script(SPAWN), str(place / "store"), *(["bad"] if bad else [])]
    result = call(*DOCTOR, "exec", "--out", "out", "--", *words)
    assert result.returncode == bad, result.stderr.decode()
    assert info().outcome == ("killed" if bad else "completed")
    assert sorted(recorded().ranks) == [0, 1]
    killed = recorded().ranks[1]
    assert (killed.state, killed.signal) == (("killed", "SIGKILL") if bad else ("finished", None))
    assert ends()[0, 0].status in (0, None)


def test_exec_knows_how_a_command_ended_that_is_a_rank_itself(place: Path) -> None:
    program = "import sys\ntry: sys.exit(7)\nexcept SystemExit: pass"
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    result = call(*DOCTOR, "exec", "--out", "out", "--", sys.executable, script(program), **alone)
    assert (result.returncode, info().outcome) == (0, "completed")
    assert (ends()[0, 0].status, recorded().ranks[0].state) == (0, "finished")


def test_exec_keeps_the_status_of_a_command(place: Path) -> None:
    def status(*command: str) -> int:
        return call(*DOCTOR, "exec", "--", *command).returncode

    assert status("sh", "-c", "exit 9") == 9
    assert status("sh", "-c", "kill -KILL $$") == 128 + signal.SIGKILL


def test_a_folder_that_cannot_be_used_stops_before_the_start(place: Path) -> None:
    Path("out").write_text("a file")
    result = doctor(*TWO, script("open('started', 'w')"))
    assert result.returncode == 2
    assert len(result.stderr.decode().strip().splitlines()) == 1
    assert not Path("started").exists()


def test_a_folder_that_goes_away_does_not_stop_training(place: Path) -> None:
    name = script("""
        import os, pathlib, shutil, time
        if os.environ["RANK"] == "0":
            shutil.rmtree(os.environ["DDPDOCTOR_DIR"])
        time.sleep(1)
        pathlib.Path("done-" + os.environ["RANK"]).touch()
    """)
    assert doctor(*TWO, name).returncode == 0
    assert Path("done-0").exists() and Path("done-1").exists()


def test_records_are_private(place: Path) -> None:
    doctor(*TWO, script("pass"))
    assert Path("out").stat().st_mode & 0o077 == 0
    for path in Path("out").iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_two_nodes_share_a_folder(place: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    name = script("import os; print('rank', os.environ['RANK'])")
    common = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    common += [f"--master-port={port}", "--rdzv-id=job", name]
    nodes = [
        subprocess.Popen(
            [*DOCTOR, "run", "--out", "out", f"--node-rank={n}", *common],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for n in (0, 1)
    ]
    said = [n.communicate(timeout=LIMIT_S) for n in nodes]
    assert [n.returncode for n in nodes] == [0, 0], said
    assert sorted(out for out, _ in said) == [b"rank 0\n", b"rank 1\n"]
    assert (info().id, info().nodes, info().world_size) == ("job", 2, 2)
    assert sorted(recorded().ranks) == [0, 1]
    assert sorted(recorded().nodes) == [0, 1]
    assert {r.state for r in recorded().ranks.values()} == {"finished"}


SMOKE = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10_000):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
    raise RuntimeError("not reached")
"""


@pytest.mark.parametrize("steps", [3, 200])
def test_training_ends_after_so_many_steps_on_every_rank(place: Path, steps: int) -> None:
    done = doctor(*TWO, "--max-steps", str(steps), script(SMOKE))
    assert done.returncode == 0, done.stderr.decode()
    assert {rank.steps for rank in recorded().ranks.values()} == {steps}
    assert json.loads(Path("out/findings.json").read_text())["findings"] == []
