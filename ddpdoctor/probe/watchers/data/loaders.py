"""Which samplers and loaders does this rank use, and which batches does the loop consume?

Loaders, samplers and subsets are noted when they are made and recorded when they are iterated. What
each iteration delivers is counted per batch.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

from ....events.process import LOADERS_LOST
from ....storage.call_ring import Phase
from ...recording import hooks, rng_state
from ...recording.devices import Work, overlapped
from ...recording.frames import disguise, unframe, updates_statistics
from ...recording.import_hooks import when_imported
from ...recording.index_sample import halvings, kept
from ...recording.patching import replace
from ...recording.recorder import Recorder, current, run_hook
from ...recording.stopwatch import loading as loading_time
from ...recording.torch_compat import interposed, sequence_number
from ...recording.watcher import Args, Kwargs, Watcher, on
from ...recording.weak_references import WeakIdentityMap
from ...tensors.fingerprints import Fingerprints
from ...training import lifecycle
from ...training.records import Forward, Loading, Step
from ...training.steady_state import Plan, Stage, steady_state
from . import samplers
from .dataset_entries import length
from .dataset_parts import DatasetParts
from .iteration import EPOCHS_IN_FULL, Iteration, LoaderLine
from .own_generators import OwnDraws
from .samplers import innermost, integer, weakly_referenceable
from .sharding import Sharding
from .worker_rng import WorkerRNG

LOST_ENTRIES = "what the data sets of some DataLoaders are made of"

WATCHED = 2
"""Epochs per line that makes loaders in which the random generators are watched: loading uses them
in every epoch or never."""

IDENTIFIED = 8
"""Loaders per line that makes them whose data set is examined; after that half of them, a quarter
and so on: some programs make a loader per epoch."""

_DATA = int(Phase.DATA)  # a plain number, see `Stage`

UNKNOWN_LINE = Loading(-1)
"""Stands for a batch whose line in the user's code is unknown."""


