"""Which lists and tensors does a data set index, and of which other data set is it a part?

Their entries are digested once per loader, so that ranks can tell whether they hold the same data.
"""

from __future__ import annotations

import itertools
import os
import re
import weakref
import zlib
from array import array
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

from ....events import Layer, Payload
from ....events.pack import pack
from ...recording.watcher import Watcher
from ...tensors.sample_digests import digest, digests_of_rows, holds_objects
from .dataset_entries import at_index, innermost, kept, length

PAYLOADS_AT_MOST = 12
"""Payloads recorded of one data set."""

WHOLE = 8192
"""Entries that are digested: all of shorter lists, else this many at regular distances."""

PARTS_LISTED = 4096
"""Texts in a list of a data set beyond which it is not recorded."""

PARTS_COMPARED = 16
"""Parts of the entries that are compared one by one."""

DEEPEST = 4
"""Nesting of data sets."""

UNLIKELY = 5
"""If so many equal pairs are expected among random integers and there is none, these integers were
selected without replacement (chance: e**-5)."""

DISTINCT = 0.75
"""Share of entries that must be distinct for an entry to identify its sample."""

SELECTED, REGULAR = 16384, 262144
"""Largest `Subset`s whose indices are recorded, and that are tested for equal distances."""

SUBSETS = 1024

ROWS_OF_TABLE, MOST_OF_ENTRY = 512, 256
"""Rows of a table of Hugging Face datasets that are read, and characters of each."""

_SMALL = re.compile(
    r"(?:large_)?(?:list<item: )?(?:u?int\d+|float\d*|double|bool|(?:large_)?string)>?$"
)
"""Types of columns that are read: numbers, texts, and lists of numbers."""


class DatasetParts(Watcher):
    lost = "which data sets are parts of others"

    def __init__(self) -> None:
        # Numbers of data sets, by id, since some cannot be hashed; the reference guards against
        # reuse.
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        # Lines that make the first `SUBSETS` subsets of a program, by id.
        self._made_at: dict[int, tuple[weakref.ref[Any], int]] = {}

    def made(self, dataset: Any, site: int) -> None:
        """Note the line that makes a `Subset`."""
        if len(self._made_at) < SUBSETS:
            self._made_at[id(dataset)] = weakref.ref(dataset), site

    def layers(self, dataset: Any) -> tuple[Layer, ...]:
        """The data set and, as long as it is a `Subset`, what it selects from."""
        import torch.utils.data as data

        found: list[Layer] = []
        while len(found) <= DEEPEST:
            subset = isinstance(dataset, data.Subset)
            selected = dataset.indices if subset else ()
            regular = _regular(selected)
            short = 0 < len(selected) <= SELECTED and not regular[2]
            packed = pack(int(i) & 0x7FFFFFFF for i in selected) if short else ""
            known, length = _lookup(self._made_at, dataset), _length(dataset)
            found.append(Layer(self._number(dataset), packed, known, length, regular))
            if not subset:
                break
            dataset = dataset.dataset
        return tuple(found)

    def _number(self, dataset: Any) -> int:
        """Number of a data set, equal for the same object; -1 if it cannot be weakly referenced."""
        if (known := _lookup(self._numbers, dataset)) >= 0:
            return known
        try:
            watched = weakref.ref(dataset)
        except TypeError:
            return -1
        number = max((n for _, n in self._numbers.values()), default=-1) + 1
        self._numbers[id(dataset)] = watched, number
        return number


def _regular(selected: Any) -> tuple[int, int, int]:
    """First index, step and count if the indices are at equal distances, else zeros."""
    count = len(selected)
    if not 1 < count <= REGULAR or not isinstance(selected, (range, list)):
        return 0, 0, 0
    first, step = selected[0], selected[1] - selected[0]
    if type(step) is not int or not step:
        return 0, 0, 0
    regular = range(first, first + count * step, step)
    return (first, step, count) if list(regular) == list(selected) else (0, 0, 0)


def _lookup(numbers: dict[int, tuple[weakref.ref[Any], int]], dataset: Any) -> int:
    watched, number = numbers.get(id(dataset), (None, -1))
    return number if watched is not None and watched() is dataset else -1


def payloads(dataset: Any) -> tuple[Payload, ...]:
    """The lists and tensors in which a data set, or one inside it, keeps one entry per sample."""
    return tuple(itertools.islice(_payloads(dataset, "", 0, plainly=True), PAYLOADS_AT_MOST))


