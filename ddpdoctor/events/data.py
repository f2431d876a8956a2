"""Samplers, loaders and what they delivered."""

from __future__ import annotations

from .base import Event, Part


class Payload(Part, frozen=True):
    """One thing that a data set indexes: `Subset.indices`, a list of files, a tensor of samples.

    Attributes:
        name: the attribute, with its path (`dataset.samples`).
        kind: `indices` (of a `Subset`), `choice` (integers that select samples), `text`, `tensor`
            or `other`.
        length: number of entries.
        order: digest of entries at the same positions on every rank; equal where the entries are.
        content: digest that does not depend on the order; 0 if there are too many entries.
        ascending: the entries are numbers that never decrease.
        tells: sample `i` is made from entry `i`, and nearly all entries are distinct, so that an
            entry identifies its sample.
        pieces: packed digests of equal parts of a tensor or other entries, in their order; empty if
            there are too few entries.
    """

    name: str
    kind: str
    length: int
    order: int
    content: int = 0
    ascending: bool = False
    tells: bool = False
    pieces: str = ""


class Layer(Part, frozen=True):
    """A data set, or one that it is a `Subset` of.

    Attributes:
        data: number of the object on this rank; equal numbers mean the same object.
        indices: what a `Subset` selects from the next layer (see `ddpdoctor.events.pack`); empty if
            it is no `Subset`, is `regular`, or is too large to record.
        site: the line that made the `Subset`.
        length: number of samples, -1 if unknown.
        regular: first, step and count of a selection at equal distances; all 0 if it is none.
    """

    data: int
    indices: str = ""
    site: int = -1
    length: int = -1
    regular: tuple[int, int, int] = (0, 0, 0)


class PerProcess(Part, frozen=True):
    """A line of the program that may give other results in each process: `how` is `hash` (of a
    text, say), `set` (its order), `shuffle` (or another draw), or `listing` (of files)."""

    how: str
    site: int


class LoaderSeen(Event, frozen=True, tag="loader"):
    """A DataLoader was iterated for the first time.

    Attributes:
        loader: number of the loader on this rank, in order of first iteration.
        site: the line that made it; `loop_site` the line that iterates it.
        made: number of loaders that line had made before.
        dataset: class name; `length` is -1 if it has none (iterable data sets).
        sampler: class name of the innermost sampler; the `replicas`/`rank`/... fields are -1 or
            None if it has no such attribute.
        batches: `len(loader)`, -1 if unknown.
        sampler_length: `len(sampler)`, -1 if unknown.
        own_order: the sampler's class chooses the indices with its own code, not torch's.
        by_epoch: that code depends on an epoch.
        replacement: the sampler may draw a sample again.
        payloads: what the data set indexes, if known.
        layers: the data set, and beneath it those that it is a `Subset` of.
        batch_sampler: class name of the batch sampler if it is not torch's own.
        epoch_name: the attribute that holds the epoch; `sets_epoch` says that the sampler has
            `set_epoch`. Of an iterable data set, which has no sampler, `shuffle` (False where it is
            told not to), `by_epoch` and these two are those of the stream itself.
        epoch_copied: the stream's epoch is a plain number, of which each persistent worker keeps
            the copy that it was started with.
        settings: digest of the numbers and texts that the data set keeps (paths of files, say), 0
            if not looked at.
        batches_given: a `BatchSampler` was passed to the loader; `batch_size` and `drop_last` are
            its own.
        indexless: the data set's `__getitem__` never reads its index.
        holds: the data set keeps an array or a list, and not only numbers.
        per_process: such lines, those of the data set's class first.
        persistent: the workers are kept from one iteration to the next.
        listed: the lists of texts (files, say) that the data set holds, of one with indices those
            with a text for each sample; the `pieces` of each are digests of all entries.
    """

    loader: int
    site: int
    loop_site: int
    dataset: str
    length: int
    sampler: str
    batches: int = -1
    batch_size: int | None = None
    drop_last: bool = False
    workers: int = 0
    iterable: bool = False
    distributed: bool = False
    replicas: int = -1
    sampler_rank: int = -1
    shuffle: bool | None = None
    seed: int | None = None
    sampler_drop_last: bool = False
    total_size: int = -1
    sampler_site: int = -1
    made: int = 0
    payloads: tuple[Payload, ...] = ()
    sampler_length: int = -1
    own_order: bool = False
    by_epoch: bool = False
    replacement: bool = False
    layers: tuple[Layer, ...] = ()
    batch_sampler: str = ""
    epoch_name: str = ""
    sets_epoch: bool = True
    settings: int = 0
    batches_given: bool = False
    indexless: bool = False
    holds: bool = False
    epoch_copied: bool = False
    per_process: tuple[PerProcess, ...] = ()
    persistent: bool = False
    listed: tuple[Payload, ...] = ()

    def describe(self) -> str:
        return f"loader {self.loader}: {self.dataset}({self.length}) through {self.sampler}"


