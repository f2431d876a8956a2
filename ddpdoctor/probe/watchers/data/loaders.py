"""Samplers and loaders: what this rank was given to read, and what it consumed."""

from __future__ import annotations

import functools
import time
import weakref
from typing import Any

from ....events import EpochBegan
from ...recording import hooks, rng_state
from ...recording.frames import passed_over, unframe, updates_statistics
from ...recording.index_sample import halvings, kept
from ...recording.patching import around, replace
from ...recording.recorder import Recorder, current, run_hook
from ...recording.stopwatch import loading as loading_time
from ...recording.torch_compat import sequence_number
from ...recording.weak_references import WeakIdentityMap
from ...tensors.sample_digests import Fingerprints
from ...training import lifecycle
from ...training.records import Forward, Loading, Step
from ...training.steady_state import routine
from . import dataset_parts, samplers, sharding, worker_rng
from .iteration import EPOCHS_IN_FULL, Place, Reading
from .samplers import innermost, integer, length, weak

LOST = "what each rank read from its DataLoaders"
LOST_ENTRIES = "what the data sets of some DataLoaders are made of"

WATCHED = 2
"""Epochs, per line that makes loaders, in which the random generators are watched."""

IDENTIFIED = 8
"""Loaders, per line that makes them, whose data set is looked at; then half of them, and so on."""

SOMEWHERE = Loading(-1)
"""Where the line could not be told."""

RANDOM_BATCHES = range(1, 4)
"""Batches around which the random generators are compared; the first one seeds samplers."""


class _Data:
    def __init__(self) -> None:
        self.loaders: WeakIdentityMap[int] = WeakIdentityMap()
        self.made: WeakIdentityMap[tuple[int, int]] = WeakIdentityMap()
        self.epochs_set: WeakIdentityMap[int] = WeakIdentityMap()
        self.places: dict[int, Place] = {}
        self.epochs_begun: dict[int, int] = {}
        # By the id of the iterator: a weak dictionary would cost more than all else per batch.
        self.readings: dict[int, Reading] = {}
        self.iterators: dict[int, weakref.ref[Any]] = {}
        self.gone: list[Reading] = []
        self.pending: dict[Reading, None] = {}
        self.tried: dict[Reading, None] = {}
        self.moved = 0
        self.delivered = 0
        self.joins = 0
        self.sequence = -1
        self.ordered: Any = None


_data = _Data()


def delivered() -> int:
    """Batches that any loader delivered so far."""
    return _data.delivered


def install() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.algorithms.join import Join
    from torch.utils.data import dataloader, dataset, distributed

    _data.__init__()  # type: ignore[misc]
    dataset_parts.forget()
    sharding.forget()
    sampler = distributed.DistributedSampler
    around(dataset.Subset, "__init__", before=_making_subset, lost=LOST)
    around(dataloader.DataLoader, "__setattr__", before=_making, lost=LOST)
    around(sampler, "__init__", before=_making_sampler, after=_made_sampler, lost=LOST)
    around(sampler, "__iter__", before=_ordering, lost=LOST)
    around(sampler, "set_epoch", before=_setting_epoch, lost=LOST)
    base = dataloader._BaseDataLoaderIter
    around(base, "__init__", before=_iterating, after=_iterated, lost=LOST)
    around(base, "_reset", before=_resetting, lost=LOST)
    _watch_batches(base)
    worker_rng.install()
    around((c10d, dist), "destroy_process_group", before=_destroying, lost=LOST)
    around(Join, "__enter__", before=_joining, lost="`Join`")
    around(Join, "__exit__", before=_joined, lost="`Join`")
    lifecycle.step_due.subscribe(_step_due, lost=LOST)
    lifecycle.trial_begins.subscribe(_trial, lost=LOST)
    hooks.leaving.subscribe(_close_all, lost=LOST)


# --- what is made -------------------------------------------------------------------------------


