"""Samplers, loaders and what they delivered."""

from __future__ import annotations

from .base import Event, Part


class Payload(Part, frozen=True):
    """One thing that a data set indexes: `Subset.indices`, a list of files, a tensor of samples.

    Attributes:
        name: the attribute, with its path (`dataset.samples`).
        kind: `indices` (of a `Subset`), `choice` (whole numbers that select samples), `text`,
            `tensor` or `other`.
        length: how many entries.
        order: digest of entries at the same positions on every rank; equal where the entries are.
        content: digest that does not depend on the order; 0 where it was too long to look at all.
        ascending: the entries are numbers that never fall.
        tells: sample `i` is made of entry `i` (and of chance), and hardly two entries are alike.
    """

    name: str
    kind: str
    length: int
    order: int
    content: int = 0
    ascending: bool = False
    tells: bool = False


class Layer(Part, frozen=True):
    """A data set, or one that it is a `Subset` of.

    Attributes:
        data: number of the object on this rank; the same object has the same number everywhere.
        indices: what a `Subset` selects from the next layer (see `ddpdoctor.events.pack`); empty
            where it is none, `regular`, or selects too much to record.
        site: the line that made the `Subset`.
        length: how many samples it holds, -1 where unknown.
        regular: first, step and count of a selection at equal distances, of any length; all 0 where
            it is none.
    """

    data: int
    indices: str = ""
    site: int = -1
    length: int = -1
    regular: tuple[int, int, int] = (0, 0, 0)


