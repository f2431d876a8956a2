"""Pieces of the launcher that need no run."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from recordings import PID, START, make_run, run_info, steps, write_folder

from ddpdoctor.config import Options
from ddpdoctor.embedded import monitor_process
from ddpdoctor.events import ExceptionRaised, ProcessEnded, RankSample, Stopped
from ddpdoctor.launch import LaunchError, devices, outcome, rendezvous_wait, torchrun
from ddpdoctor.launch import environment as environment_of
from ddpdoctor.launch.session import Session, _open_folder, _tell_outer
from ddpdoctor.monitor.monitor import Monitor
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Finding, Severity
from ddpdoctor.report.postmortem import open_run
from ddpdoctor.run import Facts, Location, Run, load
from ddpdoctor.storage.run_folder import FolderError, RunFolder, RunInfo


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, 0)
    for name in list(os.environ):
        if name.startswith(("PET_", "TORCH_")) or name in ("CUDA_VISIBLE_DEVICES", "GROUP_RANK"):
            monkeypatch.delenv(name)


def _gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(devices, "_gpus_present", lambda: count)


@pytest.mark.parametrize(
    ("words", "script", "rest"),
    [
        ("train.py --nnodes 2", "train.py", ("--nnodes", "2")),
        ("--nnodes 2 train.py x", "train.py", ("x",)),
        ("--nnodes=2 --nproc_per_node 4 train.py", "train.py", ()),
        ("--standalone train.py", "train.py", ()),
        ("-m pkg.train -m", "pkg.train", ("-m",)),
        ("-r 3 -t3 train.py", "train.py", ()),
        ("--no-python -- ./run.sh --standalone", "./run.sh", ("--standalone",)),
        ("--nproc 2 --master-p 1 train.py", "train.py", ()),
        ("", None, ()),
    ],
)
def test_the_script_is_found(words: str, script: str | None, rest: tuple[str, ...]) -> None:
    parsed = torchrun.parse(words.split())
    assert (parsed.script, parsed.script_args) == (script, rest)


def test_torchruns_own_parser_agrees_on_which_options_take_a_value() -> None:
    from torch.distributed.run import get_args_parser

    known = {*torchrun.FLAGS, *torchrun.VALUED}
    for action in get_args_parser()._actions:
        for option in action.option_strings:
            name = torchrun.SHORT.get(option[1:], option[2:]).replace("_", "-")
            if not isinstance(action, argparse._HelpAction):
                assert name in known, option
                assert (name in torchrun.FLAGS) is (action.nargs == 0), option


@pytest.mark.parametrize(
    "words",
    ["--nnodes 1", "--nnodes=1", "--nproc_per_node 3", "--nproc-per-node=3", "--standalone",
     "--rdzv-backend c10d", "--rdzv_id=7"],
)  # fmt: skip
def test_what_the_user_said_is_left_alone(words: str) -> None:
    args = [*words.split(), "train.py"]
    assert torchrun.with_defaults(args, {}) == args


def test_what_the_environment_said_is_left_alone() -> None:
    assert torchrun.with_defaults(["train.py"], {"PET_NPROC_PER_NODE": "3"}) == ["train.py"]


@pytest.mark.parametrize(("gpus", "processes"), [(0, 2), (1, 1), (8, 8)])
def test_one_process_per_gpu_or_two(
    monkeypatch: pytest.MonkeyPatch, gpus: int, processes: int
) -> None:
    _gpus(monkeypatch, gpus)
    # An option of the script is none of torchrun's.
    assert torchrun.with_defaults(["train.py", "--nnodes", "9"], {}) == [
        "--standalone", f"--nproc-per-node={processes}", "train.py", "--nnodes", "9"
    ]  # fmt: skip


def test_a_given_port_is_not_overridden_by_standalone() -> None:
    args = torchrun.with_defaults(["--master-port", "29611", "train.py"], {})
    assert "--standalone" not in args
    assert "--nproc-per-node=2" in args


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("0,2", 2), ("1,9,2", 1), ("0,0", 1), ("GPU-8f,GPU-9a", 2)],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    _gpus(monkeypatch, 4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.visible_gpus() == count


def test_a_gpu_in_parts_offers_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, 4)
    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMigMode=lambda handle: (int(handle == 2), 0),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert devices.visible_gpus() == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.visible_gpus() == 0


@pytest.mark.parametrize(("version", "count"), [("2.13.0+rocm6.4", 8), ("2.13.0+cpu", 0)])
def test_devices_that_nvml_does_not_know(
    monkeypatch: pytest.MonkeyPatch, version: str, count: int
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    answer = SimpleNamespace(stdout=b"a warning\n8\n")
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: answer)
    assert devices.visible_devices() == count


def test_nodes_and_what_they_share() -> None:
    parsed = torchrun.parse(["--nnodes", "1:3", "--rdzv-id", "job", "--node-rank", "2", "t.py"])
    assert torchrun.nodes(parsed, {}) == 3
    assert torchrun.node_rank(parsed, {}) == 2
    assert torchrun.shared_id(parsed, {}) == "job"
    static = torchrun.parse(["--nnodes=2", "--master-addr", "h", "--master-port", "1", "t.py"])
    assert torchrun.shared_id(static, {}) == "h:1"
    assert torchrun.shared_id(torchrun.parse(["--rdzv-id", "x", "t.py"]), {}) is None


def test_environment_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    added = environment_of(RunFolder(tmp_path), Options(select=("drift",), every=3), meets=True)
    assert Path(added["PYTHONPATH"]).name == "shim"  # and no empty entry beside it
    assert Path(added["DDPDOCTOR_HOME"], "ddpdoctor").is_dir()
    assert added["DDPDOCTOR_DIR"] == str(tmp_path.resolve())
    assert added["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    assert added["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert added["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path.resolve()}/flight-rank-"
    assert added["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == added["TORCH_FR_DUMP_TEMP_FILE"]
    probe = json.loads(added["DDPDOCTOR_PROBE"])
    assert probe["select"] == ["drift"] and probe["every"] == 3 and probe["hang_after"] is None


def test_what_the_user_exported_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/mine/trace_")
    added = environment_of(RunFolder(tmp_path), Options(debug_level="detail"), meets=True)
    assert added["PYTHONPATH"].endswith(f"shim{os.pathsep}mine")
    assert not [name for name in added if name.startswith("TORCH_")]


def test_detail_only_where_it_does_not_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(debug_level="detail")
    with pytest.raises(LaunchError, match="--debug-level info"):
        environment_of(RunFolder(tmp_path), options, meets=False)
    monkeypatch.setattr(sys.modules[environment_of.__module__], "visible_gpus", lambda: 1)
    assert (
        environment_of(RunFolder(tmp_path), options, meets=False)["TORCH_DISTRIBUTED_DEBUG"]
        == "DETAIL"
    )
    assert "TORCH_DISTRIBUTED_DEBUG" not in environment_of(
        RunFolder(tmp_path), Options(debug_level="off"), meets=False
    )


def _run(*ended: ProcessEnded) -> Run:
    node = Facts()
    for event in ended:
        node.add(event)
    info = RunInfo(schema_version=1, id="x", command=[], started_at="", tool_version="")
    return Run(info, {}, {0: node})


def _end(rank: int, at: float, **how: int | bool) -> ProcessEnded:
    return ProcessEnded(at=at, wall=at, rank=rank, pid=rank + 10, **how)  # type: ignore[arg-type]


def test_outcome_follows_the_first_to_end() -> None:
    cleanup = _end(0, 2, signal=15, by_launcher=True)
    assert outcome.outcome(_run(_end(0, 1, status=0)), 0, "") == "completed"
    assert outcome.outcome(_run(cleanup, _end(1, 1, status=7)), 1, "") == "failed"
    assert outcome.outcome(_run(_end(0, 2, status=1), _end(1, 1, signal=9)), 1, "") == "killed"
    assert outcome.outcome(_run(_end(0, 1, status=1), _end(1, 2, signal=6)), 1, "") == "failed"
    assert outcome.outcome(_run(cleanup), 1, "interrupt") == "killed"
    assert outcome.outcome(_run(cleanup), 1, "doctor") == "hung"
    assert outcome.outcome(_run(cleanup), 1, "") == "failed"  # another node's rank began it


@pytest.mark.parametrize(("stopped", "by", "told"), [
    (30, "interrupt", "killed"), (30, "terminate", "killed"), (30, "doctor", "failed"),
    (90, "interrupt", "failed"),
])  # fmt: skip
def test_an_error_of_a_rank_after_somebody_stopped_the_run(
    stopped: float, by: str, told: str
) -> None:
    """A program may end with an error of its own where it is interrupted. Here it does after 60
    seconds."""
    node = [Stopped(at=START + stopped, by=by)]
    run = make_run({0: [], 1: []}, nodes={0: node}, ended={0: 1, 1: 1})
    assert outcome.outcome(run, 1, "") == told


@pytest.mark.parametrize(("how", "told"), [({}, "failed"), ({"signal": 9}, "killed")])
def test_outcome_where_the_statuses_of_spawned_ranks_are_not_known(
    how: dict[str, int], told: str
) -> None:
    """Who spawned them ends the others once one has raised, and says nothing of it."""
    raised = ExceptionRaised(at=START + 1, kind="RuntimeError", message="no")
    told_of = [_end(0, START + 2), _end(1, START + 2, **how)]
    ends = [msgspec.structs.replace(e, pid=PID + e.rank) for e in told_of]
    run = make_run({0: [raised], 1: steps(1)}, nodes={0: ends}, ended=None)
    assert {r.state for r in run.ranks.values()} == {"failed", "killed"}
    assert outcome.outcome(run, 1, "") == told


def test_exit_status_first_that_applies() -> None:
    clean = diagnose(_run(), ())
    fault = Finding(code="X1", check="x", severity=Severity.WARNING, summary="", cause="", fix="")
    faulty = msgspec.structs.replace(clean, findings=(fault,))
    strict, lax = Options(fail_on="warning"), Options(fail_on="error")
    assert outcome.exit_status(1, "doctor", faulty, strict) == 4
    assert outcome.exit_status(7, "", faulty, strict) == 7
    assert outcome.exit_status(0, "", faulty, strict) == 3
    assert outcome.exit_status(0, "", faulty, lax) == 0
    assert outcome.exit_status(0, "", clean, strict) == 0
    assert outcome.exit_status(0, "", None, strict) == 0


def test_nodes_of_one_run_share_a_folder_and_runs_do_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = _open_folder(out, "train", "job")
    info = RunInfo(schema_version=1, id="job", command=[], started_at="", tool_version="")
    folder.write_info(info)
    assert _open_folder(out, "train", "job").path == out
    for other in (None, "another"):
        with pytest.raises(FolderError, match="--out"):
            _open_folder(out, "train", other)


def test_default_folders_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [_open_folder(None, "a b/c", None).path for _ in range(3)]
    assert len(set(made)) == 3
    assert all(p.parent == Path("ddpdoctor-runs") and "a-b-c" in p.name for p in made)


def test_the_report_is_printed_where_nothing_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = write_folder(tmp_path / "run", {0: steps(3)}, ended={0: 7})
    monkeypatch.setattr(RunFolder, "write_info", full)
    monkeypatch.setattr(outcome, "write_private", full)
    options = Options(out=folder.path)
    info = run_info(1, ended_at=None)
    session = Session(folder, info, Monitor(folder, 1, options), options)
    assert session.finish(7, "") == 7
    printed = capsys.readouterr().err
    assert "cannot save findings.json: No space left on device" in printed
    assert "failed (exit 7)" in printed
    assert re.search(r"^rank +state +steps", printed, re.M)
    assert "in findings.json" not in printed


@pytest.mark.parametrize(
    ("ends", "stopped_by", "told"),
    [
        ([_end(0, 1, signal=15), _end(1, 1, signal=15)], "doctor", ("hung", None)),
        ([_end(0, 1, status=0), _end(1, 1, status=0)], "", ("completed", 0)),
        ([_end(0, 1, status=3), _end(1, 1, signal=15)], "", ("failed", 3)),
    ],
)
def test_the_status_of_a_launcher_that_is_not_ours(
    ends: list[ProcessEnded], stopped_by: str, told: tuple[str, int | None]
) -> None:
    run = _run(*ends)
    status = max(e.status or 0 for e in ends)
    info = monitor_process._ended(run.info, run, status, stopped_by)
    assert (info.outcome, info.exit_code) == told


BROKEN_MONITOR = """
import os, signal, sys, threading
from ddpdoctor.launch.supervisor import Supervisor, to_group