def _making(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An attribute of a loader is set. Every kind gets its data set once, while it is made; not
    every kind calls `DataLoader.__init__` (torchdata's does not)."""
    if args[1:2] == ("sampler",):
        samplers.note_line(recorder, args[2], _data.made)
    if args[1:2] != ("dataset",) or args[0] in _data.made:
        return
    site = recorder.site()
    place = _data.places.setdefault(site, Place())
    _data.made[args[0]] = site, place.loaders
    place.loaders += 1


def _making_subset(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    dataset_parts.made(args[0], recorder.site())


def _making_sampler(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    site = recorder.site()
    _data.made[args[0]] = site, 0
    given = dict(zip(("num_replicas", "rank"), args[2:4], strict=False)) | kwargs
    return site, given.get("num_replicas"), given.get("rank")


def _made_sampler(recorder: Recorder, token: Any, result: Any, error: Any) -> None:
    if isinstance(error, ValueError):
        recorder.emit(samplers.refused(error, *token), vital=True)


def _setting_epoch(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _data.epochs_set[args[0]] = _data.epochs_set.get(args[0], 0) + 1


def _ordering(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _data.ordered = args[0]


def _ordered(recorder: Recorder, reading: Reading | None) -> None:
    """The sampler began an order, for the batch that is about to be handed out."""
    sampler, _data.ordered = _data.ordered, None
    if reading is not None and reading.sampler == id(sampler):
        number = integer(sampler.epoch) if not _data.epochs_set.get(sampler) else None
        reading.orders.append((reading.counted + len(reading.given), number))


def _joining(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    routine.stop(recorder)
    _data.joins += 1


def _joined(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _data.joins -= 1


# --- an iteration begins ------------------------------------------------------------------------


def _iterating(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """None within torch's `update_bn`: for statistics any part of the data will do."""
    loader = args[1] if len(args) > 1 else kwargs["loader"]
    return None if updates_statistics() else (args[0], loader, recorder.site())


def _iterated(recorder: Recorder, token: Any, result: Any, error: Any) -> None:
    if token is not None and error is None:
        _begin(recorder, *token)


def _resetting(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Persistent workers: one iterator for all epochs. The first reset is part of the making."""
    first = args[2] if len(args) > 2 else kwargs.get("first_iter", False)
    loader = args[1] if len(args) > 1 else kwargs.get("loader")
    if not first and loader is not None:
        _begin(recorder, args[0], loader, recorder.site())


def _begin(recorder: Recorder, iterator: Any, loader: Any, site: int) -> None:
    _close_gone(recorder)
    made, nth = _data.made.get(loader, (-1, 0))
    number = _data.loaders.get(loader)
    if number is None:
        number = _data.loaders[loader] = len(_data.epochs_begun)
        _data.epochs_begun[number] = 0
        sampler, made_of = innermost(loader), None
        if kept(nth, halvings(nth, IDENTIFIED)):
            emitted = "data.made_of", LOST_ENTRIES
            made_of = run_hook(recorder, *emitted, samplers.made_of, loader.dataset)
        seen = samplers.loader_seen(
            loader,
            sampler,
            number=number,
            made=(made, nth),
            loop=site,
            sampler_site=_data.made.get(sampler, (-1, 0))[0] if weak(sampler) else -1,
            made_of=made_of or samplers.MadeOf(),
        )
        recorder.emit(seen, vital=True)
    for other in [r for r in _data.readings.values() if r.loader == number and r.open]:
        _close(recorder, other)
    epoch = _data.epochs_begun[number]
    _data.epochs_begun[number] += 1
    place = _data.places.setdefault(made, Place())
    count, place.epochs = place.epochs, place.epochs + 1
    recorded = count % (1 << halvings(count, EPOCHS_IN_FULL)) == 0
    # The content of some samples of the epochs 0, 1, 2, 4, 8, ...: a loader may become another one.
    close = count & (count - 1) == 0
    iterable = loader._dataset_kind == 1
    prints = Fingerprints(length(loader.dataset), loader.batch_size, iterable) if close else None
    reading = Reading(number, epoch, place, prints, silent=not recorded)
    reading.watch_random = count < WATCHED and loader.num_workers == 0
    reading.sequence, reading.sampler = _sequence(), id(innermost(loader))
    identifier = id(iterator)
    _data.readings[identifier] = reading
    _data.iterators[identifier] = weakref.ref(iterator, functools.partial(_dropped, identifier))
    if recorded:
        _emit_began(recorder, iterator, loader, reading, site)
    reading.notes = worker_rng.share(loader.num_workers if count < WATCHED else 0)


def _dropped(identifier: int, _: object) -> None:
    # This may run inside a collection at any moment: only note it, record later.
    _data.iterators.pop(identifier, None)
    reading = _data.readings.pop(identifier, None)
    if reading is not None and reading.open:
        reading.ended_at = time.monotonic()
        _data.gone.append(reading)


def _sequence() -> int:
    import torch.distributed as dist

    ready = dist.is_available() and dist.is_initialized()
    return sequence_number(dist.group.WORLD) if ready else _data.sequence


def _destroying(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An iteration that is never ended, over a stream without an end, outlives the group."""
    _data.sequence = _sequence()


def _emit_began(
    recorder: Recorder, iterator: Any, loader: Any, reading: Reading, site: int
) -> None:
    sampler = innermost(loader)
    seed = getattr(iterator, "_base_seed", None)
    recorder.emit(
        EpochBegan(
            at=time.monotonic(),
            loader=reading.loader,
            epoch=reading.number,
            step=recorder.step,
            site=site,
            sampler_epoch=samplers.epoch_of(sampler),
            batches=length(loader),
            seed=integer(getattr(sampler, "seed", None)),
            epochs_set=_data.epochs_set.get(sampler, 0) if weak(sampler) else 0,
            joined=_data.joins > 0,
            random=rng_state.digests(rng_state.positions()),
            base_seed=seed if loader.num_workers else None,
        ),
        vital=True,
    )


# --- batches ------------------------------------------------------------------------------------


def _watch_batches(base: Any) -> None:
    """These two run for every batch: wrapped by hand, since `around` would cost five times more."""
    import torch

    next_index, next_batch = vars(base)["_next_index"], vars(base)["__next__"]
    readings, clock = _data.readings, time.perf_counter_ns
    state, grad_enabled = _data, torch.is_grad_enabled

    def _next_index(self: Any) -> Any:
        state.ordered = None
        try:
            index = next_index(self)
        except BaseException as error:  # often the end of the epoch
            unframe(error)
            raise
        reading = readings.get(id(self))
        if state.ordered is not None and (recorder := current.recorder) is not None:
            run_hook(recorder, "data.ordered", LOST, _ordered, reading)
        if reading is not None:
            reading.given.append(index)
        return index

    def __next__(self: Any) -> Any:
        recorder = current.recorder
        if recorder is None:
            try:
                return next_batch(self)
            except BaseException as error:
                unframe(error)
                raise
        reading = readings.get(id(self))
        before = _before(recorder, reading) if reading and reading.watch_random else None
        loading = run_hook(recorder, "data.loading", LOST, _loading) or SOMEWHERE
        began = clock()
        try:
            batch = next_batch(self)
        except BaseException as error:
            loading_time.ns += clock() - began
            lifecycle.loading_ends.fire(recorder, loading)
            if reading is not None:
                _failed(recorder, reading, Loading(loading.site, error))
            unframe(error)
            raise
        now = clock()
        loading_time.ns += now - began
        lifecycle.loading_ends.fire(recorder, loading)
        if reading is not None:
            state.delivered += 1
            reading.batches = batches = reading.batches + 1
            if state.tried or (state.pending and state.moved != recorder.moves):
                _use(recorder)
            if grad_enabled():
                reading.grad_enabled = True
                state.pending[reading], state.moved = None, recorder.moves
            if batches >= reading.look_at or now >= reading.write_at or before is not None:
                _look(recorder, reading, batch, now, before)
        recorder.own_ns += clock() - now
        return batch

    for name, wrapper, original in (
        ("_next_index", _next_index, next_index),
        ("__next__", __next__, next_batch),
    ):
        wrapper.__ddpdoctor__ = True  # type: ignore[attr-defined]
        replace(base, name, passed_over(wrapper, original))


def _loading(recorder: Recorder) -> Loading:
    loading = Loading(recorder.sites.caller("loading")[1])
    lifecycle.loading_begins.fire(recorder, loading)
    return loading


def _before(recorder: Recorder, reading: Reading) -> Any:
    if reading.batches not in RANDOM_BATCHES:
        reading.watch_random = reading.batches < RANDOM_BATCHES.start
        return None
    try:
        return rng_state.positions()
    except Exception as error:
        reading.watch_random = False
        recorder.trouble("data.random", error, "the random numbers that loading data draws")
        return None


def _look(recorder: Recorder, reading: Reading, batch: Any, now: int, before: Any) -> None:
    if recorder.disabled("data.look"):
        return
    try:
        if before is not None:
            for name, old, new in zip(rng_state.NAMES, before, rng_state.positions()):  # noqa: B905
                if old != new:
                    reading.drawn[name] = None
        if reading.batches >= reading.look_at or now >= reading.write_at:
            reading.look(recorder, batch, now)
        if _data.gone:
            _close_gone(recorder)
    except Exception as error:
        recorder.trouble("data.look", error, LOST)


def _failed(recorder: Recorder, reading: Reading, loading: Loading) -> None:
    try:
        if isinstance(loading.error, StopIteration):
            reading.exhausted = True
            _close(recorder, reading)
        else:
            lifecycle.loading_failed.fire(recorder, loading)
    except Exception as trouble:
        recorder.trouble("data.close", trouble, LOST)


# --- what the loop does with them ---------------------------------------------------------------


def _step_due(recorder: Recorder, step: Step) -> None:
    sharding.look(recorder, step)
    if _data.gone:
        _close_gone(recorder)


def _settle(recorder: Recorder) -> None:
    """What was delivered before a backward or step was trained on."""
    if not _data.pending or _data.moved == recorder.moves:
        return
    for reading in _data.pending:
        reading.trained += 1
    _data.pending.clear()
    _data.tried.clear()


def _trial(recorder: Recorder, forward: Forward) -> None:
    """What goes through the model without gradients may yet be trained on: a generator's samples
    for the other network, examples that are mined. Only the next batch tells."""
    _settle(recorder)
    _data.tried.update(_data.pending)


def _use(recorder: Recorder) -> None:
    """Another batch comes: what those before it were used for."""
    try:
        _settle(recorder)
        _evaluated()
    except Exception as error:
        recorder.trouble("data.use", error, "which batches were trained on")


def _evaluated() -> None:
    """Another batch came, or an iteration ended, before what went through the model was trained
    on: that was evaluation."""
    for reading in _data.tried:
        reading.evaluated += 1
        _data.pending.pop(reading, None)
    _data.tried.clear()


# --- an iteration ends --------------------------------------------------------------------------


def _close(recorder: Recorder, reading: Reading) -> None:
    if not reading.open:
        return
    reading.open = False
    _settle(recorder)
    _evaluated()
    now = _sequence()
    issued = now - reading.sequence if now >= 0 and reading.sequence >= 0 else -1
    reading.close(recorder, issued, sharding.shares_inputs())


def _close_gone(recorder: Recorder) -> None:
    while _data.gone:
        _close(recorder, _data.gone.pop())


def _close_all(recorder: Recorder, _: None) -> None:
    _close_gone(recorder)
    for reading in list(_data.readings.values()):
        _close(recorder, reading)
