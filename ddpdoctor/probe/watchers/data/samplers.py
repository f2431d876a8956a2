"""What do loaders and samplers of any class say about themselves: sizes, ranks, seeds, epochs?

Asked once per loader, when it is first iterated. For samplers of the user the bytecode shows
whether their order depends on an epoch.
"""

from __future__ import annotations

import dis
import inspect
import sys
import time
from collections.abc import MutableMapping
from types import CodeType
from typing import Any, NamedTuple

from ....events import Layer, LoaderSeen, Payload, SamplerRefused
from ...recording.recorder import Recorder
from . import dataset_entries, dataset_parts
from .dataset_parts import DatasetParts

_SEEDS = ("manual_seed", "seed", "Random", "RandomState", "default_rng")


class MadeOf(NamedTuple):
    """What a data set is made of; the fields are those of `LoaderSeen`."""

    payloads: tuple[Payload, ...] = ()
    layers: tuple[Layer, ...] = ()
    settings: int = 0
    indexless: bool = False
    holds: bool = False


def made_of(recorder: Recorder, dataset: Any) -> MadeOf:
    """Examine a data set. It may hold any objects of the user, so this may raise; the caller then
    records the loader without."""
    return MadeOf(
        dataset_parts.payloads(dataset),
        DatasetParts.current.layers(dataset),
        dataset_entries.settings(dataset),
        dataset_entries.ignores_index(dataset),
        dataset_entries.holds_entries(dataset),
    )


def loader_seen(
    loader: Any,
    sampler: Any,
    *,
    number: int,
    made: tuple[int, int],
    loop: int,
    sampler_site: int,
    made_of: MadeOf,
) -> LoaderSeen:
    """The event that describes a loader."""
    iterable = loader._dataset_kind == 1
    shuffle = getattr(sampler, "shuffle", None)
    epoch_name = "" if _in_torchs_order(sampler) else _epoch_name(sampler)
    given = loader.batch_size is None and _is_torchs_batches(loader.batch_sampler)
    batches = loader.batch_sampler if given else loader
    return LoaderSeen(
        at=time.monotonic(),
        loader=number,
        site=made[0],
        loop_site=loop,
        dataset=type(loader.dataset).__name__,
        length=-1 if iterable else length(loader.dataset),
        sampler=type(sampler).__name__,
        batches=length(loader),
        batch_size=integer(batches.batch_size),
        drop_last=bool(batches.drop_last),
        workers=loader.num_workers,
        persistent=bool(loader.persistent_workers),
        iterable=iterable,
        distributed=integer(getattr(sampler, "num_replicas", None)) is not None,
        replicas=integer_of(sampler, "num_replicas"),
        sampler_rank=integer_of(sampler, "rank"),
        shuffle=shuffle if isinstance(shuffle, bool) else None,
        seed=integer(getattr(sampler, "seed", None)),
        sampler_drop_last=getattr(sampler, "drop_last", False) is True,
        total_size=integer_of(sampler, "total_size"),
        sampler_length=-1 if iterable else length(sampler),
        own_order=not _in_torchs_order(sampler),
        by_epoch=bool(epoch_name),
        replacement=getattr(sampler, "replacement", False) is True,
        sampler_site=sampler_site,
        made=made[1],
        payloads=made_of.payloads,
        layers=made_of.layers,
        batch_sampler=_own_batch_sampler(loader),
        epoch_name=epoch_name,
        sets_epoch=_sets_epoch(type(sampler)),
        settings=made_of.settings,
        batches_given=given,
        indexless=made_of.indexless,
        holds=made_of.holds,
    )


def note_line(recorder: Recorder, sampler: Any, made: MutableMapping[Any, tuple[int, int]]) -> None:
    """Note in `made` the line that makes a sampler of the user's class.

    Called when a loader gets it. The line is the only one that names the class in the function that
    makes the loader, if there is just one.
    """
    if not weakly_referenceable(sampler) or sampler in made or _in_torchs_order(sampler):
        return
    frame = recorder.sites.user_frame(sys._getframe(1))
    line = only_line(frame.f_code, type(sampler).__name__) if frame is not None else None
    if frame is not None and line is not None:
        made[sampler] = recorder.sites.number(frame.f_code, line), 0


