"""DDP103 over literal events."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.launch.environment_skew import EnvironmentSkew
from recordings import make_run, site, started, torch_loaded

from ddpdoctor.events import Event, InitEntered, ProgramSeen
from ddpdoctor.probe.source.source_text import lines_that_set


def program(files: dict[str, str], **versions: str) -> Event:
    return ProgramSeen(at=0, files=files, versions=versions)


def entered(set_at: int = -1, **changed: str) -> Event:
    return InitEntered(
        at=0, backend="gloo", init_method="", rank=-1, world_size=-1, env_rank=0,
        env_world_size=2, env_local_rank=0, timeout_s=-1, site=-1, changed=changed,
        set_at={} if set_at < 0 else dict.fromkeys((*changed, "NCCL_ALGO"), set_at),
    )  # fmt: skip


def differences(run: object) -> list[str]:
    return [str(s) for f in EnvironmentSkew().examine(run) for s in f.subjects]  # type: ignore[arg-type]


def test_versions_of_torch() -> None:
    run = make_run({0: [torch_loaded()], 1: [torch_loaded()], 2: [torch_loaded("2.12.1")]})
    (finding,) = EnvironmentSkew().examine(run)
    assert finding.ranks == (2,)
    assert finding.subjects == ("torch",)
    assert "2.12.1 on rank 2" in finding.summary


def test_contents_of_a_module() -> None:
    run = make_run(
        {
            0: [program({"train.py": "a", "net.py": "b"})],
            1: [program({"train.py": "a", "net.py": "c", "only_here.py": "d"})],
        }
    )
    assert differences(run) == ["file net.py"]


def test_settings_changed_by_the_script() -> None:
    run = make_run({0: [entered()], 1: [entered(NCCL_ALGO="Tree")]})
    assert differences(run) == ["NCCL_ALGO"]


@pytest.mark.parametrize("only", [True, False])
def test_the_line_of_the_program_that_sets_a_variable(only: bool) -> None:
    here = site(7, "train.py", 3, 'os.environ["NCCL_ALGO"] = "Tree"')
    first = entered(7) if only else entered(7, NCCL_ALGO="Ring")
    run = make_run({0: [here, first], 1: [here, entered(7, NCCL_ALGO="Tree")]})
    (finding,) = EnvironmentSkew().examine(run)
    assert (str(finding.location), finding.ranks) == ("train.py:3", (1,) if only else (0, 1))
    assert "launch" not in finding.cause


def test_a_variable_that_was_other_at_the_start_and_is_set_as_well() -> None:
    here = site(7, "train.py", 3, 'os.environ.setdefault("NCCL_ALGO", "Tree")')
    start = {r: started(r, 2, environment={"NCCL_ALGO": "Ring"} if r else {}) for r in range(2)}
    run = make_run({r: [start[r], here, entered(7)] for r in range(2)})
    (finding,) = EnvironmentSkew().examine(run)
    assert "launch commands" in finding.cause


@pytest.mark.parametrize(
    ("name", "threads", "told"),
    [
        ("OMP_NUM_THREADS", 4, True),
        ("OMP_NUM_THREADS", 1, False),
        ("PYTHONHASHSEED", 1, False),
    ],
)
def test_what_the_program_sets_too_late(name: str, threads: int, told: bool) -> None:
    here = site(7, "train.py", 3, f'os.environ["{name}"] = "4"')
    events = [torch_loaded(threads=1), here, entered(7)]
    other = [torch_loaded(threads=threads), here, entered(7, **{name: "4"})]
    assert (differences(make_run({0: events, 1: other})) == [name]) is told


def test_lines_that_set_variables(tmp_path: Path) -> None:
    text = """
'''Shows what
os.environ["NCCL_ALGO"] = "Tree" does.'''
# os.environ["NCCL_ALGO"] = "Tree"
import os
if os.environ["NCCL_ALGO"] == "Tree": os.environ.get("NCCL_PROTO", "LL")
os.environ.setdefault('NCCL_PROTO', "LL"); os.environ["EDITOR"] = "vi"
os.environ[ "NCCL_ALGO" ] = "Ring"
os.environ["NCCL_ALGO"] = "Tree"
"""
    (file := tmp_path / "train.py").write_text(text)
    found = lines_that_set([str(file)])
    assert found == {"NCCL_PROTO": (str(file), 7), "NCCL_ALGO": (str(file), 8)}


def test_library_versions() -> None:
    run = make_run({0: [program({}, numpy="2.1")], 1: [program({}, numpy="2.0", wandb="1")]})
    assert differences(run) == ["package numpy"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("RANK", ("0", "1")),
        ("MASTER_PORT", ("1", "2")),
        ("NCCL_SOCKET_IFNAME", ("eth0", "eth1")),
        ("NCCL_IB_HCA", ("mlx5_0", "mlx5_1")),
        ("NCCL_DEBUG", ("INFO", "WARN")),
        ("TORCH_HOME", ("/a", "/b")),
        ("CUDA_VISIBLE_DEVICES", ("0", "1")),
        ("TORCHELASTIC_RUN_ID", ("x", "y")),
        ("SLURM_PROCID", ("0", "1")),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", ("/tmp/a", "/tmp/b")),
        ("PYTHONPATH", ("/a", "/b")),
    ],
)
def test_what_may_differ(name: str, values: tuple[str, str]) -> None:
    run = make_run({r: [started(r, 2, environment={name: values[r]}), entered()] for r in range(2)})
    assert not list(EnvironmentSkew().examine(run))


def test_a_single_rank() -> None:
    assert EnvironmentSkew().unobserved(make_run({0: [torch_loaded()]}))