def fail(*args, **kwargs):
    raise RuntimeError("injected")

class Monitor:
    tick = stopped = swept = reaped = rank_pids = failed = fail
    ranks_wait = property(fail)

if sys.argv[2:]:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
watch = Supervisor(Monitor(), forward=to_group)
sys.exit(watch.run(["sh", "-c", sys.argv[1]], os.environ, new_session=True))
"""


@pytest.mark.parametrize(
    ("command", "stopped", "status"),
    [("sleep 0.6; exit 7", [], 7), ("trap 'exit 9' TERM; sleep 30 & wait", ["stop"], 9)],
)
def test_a_broken_monitor_ends_no_run_and_holds_no_signal_back(
    command: str, stopped: list[str], status: int
) -> None:
    words = [sys.executable, "-c", BROKEN_MONITOR, command, *stopped]
    assert subprocess.run(words, timeout=60).returncode == status


DEAF_LAUNCHER = """
import os, signal, sys, threading
from ddpdoctor.launch import supervisor
from ddpdoctor.launch.rendezvous_wait import Gathering
from ddpdoctor.launch.torchrun import TorchrunArgs

class Monitor:
    ranks_wait, run, begun, stall_detector = False, None, False, property(lambda self: self)
    tick = stopped = swept = reaped = lambda self, *a: None
    take_notices = lambda self: ()
    def failed(self, error): raise error
    rank_pids = lambda self: {1} if sys.argv[1] == "ranks" else set()

