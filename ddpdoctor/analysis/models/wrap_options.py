"""What to type in a program that a framework trains: how it sets an option of the wrapper, has a
number reduced, or plans a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...events import Wrapped
from ...run import Location

UNUSED, NO_UNUSED = "find_unused_parameters=True", "find_unused_parameters=False"
STATIC, NO_STATIC = "static_graph=True", "static_graph=False"
REENTRANT = "use_reentrant=False"
REDUCED = "reduced"
EACH_ONCE = "each once"
CALLED = "called"
EQUAL_BATCHES = "equal batches"
COUNTED = "counted"
WRAPPED = "wrapped"
PLANNED = "planned"
DIVIDED = "divided"
UNSYNCED = "unsynchronised"

AT_THE_END = "_epoch_end"
"""How Lightning's hooks end in which a metric of a whole epoch is computed."""

_LIGHTNING = {
    UNUSED: 'Trainer(strategy="ddp_find_unused_parameters_true")',
    NO_UNUSED: 'Trainer(strategy="ddp")',
    REDUCED: 'self.log("{name}", ..., sync_dist=True)',
    CALLED: "compute the loss in `training_step`, which runs inside the wrapper",
    EQUAL_BATCHES: "set `Trainer(limit_train_batches=N)` with no more batches than any rank has "
    "(here {least}); or let the data begin again at its end and set `Trainer(max_steps=N)`",
    WRAPPED: "trainer.fit(...)",
    PLANNED: "plan with `total_steps=self.trainer.estimated_stepping_batches`, which counts the "
    "optimizer steps of one rank (`self.train_dataloader()` is not divided yet)",
    DIVIDED: "pass the loader to `trainer.fit(...)`, or return it from `train_dataloader()`: the "
    "Trainer divides it, unless it is given `use_distributed_sampler=False`",
    "": "Trainer(strategy=DDPStrategy({option}))",
}
_FABRIC = {
    UNUSED: 'Fabric(strategy="ddp_find_unused_parameters_true")',
    NO_UNUSED: 'Fabric(strategy="ddp")',
    WRAPPED: "fabric.setup(...)",
    CALLED: "keep what `fabric.setup(...)` returns and call it",
    DIVIDED: "iterate what `fabric.setup_dataloaders(loader)` returns, which divides the data "
    "among the ranks, unless it is given `use_distributed_sampler=False`",
    UNSYNCED: "fabric.no_backward_sync({name})",
    "": "Fabric(strategy=DDPStrategy({option}))",
}
_TRAINER = {
    CALLED: "call the `model` that the Trainer passes to `compute_loss`",
    EQUAL_BATCHES: "let the data begin again at its end and set `TrainingArguments(max_steps=N)`",
    WRAPPED: "trainer.train()",
    COUNTED: "TrainingArguments(average_tokens_across_devices=True)",
    DIVIDED: "return `self.accelerator.prepare(loader)` from `get_train_dataloader`, which divides "
    "the batches among the ranks",
    REENTRANT: 'TrainingArguments(gradient_checkpointing_kwargs={{"use_reentrant": False}})',
    "": "TrainingArguments(ddp_{option})",
}
_ACCELERATE = {
    WRAPPED: "accelerator.prepare(...)",
    EACH_ONCE: "accelerator.gather_for_metrics(...)",
    CALLED: "keep what `accelerator.prepare(...)` returns and call it",
    DIVIDED: "pass the loader to `accelerator.prepare(...)` and iterate what that returns, which "
    "divides the batches among the ranks",
    UNSYNCED: "accelerator.no_sync({name})",
    "": "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({option})])",
}

_BY_FRAMEWORK: Mapping[str, Mapping[str, str]] = {
    "lightning.pytorch": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "lightning.fabric": _FABRIC,
    "lightning_fabric": _FABRIC,
    "transformers": _TRAINER,
    "trl": _TRAINER,
    "accelerate": _ACCELERATE,
}
"""By the begin of the module's name that the program called: what to type for an option; for all
others what stands under the empty name."""

_BY_PROGRAM = {
    REENTRANT: "checkpoint(..., use_reentrant=False)",
    WRAPPED: "DistributedDataParallel(...)",
    CALLED: "keep the result of `DistributedDataParallel(...)` and call it",
    "": "DDP(..., {option})",
}


