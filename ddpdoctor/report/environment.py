"""What a run ran on, in the words of a bug report: versions, machines, limits, settings."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..events import InitEntered, MemoryLimit, MonitorStarted, TorchLoaded
from ..run import Facts, Rank, Run, ranks_text

_SETTINGS = re.compile(
    r"NCCL_|GLOO_|OMP_|MKL_|KMP_|CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|CUBLAS_|UCX_|"
    r"PYTORCH_|TORCH_|TORCHDYNAMO_|TORCHINDUCTOR_|NVIDIA_TF32|LD_PRELOAD|PYTHONHASHSEED"
)
_OURS = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_DISTRIBUTED_DEBUG=INFO",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
)
"""What the doctor and torchrun set themselves."""

_MOST_SETTINGS = 16


def describe(run: Run) -> tuple[str, ...]:
    """A few lines on versions and machines; what is equal on all ranks or nodes appears once."""
    if run.left_behind:
        return ()  # what it ran on is not on record
    lines = [_software(run), *_nodes(run), *_settings(run)]
    return tuple(line for line in lines if line)


def _software(run: Run) -> str:
    pythons = [r.started.python for r in run.ranks.values() if r.started]
    loaded = [t for r in run.ranks.values() if (t := r.first(TorchLoaded)) is not None]
    words = [f"Python {v}" for v in _distinct(pythons or [run.info.python])]
    words += [f"torch {v}" for v in _distinct(t.torch for t in loaded)]
    words += [f"CUDA {v}" for v in _distinct(t.cuda for t in loaded)]
    words += [f"NCCL {v}" for v in _distinct(t.nccl for t in loaded)]
    words += _distinct([run.info.platform])
    return ", ".join(words)


def _nodes(run: Run) -> list[str]:
    """Machines by what they are: equal ones on one line."""
    by_text: dict[str, list[str]] = {}
    for facts in run.nodes.values():
        started = facts.latest(MonitorStarted)
        if started is not None:
            by_text.setdefault(_node(started, facts), []).append(started.node)
    if not by_text:
        return _cores_only(run)
    return [f"{_names(names)}: {text}" for text, names in by_text.items()]


def _names(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{len(names)} nodes ({names[0]}, ...)"


def _node(started: MonitorStarted, facts: Facts) -> str:
    words = [f"{started.cores} cores"]
    if started.cpu_quota is not None and started.cpu_quota < started.cores:
        words.append(f"of which {started.cpu_quota:g} may be used")
    if started.memory_bytes:
        words.append(f"{started.memory_bytes / 2**30:.0f} GB of memory")
    limit = next((e.limit_bytes for e in facts.of(MemoryLimit) if e.limit_bytes), None)
    if limit is not None and limit < started.memory_bytes:
        words.append(f"limited to {limit / 2**30:.1f} GB")
    for name in dict.fromkeys(started.gpus):
        count = started.gpus.count(name)
        words.append(f"{count} x {name}" if count > 1 else name)
    if started.driver:
        words.append(f"driver {started.driver}")
    return ", ".join(words)


def _cores_only(run: Run) -> list[str]:
    """Without a monitor: what the ranks know of their machines."""
    cores = {(r.node, r.started.cores) for r in run.ranks.values() if r.started and r.started.cores}
    return [f"{node}: {count} cores" for node, count in sorted(cores)]


def _settings(run: Run) -> list[str]:
    """Variables that matter; those that only some ranks have, with these ranks."""
    by_setting: dict[str, list[int]] = {}
    for rank in run.ranks.values():
        for name, value in _environment(rank).items():
            if _SETTINGS.match(name) and not f"{name}={value}".startswith(_OURS):
                by_setting.setdefault(f"{name}={value}", []).append(rank.rank)
    shown = [
        text if len(ranks) == len(run.ranks) else f"{text} ({ranks_text(ranks)})"
        for text, ranks in sorted(by_setting.items())
    ]
    if not shown:
        return []
    more = len(shown) - _MOST_SETTINGS
    return [", ".join(shown[:_MOST_SETTINGS]) + (f" and {more} more" if more > 0 else "")]


def _environment(rank: Rank) -> dict[str, str]:
    found = dict(rank.started.environment) if rank.started else {}
    entered = rank.latest(InitEntered)
    found.update(entered.changed if entered else {})
    return found


def _distinct(values: Iterable[str]) -> list[str]:
    return [v for v in dict.fromkeys(values) if v]