class LoaderSeen(Event, frozen=True, tag="loader"):
    """A DataLoader was iterated for the first time.

    Attributes:
        loader: number of the loader on this rank, in order of first iteration.
        site: the line that made it; `loop_site` the line that iterates it.
        made: how many loaders that line had made before.
        dataset: class name; length -1 where it has none (iterable data sets).
        sampler: class name of the innermost sampler; the `replicas`/`rank`/... fields are -1 or
            None where it has no such attribute.
        batches: `len(loader)`, -1 where unknown.
        sampler_length: `len(sampler)`, -1 where unknown.
        own_order: the sampler's class chooses the indices by code of its own, not by torch's.
        by_epoch: that code goes by an epoch that it is told.
        replacement: the sampler may draw a sample again.
        payloads: what the data set indexes, as far as that could be told.
        layers: the data set, and beneath it those that it is a `Subset` of.
        batch_sampler: class name of what makes up the batches, where that is not torch's own.
        epoch_name: the attribute of such an epoch; sets_epoch: it offers `set_epoch`.
        settings: digest of the numbers and texts that the data set keeps (where its files lie,
            say), 0 where that was not looked at.
        batches_given: a `BatchSampler` was given, whose are `batch_size` and `drop_last`.
        indexless: the data set's `__getitem__` never looks at the index that it is given.
        holds: the data set keeps an array or a list, and not only numbers.
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

    def describe(self) -> str:
        return f"loader {self.loader}: {self.dataset}({self.length}) through {self.sampler}"


class SamplerRefused(Event, frozen=True, tag="sampler-refused"):
    """torch refused to make a `DistributedSampler`.

    Attributes:
        replicas, rank: the arguments as given, None where left out.
        world_size, group_rank: of the default group, -1 where there is none.
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
        epochs_set: how often `set_epoch` was called on it until then.
        joined: inside `torch.distributed.algorithms.Join`.
        random: digests of the states of torch's, numpy's and Python's random numbers, 0 where
            unknown; `base_seed` is the one that the loader gives its workers.
    """

    loader: int
    epoch: int
    step: int
    site: int
    sampler_epoch: int | None = None
    batches: int = -1
    seed: int | None = None
    epochs_set: int = 0
    joined: bool = False
    random: tuple[int, int, int] = (0, 0, 0)
    base_seed: int | None = None

    def describe(self) -> str:
        return f"loader {self.loader}: epoch {self.epoch} began (step {self.step})"


class IndicesRead(Event, frozen=True, tag="indices"):
    """Part of what an epoch consumed so far, so that a rank that is killed keeps it.

    Attributes:
        batches: delivered since the epoch began; samples likewise.
        backwards: backward calls or optimizer steps that followed a delivery so far.
        indices: those since the record before, ascending (see `ddpdoctor.events.pack`).
        sampled: every index was kept (1), or one in `sampled` by hash, the same on every rank.
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
        drawn: the generators that loading its first few batches advanced; of a stream, batches
            after the first.
    """

    worker: int
    states: tuple[int, int, int]
    drawn: tuple[str, ...] = ()


class EpochEnded(Event, frozen=True, tag="epoch-ended"):
    """An iteration over a loader ended, or was left.

    Attributes:
        batches, samples: delivered to the loop.
        backwards: of these batches, how many a backward or an optimizer step followed before the
            next delivery; tells training from evaluation. `evaluated` are those that a forward
            without gradients or in `eval()` mode followed.
        exhausted: the loader ran dry (False: the loop was left early).
        grad_enabled: gradients were on at some delivery.
        indices: the delivered indices, ascending (see `ddpdoctor.events.pack`), those of earlier
            `IndicesRead` left out; empty where the data set has none.
        sampled: every index was kept (1), or one in `sampled` by hash.
        order: digest of all indices in the order of delivery; `head` are the first of them.
        ascending: they never fell.
        collectives: issued on the default group meanwhile, -1 where unknown.
        sharded: parameters are sharded in a way that may need equal inputs on several ranks.
        drawn: the generators (`torch`, `numpy`, `random`) that loading a batch advanced.
        again: how often torch's `DistributedSampler` began anew beneath this iteration, by the same
            number as before, which nobody ever set.
        workers: of a loader whose worker processes were forked for this iteration.
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
    collectives: int = -1
    sharded: bool = False
    drawn: tuple[str, ...] = ()
    again: int = 0
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
        columns: packed digests, parallel to these; two columns per part of the batch (its first
            bytes, and some from all over it). 0 where a sample lacks that part.
    """

    loader: int
    epoch: int
    batches: str
    columns: tuple[str, ...]
    indices: str = ""


class RowsRead(Event, frozen=True, tag="rows"):
    """Digests of all rows of the batches that a stream made itself, in early, short epochs.

    Attributes:
        batches: number of the batch that each row was in.
        rows: packed digests, parallel to these, of the largest part of the batch.
    """

    loader: int
    epoch: int
    batches: str
    rows: str


class ForwardInput(Event, frozen=True, tag="forward-input"):
    """What a forward of a wrapped model was given, at some forwards, the same on every rank.

    Attributes:
        forward: number of the forward with gradients, per model.
        digest: of the input's content, 0 where it could not be read (on a device).
        numbers: how many numbers the inputs hold; rows: how many samples.
        begins: where it is a slice of another tensor's rows, the first of them.
        fed: a DataLoader delivered since the forward before, or they are its last batch again.
        drawn: random numbers drawn from global generators since the step before, at least;
            -1 where unknown.
        training: the model was in `train()` mode.
        carried: some of the input was the output of the forward before (a recurrent state), and is
            not counted.
        loaders: those whose last batch the inputs are, or are views of; empty where that is not
            known (copies on another device).
    """

    model: int
    forward: int
    site: int
    digest: int
    numbers: int
    rows: int
    fed: bool
    drawn: int = -1
    training: bool = True
    begins: int = 0
    carried: bool = False
    loaders: tuple[int, ...] = ()


class ShardedOver(Event, frozen=True, tag="sharded-over"):
    """`fully_shard` was given a mesh of several dimensions that holds all ranks: it shards over one
    and replicates over another, and every rank is to read data of its own.

    Attributes:
        ranks: all of the mesh; `groups` are this rank's, one for each dimension.
    """

    RANKS = ("ranks", "groups")

    ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] = ()
