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

from ....events import EpochBegan, Layer, LoaderSeen, Payload, PerProcess, SamplerRefused
from ...recording import rng_state
from ...recording.code_locations import own_files
from ...recording.recorder import Recorder
from ...source import process_order
from ...tensors.sample_digests import digest_state
from . import dataset_entries, dataset_parts
from .dataset_entries import length
from .dataset_parts import DatasetParts

_SEEDS = ("manual_seed", "seed", "Random", "RandomState", "default_rng")

_FILES = 4
"""Files of the program that are parsed to find lines that differ between processes, beyond those
of the data set's class: one of a thousand lines takes some 30 ms."""

_NESTED = 5
"""Iterable data sets within each other that are searched for the one with an epoch."""


class MadeOf(NamedTuple):
    """What a data set is made of; the fields are those of `LoaderSeen`."""

    payloads: tuple[Payload, ...] = ()
    layers: tuple[Layer, ...] = ()
    settings: int = 0
    indexless: bool = False
    holds: bool = False
    per_process: tuple[PerProcess, ...] = ()
    listed: tuple[Payload, ...] = ()


STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
"""The module of the loader that can be stopped and continued."""


class Restored(NamedTuple):
    """The state that a loader continues from.

    Attributes:
        state: digest of it, 0 if it is not known.
        over: digest of what the data set held until then.
        site: the line that gave it.
    """

    state: int = 0
    over: int = 0
    site: int = -1


def restored(dataset: Any, state: Any, site: int) -> Restored:
    """What a loader over this data set is given by `load_state_dict`."""
    held = digest_state(dataset_entries.kept(dataset), whole=False)
    return Restored(digest_state(state), held, site)


def made_of(recorder: Recorder, dataset: Any) -> MadeOf:
    """Examine a data set. It may hold any objects of the user, so this may raise; the caller then
    records the loader without."""
    return MadeOf(
        dataset_parts.payloads(dataset),
        DatasetParts.current.layers(dataset),
        dataset_entries.settings(dataset),
        dataset_entries.ignores_index(dataset),
        dataset_entries.holds_entries(dataset),
        _per_process(recorder, dataset),
        dataset_parts.listed(dataset),
    )


def _per_process(recorder: Recorder, dataset: Any) -> tuple[PerProcess, ...]:
    from torch.utils.data import IterableDataset

    inner = dataset_entries.innermost(dataset)
    if isinstance(inner, IterableDataset):  # its samples have no indices to compare them by
        return ()
    return tuple(
        PerProcess(how, recorder.sites.place(file, line, ""))
        for how, file, line in process_order.places(type(inner), own_files()[:_FILES])
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
    ordered = stream_with_epoch(loader.dataset) if iterable else sampler
    shuffle = _told_to_shuffle(ordered) if iterable else getattr(sampler, "shuffle", None)
    epoch_name = "" if _in_torchs_order(ordered) else _epoch_name(ordered)
    copied = iterable and integer(getattr(ordered, epoch_name or "epoch", None)) is not None
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
        sets_epoch=_sets_epoch(type(ordered)),
        settings=made_of.settings,
        batches_given=given,
        indexless=made_of.indexless,
        holds=made_of.holds,
        per_process=made_of.per_process,
        listed=made_of.listed,
        epoch_copied=copied and getattr(loader, "persistent_workers", False) is True,
    )


def share_of_one_pass(loader: Any) -> int:
    """Batches of this rank in one pass of all ranks over the data, if the loader goes on for more;
    0 if it does not, or nobody knows."""
    import torch.distributed as dist

    size = integer(getattr(loader, "batch_size", None)) or 0
    ready = dist.is_available() and dist.is_initialized()
    if not ready or size < 1 or loader._dataset_kind == 1:
        return 0
    share = length(loader.dataset) // dist.get_world_size() // size
    return share if 0 < share < length(loader) else 0


def epoch_began(
    iterator: Any,
    loader: Any,
    *,
    step: int,
    site: int,
    number: tuple[int, int],
    given: Restored,
    epochs_set: MutableMapping[Any, int],
    epoch_set_at: MutableMapping[Any, int],
    joined: bool,
    calls: tuple[int, ...],
) -> EpochBegan:
    """The event that an iteration begins.

    Args:
        number: of the loader, and of its epoch.
        given: the state that it begins with.
        epochs_set: calls of `set_epoch`, by sampler.
        epoch_set_at: the line of the last one, by the sampler's data set.
        joined: inside of a `Join` context.
        calls: of `EpochBegan`.
    """
    sampler = innermost(loader)
    seed = getattr(iterator, "_base_seed", None)
    own = epochs_set.get(sampler, 0) if weakly_referenceable(sampler) else 0
    dataset = getattr(sampler, "dataset", None)
    known = not own and weakly_referenceable(dataset)
    return EpochBegan(
        at=time.monotonic(),
        loader=number[0],
        epoch=number[1],
        step=step,
        site=site,
        sampler_epoch=epoch_of(orders(loader)),
        batches=length(loader),
        seed=integer(getattr(sampler, "seed", None)),
        epochs_set=own,
        set_elsewhere=epoch_set_at.get(dataset, -1) if known else -1,
        joined=joined,
        random=rng_state.digests(rng_state.positions()),
        base_seed=seed if loader.num_workers else None,
        restored=given.state,
        restored_over=given.over,
        restored_site=given.site,
        calls=calls,
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


def orders(loader: Any) -> Any:
    """What decides on a loader's order: its innermost sampler, or the stream that it iterates."""
    return stream_with_epoch(loader.dataset) if loader._dataset_kind == 1 else innermost(loader)


def stream_with_epoch(dataset: Any) -> Any:
    """An iterable data set, or the one within it whose order depends on an epoch."""
    from torch.utils.data import IterableDataset

    stream = dataset
    for _ in range(_NESTED):
        if not _in_torchs_order(stream) and _epoch_name(stream):
            return stream
        within = getattr(stream, "__dict__", {}).values()
        stream = next((v for v in within if isinstance(v, IterableDataset)), None)
        if stream is None:
            break
    return dataset


def _told_to_shuffle(stream: Any) -> bool | None:
    """False where all attributes of a stream that speak of shuffling say no, else None."""
    said = [v for name, v in dataset_entries.kept(stream).items() if "shuffl" in name.lower()]
    refused = all(v is None or (type(v) in (bool, int) and not v) for v in said)
    return False if said and refused else None


def epoch_of(sampler: Any) -> int | None:
    """The epoch that a sampler or a stream orders by, None if it has none."""
    name = "" if _in_torchs_order(sampler) else _epoch_name(sampler)
    return _number(getattr(sampler, name or "epoch", None))


def _number(value: Any) -> int | None:
    """A whole number, also one in shared memory: a tensor, or a `multiprocessing.Value`."""
    import torch

    if type(value) is torch.Tensor:
        whole = value.is_cpu and value.numel() == 1 and not value.is_floating_point()
        return int(value) if whole else None
    if type(value).__module__.startswith("multiprocessing."):
        # Not through the lock that a worker may hold.
        value = getattr(getattr(value, "get_obj", lambda: value)(), "value", None)
    return integer(value)


def _epoch_name(sampler: Any) -> str:
    """Name of the attribute for the epoch that a sampler of the user orders by; empty if none.

    That is what `set_epoch` stores and `__iter__`, with what it calls, reads. Without `set_epoch`
    it is `epoch`, if these read it and seed a generator.
    """
    kind = type(sampler)
    read = names_used(kind, "__iter__")
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


def names_used(kind: type, method: str) -> set[str]:
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