class Loaders(Watcher):
    """
    Attributes:
        loaders: numbers of loaders that were iterated.
        made: line that makes a loader or sampler, and how many were made there before.
        epochs_set: calls of `set_epoch`, by sampler; epoch_set_at: the line of the last one, by
            the sampler's data set.
        restored: by loader, the state that its next iteration begins with.
        lines: by site, what all loaders made there delivered.
        epochs_begun: by loader number.
        iterations, iterators: running iterations and their iterators, by the iterator's id.
        gone: iterations whose iterator was garbage-collected, still to be closed.
        pending: iterations that delivered a batch since the last backward or step; `tried` are
            those of which a batch went through a model without gradients.
        moved: `recorder.moves` when `pending` was last added to.
        delivered: batches of all loaders so far.
        joins: nesting of `Join` contexts.
        sequence: torch's count of collectives before the process group was destroyed.
        loading: the last wait for a batch of a step on the fast path.
        ordered: the sampler that has begun an order since the last index was asked for.
    """

    lost = LOADERS_LOST

    def __init__(self) -> None:
        self.loaders: WeakIdentityMap[int] = WeakIdentityMap()
        self.made: WeakIdentityMap[tuple[int, int]] = WeakIdentityMap()
        self.epochs_set: WeakIdentityMap[int] = WeakIdentityMap()
        self.epoch_set_at: WeakIdentityMap[int] = WeakIdentityMap()
        self.restored: WeakIdentityMap[samplers.Restored] = WeakIdentityMap()
        self.lines: dict[int, LoaderLine] = {}
        self.epochs_begun: dict[int, int] = {}
        # By the id of the iterator: a weak dictionary would cost more than all else per batch.
        self.iterations: dict[int, Iteration] = {}
        self.iterators: dict[int, weakref.ref[Any]] = {}
        self.gone: list[Iteration] = []
        self.pending: dict[Iteration, None] = {}
        self.tried: dict[Iteration, None] = {}
        self.moved = 0
        self.delivered = 0
        self.joins = 0
        self.sequence = -1
        self.ordered: Any = None
        self.loading = Loading(-1)
        self.grad_enabled: Callable[[], bool] = bool

    def install(self) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d
        from torch.distributed.algorithms.join import Join
        from torch.utils.data import dataloader, dataset, distributed

        sampler = distributed.DistributedSampler
        self.around(dataset.Subset, "__init__", before=self._making_subset)
        self.around(dataloader.DataLoader, "__setattr__", before=self._making)
        self.around(sampler, "__init__", before=self._making_sampler, after=self._made_sampler)
        self.around(sampler, "__iter__", before=self._ordering)
        self.around(sampler, "set_epoch", before=self._setting_epoch)
        base = dataloader._BaseDataLoaderIter
        self.around(base, "__init__", before=self._iterating, after=self._iterated)
        self.around(base, "_reset", before=self._resetting)
        self._watch_batches(base)
        when_imported(samplers.STATEFUL, self._watch_states, lost=self.lost)
        self.around((c10d, dist), "destroy_process_group", before=self._destroying)
        self.around(Join, "__enter__", before=self._joining, lost="`Join`")
        self.around(Join, "__exit__", before=self._joined, lost="`Join`")

    # --- what is made -------------------------------------------------------------------

    def _making(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        """An attribute of a loader is set.

        Every loader class sets `dataset` once, in its constructor; not every one calls
        `DataLoader.__init__` (torchdata's `StatefulDataLoader` does not).
        """
        if args[1:2] == ("sampler",):
            samplers.note_line(recorder, args[2], self.made)
        if args[1:2] != ("dataset",) or args[0] in self.made:
            return
        site = recorder.site()
        line = self.lines.setdefault(site, LoaderLine())
        self.made[args[0]] = site, line.loaders
        line.loaders += 1

    def _making_subset(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        DatasetParts.current.made(args[0], recorder.site())

    def _watch_states(self, module: Any) -> None:
        self.around(module.StatefulDataLoader, "load_state_dict", before=self._restoring)

    def _restoring(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        state = args[1] if len(args) > 1 else kwargs["state_dict"]
        self.restored[args[0]] = samplers.restored(args[0].dataset, state, recorder.site())

    def _making_sampler(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        site = recorder.site()
        self.made[args[0]] = site, 0
        given = dict(zip(("num_replicas", "rank"), args[2:4], strict=False)) | kwargs
        return site, given.get("num_replicas"), given.get("rank")

    def _made_sampler(self, recorder: Recorder, token: Any, result: Any, error: Any) -> None:
        if isinstance(error, ValueError):
            recorder.emit(samplers.sampler_refused(error, *token), vital=True)

    def _setting_epoch(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        self.epochs_set[args[0]] = self.epochs_set.get(args[0], 0) + 1
        if weakly_referenceable(args[0].dataset):
            self.epoch_set_at[args[0].dataset] = recorder.site()

    def _ordering(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        self.ordered = args[0]

    def _ordered(self, recorder: Recorder, iteration: Iteration | None) -> None:
        """Note that the sampler began a new order, for the next batch."""
        sampler, self.ordered = self.ordered, None
        if iteration is not None and iteration.sampler == id(sampler):
            number = integer(sampler.epoch) if not self.epochs_set.get(sampler) else None
            iteration.orders.append((iteration.counted + len(iteration.given), number))

    def _joining(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        steady_state.stop(recorder)
        self.joins += 1

    def _joined(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        self.joins -= 1

    # --- an iteration begins ------------------------------------------------------------

    def _iterating(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        """Note the loader that is iterated; None inside `torch.optim.swa_utils.update_bn`, which
        may use any part of the data."""
        loader = args[1] if len(args) > 1 else kwargs["loader"]
        return None if updates_statistics() else (args[0], loader, recorder.site())

    def _iterated(self, recorder: Recorder, token: Any, result: Any, error: Any) -> None:
        if token is not None and error is None:
            self._begin(recorder, *token)

    def _resetting(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        """An iterator with persistent workers serves all epochs and is reset for each; the first
        reset is part of its constructor."""
        first = args[2] if len(args) > 2 else kwargs.get("first_iter", False)
        loader = args[1] if len(args) > 1 else kwargs.get("loader")
        if not first and loader is not None:
            self._begin(recorder, args[0], loader, recorder.site())

    def _begin(self, recorder: Recorder, iterator: Any, loader: Any, site: int) -> None:
        self._close_gone(recorder)
        made, nth = self.made.get(loader, (-1, 0))
        number = self.loaders.get(loader)
        if number is None:
            number = self.loaders[loader] = len(self.epochs_begun)
            self.epochs_begun[number] = 0
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
                sampler_site=self.made.get(sampler, (-1, 0))[0]
                if weakly_referenceable(sampler)
                else -1,
                made_of=made_of or samplers.MadeOf(),
            )
            recorder.emit(seen, vital=True)
        for other in [r for r in self.iterations.values() if r.loader == number and r.open]:
            self._close(recorder, other)
        epoch = self.epochs_begun[number]
        self.epochs_begun[number] += 1
        line = self.lines.setdefault(made, LoaderLine())
        count, line.epochs = line.epochs, line.epochs + 1
        recorded = count % (1 << halvings(count, EPOCHS_IN_FULL)) == 0
        # Fingerprint samples in the epochs 0, 1, 2, 4, 8, ...: a data set may change between
        # epochs.
        close = count & (count - 1) == 0
        iterable = loader._dataset_kind == 1
        prints = (
            Fingerprints(length(loader.dataset), loader.batch_size, iterable) if close else None
        )
        if count == 0:
            line.share = samplers.share_of_one_pass(loader)
        iteration = Iteration(number, epoch, line, prints, silent=not recorded)
        iteration.watch_random = count < WATCHED and loader.num_workers == 0
        iteration.own = (
            OwnDraws(loader.dataset) if iteration.watch_random and not iterable else None
        )
        iteration.sequence, iteration.sampler = self._sequence(), id(innermost(loader))
        identifier = id(iterator)
        self.iterations[identifier] = iteration
        self.iterators[identifier] = weakref.ref(
            iterator, functools.partial(self._dropped, identifier)
        )
        if recorded:
            began = samplers.epoch_began(
                iterator,
                loader,
                step=recorder.step,
                site=site,
                number=(number, epoch),
                given=self.restored.pop(loader, samplers.Restored()),
                epochs_set=self.epochs_set,
                epoch_set_at=self.epoch_set_at,
                joined=self.joins > 0,
                calls=log.counts() if (log := recorder.call_log) is not None else (),
            )
            recorder.emit(began, vital=True)
        iteration.notes = WorkerRNG.current.share(
            loader.num_workers if count < WATCHED else 0, loader.dataset if iterable else None
        )

    def _dropped(self, identifier: int, _: object) -> None:
        # Called by the garbage collector, inside any code and maybe under a lock: only note it.
        self.iterators.pop(identifier, None)
        iteration = self.iterations.pop(identifier, None)
        if iteration is not None and iteration.open:
            iteration.ended_at = time.monotonic()
            self.gone.append(iteration)

    def _sequence(self) -> int:
        import torch.distributed as dist

        ready = dist.is_available() and dist.is_initialized()
        return sequence_number(dist.group.WORLD) if ready else self.sequence

    def _destroying(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        """Keep the count of collectives: an iteration over an endless stream outlives the group."""
        self.sequence = self._sequence()

    # --- batches ------------------------------------------------------------------------

    def _watch_batches(self, base: Any) -> None:
        """Wrap the two functions that run for every batch; `around` would cost five times more."""
        import torch

        next_index, next_batch = vars(base)["_next_index"], vars(base)["__next__"]
        iterations, clock = self.iterations, time.perf_counter_ns
        grad_enabled = self.grad_enabled = torch.is_grad_enabled

        def _next_index(iterator: Any) -> Any:
            self.ordered = None
            try:
                index = next_index(iterator)
            except BaseException as error:  # often the end of the epoch
                unframe(error)
                raise
            iteration = iterations.get(id(iterator))
            if self.ordered is not None and (recorder := current.recorder) is not None:
                run_hook(recorder, "data.ordered", self.lost, self._ordered, iteration)
            if iteration is not None:
                iteration.given.append(index)
            return index

        def __next__(iterator: Any) -> Any:
            recorder = current.recorder
            if recorder is None:
                try:
                    return next_batch(iterator)
                except BaseException as error:
                    unframe(error)
                    raise
            iteration = iterations.get(id(iterator))
            before = None
            if iteration and iteration.watch_random:
                before = iteration.generators(recorder)
            plan = steady_state.expected
            if plan is not None:
                plan = self._begins_fast(recorder, plan)
            if plan is None:
                loading = run_hook(recorder, "data.loading", self.lost, _loading) or UNKNOWN_LINE
            else:
                loading = self.loading
            began = clock()
            try:
                batch = next_batch(iterator)
            except BaseException as error:
                loading_time.ns += clock() - began
                recorder.catch_up()
                lifecycle.loading_ends.fire(recorder, loading)
                if iteration is not None:
                    self._loading_failed(recorder, iteration, loading.site, error)
                unframe(error)
                raise
            now = clock()
            loading_time.ns += now - began
            if Work.latest is not None:
                run_hook(recorder, "data.overlap", self.lost, overlapped, now - began)
            if plan is None or (plan.inside is None and lifecycle.loading_ends.on_fast_path):
                lifecycle.loading_ends.fire(recorder, loading)
            if plan is not None:
                plan.loaded(recorder, loading.site, now * 1e-9)
            if iteration is not None:
                self.delivered += 1
                iteration.batches = batches = iteration.batches + 1
                if self.tried or (self.pending and self.moved != recorder.moves):
                    if not self.tried and len(self.pending) == 1 and iteration in self.pending:
                        iteration.trained += 1  # as `_next_batch` does, in most programs
                    else:
                        self._next_batch(recorder)
                if grad_enabled():
                    iteration.grad_enabled = True
                    self.pending[iteration], self.moved = None, recorder.moves
                if batches >= iteration.look_at or now >= iteration.write_at or before is not None:
                    self._batch_delivered(recorder, iteration, batch, now, before)
            recorder.own_ns += clock() - now
            return batch

        both = ("_next_index", _next_index, next_index), ("__next__", __next__, next_batch)
        for name, wrapper, original in both:
            wrapper.__ddpdoctor__ = True  # type: ignore[attr-defined]
            replace(base, name, disguise(wrapper, original))

    def _begins_fast(self, recorder: Recorder, plan: Plan) -> Plan | None:
        """Enter the wait for a batch before a step that is to take the fast path; None if other
        watchers want to know of it, or it may be an evaluation's."""
        if steady_state.stage != Stage.NONE or lifecycle.loading_begins.on_fast_path:
            plan.light = 0
            return None
        began = time.perf_counter_ns()
        try:
            module = plan.model.inner()
            trains = module is not None and module.training and self.grad_enabled()
            if not trains or interposed.compiler() is not None:
                return None
            ring, now = plan.ring, began * 1e-9
            if plan.light and not lifecycle.loading_ends.in_light and plan.load(now):
                return plan
            recorder.catch_up()
            site = recorder.sites.caller("fast loading")[1]
            if site != self.loading.site or plan.loads is None:
                self.loading = Loading(site)
                plan.load_at(recorder, site)
            ring.enter(_DATA, site, now)
            if ring.in_evaluation:
                ring.evaluating(False)
        except Exception as error:
            recorder.trouble("data.loading", error, self.lost)
            return None
        finally:
            recorder.own_ns += time.perf_counter_ns() - began
        return plan

    def _batch_delivered(
        self, recorder: Recorder, iteration: Iteration, batch: Any, now: int, before: Any
    ) -> None:
        if recorder.disabled("data.look"):
            return
        try:
            if before is not None:
                for name, old, new in zip(rng_state.NAMES, before, rng_state.positions()):  # noqa: B905
                    if old != new:
                        iteration.drawn[name] = None
            if iteration.batches >= iteration.look_at or now >= iteration.write_at:
                iteration.examine(recorder, batch, now)
            if self.gone:
                self._close_gone(recorder)
        except Exception as error:
            recorder.trouble("data.look", error, self.lost)

    def _loading_failed(
        self, recorder: Recorder, iteration: Iteration, site: int, error: BaseException
    ) -> None:
        try:
            if isinstance(error, StopIteration):
                iteration.exhausted = True
                self._close(recorder, iteration)
            else:
                lifecycle.loading_failed.fire(recorder, Loading(site, error))
        except Exception as trouble:
            recorder.trouble("data.close", trouble, self.lost)

    # --- what the loop does with them ---------------------------------------------------

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        Sharding.current.look(recorder, step)
        if self.gone:
            self._close_gone(recorder)

    def _count_trained(self, recorder: Recorder) -> None:
        """Count batches that a backward or step followed as trained on."""
        if not self.pending or self.moved == recorder.moves:
            return
        for iteration in self.pending:
            iteration.trained += 1
        self.pending.clear()
        self.tried.clear()

    @on(lifecycle.trial_begins)
    def _trial_begins(self, recorder: Recorder, forward: Forward) -> None:
        """A forward without gradients: its batch counts as evaluated unless a backward comes before
        the next batch (as for a generator's samples or mined examples)."""
        self._count_trained(recorder)
        self.tried.update(self.pending)

    def _next_batch(self, recorder: Recorder) -> None:
        """Another batch was delivered: count those before it as trained on or evaluated."""
        try:
            self._count_trained(recorder)
            self._count_evaluated()
        except Exception as error:
            recorder.trouble("data.use", error, "which batches were trained on")

    def _count_evaluated(self) -> None:
        """Count batches that went through a model without gradients and were not trained on."""
        for iteration in self.tried:
            iteration.evaluated += 1
            self.pending.pop(iteration, None)
        self.tried.clear()

    # --- an iteration ends --------------------------------------------------------------

    def _close(self, recorder: Recorder, iteration: Iteration) -> None:
        if not iteration.open:
            return
        iteration.open = False
        self._count_trained(recorder)
        self._count_evaluated()
        now = self._sequence()
        issued = now - iteration.sequence if now >= 0 and iteration.sequence >= 0 else -1
        iteration.close(recorder, issued, Sharding.current.shares_inputs)

    def _close_gone(self, recorder: Recorder) -> None:
        while self.gone:
            self._close(recorder, self.gone.pop())

    @on(hooks.leaving)
    def _close_all(self, recorder: Recorder, _: None) -> None:
        self._close_gone(recorder)
        for iteration in list(self.iterations.values()):
            self._close(recorder, iteration)


def _loading(recorder: Recorder) -> Loading:
    loading = Loading(recorder.sites.caller("loading")[1])
    lifecycle.loading_begins.fire(recorder, loading)
    return loading
