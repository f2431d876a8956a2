"""The list of all modules that wrap torch, and the order in which they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..recording import hooks

Activate = Callable[[int, int, str | None], None]
"""Called with (rank, world size, init method) of `init_process_group`; -1 for what is left out."""

Missing = tuple[str, Exception, str]
"""A module that failed to install, the error, and what is not observed without it."""

PARTS = (
    # Modules that fire the hooks of training come before the watchers that subscribe to these:
    # a hook calls its subscribers in the order of subscription.
    "collectives.process_groups",
    "training.optimizer_models",  # fills `Step.holdings`, which the watchers of a step read
    "training.module_origins",
    "training.wrapped_models",
    "training.forwards",
    "training.backwards",
    "training.optimizers",
    "watchers.data.loaders",
    "watchers.data.forward_inputs",
    "collectives.sync_points",
    "recording.threads",
    "watchers.process.files",
    "watchers.numerics.numerics",  # sees gradients before anything else of a step reads them
    "watchers.memory.memory",
    "watchers.graph.devices_used",
    "watchers.graph.data_parallel",
    "recording.debug_level",
    "watchers.timing.ddp_timing",
    "watchers.graph.unused_parameters",
    # Calls are recorded from here on: collectives that torch makes for the modules above are not
    # calls of the program.
    "collectives.collectives",
    "training.ddp_collectives",
    "watchers.timing.idle_time",
    "training.phases",
    "watchers.graph.unused_search_cost",
    "watchers.process.program_info",
    "watchers.process.no_process_group",
    # Digests of a step are taken before the watchers that compare with them run.
    "watchers.gradients.replica_digests",
    "watchers.graph.late_buffers",
    "watchers.gradients.evaluation",
    # `gradient_sync` decides whether gradients were synchronised; those below ask it.
    "watchers.gradients.gradient_sync",
    "watchers.gradients.manual_edits",
    "watchers.gradients.edits_after_wrap",
    "watchers.gradients.state_loading",
    "watchers.gradients.loss_scaling",
    "watchers.gradients.second_reduction",
    "watchers.gradients.zero_grad",
    "watchers.gradients.step_in_backward",
    "watchers.graph.fsdp_no_sync",
    "watchers.gradients.hyperparameters",
    # `exchanges` records what the program exchanges itself; those below ask it.
    "watchers.manual_sync.exchanges",
    "watchers.manual_sync.unused_allreduce",
    "watchers.manual_sync.pending_works",
    "watchers.graph.wrapper_bypass",
    "watchers.graph.changes_after_wrap",
    "watchers.manual_sync.unwrapped",
    "watchers.manual_sync.averaged_gradients",
    "watchers.manual_sync.unwrapped_inputs",
    "watchers.graph.model_names",
    "watchers.graph.optimizer_coverage",
    "watchers.graph.reducer_errors",
    "watchers.process.caught_exceptions",
    "recording.weak_references",
    "watchers.process.sent_signals",
    "watchers.gradients.zero_gradients",
)
"""The modules that wrap torch, in order. Each has `install()` and `LOST`, which says what is not
observed if it fails. A new watcher is a line here."""


def _part(name: str) -> Any:
    return importlib.import_module(f"..{name}", __package__)


def install(activate: Activate) -> list[Missing]:
    """Wrap torch; call once, right after torch was imported.

    Args:
        activate: called at the start of `init_process_group`, before it can block.

    Returns:
        The modules that failed to install.
    """
    hooks.forget()
    _part("training.steady_state").forget()
    missing: list[Missing] = []
    for name in PARTS:
        part = _part(name)
        try:
            part.install()
        except Exception as error:  # this version of torch lacks something: go on without
            missing.append((part.__name__, error, part.LOST))
    _part("watchers.process.exits").listen()
    for name in (
        "collectives.process_groups",
        "watchers.graph.data_parallel",
        "watchers.process.no_process_group",
    ):
        _part(name).activate_with(activate)
    # By name: torch.multiprocessing re-exports a function that hides the module of the same name.
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    _part("watchers.process.spawned_processes").watch_spawned(spawn)
    return missing
