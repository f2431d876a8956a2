"""The probe: runs inside every rank, wraps torch and records events.

Imported by the import shim that the launcher installs, or by the decorator. Nothing here may change
the run: no collective, no random number, no device synchronisation, nothing attached to the user's
objects, and every failure of the probe is caught where it happens.
"""

from __future__ import annotations

from .recording import startup_cost  # first: its clock starts on import and times the rest

# isort: split
from .bootstrap.activation import (
    become_rank,
    become_rank_by_training,
    leave,
    rank_started,
    torch_found,
    torch_loaded,
    wait_for_torch,
    watch_here,
)
from .recording.recorder import current_recorder as current_recorder
from .watchers.process.exits import failed, note_exception

startup_cost.imported()

__all__ = [
    "become_rank",
    "become_rank_by_training",
    "failed",
    "leave",
    "note_exception",
    "rank_started",
    "current_recorder",
    "torch_found",
    "torch_loaded",
    "wait_for_torch",
    "watch_here",
]