class SamplerRefused(Event, frozen=True, tag="sampler-refused"):
    """The constructor of a `DistributedSampler` raised.

    Attributes:
        replicas, rank: the arguments passed, None if left out.
        world_size, group_rank: of the default group, -1 if there is none.
    """

    site: int
    error: str
    replicas: int | None = None
    rank: int | None = None
    world_size: int = -1
    group_rank: int = -1

    def describe(self) -> str:
        return f"DistributedSampler(num_replicas={self.replicas}, rank={self.rank}): {self.error}"


class EpochBegan(Event, frozen=True, tag="epoch-began"):
    """An iteration over a loader began. `epoch` counts iterations of this loader from 0.

    Attributes:
        batches: `len(loader)` at that moment, -1 where unknown.
        sampler_epoch, seed: of the innermost sampler at that moment; see `LoaderSeen.epoch_name`.
            The epoch of an iterable data set is the one in this process, whatever workers hold.
        epochs_set: calls of `set_epoch` on it so far; set_elsewhere: if none, the line that called
            it last on another sampler of the same data set.
        joined: inside `torch.distributed.algorithms.Join`.
        random: digests of the states of the random generators of torch, NumPy and Python, 0 if
            unknown; `base_seed` is the seed that the loader passes to its workers.
        restored: digest of the state that the loader was given before (`load_state_dict` of
            torchdata's), at the line `restored_site`; 0 if there was none. `restored_over` is one
            of what the data set held until then.
        calls: how many collectives of each group the rank had called: `g0, n0, g1, n1, ...`; none
            in older records.
    """

    loader: int
    epoch: int
    step: int
    site: int
    sampler_epoch: int | None = None
    batches: int = -1
    seed: int | None = None
    epochs_set: int = 0
    set_elsewhere: int = -1
    joined: bool = False
    random: tuple[int, int, int] = (0, 0, 0)
    base_seed: int | None = None
    restored: int = 0
    restored_over: int = 0
    restored_site: int = -1
    calls: tuple[int, ...] = ()

    def describe(self) -> str:
        return f"loader {self.loader}: epoch {self.epoch} began (step {self.step})"


class IndicesRead(Event, frozen=True, tag="indices"):
    """Part of what an epoch has delivered so far; recorded so that it survives the rank being
    killed.

    Attributes:
        batches, samples: delivered since the epoch began.
        backwards: batches so far that a backward or an optimizer step followed.
        indices: those since the last record, ascending (see `ddpdoctor.events.pack`).
        sampled: one in `sampled` indices was kept, selected by a hash that is equal on all ranks.
    """

    loader: int
    epoch: int
    batches: int
    samples: int
    backwards: int
    indices: str
    sampled: int = 1


class WorkerRandom(Part, frozen=True):
    """The random generators of a loader's worker process, after its first batch.

    Attributes:
        states: digests, as `EpochBegan.random`.
        drawn: the generators that loading its first few batches advanced; for an iterable data set
            without the first batch.
        own: generators that an iterable data set keeps as attributes (`Stream.rng`) and never
            seeds anew, if its first few batches advanced them: digests of the states in which this
            process handed them to the worker.
        kept: generators that a map-style data set or its transforms keep (`Images.rng`), if batches
            after the first advanced them: digests of their states after the first.
    """

    worker: int
    states: tuple[int, int, int]
    drawn: tuple[str, ...] = ()
    own: dict[str, int] = {}
    kept: dict[str, int] = {}


class StepDraws(Event, frozen=True, tag="step-draws"):
    """A training step drew random numbers from torch's generator after it had its batch. Recorded
    in a few early steps.

    Attributes:
        step: optimizer steps taken before.
        before, after: digests of the generator's state, as in `EpochBegan.random`.
        dropout: the model has modules that draw by themselves.
        site: the user's line of the forward.
    """

    model: int
    step: int
    before: int
    after: int
    dropout: bool
    site: int


class Seeded(Event, frozen=True, tag="seeded"):
    """The program seeded a global random generator with a number, or restored a state of it; each
    line and number once.

    Attributes:
        generator: `torch`, `numpy` or `random`.
        seed: in digits; of a state its checksum.
        by: the module of a library that the program called for it, empty for none.
        restored: it is a state.
    """

    generator: str
    seed: str
    site: int
    by: str = ""
    restored: bool = False