def framework_of(by: str) -> Mapping[str, str]:
    """What to type in the framework that a module is of; empty for no framework that is known."""
    names = (n for n in _BY_FRAMEWORK if f"{by}.".startswith(f"{n}."))
    return _BY_FRAMEWORK[name] if (name := next(names, "")) else {}


def reduced(by: str, name: str, logs: Location | None) -> str:
    """What has a framework reduce a number that a line logs by name; empty where that is not
    known. A number that is logged at the end of an epoch may be no mean over samples."""
    words = framework_of(by).get(REDUCED)
    if not words:
        return ""
    option = f"`{words.format(name=name)}`"
    if logs is None or not logs.function.endswith(AT_THE_END):
        return option
    return (
        f"sum what `{name}` is computed from over the ranks first (`self.all_gather`, or a "
        f"torchmetrics `Metric`, whose `compute()` does that); where it is a mean over samples, "
        f"{option} is enough"
    )


def equal_batches(by: str, least: int) -> str:
    """What to do where a framework runs the loop and ranks have different numbers of batches, as a
    sentence; empty where the program runs it.

    Args:
        least: the smallest number of batches that a rank has.
    """
    return framework_of(by).get(EQUAL_BATCHES, "").format(least=least)


def divided(by: str) -> str:
    """What has a framework divide a loader among the ranks, as a sentence; empty where that is not
    known."""
    return framework_of(by).get(DIVIDED, "")


def planned(by: str) -> str:
    """What to plan a schedule with that a framework steps, as a sentence; empty where that is not
    known."""
    return framework_of(by).get(PLANNED, "")


def unsynced(by: str, name: str) -> str:
    """The context in which backwards of a model by that name do not synchronise, as code."""
    return framework_of(by).get(UNSYNCED, "{name}.no_sync()").format(name=name)


def each_once(by: str) -> str:
    """The code, in backquotes, that has a framework gather a result of each sample once; empty
    where it has none that is known."""
    words = framework_of(by).get(EACH_ONCE)
    return f"`{words}`" if words else ""


def counted(by: str) -> str:
    """The code, in backquotes, that has a framework divide its loss by the elements of all ranks;
    empty where it has none that is known."""
    words = framework_of(by).get(COUNTED)
    return f"`{words}`" if words else ""


@dataclass(frozen=True)
class WrapOptions:
    """The options of a wrapper, for the templates of fixes: each is what to type, as code.

    In a program that wraps its model itself, `unused` is ``DDP(..., find_unused_parameters=True)``;
    where Lightning does, ``Trainer(strategy="ddp_find_unused_parameters_true")``.
    """

    wrapped: Wrapped

    @property
    def unused(self) -> str:
        return self.set(UNUSED)

    @property
    def static(self) -> str:
        return self.set(STATIC)

    @property
    def reentrant(self) -> str:
        return self.set(REENTRANT)

    @property
    def called(self) -> str:
        """What to do so that forwards go through the wrapper, as a sentence."""
        return (framework_of(self.wrapped.by) or _BY_PROGRAM).get(CALLED, _BY_PROGRAM[CALLED])

    @property
    def wrapping(self) -> str:
        """The call of the program by which its model is wrapped, in backquotes."""
        words = framework_of(self.wrapped.by) or _BY_PROGRAM
        return f"`{words[WRAPPED]}`"

    @property
    def drop_unused(self) -> str:
        """What to do to search for unused parameters no longer."""
        return self._drop(UNUSED, NO_UNUSED)

    @property
    def drop_static(self) -> str:
        return self._drop(STATIC, NO_STATIC)

    def _drop(self, given: str, instead: str) -> str:
        return f"set {self.set(instead)}" if self.wrapped.by else f"remove `{given}`"

    def set(self, option: str) -> str:
        """The code that sets an option (`static_graph=True`), in backquotes."""
        by = self.wrapped.by
        words = framework_of(by) or _BY_PROGRAM
        if by and words is _BY_PROGRAM:
            return f"`{option}` where {by.partition('.')[0]} wraps the model"
        if option == REENTRANT and option not in words:
            words = _BY_PROGRAM
        return f"`{(words.get(option) or words['']).format(option=option)}`"
