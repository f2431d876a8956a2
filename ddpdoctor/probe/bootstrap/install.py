"""Puts every watcher in place. Each watches one thing and lives in a module of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..recording import hooks

Activate = Callable[[int, int, str | None], None]
"""(rank, world size, init method) as given to `init_process_group`, -1 where left out."""

Missing = tuple[str, Exception, str]
"""A part that could not be put in place, why, and what is not observed without it."""

PARTS = (
    # What brackets training, before those that subscribe to it: a hook calls its subscribers in
    # the order in which they came.
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
    # Calls are recorded from here on: what the above ask of torch is none of the program's.
    "collectives.collectives",
    "training.ddp_collectives",
    "watchers.timing.idle_time",
    "training.phases",
    "watchers.graph.unused_search_cost",
    "watchers.process.program_info",
    "watchers.process.no_process_group",
    # Digests come before the watchers that compare with them.
    "watchers.gradients.replica_digests",
    "watchers.graph.late_buffers",
    "watchers.gradients.evaluation",
    # Whether gradients were synchronised, before those that ask `gradient_sync` about it.
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
    # What the program exchanges itself, before those that ask `exchanges` about it.
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
"""The modules that wrap torch, in order; each has `install()` and `LOST`, what is not observed
without it. A new watcher is a line here."""


def _part(name: str) -> Any:
    return importlib.import_module(f"..{name}", __package__)


def install(activate: Activate) -> list[Missing]:
    """Wrap torch; call once, right after torch was imported. What could not be put in place."""
    hooks.forget()
    _part("training.steady_state").forget()
    missing: list[Missing] = []
    for name in PARTS:
        part = _part(name)
        try:
            part.install()
        except Exception as error:  # this torch lacks something: the other parts still work
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
