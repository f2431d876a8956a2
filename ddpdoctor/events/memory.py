"""Memory of a rank as it trains, on the host and on its device."""

from __future__ import annotations

from .base import Event


class MemorySample(Event, frozen=True, tag="memory"):
    """Memory of the process between two steps. Sampled often at first, more rarely later.

    Attributes:
        rss_bytes: resident memory; `peak_rss_bytes` its maximum so far.
        device_bytes: allocated by torch on the current device, `device_peak_bytes` its maximum,
            `device_reserved_bytes` reserved from the driver; 0 without a device.
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
    """A container of tensors that grows with every step, found while memory grew.

    Attributes:
        name: the program's name for it (`losses`, `self.history`), empty if unknown.
        kind: class name of the container; `graph` for a sum that keeps the graph of all its terms.
        length: number of entries, `grown` of them in the last `steps` steps.
        graphs: its tensors keep autograd graphs.
        entry_bytes: bytes of the tensors in one entry that other entries do not share.
        site: the line that adds to it, or else the line where it was found.
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
