"""GPUs by their UUID, since their index depends on `CUDA_VISIBLE_DEVICES`."""

from __future__ import annotations

from ...events import DeviceUsed, MonitorStarted
from ...run import Rank, Run


def plain(uuid: str) -> str:
    """A device's UUID in a form that torch and NVML share: lower case, no `GPU-` or `MIG-`."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def monitor_of(run: Run, rank: Rank) -> MonitorStarted | None:
    """What the monitor of a rank's node recorded when it started; None where there was none."""
    for facts in run.nodes.values():
        started = facts.latest(MonitorStarted)
        if started is not None and started.node == rank.node:
            return started
    return None


def used(rank: Rank) -> list[DeviceUsed]:
    """Devices that hold a rank's parameters or that it passed to `set_device`."""
    return rank.of(DeviceUsed)


def trained_on(rank: Rank) -> list[DeviceUsed]:
    """Devices that hold a rank's parameters."""
    return [e for e in used(rank) if e.why == "parameters"]


def users(run: Run) -> dict[tuple[str, str], list[tuple[Rank, DeviceUsed]]]:
    """Who trains on which GPU, by node and UUID. Not of GPUs that are divided: ranks that name the
    whole one may have parts of their own."""
    found: dict[tuple[str, str], list[tuple[Rank, DeviceUsed]]] = {}
    for rank in run.ranks.values():
        seen = monitor_of(run, rank)
        divided = set(map(plain, seen.divided)) if seen is not None else set()
        for event in trained_on(rank):
            if event.uuid and plain(event.uuid) not in divided:
                found.setdefault((rank.node, plain(event.uuid)), []).append((rank, event))
    return found


def shared(of: list[tuple[Rank, DeviceUsed]]) -> bool:
    """Whether more than one rank trains on a GPU with these users."""
    return len({rank.rank for rank, _ in of}) > 1


def no_gpu(run: Run) -> str | None:
    """Why GPUs cannot be judged in this run; None where they can."""
    if run.any(DeviceUsed):
        return None
    troubles = {
        m.gpu_trouble
        for facts in run.nodes.values()
        if (m := facts.latest(MonitorStarted)) is not None and m.gpu_trouble
    }
    return next(iter(troubles), "no rank used a GPU")
