"""Puts every watcher in place. Each watches one thing and lives in a module of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ..recording import hooks

Activate = Callable[[int, int, str | None], None]
"""(rank, world size, init method) as given to `init_process_group`, -1 where left out."""

Missing = tuple[str, Exception, str]
"""A part that could not be put in place, why, and what is not observed without it."""


def install(activate: Activate) -> list[Missing]:
    """Wrap torch; call once, right after torch was imported. What could not be put in place."""
    from ..collectives import collectives, process_groups, sync_points
    from ..recording import debug_level, threads, weak_references
    from ..training import (
        backwards,
        ddp_collectives,
        forwards,
        module_origins,
        optimizer_models,
        optimizers,
        phases,
        steady_state,
        wrapped_models,
    )
    from ..watchers.data import forward_inputs, loaders
    from ..watchers.gradients import (
        edits_after_wrap,
        evaluation,
        gradient_sync,
        hyperparameters,
        loss_scaling,
        manual_edits,
        replica_digests,
        second_reduction,
        state_loading,
        step_in_backward,
        zero_grad,
        zero_gradients,
    )
    from ..watchers.graph import (
        changes_after_wrap,
        data_parallel,
        devices_used,
        fsdp_no_sync,
        late_buffers,
        model_names,
        optimizer_coverage,
        reducer_errors,
        unused_parameters,
        unused_search_cost,
        wrapper_bypass,
    )
    from ..watchers.manual_sync import (
        averaged_gradients,
        exchanges,
        pending_works,
        unused_allreduce,
        unwrapped,
        unwrapped_inputs,
    )
    from ..watchers.memory import memory
    from ..watchers.numerics import numerics
    from ..watchers.process import (
        caught_exceptions,
        exits,
        files,
        no_process_group,
        program_info,
        sent_signals,
        spawned_processes,
    )
    from ..watchers.timing import ddp_timing, idle_time

    hooks.forget()
    steady_state.forget()
    missing: list[Missing] = []
    for part in (
        process_groups,
        optimizer_models,
        module_origins,
        wrapped_models,
        forwards,
        backwards,
        optimizers,
        loaders,
        forward_inputs,
        sync_points,
        threads,
        files,
        numerics,
        memory,
        devices_used,
        data_parallel,
        debug_level,
        ddp_timing,
        unused_parameters,
        collectives,
        ddp_collectives,
        idle_time,
        phases,
        unused_search_cost,
        program_info,
        no_process_group,
        replica_digests,
        late_buffers,
        evaluation,
        gradient_sync,
        manual_edits,
        edits_after_wrap,
        state_loading,
        loss_scaling,
        second_reduction,
        zero_grad,
        step_in_backward,
        fsdp_no_sync,
        hyperparameters,
        exchanges,
        unused_allreduce,
        pending_works,
        wrapper_bypass,
        changes_after_wrap,
        unwrapped,
        averaged_gradients,
        unwrapped_inputs,
        model_names,
        optimizer_coverage,
        reducer_errors,
        caught_exceptions,
        weak_references,
        sent_signals,
        zero_gradients,
    ):
        try:
            part.install()
        except Exception as error:  # this torch lacks something: the other parts still work
            missing.append((part.__name__, error, part.LOST))
    exits.listen()
    process_groups.activate_with(activate)
    data_parallel.activate_with(activate)
    no_process_group.activate_with(activate)
    # By name: torch.multiprocessing re-exports a function that hides the module of the same name.
    spawned_processes.watch_spawned(importlib.import_module("torch.multiprocessing.spawn"))
    return missing
