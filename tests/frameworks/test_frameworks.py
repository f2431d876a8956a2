"""Frameworks for real: what is right is left alone, what was planted is found.

A program's docstring has what a sample's has (see `sampling`), and two lines more: `steps: 8` says
how many optimizer steps every rank takes (`steps: 5, 7`: rank 0 takes 5, rank 1 takes 7), of the
optimizer that takes the most, or of all in turn where one takes over from another; `needs: a, b`
names packages or programs without which it is skipped.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
from pathlib import Path

import pytest
from sampling import Sample, differences, launched, read

from ddpdoctor.events import TorchLoaded
from ddpdoctor.run import load
from ddpdoctor.storage.run_folder import RunFolder

HERE = Path(__file__).parent / "programs"
PROGRAMS = sorted(HERE.glob("*.py"))
PAIRS = {
    "Accelerate behind lazy imports": ("accelerate_lazy", "accelerate_lazy_redundant"),
    "accelerate launch": ("accelerate_launch", "accelerate_launch_unused"),
    "Transformers Trainer": ("transformers_trainer", "transformers_trainer_unused"),
    "Lightning": ("lightning_ddp", "lightning_unused"),
    "Lightning, manual optimisation": ("lightning_manual", "lightning_manual_unsynced"),
    "Lightning Fabric": ("fabric", "fabric_unsharded"),
    "timm": ("timm_style", "timm_style_buffers"),
    "torchdata": ("stateful_loader", "stateful_loader_frozen"),
    "Hugging Face datasets": ("datasets_split_clean", "datasets_split"),
    "TRL": ("trl_style", "trl_style_bypassed"),
    "plain DDP": ("plain_loop", "plain_loop_frozen"),
}
"""Of every kind a program that is right and one with a single fault."""


def said(path: Path, key: str) -> str | None:
    """What stands in the docstring after `key:`."""
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    lines = [line.partition(":") for line in text.splitlines()]
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)


def is_there(needed: str) -> bool:
    """Whether a package, or a program, is installed."""
    return importlib.util.find_spec(needed) is not None or shutil.which(needed) is not None


def steps_of(path: Path, world_size: int) -> dict[int, int]:
    """How many optimizer steps each rank takes, as the program says."""
    numbers = [int(number) for number in (said(path, "steps") or "").split(",")]
    if len(numbers) == 1:
        numbers *= world_size
    return dict(enumerate(numbers))


@pytest.mark.parametrize("kind", PAIRS)
def test_every_kind_has_a_right_program_and_a_faulty_one(kind: str) -> None:
    right, faulty = (read(HERE / f"{name}.py") for name in PAIRS[kind])
    assert right.expected == ()
    assert len(faulty.expected) == 1 and not faulty.clean


@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_framework(path: Path, tmp_path: Path) -> None:
    for needed in (said(path, "needs") or "").replace(",", " ").split():
        if not is_there(needed):
            pytest.skip(f"{needed} is not installed (make frameworks)")
    sample: Sample = read(path)
    status, report = launched(sample, tmp_path, limit_s=300)
    assert status == int(said(path, "status") or 0)
    assert not [f.summary for f in report.findings if f.code == "DDP001"]
    assert report.coverage.examined
    assert report.coverage.lost == ()
    run = load([RunFolder(tmp_path / "run")])
    world = list(range(report.run.world_size))
    assert len(world) > 1
    assert [rank for rank in world if run.ranks[rank].first(TorchLoaded)] == world
    assert {row.rank: row.steps for row in report.ranks} == steps_of(path, len(world))
    assert differences(sample, report) == []