class EpochEnded(Event, frozen=True, tag="epoch-ended"):
    """An iteration over a loader ended or was left early.

    Attributes:
        batches, samples: delivered to the loop.
        backwards: batches that a backward or an optimizer step followed before the next batch:
            training. `evaluated` are those that only a forward without gradients or in `eval()`
            mode followed.
        exhausted: the loader was exhausted (False: the loop was left early).
        grad_enabled: gradients were enabled when some batch was delivered.
        indices: the delivered indices, ascending (see `ddpdoctor.events.pack`), without those of
            earlier `IndicesRead`; empty if the data set has none.
        sampled: one in `sampled` indices was kept, selected by a hash.
        order: digest of all indices in the order of delivery; `head` are the first of them.
        ascending: the indices never decrease; `falls`: how often one is lower than the one before,
            -1 in older records.
        collectives: issued on the default group meanwhile, -1 if unknown.
        sharded: parameters are sharded in a way that may need equal inputs on several ranks.
        drawn: the generators (`torch`, `numpy`, `random`) that loading a batch advanced.
        again: how often torch's `DistributedSampler` began another order in this iteration with the
            same epoch, which the program never set.
        kept: as `WorkerRandom.kept`, where the rank itself loads.
        workers: the generators of workers that were forked for this iteration.
    """

    loader: int
    epoch: int
    batches: int
    samples: int
    backwards: int
    exhausted: bool
    grad_enabled: bool = True
    indices: str = ""
    sampled: int = 1
    evaluated: int = 0
    order: int = 0
    head: tuple[int, ...] = ()
    ascending: bool = False
    falls: int = -1
    collectives: int = -1
    sharded: bool = False
    drawn: tuple[str, ...] = ()
    again: int = 0
    kept: dict[str, int] = {}
    workers: tuple[WorkerRandom, ...] = ()

    def describe(self) -> str:
        return (
            f"loader {self.loader}: epoch {self.epoch} {'ended' if self.exhausted else 'left'} "
            f"after {self.batches} batches, {self.samples} samples"
        )


class ContentRead(Event, frozen=True, tag="content"):
    """Digests of the content of some delivered samples.

    Attributes:
        indices: of the samples, in order of delivery; empty for iterable data sets.
        batches: number of the batch that each was in.
        columns: packed digests, parallel to `indices`; two columns per part of the batch (of its
            first bytes, and of bytes from all over it). 0 if a sample lacks that part.
        numbers: for each column `n` where each sample has one or a few whole numbers in it, as
            labels and ids are, else `-`.
    """

    loader: int
    epoch: int
    batches: str
    columns: tuple[str, ...]
    indices: str = ""
    numbers: str = ""


class RowsRead(Event, frozen=True, tag="rows"):
    """Digests of all rows of the batches of an iterable data set that batches itself, in early,
    short epochs.

    Attributes:
        batches: number of the batch that each row was in.
        rows: packed digests, parallel to `batches`, of the largest part of the batch.
    """

    loader: int
    epoch: int
    batches: str
    rows: str


class RowsChosen(Event, frozen=True, tag="rows-chosen"):
    """Digests of rows of a stream, chosen by the digest itself, so that ranks that deliver the same
    rows in another order choose the same ones.

    Attributes:
        looked: rows digested from the begin of the epoch on.
        halved: of these, one in `2 ** halved` is chosen.
        rows: packed digests of the largest part of the batch, each once.
        again: how many of the chosen rows came again.
    """

    loader: int
    epoch: int
    looked: int
    halved: int
    rows: str
    again: int = 0


class ComparedValue(Event, frozen=True, tag="compared-value"):
    """A number that a running function compares by `<` and the like had changed when an iteration
    over a loader began.

    Attributes:
        name: as written in the program; `site` is the line that compares it.
        loader: the one that was iterated before, so that the number changed in that iteration or
            after it.
    """

    name: str
    value: float
    loader: int
    step: int
    site: int


class TotalDivided(Event, frozen=True, tag="total-divided"):
    """A sum of a loop over a loader is divided by the length of its whole data set; recorded when
    the first iteration begins.

    Attributes:
        name: of the sum, as written; `length` of the data set; `site` is the line that divides.
    """

    loader: int
    name: str
    length: int
    site: int


class SaveDecided(Event, frozen=True, tag="save-decided"):
    """A file is saved, copied, renamed or linked under a condition that compares a result of a loop
    over a loader.

    Attributes:
        name, value: of the result, None where it could not be read; `compared` is the line that
            compares it.
        loader: its number.
        site: the line that saves.
    """

    name: str
    value: float | None
    step: int
    compared: int
    loader: int
    site: int


class WeightsKept(SaveDecided, frozen=True, tag="weights-kept"):
    """The state of a module is taken (`state_dict`) under such a condition; `site` is that line."""


class EndDecided(SaveDecided, frozen=True, tag="end-decided"):
    """A loop that trains can be left under a condition that compares a result of a loop over a
    loader; recorded when that one begins again after an optimizer step. `site` is the line that
    leaves the loop.
    """


class ResultWritten(Event, frozen=True, tag="result-written"):
    """A file is written with a result of a loop over a loader.

    Attributes:
        name: the variable that the loop changes.
        loader: its number.
        site: the line that opens the file, of that path.
    """

    name: str
    loader: int
    step: int
    site: int
    path: str
