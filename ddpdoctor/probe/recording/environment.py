"""The environment variables and the command line of a rank, as they are recorded: only what
distributed training depends on, with secrets hidden."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
from collections.abc import Mapping, Sequence

PREFIXES = (
    "CUDA_", "GLOO_", "KMP_", "LOCAL_", "MASTER_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "PYTORCH_",
    "RANK", "ROLE_", "SLURM_", "OMPI_", "PMI_", "TORCH", "TP_SOCKET", "WORLD_SIZE", "GROUP_",
    "PYTHONHASHSEED", "PYTHONPATH", "LD_PRELOAD", "ACCELERATE_", "DEEPSPEED_", "UCX_", "HSA_",
)  # fmt: skip
_SECRET = re.compile(r"token|secret|passw|credential|api_?key|private|auth|cookie|session", re.I)
_KEY_VALUE = re.compile(r"^(--?[\w-]+|\w+)=(.*)$", re.S)
_URL_PASSWORD = re.compile(r"(\w+://[^/\s:@]*):[^/\s@]+@")


HIDDEN = "<hidden>"

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launchers_environment() -> dict[str, str]:
    """The environment, with RANK and the like as the launcher set them, even if the script has
    changed them since."""
    now = dict(os.environ)
    if multiprocessing.parent_process() is not None:
        return now  # the launcher of a spawned process is its parent: what that set is in `now`
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        pairs = (os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0"))
        now |= {name: value for name, _, value in pairs if name in _LAUNCHERS}
    return now


def interesting_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that distributed training depends on; secrets are hidden, values cut at 500
    characters."""
    return {
        name: HIDDEN if _SECRET.search(name) else _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", value)[:500]
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES)
    }


def visible_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command line, with the values of options that look like secrets hidden."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        pair = _KEY_VALUE.match(argument)
        if hide_next:
            shown.append(HIDDEN)
        elif pair and _SECRET.search(pair[1]):
            shown.append(f"{pair[1]}={HIDDEN}")
        else:
            shown.append(_URL_PASSWORD.sub(rf"\1:{HIDDEN}@", argument)[:500])
        hide_next = bool(
            not hide_next and argument.startswith("-") and not pair and _SECRET.search(argument)
        )
    return tuple(shown)


def number_in_environment(name: str, default: int = -1) -> int:
    """An environment variable as a number; the default if it is unset or no number."""
    try:
        return int(os.environ.get(name, ""))
    except ValueError:
        return default


_at_start: dict[str, str] = {}


def note_environment() -> None:
    """Remember the environment of this process, which becomes a rank now."""
    _at_start.clear()
    _at_start.update(interesting_environment(launchers_environment()))


def environment_at_start() -> dict[str, str]:
    """The environment when this process became a rank, as in `RankStarted.environment`."""
    return dict(_at_start)
