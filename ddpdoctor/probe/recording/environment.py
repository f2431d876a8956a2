"""What of the environment and the command line may be recorded: what matters, without secrets."""

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
    """The environment, with who is which rank as the launcher said it, whatever the script has
    made of that since. A forked process was told by its parent."""
    now = dict(os.environ)
    if multiprocessing.parent_process() is not None:
        return now
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        pairs = (os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0"))
        now |= {name: value for name, _, value in pairs if name in _LAUNCHERS}
    return now


def interesting_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that distributed training depends on; values of secrets are hidden."""
    return {
        name: HIDDEN if _SECRET.search(name) else _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", value)[:500]
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES)
    }


def visible_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command line with the values of options that look secret hidden."""
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
    try:
        return int(os.environ.get(name, ""))
    except ValueError:
        return default


_at_start: dict[str, str] = {}


def note_environment() -> None:
    """This process becomes a rank: remember what its environment says now."""
    _at_start.clear()
    _at_start.update(interesting_environment(launchers_environment()))


def environment_at_start() -> dict[str, str]:
    """What `RankStarted.environment` says."""
    return dict(_at_start)
