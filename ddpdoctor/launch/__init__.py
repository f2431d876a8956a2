"""Starts a run under the doctor's eyes and says how it went."""

from __future__ import annotations

from .environment import LaunchError, environment
from .session import exec_command, run
from .spawning import Spawning, starts_its_own_ranks

__all__ = [
    "LaunchError",
    "Spawning",
    "environment",
    "exec_command",
    "run",
    "starts_its_own_ranks",
]
