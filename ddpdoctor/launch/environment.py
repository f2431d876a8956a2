"""The environment variables that load the probe into the ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..storage.flight_dumps import PREFIX
from ..storage.run_folder import RunFolder
from .devices import visible_gpus

if TYPE_CHECKING:
    from ..config import Options

PACKAGE = Path(__file__).resolve().parent.parent

_FLIGHT_RECORDER_ENTRIES = "2000"
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The second is its name in older versions of torch."""


class LaunchError(Exception):
    """The run cannot be started like this; the message says in one line what to type instead."""


def environment(folder: RunFolder, options: Options, *, meets: bool) -> dict[str, str]:
    """The variables to add to a launcher's environment so that its ranks are examined.

    Args:
        meets: a rank of each node meets the other nodes, as the launcher does not.

    Raises:
        LaunchError: `--debug-level detail` would crash this run.
    """
    shim = str(PACKAGE / "shim")
    before = os.environ.get("PYTHONPATH")
    added = {
        # An empty entry in PYTHONPATH means the current folder: leave no stray separator.
        "PYTHONPATH": f"{shim}{os.pathsep}{before}" if before else shim,
        "DDPDOCTOR_DIR": str(folder.path.resolve()),
        "DDPDOCTOR_HOME": str(PACKAGE.parent),
        "DDPDOCTOR_PROBE": _probe_options(options, meets),
    }
    # Its older name, TORCH_NCCL_TRACE_BUFFER_SIZE, makes torch print a warning on every rank.
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        added["TORCH_FR_BUFFER_SIZE"] = _FLIGHT_RECORDER_ENTRIES
    # Where torch's watchdog ends a wait, it leaves there what each rank had issued.
    if not set(_DUMPS) & os.environ.keys():
        added |= dict.fromkeys(_DUMPS, str(folder.path.resolve() / PREFIX))
    level = debug_level(options)
    if level:
        added["TORCH_DISTRIBUTED_DEBUG"] = level
    return added


def debug_level(options: Options) -> str | None:
    """The value to set for TORCH_DISTRIBUTED_DEBUG, None to leave it alone."""
    if options.debug_level == "off" or "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        return None
    if options.debug_level == "detail" and not visible_gpus():
        raise LaunchError(
            "--debug-level detail crashes DistributedDataParallel with gloo, the backend without "
            "GPUs; type --debug-level info"
        )
    return options.debug_level.upper()


def _probe_options(options: Options, meets: bool) -> str:
    chosen = {
        "budget": options.budget,
        "every": options.every,
        "max_steps": options.max_steps,
        "select": options.select,
        "ignore": options.ignore,
        "hang_after": options.hang_after,
        "debug_level": debug_level(options),
        # Where all ranks have formed a group, all have begun their records.
        "ranks_come_s": 0.0 if meets else None,
    }
    return msgspec.json.encode(chosen).decode()
