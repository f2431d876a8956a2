"""Launches a run so that its ranks are examined, and reports how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .environment import LaunchError, environment
from .spawning import Spawning, starts_its_own_ranks

if TYPE_CHECKING:
    from .session import exec_command, run

__all__ = [
    "LaunchError",
    "Spawning",
    "environment",
    "exec_command",
    "run",
    "starts_its_own_ranks",
]


def __getattr__(name: str) -> object:
    # Imported on demand: `report` needs only torchrun's options, not the monitor.
    if name not in ("exec_command", "run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import session

    return getattr(session, name)
