"""Finds every watcher, and installs them in order."""

from __future__ import annotations

import importlib

from ..recording import hooks
from ..recording.watcher import Activate, Watcher, find, in_order
from ..training.steady_state import steady_state
from ..watchers.process import exits, spawned_processes

PACKAGES = (
    # What fires the hooks of training comes before the watchers that subscribe to these: a hook
    # calls its subscribers in the order of subscription.
    "recording",
    "collectives",
    "training",
    "watchers.data",
    "watchers.numerics",  # sees gradients before anything else of a step reads them
    "watchers.memory",
    "watchers.timing",
    "watchers.process",
    "watchers.gradients",
    "watchers.losses",
    "watchers.manual_sync",
    "watchers.graph",
)
"""Where watchers are, in the order in which they are installed."""

Missing = tuple[str, Exception, str]
"""A watcher that failed to install, the error, and what is not observed without it."""


def watchers() -> list[type[Watcher]]:
    """Every watcher of the probe, in the order of installation."""
    probe = __package__.rpartition(".")[0]
    return in_order(find(f"{probe}.{package}" for package in PACKAGES))


def install(activate: Activate) -> list[Missing]:
    """Wrap torch; call once, right after torch was imported.

    Args:
        activate: called at the start of `init_process_group`, before it can block.

    Returns:
        The watchers that failed to install.
    """
    hooks.forget()
    steady_state.reset()
    missing: list[Missing] = []
    every = watchers()
    for watcher in every:
        try:
            watcher.begin()
        except Exception as error:  # this version of torch lacks something: go on without
            missing.append((watcher.__module__, error, watcher.lost))
    exits.listen()
    for watcher in every:
        watcher.current.activate_with(activate)
    # By name: torch.multiprocessing re-exports a function that hides the module of the same name.
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    spawned_processes.watch_spawned(spawn)
    return missing
