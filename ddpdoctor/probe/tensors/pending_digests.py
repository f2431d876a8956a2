"""Digests that are not recorded yet: they are on their way from a device, or are collected to be
written together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..recording.devices import HostCopy, Work, hands_off
from .digests import numbers, sampled, some_values
from .limits import ROW_WAITS_S, ROWS_WAITING

T = TypeVar("T")


class Arrivals(Generic[T]):
    """What is to be recorded or compared once its digests are there, in order."""

    def __init__(self) -> None:
        self._waiting: list[tuple[T, tuple[Waiting, ...]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, what: T, *digests: Waiting) -> None:
        self._waiting.append((what, digests))

    def take(self, *, wait: bool = False) -> Iterator[tuple[T, list[list[int]]]]:
        """Remove and return all up to the first whose digests have not arrived; with `wait`, wait
        for them a little (`devices.PATIENCE_S`)."""
        while self._waiting:
            what, digests = self._waiting[0]
            if not all([one.ready(wait=wait) for one in digests]):
                return
            del self._waiting[0]
            yield what, [one.values for one in digests]


@dataclass
class Row:
    """Digests of one kind at one moment; the fields are those of the event `Digests`."""

    key: int
    stride: int
    backwards: int
    waiting: Waiting


class Rows:
    """Rows of one kind that are collected to be written together."""

    def __init__(self) -> None:
        self._rows: Arrivals[Row] = Arrivals()
        self._since = time.monotonic()

    def add(self, row: Row) -> None:
        if not self._rows:
            self._since = time.monotonic()
        self._rows.add(row, row.waiting)

    def due(self) -> bool:
        """Whether the rows should be written now."""
        late = time.monotonic() - self._since > ROW_WAITS_S
        return len(self._rows) >= ROWS_WAITING or (bool(self._rows) and late)

    def take(self, *, wait: bool = False) -> list[Row]:
        """The rows that have arrived, see `Arrivals.take`; those that have not are late again only
        `ROW_WAITS_S` from now on."""
        self._since = time.monotonic()
        return [row for row, _ in self._rows.take(wait=wait)]


class Waiting:
    """Digests whose sums may still be on their way from a device, copied without waiting for it.

    Attributes:
        values: the digests, once `ready` has returned True.
    """

    def __init__(self, totals: list[Any]) -> None:
        self._copy: HostCopy | None = None
        self._present = [total is not None for total in totals]
        self.values: list[int] = []
        there = [total for total in totals if total is not None]
        devices = [total.device for total in there if not total.is_cpu]
        if devices:
            self._copy = _copied(there, devices[0])
        else:
            self.values = numbers(totals)

    def ready(self, *, wait: bool = False) -> bool:
        """Whether the digests have arrived; with `wait`, wait for them a little."""
        if self._copy is not None:
            if not self._copy.arrived(wait=wait):
                return False
            arrived = iter(self._copy.host.tolist())
            self.values = numbers([next(arrived) if there else None for there in self._present])
            self._copy = None
        return True


class SomeValues:
    """`some_values` of tensors; of those on a device they may still be on their way.

    Attributes:
        values: once `ready` has returned True; empty where there are none, or the device is to be
            left alone.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self._copy: HostCopy | None = None
        away = [t for t in tensors if t is not None and not t.is_cpu]
        self.values = [] if away else some_values(tensors)
        if away and not hands_off():
            self._copy = _sampled(away)

    def ready(self, *, wait: bool = False) -> bool:
        """Whether the values have arrived; with `wait`, wait for them a little."""
        if self._copy is not None:
            if not self._copy.arrived(wait=wait):
                return False
            self.values, self._copy = self._copy.host.tolist(), None
        return True


def _sampled(tensors: list[Any]) -> HostCopy | None:
    """Values of tensors on one device, by one kernel and a copy; None where there are none."""
    import torch

    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        views = sampled([t for t in tensors if t.device == tensors[0].device])
        if not views:
            return None
        Work.add(1)
        return HostCopy(torch.cat(views))


def _copied(totals: list[Any], device: Any) -> HostCopy:
    import torch

    with torch.inference_mode():
        return HostCopy(torch.stack([total.to(device, non_blocking=True) for total in totals]))