def only_line(code: CodeType, name: str) -> int | None:
    """The only line of a function that reads a name; None if there is none or several."""
    starts = dict(dis.findlinestarts(code))
    line: int | None = None
    found: set[int | None] = set()
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset, line)
        loads = instruction.opname.startswith("LOAD_") and instruction.opname != "LOAD_CONST"
        if loads and instruction.argval == name:
            found.add(line)
    return found.pop() if len(found) == 1 else None


def sampler_refused(error: ValueError, site: int, replicas: Any, rank: Any) -> SamplerRefused:
    """The event for a `DistributedSampler` whose constructor raised."""
    import torch.distributed as dist

    ready = dist.is_available() and dist.is_initialized()
    return SamplerRefused(
        at=time.monotonic(),
        site=site,
        error=str(error)[:500],
        replicas=replicas if isinstance(replicas, int) else None,
        rank=rank if isinstance(rank, int) else None,
        world_size=dist.get_world_size() if ready else -1,
        group_rank=dist.get_rank() if ready else -1,
    )


def _is_torchs_batches(batches: Any) -> bool:
    """Whether batches are formed by torch's own `BatchSampler.__iter__`."""
    sizes = hasattr(batches, "batch_size") and hasattr(batches, "drop_last")
    return sizes and _in_torchs_order(batches)


def _own_batch_sampler(loader: Any) -> str:
    batches = loader.batch_sampler
    return "" if batches is None or _in_torchs_order(batches) else type(batches).__name__


def _in_torchs_order(sampler: Any) -> bool:
    chooses = getattr(type(sampler), "__iter__", None)
    return str(getattr(chooses, "__module__", "")).startswith("torch.utils.data")


def epoch_of(sampler: Any) -> int | None:
    """The epoch that a sampler orders by, None if it has none."""
    name = "" if _in_torchs_order(sampler) else _epoch_name(sampler)
    return integer(getattr(sampler, name or "epoch", None))


def _epoch_name(sampler: Any) -> str:
    """Name of the attribute for the epoch that a sampler of the user orders by; empty if none.

    That is what `set_epoch` stores and `__iter__`, with what it calls, reads. Without `set_epoch`
    it is `epoch`, if these read it and seed a generator.
    """
    kind = type(sampler)
    read = _names_used(kind, "__iter__")
    if not _sets_epoch(kind):
        drawn = "epoch" in read and not read.isdisjoint(_SEEDS)
        return "epoch" if drawn and integer(getattr(sampler, "epoch", None)) is not None else ""
    if "epoch" in read:
        return "epoch"
    # `set_epoch` may also store a start position: only names with "epoch" count.
    stored = {i.argval for code in _setters(kind) for i in dis.get_instructions(code)
              if i.opname == "STORE_ATTR" and "epoch" in i.argval}  # fmt: skip
    found = (n for n in sorted(stored & read) if integer(getattr(sampler, n, None)) is not None)
    return next(found, "")


def _sets_epoch(kind: type) -> bool:
    return callable(inspect.getattr_static(kind, "set_epoch", None))


def _setters(kind: type) -> list[CodeType]:
    """The code of `set_epoch` of a class and its bases."""
    found = (getattr(vars(c).get("set_epoch"), "__code__", None) for c in kind.__mro__)
    return [code for code in found if isinstance(code, CodeType)]


def _names_used(kind: type, method: str) -> set[str]:
    """All names in a method and in the methods of the class that it names."""
    named, found = [method], set()
    while named:
        name = named.pop()
        if name in found:
            continue
        found.add(name)
        value = inspect.getattr_static(kind, name, None)
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        codes = [getattr(value, "__code__", None)]
        while codes:
            if isinstance(code := codes.pop(), CodeType):
                named += code.co_names
                codes += code.co_consts
    return found


def innermost(loader: Any) -> Any:
    """The sampler that chooses the samples, beneath batch samplers and wrappers."""
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    for _ in range(5):
        inner = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
        if inner is None or hasattr(sampler, "num_replicas"):
            break
        sampler = inner
    return sampler


def weakly_referenceable(value: Any) -> bool:
    """Whether an object can be a key of a weak dictionary; a list used as a sampler cannot."""
    return hasattr(value, "__weakref__") and getattr(type(value), "__hash__", None) is not None


def integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def integer_of(owner: Any, name: str) -> int:
    found = integer(getattr(owner, name, None))
    return -1 if found is None else found


def length(of: Any) -> int:
    try:
        return len(of)
    except Exception:  # of the user's class, which need not have one
        return -1