def _payloads(dataset: Any, path: str, depth: int, *, plainly: bool) -> Iterator[Payload]:
    """Payloads of a data set and those inside it.

    Args:
        path: of attributes that leads to it.
        plainly: the surrounding data set passes its own index on unchanged.
    """
    import torch.utils.data as data

    if depth > DEEPEST:
        return
    if isinstance(dataset, (list, tuple)):
        yield from _column(dataset, path or "list", "other")
        return
    if type(dataset).__module__.startswith("datasets."):
        yield from _of_table(dataset, path)
        return
    subset = isinstance(dataset, data.Subset)
    indexed = at_index(dataset) if plainly else ()
    for name, value in list(kept(dataset).items()):
        where = f"{path}.{name}" if path else name
        if isinstance(value, data.Dataset):
            yield from _payloads(value, where, depth + 1, plainly=name in indexed)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], data.Dataset):
            for n, part in enumerate(value[:PAYLOADS_AT_MOST]):
                yield from _payloads(part, f"{where}[{n}]", depth + 1, plainly=False)
        elif isinstance(value, (list, tuple)) and len(value) <= PAYLOADS_AT_MOST and _arrays(value):
            for n, part in enumerate(value):
                yield from _column(part, f"{where}[{n}]", "tensor")
        elif subset and name == "indices":
            yield from _column(value, where, "indices")
        elif _sized(value) and len(value) == _length(dataset):
            yield from _column(value, where, "other", indexed=name in indexed)


