"""DDP103 over literal events."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.launch.environment_skew import EnvironmentSkew
from recordings import make_run, started, torch_loaded

from ddpdoctor.events import Event, InitEntered, ProgramSeen


def program(files: dict[str, str], **versions: str) -> Event:
    return ProgramSeen(at=0, files=files, versions=versions)


def entered(**changed: str) -> Event:
    return InitEntered(
        at=0, backend="gloo", init_method="", rank=-1, world_size=-1, env_rank=0,
        env_world_size=2, env_local_rank=0, timeout_s=-1, site=-1, changed=changed,
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
