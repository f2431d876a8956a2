"""Digests of samples of an epoch, to compare ranks that read the same or other data."""

from __future__ import annotations

import math
import time
from array import array
from typing import Any

from ...events import ContentRead, RowsChosen, RowsRead
from ...events.pack import pack
from ..recording.recorder import Recorder
from .limits import (
    BATCH_PARTS,
    EPOCH_BATCHES,
    EPOCH_ROWS,
    EPOCH_SAMPLES,
    LABEL_NUMBERS,
    ROWS_CHOSEN,
    ROWS_LOOKED_AT,
    SAMPLES_PER_BATCH,
)
from .sample_digests import digest, first_dimension, leaves, rows_of


class Fingerprints:
    """Digests of some samples of one epoch of a loader.

    Args:
        length: samples in an epoch, -1 if unknown.
        iterable: the data set is iterable: samples have no indices.
    """

    def __init__(self, length: int, batch_size: int | None, iterable: bool) -> None:
        first = EPOCH_BATCHES * max(1, batch_size or 1)
        population = min(length, first) if length > 0 else EPOCH_SAMPLES
        self.halved = 0 if iterable else max(0, (population // EPOCH_SAMPLES).bit_length() - 1)
        self.iterable = iterable
        self.indices = array("q")
        self.batches = array("i")
        self.columns = [array("I") for _ in range(2 * BATCH_PARTS)]
        self.numbers = [True] * BATCH_PARTS
        self.rows, self.rows_from = array("I"), array("i")
        self.rows_left = EPOCH_ROWS if iterable else 0
        self.chosen = ChosenRows()
        self.taken = 0

    def take(self, number: int, given: Any, batch: Any) -> bool:
        """Digest samples of a delivered batch; False once the epoch's samples are complete.

        Args:
            number: of the batch in the epoch.
            given: the indices that the sampler yielded: a list, or one if batching is off.
        """
        from ..recording.index_sample import kept, key

        if not isinstance(given, list):  # no automatic batching: one entry, whatever it holds
            self._add(number, key(given), list(leaves(batch, None)), None)
            if self.rows_left > 0:
                self._add_rows(number, batch)
        else:
            size = first_dimension(batch) if self.iterable else len(given)
            parts = list(leaves(batch, size))
            rows = min(len(given), size or 0, SAMPLES_PER_BATCH) if self.iterable else len(given)
            if self.iterable:
                self.chosen.take(batch, size or 0)
                rows = 0 if self.taken >= EPOCH_SAMPLES else rows
            for row, index in enumerate(given[:rows]):
                found = key(index)
                if found is not None and not kept(found, self.halved):
                    continue
                self._add(number, found, parts, row)
                if self.iterable and self.taken >= EPOCH_SAMPLES:
                    break
        more = not self.iterable or self.taken < EPOCH_SAMPLES or self.chosen.more()
        return number < EPOCH_BATCHES and more

    def _add(self, number: int, index: int | None, parts: list[Any], row: int | None) -> None:
        digests = [d for part in parts for d in digest(part, row)]
        if not any(digests):
            return
        for n, part in enumerate(parts):
            self.numbers[n] = self.numbers[n] and _few_numbers(part)
        self.taken += 1
        self.batches.append(number)
        if index is not None:
            self.indices.append(index)
        digests += [0] * (2 * BATCH_PARTS - len(digests))
        for column, value in zip(self.columns, digests, strict=False):
            column.append(value)

    def _add_rows(self, number: int, batch: Any) -> None:
        size = first_dimension(batch) or 0
        self.rows_left -= max(1, size)
        if self.rows_left >= 0 and (found := rows_of(batch, size)):
            self.rows.extend(found)
            self.rows_from.extend([number] * size)

    def write(self, recorder: Recorder, loader: int, epoch: int) -> None:
        if self.rows:
            rows = array("i", self.rows.tobytes())
            recorder.emit(RowsRead(at=time.monotonic(), loader=loader, epoch=epoch,
                                 batches=pack(self.rows_from), rows=pack(rows)))  # fmt: skip
            del self.rows[:], self.rows_from[:]
        self.chosen.write(recorder, loader, epoch)
        if not self.batches:
            return
        pairs = [self.columns[n : n + 2] for n in range(0, 2 * BATCH_PARTS, 2)]
        kinds = ["n" if few else "-" for few in self.numbers]
        used = [(c, kind) for (head, body), kind in zip(pairs, kinds, strict=True)
                for c in ([head] if head == body else [head, body]) if any(c)]  # fmt: skip
        indices = self.indices if len(self.indices) == len(self.batches) else ()
        recorder.emit(
            ContentRead(
                at=time.monotonic(),
                loader=loader,
                epoch=epoch,
                batches=pack(self.batches),
                columns=tuple(pack(array("i", c.tobytes())) for c, _ in used),
                indices=pack(i & 0x7FFFFFFF for i in indices),
                numbers="".join(kind for _, kind in used),
            )
        )
        del self.batches[:], self.indices[:]
        for column in self.columns:
            del column[:]


class ChosenRows:
    """Digests of the rows of a stream, as many as are kept: those that end in the most zeros, which
    are the same ones on every rank that delivers them.

    Attributes:
        looked: rows digested so far; `written` of them when they were recorded last.
        halved: so many zeros; `kept` are the digests that end in them, `again` how many came again.
    """

    def __init__(self) -> None:
        self.looked = self.written = 0
        self.halved = 0
        self.kept: set[int] = set()
        self.again = 0

    def more(self) -> bool:
        """Whether more rows are to be digested."""
        return 0 < self.looked < ROWS_LOOKED_AT

    def take(self, batch: Any, size: int) -> None:
        """Digest the rows of a batch of so many samples."""
        if self.looked >= ROWS_LOOKED_AT:
            return
        found = rows_of(batch, size)
        self.looked += len(found)
        mask = (1 << self.halved) - 1
        for row in found:
            row &= 0x7FFFFFFF
            if not row & mask and row:
                self.again += row in self.kept
                self.kept.add(row)
        while len(self.kept) > ROWS_CHOSEN:
            self.halved += 1
            mask = (1 << self.halved) - 1
            self.kept = {row for row in self.kept if not row & mask}
            self.again //= 2

    def write(self, recorder: Recorder, loader: int, epoch: int) -> None:
        """Record the rows so far; a later record of an epoch replaces an earlier one."""
        if self.looked > self.written:
            self.written = self.looked
            recorder.emit(
                RowsChosen(
                    at=time.monotonic(),
                    loader=loader,
                    epoch=epoch,
                    looked=self.looked,
                    halved=self.halved,
                    rows=pack(sorted(self.kept)),
                    again=self.again,
                )
            )


def _few_numbers(part: Any) -> bool:
    """Whether a part of a batch holds one or a few whole numbers for each sample."""
    if isinstance(part, (list, tuple)):
        return bool(part) and type(part[0]) is int
    kind, shape = str(getattr(part, "dtype", "")), getattr(part, "shape", ())
    return "int" in kind and len(shape) > 0 and math.prod(shape[1:]) <= LABEL_NUMBERS
