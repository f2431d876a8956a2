"""Puts every watcher in place. Each watches one thing and lives in a module of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable

Activate = Callable[[int, int, str | None], None]
"""(rank, world size, init method) as given to `init_process_group`, -1 where left out."""

Missing = tuple[str, Exception, str]
"""A part that could not be put in place, why, and what is not observed without it."""


def install(activate: Activate) -> list[Missing]:
    """Wrap torch; call once, right after torch was imported. What could not be put in place."""
    from . import (
        afterwrap,
        alone,
        autograd,
        averaging,
        bypass,
        calls,
        changes,
        clearing,
        data,
        dataparallel,
        debuglevel,
        devices,
        discarded,
        drift,
        edits,
        evaluation,
        exchanges,
        files,
        forwards,
        given,
        groups,
        holdings,
        hyperparameters,
        implicit,
        inflight,
        inputs,
        inside,
        keptback,
        latebuffers,
        loads,
        losses,
        meetings,
        memory,
        models,
        modules,
        moments,
        naming,
        numerics,
        optimizers,
        ownership,
        passing,
        phases,
        process,
        reduction,
        references,
        routine,
        search_cost,
        signals,
        spawned,
        summed,
        surroundings,
        sync,
        synctimes,
        threads,
        unused,
        unwrapped,
        waits,
        zeros,
    )

    moments.forget()
    routine.forget()
    missing: list[Missing] = []
    for part in (
        groups,
        holdings,
        modules,
        models,
        forwards,
        autograd,
        optimizers,
        data,
        inputs,
        meetings,
        threads,
        files,
        numerics,
        memory,
        devices,
        dataparallel,
        debuglevel,
        synctimes,
        unused,
        calls,
        implicit,
        waits,
        phases,
        search_cost,
        surroundings,
        alone,
        drift,
        latebuffers,
        evaluation,
        sync,
        edits,
        afterwrap,
        loads,
        losses,
        summed,
        clearing,
        inside,
        keptback,
        hyperparameters,
        exchanges,
        discarded,
        inflight,
        bypass,
        changes,
        unwrapped,
        averaging,
        given,
        naming,
        ownership,
        reduction,
        passing,
        references,
        signals,
        zeros,
    ):
        try:
            part.install()
        except Exception as error:  # this torch lacks something: the other parts still work
            missing.append((part.__name__, error, part.LOST))
    process.listen()
    groups.activate_with(activate)
    dataparallel.activate_with(activate)
    alone.activate_with(activate)
    # By name: torch.multiprocessing re-exports a function that hides the module of the same name.
    spawned.watch_spawned(importlib.import_module("torch.multiprocessing.spawn"))
    return missing
