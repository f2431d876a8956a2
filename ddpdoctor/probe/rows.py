"""Digests that wait: for the device they are on, and to be written with others of their kind."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from .digests import numbers

ROWS_AT_MOST = 64
SECONDS_AT_MOST = 1.0


@dataclass
class Row:
    """One kind at one moment; see `Digests`."""

    key: int
    stride: int
    backwards: int
    waiting: Waiting


class Rows:
    """Digests of one kind that wait to be written together."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.since = time.monotonic()

    def add(self, row: Row) -> None:
        if not self.rows:
            self.since = time.monotonic()
        self.rows.append(row)

    def due(self) -> bool:
        late = time.monotonic() - self.since > SECONDS_AT_MOST
        return len(self.rows) >= ROWS_AT_MOST or (bool(self.rows) and late)


class Waiting:
    """Sums that may still be on their way from a device: nothing waits for it to finish."""

    def __init__(self, totals: list[Any]) -> None:
        self._totals: list[Any] | None = totals
        self._event: Any = None
        self._present: list[bool] = []
        self.values: list[int] = []
        there = [t for t in totals if t is not None]
        if there and not there[0].is_cpu:
            self._copy(there)
        else:
            self._finish()

    def _copy(self, there: list[Any]) -> None:
        import torch

        assert self._totals is not None
        self._present = [t is not None for t in self._totals]
        with torch.inference_mode():
            stacked = torch.stack(there)
            self._host = torch.empty(len(there), dtype=torch.int64, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()
        self._totals = None

    def _finish(self) -> None:
        assert self._totals is not None
        self.values, self._totals = numbers(self._totals), None

    def ready(self, *, wait: bool = False) -> bool:
        if self._event is not None:
            if wait:
                self._event.synchronize()
            if not self._event.query():
                return False
            arrived = iter(self._host.tolist())
            self._totals = [next(arrived) if there else None for there in self._present]
            self._event = None
            self._finish()
        return True
