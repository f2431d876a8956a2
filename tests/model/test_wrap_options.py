"""Fixes name an option as whoever wraps the model takes it."""

from __future__ import annotations

import pytest

from ddpdoctor.analysis.models.wrap_options import WrapOptions, divided, planned, unsynced
from ddpdoctor.events import Wrapped


def options(by: str) -> WrapOptions:
    return WrapOptions(
        Wrapped(
            at=0, model=0, wrapper="DistributedDataParallel", kind="Net", group=0, site=1, by=by
        )
    )


@pytest.mark.parametrize(("by", "unused", "drop_unused"), [
    ("", "`DDP(..., find_unused_parameters=True)`", "remove `find_unused_parameters=True`"),
    ("lightning.pytorch.trainer.trainer",
     '`Trainer(strategy="ddp_find_unused_parameters_true")`', 'set `Trainer(strategy="ddp")`'),
    ("lightning.fabric.fabric",
     '`Fabric(strategy="ddp_find_unused_parameters_true")`', 'set `Fabric(strategy="ddp")`'),
    ("transformers.trainer", "`TrainingArguments(ddp_find_unused_parameters=True)`",
     "set `TrainingArguments(ddp_find_unused_parameters=False)`"),
    ("accelerate.accelerator",
     "`Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])`",
     "set `Accelerator(kwargs_handlers="
     "[DistributedDataParallelKwargs(find_unused_parameters=False)])`"),
    ("mmengine.runner", "`find_unused_parameters=True` where mmengine wraps the model",
     "set `find_unused_parameters=False` where mmengine wraps the model"),
])  # fmt: skip
def test_unused_parameters(by: str, unused: str, drop_unused: str) -> None:
    assert (options(by).unused, options(by).drop_unused) == (unused, drop_unused)


@pytest.mark.parametrize(("by", "reentrant"), [
    ("", "`checkpoint(..., use_reentrant=False)`"),
    ("accelerate.accelerator", "`checkpoint(..., use_reentrant=False)`"),
    ("transformers.trainer",
     '`TrainingArguments(gradient_checkpointing_kwargs={"use_reentrant": False})`'),
])  # fmt: skip
def test_checkpoints(by: str, reentrant: str) -> None:
    assert options(by).reentrant == reentrant


@pytest.mark.parametrize(("by", "wrapping", "plans"), [
    ("", "`DistributedDataParallel(...)`", False),
    ("lightning.pytorch.trainer.trainer", "`trainer.fit(...)`", True),
    ("pytorch_lightning.trainer.trainer", "`trainer.fit(...)`", True),
    ("lightning.fabric.fabric", "`fabric.setup(...)`", False),
    ("transformers.trainer", "`trainer.train()`", False),
    ("accelerate.accelerator", "`accelerator.prepare(...)`", False),
    ("mmengine.runner", "`DistributedDataParallel(...)`", False),
])  # fmt: skip
def test_what_wraps_the_model_and_plans_a_schedule(by: str, wrapping: str, plans: bool) -> None:
    assert options(by).wrapping == wrapping
    assert ("estimated_stepping_batches" in planned(by)) is plans


def test_other_options() -> None:
    assert options("lightning.pytorch.trainer").static == (
        "`Trainer(strategy=DDPStrategy(static_graph=True))`"
    )
    assert options("").drop_static == "remove `static_graph=True`"
    assert options("lightningx.core").unused.endswith("where lightningx wraps the model")


@pytest.mark.parametrize(("by", "words"), [
    ("", ""),
    ("lightning.pytorch.trainer.trainer", "`trainer.fit(...)`"),
    ("lightning.fabric.fabric", "`fabric.setup_dataloaders(loader)`"),
    ("lightning_fabric.fabric", "`fabric.setup_dataloaders(loader)`"),
    ("transformers.trainer", "`self.accelerator.prepare(loader)`"),
    ("accelerate.accelerator", "`accelerator.prepare(...)`"),
    ("mmengine.runner", ""),
])  # fmt: skip
def test_what_divides_a_loader(by: str, words: str) -> None:
    assert words in divided(by) if words else not divided(by)


@pytest.mark.parametrize(("by", "code"), [
    ("", "net.no_sync()"),
    ("lightning.fabric.fabric", "fabric.no_backward_sync(net)"),
    ("accelerate.accelerator", "accelerator.no_sync(net)"),
    ("transformers.trainer", "net.no_sync()"),
])  # fmt: skip
def test_how_a_backward_is_not_synchronised(by: str, code: str) -> None:
    assert unsynced(by, "net") == code
