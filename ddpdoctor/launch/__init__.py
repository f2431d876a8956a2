"""Starts a run under the doctor's eyes and says how it went."""

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
    # Imported when asked for: `report` needs torchrun's options only, and no monitor.
    if name not in ("exec_command", "run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import session

    return getattr(session, name)
