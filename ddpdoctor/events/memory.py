"""Memory of a rank as it trains, on the host and on its device."""

from __future__ import annotations

from .base import Event


class MemorySample(Event, frozen=True, tag="memory"):
    """What the process held between two steps. Taken often at first, more rarely later.

    Attributes:
        rss_bytes: resident memory; peak_rss_bytes the most there has been.
        device_bytes: what torch has allocated on the current device, device_peak_bytes the most,
            device_reserved_bytes what it keeps from the driver; 0 without a device.
        forwards: forwards of wrapped models so far (evaluation takes no steps).
    """

    step: int
    rss_bytes: int
    peak_rss_bytes: int
    forwards: int = 0
    device_bytes: int = 0
    device_peak_bytes: int = 0
    device_reserved_bytes: int = 0


class MemoryHeld(Event, frozen=True, tag="memory-held"):
    """Something that grows by tensors with every step, found while memory grew.

    Attributes:
        name: as the program calls it (`losses`, `self.history`), empty where unknown.
        kind: class name of the container; `graph` for a sum that drags its whole history along.
        length: entries when it was looked at last, `grown` of them since it was looked at first,
            in `steps` steps.
        graphs: its tensors keep autograd graphs.
        entry_bytes: what the tensors of one entry hold by themselves.
        site: the line that adds to it, or where it was found growing.
    """

    name: str
    kind: str
    length: int
    grown: int
    steps: int
    step: int
    graphs: bool
    site: int = -1
    entry_bytes: int = 0

    def describe(self) -> str:
        return f"{self.name or self.kind} keeps tensors: {self.length}, {self.grown} more"