supervisor.TORCHRUNS_S = supervisor._LAST_WORDS_S = supervisor._IMPATIENT_S = 0.5
ours = None if sys.argv[1] == "exec" else Gathering(TorchrunArgs(), {}, None)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
watch = supervisor.Supervisor(Monitor(), forward=supervisor.to_launcher, gathering=ours)
deaf = "trap '' TERM INT; for i in 1 2 3 4 5 6 7 8; do sleep 0.5; done; exit 7"
sys.exit(watch.run(["sh", "-c", deaf], os.environ, new_session=True))
"""


@pytest.mark.parametrize(
    ("case", "status", "said"),
    [
        ("alone", 128 + 9, "for torchrun to end"),
        ("ranks", 7, "for the ranks to end"),
        ("exec", 7, "waiting for the command to end"),
    ],
)
def test_a_torchrun_without_ranks_that_hears_no_signal_is_ended(
    case: str, status: int, said: str
) -> None:
    """Whose ranks still run, it ends by itself; who is no torchrun may have more to do."""
    words = [sys.executable, "-c", DEAF_LAUNCHER, case]
    done = subprocess.run(words, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1)
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "hang_after", "after_s"),
    [
        (("--nnodes=2", "--master-addr=h", "--master-port=1"), None, 30),
        (("--nnodes=2", "--rdzv-endpoint=h:1"), 10, 10),
        (("--nnodes=2", "--rdzv-endpoint=h:1"), 900, 60),
    ],
)
def test_nodes_that_do_not_come_are_told_once(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], hang_after: float, after_s: float
) -> None:
    now = 0.0
    monkeypatch.setattr(rendezvous_wait.time, "monotonic", lambda: now)
    args = torchrun.parse([*words, "t.py"])
    told, here, gives_up = (
        rendezvous_wait.Gathering(args, {}, hang_after, limit) for limit in (None, None, 200.0)
    )
    now = after_s - 1
    assert told.look(False) == here.look(True) == ("", "")
    now = after_s + 1
    line = "waiting for other nodes at h:1; only this one of 2 is here"
    assert told.look(False) == gives_up.look(False) == (line, "")
    now = 1000.0
    assert told.look(False) == here.look(False) == ("", "")
    assert "did not reach h:1 within 200 s" in gives_up.look(False)[1]


def test_one_node_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = rendezvous_wait.Gathering(torchrun.parse(["--standalone", "t.py"]), {}, 0.0, 0.0)
    assert waits.look(False) == ("", "")


@pytest.mark.parametrize(
    ("fields", "stopped", "said"),
    [
        ({"exit_code": 1}, "", "torchrun started no rank; what it printed says why"),
        ({"exit_code": 143}, "", "torchrun was ended before it had started a rank"),
        ({"exit_code": 1}, "interrupt", "torchrun was ended before it had started a rank"),
        ({"exit_code": None}, "", "torchrun had started no rank when these records end"),
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_why_torchrun_started_no_rank(
    tmp_path: Path, fields: dict[str, object], stopped: str, said: str, nodes: int
) -> None:
    folder = write_folder(
        tmp_path / "run", {}, launcher="run", nodes=None, stopped=stopped,
        **{**fields, "ended_at": None},
    )  # fmt: skip
    info = folder.read_info()
    assert info
    folder.write_info(msgspec.structs.replace(info, nodes=nodes))
    (nobody,) = diagnose(load([folder]), []).coverage.lost
    assert nobody.startswith(said)
    assert ("once the other nodes are there" in nobody) is (nodes > 1 and "printed" not in said)


@pytest.mark.parametrize("said", [True, False])
def test_the_log_of_a_rank_says_a_place_once(tmp_path: Path, said: bool) -> None:
    finding = Finding(
        code="DDP605", check="rank-died", severity=Severity.ERROR, ranks=(1,), cause="", fix="",
        location=Location("train.py", 38), summary="it died" + " in train.py:38" * said,
    )  # fmt: skip
    outcome._append_to_log(tmp_path / "rank-1.log", 1, [finding])
    assert (tmp_path / "rank-1.log").read_text().count("train.py:38") == 1


@pytest.mark.parametrize("launcher", ["run", "exec"])
def test_records_that_are_gone_are_no_launcher_s_failure(tmp_path: Path, launcher: str) -> None:
    folder = write_folder(tmp_path / "run", {}, launcher=launcher)
    (nobody,) = diagnose(load([folder]), []).coverage.lost
    assert "gone" not in nobody
    assert ("torchrun" in nobody) is (launcher == "run")
    folder.node_path(0).unlink()
    (gone,) = diagnose(load([folder]), []).coverage.lost
    assert gone.startswith("the records are gone: the run folder")


def test_ranks_whose_records_were_deleted_were_ranks(tmp_path: Path) -> None:
    samples = [RankSample(at=1, rank=r, pid=7 + r, rss_bytes=1) for r in range(2)]
    folder = write_folder(tmp_path / "run", {}, launcher="checkup", nodes={0: samples})
    (gone,) = diagnose(load([folder]), []).coverage.lost
    assert gone.startswith("ranks 0-1 ran, and what each recorded (rank-*.jsonl) is gone")


def test_a_doctor_in_a_doctor_says_where_the_ranks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = write_folder(tmp_path / "outer", {}, launcher="exec")
    (nobody,) = diagnose(load([outer]), []).coverage.lost
    assert nobody.startswith("no Python process of this command was a rank")
    monkeypatch.setenv("DDPDOCTOR_DIR", str(outer.path))
    _tell_outer(RunFolder(tmp_path / "inner"))
    (told,) = diagnose(load([outer]), []).coverage.lost
    with pytest.raises(FolderError, match="examined by another ddpdoctor"):
        open_run([outer.path])
    assert told.endswith(f"type ddpdoctor report {tmp_path / 'inner'}")
    monkeypatch.setenv("DDPDOCTOR_DIR", str(tmp_path / "gone"))
    _tell_outer(RunFolder(tmp_path / "inner"))
