"""GPUs by what they are, not by the number that somebody gives them."""

from __future__ import annotations

from ...events import DeviceUsed, MonitorStarted
from ...run import Rank, Run


def plain(uuid: str) -> str:
    """torch and NVML spell identities differently."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def monitor_of(run: Run, rank: Rank) -> MonitorStarted | None:
    """The first record of the monitor of a rank's node."""
    for facts in run.nodes.values():
        started = facts.latest(MonitorStarted)
        if started is not None and started.node == rank.node:
            return started
    return None


def used(rank: Rank) -> list[DeviceUsed]:
    """Devices that a rank trains on or was told to use."""
    return rank.of(DeviceUsed)


def trained_on(rank: Rank) -> list[DeviceUsed]:
    return [e for e in used(rank) if e.why == "parameters"]


def no_gpu(run: Run) -> str | None:
    """Why nothing can be said of GPUs."""
    if run.any(DeviceUsed):
        return None
    troubles = {
        m.gpu_trouble
        for facts in run.nodes.values()
        if (m := facts.latest(MonitorStarted)) is not None and m.gpu_trouble
    }
    return next(iter(troubles), "no rank used a GPU")
