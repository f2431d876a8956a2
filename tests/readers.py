"""Literal events of loaders, for the tests of the data family.

loader(0, [0, 2, 4], trains=True)        # one rank: seen, one epoch that ran to its end
loader(0, [[0, 2], [4, 6]])              # two epochs
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Sequence

from recordings import make_run, site

from ddpdoctor.events import (
    ContentRead,
    EpochBegan,
    EpochEnded,
    Event,
    GroupReady,
    LoaderSeen,
    StepDone,
    Wrapped,
)
from ddpdoctor.events.pack import pack, pack_ascending
from ddpdoctor.report.findings import Check, Finding
from ddpdoctor.run import Run

SITES = [
    site(1, "train.py", 10, "sampler = make_sampler(dataset)"),
    site(2, "train.py", 11, "loader = DataLoader(dataset)"),
    site(3, "train.py", 20, "for x, y in loader:"),
    site(4, "train.py", 21, "loss = model(x)"),
]


def prologue(world: int, *, wrapped: bool = True, group: Sequence[int] = ()) -> list[Event]:
    """Sites, the default group, a sub-group if given (number 1), and a wrapped model."""
    events: list[Event] = [
        *SITES,
        GroupReady(at=0, group=0, name="0", backend="gloo", ranks=tuple(range(world)), member=True,
                   site=-1),
    ]  # fmt: skip
    if group:
        events.append(
            GroupReady(at=0, group=1, name="1", backend="gloo", ranks=tuple(group), member=True,
                       site=-1)
        )  # fmt: skip
    if wrapped:
        number = 1 if group else 0
        events.append(
            Wrapped(at=0, model=0, wrapper="DistributedDataParallel", kind="Net", group=number,
                    site=-1)
        )  # fmt: skip
    return events


def loader(
    number: int,
    epochs: Sequence[Sequence[int]],
    *,
    length: int = 100,
    trains: bool = True,
    batch_size: int = 4,
    ended: bool = True,
    exhausted: bool = True,
    content: int | None = None,
    began: dict[str, object] | None = None,
    ends: dict[str, object] | None = None,
    planned: bool = False,
    **seen: object,
) -> list[Event]:
    """One rank's loader. `content`: number of the data that indices stand for, None: unknown."""
    values: dict[str, object] = {
        "loader": number, "site": 2, "loop_site": 3, "dataset": "Photos", "length": length,
        "sampler": "RandomSampler", "batch_size": batch_size, **seen,
    }  # fmt: skip
    events: list[Event] = [LoaderSeen(at=0, **values)]  # type: ignore[arg-type]
    for epoch, indices in enumerate(epochs):
        batches = -(-len(indices) // batch_size)
        whole = _at({"exhausted": exhausted, **(ends or {})}, epoch)["exhausted"]
        expected = batches + (not whole and not planned)  # who left early had more before it
        events.append(
            EpochBegan(at=0, loader=number, epoch=epoch,
                       **{"site": 3, "step": 0, "batches": expected, **_at(began, epoch)})
        )  # fmt: skip
        if content is not None:
            events.append(fingerprints(number, epoch, indices, content))
        if trains:
            events += [StepDone(at=0, optimizer=0, step=n, site=4, wall_s=0.1) for n in range(2)]
        if ended:
            events.append(_end(number, epoch, indices, batches, trains, exhausted, ends))
    return events


def _at(values: dict[str, object] | None, epoch: int) -> dict[str, object]:
    """Lists hold one value per epoch."""
    found = (values or {}).items()
    return {k: v[epoch] if isinstance(v, list) else v for k, v in found}


def _end(
    number: int,
    epoch: int,
    indices: Sequence[int],
    batches: int,
    trains: bool,
    exhausted: bool,
    more: dict[str, object] | None,
) -> EpochEnded:
    values: dict[str, object] = {
        "at": 0,
        "batches": batches,
        "samples": len(indices),
        "backwards": batches if trains else 0,
        "exhausted": exhausted,
        "indices": pack_ascending(array("q", indices)),
        "order": zlib.crc32(array("q", indices)),
        "head": tuple(indices[:16]),
        "ascending": list(indices) == sorted(indices),
        "collectives": 2 * batches,
        **_at(more, epoch),
    }
    return EpochEnded(loader=number, epoch=epoch, **values)  # type: ignore[arg-type]


def fingerprints(number: int, epoch: int, indices: Sequence[int], content: int) -> ContentRead:
    """As if index `i` of data set `content` held the number `1000 * content + i`."""
    return ContentRead(
        at=0,
        loader=number,
        epoch=epoch,
        batches=pack(n // 4 for n in range(len(indices))),
        columns=(pack(1000 * content + i + 1 for i in indices),),
        indices=pack(indices),
    )


def run_of(*ranks: Sequence[Event], world: int = 0, **options: object) -> Run:
    size = world or len(ranks)
    return make_run({r: [*prologue(size), *events] for r, events in enumerate(ranks)}, **options)  # type: ignore[arg-type]


def found(check: Check, run: Run) -> list[Finding]:
    return [] if check.unobserved(run) else list(check.examine(run))


def shuffled(seed: int, first: int = 1, count: int = 40) -> list[int]:
    return random.Random(seed).sample(range(first, first + count), count)