def _of_table(dataset: Any, path: str) -> Iterator[Payload]:
    """Which rows a `Dataset` of Hugging Face datasets selects of its table, and what they have in
    the first column that is small enough to be read."""
    at = f"{path}." if path else ""
    chosen = getattr(dataset, "_indices", None)
    rows: Any = range(_length(dataset)) if chosen is None else _Scalars(chosen.column(0))
    if chosen is not None:
        yield from _column(rows, f"{at}_indices", "indices")
    table: Any = getattr(dataset, "_data", None)
    for name in getattr(table, "column_names", ()):
        column = table.column(name)
        if _SMALL.match(str(column.type)):
            picked = range(0, len(rows), max(1, -(-len(rows) // ROWS_OF_TABLE)))
            entries = [repr(column[rows[row]].as_py())[:MOST_OF_ENTRY] for row in picked]
            order = zlib.crc32("\n".join(entries).encode())
            whole = sum(zlib.crc32(e.encode()) for e in entries)
            yield Payload(
                name=at + name,
                kind="text" if str(column.type).endswith("string") else "other",
                length=len(rows),
                order=order,
                content=whole if len(picked) == len(rows) else 0,
            )
            return


class _Scalars:
    """A column of an Arrow table as a sequence of Python's numbers."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, row: int) -> Any:
        return self._column[row].as_py()


def _arrays(values: Any) -> bool:
    return bool(values) and all(hasattr(v, "dtype") and len(v.shape) for v in values)


def _sized(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return True
    return hasattr(value, "dtype") and bool(getattr(value, "shape", ()))


def _length(of: Any) -> int:
    try:
        return len(of)
    except Exception:  # of the user's class
        return -1


def _column(values: Any, name: str, kind: str, *, indexed: bool = False) -> Iterator[Payload]:
    length = len(values)
    if not length:
        yield Payload(name=name, kind=kind, length=0, order=0)
        return
    tensor = hasattr(values, "dtype") and not holds_objects(values)
    stride = max(1, -(-length // WHOLE))
    rows = range(0, length, stride)
    if str(getattr(values, "device", "cpu")) != "cpu":
        return  # each entry would be waited for
    if kind == "indices":
        digests = array("Q", [int(values[r]) & 0xFFFFFFFFFFFF for r in rows])
    elif tensor:
        digests = array("Q", [_combined(*found) for found in digests_of_rows(values, rows)])
    elif any(values[r] is None for r in rows):
        return  # a cache that is filled while samples are read; it differs between ranks
    else:
        digests = array("Q", [_entry(values[r]) for r in rows])
    if not any(digests) and kind != "indices":
        return
    if kind != "indices":
        kind = "tensor" if tensor else _kind(values[0])
        kind = "choice" if kind != "text" and _is_selection(values, stride) else kind
    yield Payload(
        name=name,
        kind=kind,
        length=length,
        order=zlib.crc32(digests),
        # A sum, since it does not depend on the order; with squares, so that two changed entries
        # do not cancel out.
        content=sum(d * d + d for d in digests) & 0x7FFFFFFFFFFFFFFF if stride == 1 else 0,
        ascending=kind == "indices" and all(a <= b for a, b in itertools.pairwise(digests)),
        tells=indexed and kind != "choice" and len(set(digests)) >= DISTINCT * len(digests),
        pieces=pack(_pieces(digests)) if kind in ("tensor", "other") else "",
    )


def _names(values: Any) -> bool:
    """Whether this is a list of different texts or paths, as of the files of a stream."""
    if not isinstance(values, (list, tuple)) or not 1 < len(values) <= PARTS_LISTED:
        return False
    texts = all(isinstance(v, str) or hasattr(v, "__fspath__") for v in values)
    return texts and len(set(values)) == len(values)


def listed(dataset: Any) -> tuple[Payload, ...]:
    """The lists of texts that a data set holds: the files or shards of an iterable one, or of one
    inside it; of any other those with an entry for each sample."""
    import torch.utils.data as data

    if isinstance(dataset, data.IterableDataset):
        return tuple(itertools.islice(_listed(dataset, "", 0), PAYLOADS_AT_MOST))
    held, count = list(kept(inner := innermost(dataset)).items()), length(inner)
    named = ((name, _first_of_each(v)) for name, v in held if _has_length(v, count))
    found = (_list_of(texts, name) for name, texts in named if _names(texts))
    return tuple(itertools.islice(found, PAYLOADS_AT_MOST))


def _has_length(values: Any, count: int) -> bool:
    return isinstance(values, (list, tuple)) and 1 < len(values) == count <= PARTS_LISTED


def _first_of_each(values: Sequence[Any]) -> Sequence[Any]:
    """Of pairs, such as a path and a label, what comes first."""
    pairs = all(isinstance(v, (list, tuple)) and v for v in values)
    return [v[0] for v in values] if pairs else values


def _listed(dataset: Any, path: str, depth: int) -> Iterator[Payload]:
    import torch.utils.data as data

    for name, value in list(kept(dataset).items()):
        where = f"{path}.{name}" if path else name
        if isinstance(value, data.IterableDataset) and depth < DEEPEST:
            yield from _listed(value, where, depth + 1)
        elif _names(value):
            yield _list_of(value, where)


def _list_of(values: Any, name: str) -> Payload:
    digests = [zlib.crc32(os.fsencode(v)) & 0x7FFFFFFF for v in values]
    return Payload(
        name=name,
        kind="text",
        length=len(values),
        order=zlib.crc32(array("I", digests)),
        content=sum(d * d + d for d in digests) & 0x7FFFFFFFFFFFFFFF,
        pieces=pack(digests),
    )


def _pieces(digests: array[int]) -> list[int]:
    """Checksums of `PARTS_COMPARED` equal parts; none of a few entries."""
    count = len(digests)
    if count < 2 * PARTS_COMPARED:
        return []
    ends = [count * n // PARTS_COMPARED for n in range(PARTS_COMPARED + 1)]
    return [zlib.crc32(digests[a:b]) & 0x7FFFFFFF for a, b in itertools.pairwise(ends)]


def _is_selection(values: Any, stride: int) -> bool:
    """Whether the values select samples: integers without repetition in a range so small that
    random ones would repeat. False for tensors on a device, which are not read."""
    if hasattr(values, "dtype"):
        device = getattr(values, "device", "cpu")
        if len(values.shape) != 1 or str(device) != "cpu" or "int" not in str(values.dtype):
            return False
        numbers = values[::stride].tolist()
    else:
        numbers = values[::stride]
        if not all(isinstance(v, Integral) for v in numbers):  # NumPy registers its integers
            return False
    distinct = set(numbers)
    if len(distinct) < len(numbers):
        return False
    span = int(max(distinct)) - int(min(distinct)) + 1
    return len(distinct) ** 2 > 2 * UNLIKELY * span


def _combined(head: int, body: int) -> int:
    return head << 32 ^ body


def _entry(value: Any) -> int:
    """A checksum of an entry of a list, equal in all processes."""
    if isinstance(value, (str, int, float, bytes)):
        return zlib.crc32(repr(value).encode())
    if hasattr(value, "__fspath__"):
        return zlib.crc32(str(value).encode())
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([_entry(v) for v in value[:4]]).encode())
    return _combined(*digest(value, None))


def _kind(value: Any) -> str:
    while isinstance(value, (list, tuple, dict)) and value:
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    if isinstance(value, str) or hasattr(value, "__fspath__"):
        return "text"
    return "tensor" if hasattr(value, "dtype") else "other"
