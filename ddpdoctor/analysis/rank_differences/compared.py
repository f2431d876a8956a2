"""What of each event is compared between ranks, and which events are not, and why."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ... import events as e
from ...events import Event

LOAD_ALL = (
    "load the whole checkpoint on every rank (`torch.load(path, map_location=...)`): the weights, "
    "the state of the optimizer and of the scheduler, and the epoch or step to continue from"
)
"""What to do where only some ranks resume."""
ONLY_SOME = "only some ranks run this line"


class Recorded(enum.Enum):
    """How complete the records of an event are (see its docstring): what a missing one means."""

    ALWAYS = "every time, or the first times: a rank without a record did not do it"
    CHANGES = "when it begins or changes: a record holds until the next one"
    SAMPLED = "now and then: only moments that all ranks recorded can be compared"


@dataclass(frozen=True)
class Compared:
    """What of one kind of event is compared.

    Fields that are not named are each rank's own: its number, device and process, the content of
    its data, its times.

    Attributes:
        what: how a report calls it.
        fields: those that are equal on ranks that do the same; values are compared without the
            rank's own number (`state-0.pt`, `cuda:0`), and a field called `...site` as a line.
        key: those that say which one it is: records with equal keys belong together.
        moment: the field that counts it within its key (a step, a call): records of one moment
            belong together. Empty: the first belongs to the first, the second to the second.
        recorded: how complete the records are.
        when: the records that are compared; all if None.
        usual: ranks of a correct program may differ in it, too (the first rank writes the
            checkpoints, each rank draws its own random numbers).
        advice: what to do so that the ranks agree, where that can be said.
        words: by field, how a report calls it, where `what` and its name do not say it.
    """

    what: str
    fields: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    moment: str = ""
    recorded: Recorded = Recorded.ALWAYS
    when: Callable[[Any], bool] | None = None
    usual: bool = False
    advice: str = ""
    words: Mapping[str, str] = field(default_factory=dict)


ALWAYS, CHANGES, SAMPLED = Recorded


def _row(
    what: str,
    fields: str = "",
    key: str = "",
    moment: str = "",
    recorded: Recorded = ALWAYS,
    when: Callable[[Any], bool] | None = None,
    usual: bool = False,
    advice: str = "",
    words: Mapping[str, str] | None = None,
) -> Compared:
    names, keys = tuple(fields.split()), tuple(key.split())
    return Compared(what, names, keys, moment, recorded, when, usual, advice, words or {})


SAME_MICRO_BATCH = (
    "synchronise and step after the same micro-batch on every rank: count micro-batches, or let "
    "one rank decide (`dist.broadcast`), or all-reduce the value that decides"
)


COMPARED: dict[type[Event], Compared] = {
    # The program and the machine.
    e.RankStarted: _row("start", "argv python script_digest environment world_size spawned"),
    e.TorchLoaded: _row("torch", "torch cuda nccl threads interop_threads gpus late"),
    e.ProgramSeen: _row("program", "files versions"),
    e.ThreadsSeen: _row("compute threads", "compute asked", recorded=CHANGES),
    e.DeviceUsed: _row("device", "name", "why"),
    e.DeviceTouched: _row("use of another device", "by site"),
    e.TrainsAlone: _row("training without a process group", "layers"),
    # Process groups.
    e.InitEntered: _row(
        "init_process_group",
        "backend init_method rendezvous world_size timeout_s changed site",
    ),
    e.GroupReady: _row(
        "process group",
        "ranks site",
        when=lambda group: not group.local_synchronization,
    ),
    e.GroupDestroyed: _row("destroy_process_group", "site"),
    e.ShardedOver: _row("device mesh", "ranks"),
    # Models.
    e.Wrapped: _row(
        "model", "wrapper kind parameters buffers options device site", "model"
    ),
    e.Named: _row("variable of the model", "name", "model"),
    e.CommHook: _row(
        "communication hook", "name site", "model",
        advice="register the same communication hook on every rank, before the first forward",
    ),
    e.ParametersChanged: _row("parameters changed after the wrap", "names step site", "model kind"),
    e.SentBuffers: _row("buffers to broadcast", "buffers", "model", "forward", SAMPLED),
    e.Unwrapped: _row("parameters without a wrapper", "kind parameters site", "optimizer"),
    # Forward and backward.
    e.ModulesSkipped: _row("skipped modules", "names", "model", "backward", CHANGES),
    e.UnusedParameters: _row("unused parameters", "indices", "model", "backward", CHANGES),
    e.BatchSeen: _row("batch", "size reduction weight", "model", "forward", CHANGES, usual=True),
    e.ForwardInput: _row("forward", "training", "model", "forward", SAMPLED),
    e.LossScaled: _row("division of the loss", "divisor expression site", "model"),
    e.LossMultiplied: _row("multiplication of the loss", "size expression site", "model"),
    e.LossCounted: _row("division of the loss by a count", "size site", "model"),
    e.LossMeans: _row("means in the loss", "", "model", "forward", CHANGES, usual=True),
    e.ReducedInGraph: _row("tensor of the loss reduced in place", "size shape site", "model"),
    e.GatheredInGraph: _row(
        "tensor of the loss gathered without its gradient", "size function site", "model"
    ),
    e.ShardedModel: _row("model that is sharded", "kind wrapper ranks", "model"),
    e.GatheredWithoutGradient: _row("tensor gathered without any gradient", "site", "model"),
    e.Bypassed: _row("step around the wrapper", "site", "model optimizer", "count"),
    e.ReadyTwice: _row("parameter ready twice", "parameter site", "model"),
    e.StaticGraphBroken: _row("graph that is not static", "site", "model kind"),
    e.SteppedInside: _row("step inside backward", "first site", "model", "count"),
    e.NonFinite: _row("NaN or infinity", "kind value step", usual=True),
    e.TrainingMode: _row(
        "mode", "count evaluating whole", "model", "backward", CHANGES,
        advice="call `model.train()` on every rank after an evaluation",
        words={"count": "number of modules in evaluation mode"},
    ),
    # Synchronisation.
    e.SyncPattern: _row(
        "backwards of a step", "synced unsynced reason talked", "model optimizer", "step", CHANGES,
        advice=SAME_MICRO_BATCH,
        words={
            "synced": "number of synchronised backwards in a step",
            "unsynced": "number of backwards without synchronisation in a step",
        },
    ),
    e.EditedBeforeSync: _row(
        "edit before averaging", "function times site", "model optimizer", "step", SAMPLED
    ),
    e.KeptBack: _row("gradients that FSDP keeps back", "step applied", "optimizer"),
    e.GradientReduced: _row("reduced gradients", "op copied", "model", "call", SAMPLED),
    e.UnwrappedState: _row(
        "manual synchronisation",
        "exchanged complete averaged shared late running wrapped",
        "optimizer",
        "step",
        SAMPLED,
    ),
    # Optimizers.
    e.OptimizerSeen: _row("optimizer", "kind models parameters closure site", "optimizer"),
    e.Replica: _row("copy of the model", "broadcast hook left_out", "model optimizer"),
    e.StepDone: _row(
        "optimizer step",
        "backwards synced",
        "optimizer",
        "step",
        recorded=SAMPLED,
        when=lambda done: done.count == 1,
        advice=SAME_MICRO_BATCH,
        words={
            "backwards": "number of backwards before an optimizer step",
            "synced": "number of synchronised backwards before an optimizer step",
        },
    ),
    e.Hyperparameters: _row("options", "groups", "optimizer", "step", CHANGES),
    e.SchedulerStep: _row(
        "scheduler step", "step", "kind optimizer scheduler site", "call", SAMPLED
    ),
    e.ScheduleEnded: _row("schedule", "planned calls", "optimizer"),
    e.ScalerStep: _row("loss scale", "scale", "scaler optimizer", "call", CHANGES),
    e.Carried: _row("old gradients", "carried", "optimizer", "step", CHANGES),
    e.Ownership: _row("unheld parameters", "missing held", "model kind", "step", CHANGES),
    e.ZeroGradients: _row("zero gradients", "indices", "model optimizer", "step", SAMPLED),
    e.Clipped: _row("clipping", "", "function site", "call", SAMPLED),
    # State.
    e.Loaded: _row(
        "load of a state", "step site", "what model",
        advice="load the same state on every rank, or broadcast what one rank loaded",
    ),
    e.Edited: _row(
        "modification", "changed ratio functions beside", "model optimizer kind", "step", CHANGES
    ),
    e.StateTaken: _row("state_dict", "step", "model site", usual=True),
    e.FileRead: _row(
        "file read", "site", "path",
        advice="let every rank read the file, or broadcast what one rank read",
    ),
    e.Seeded: _row("seed", "seed", "generator", usual=True),
    e.FileWritten: _row("file written", "site", "path", usual=True),
    e.FileLocked: _row("file lock", "site", "path", usual=True),
    e.FileRemoved: _row("file removed", "site", "path", usual=True),
    e.SavedPart: _row("saved part", "site", "path", usual=True),
    e.FolderMade: _row("folder made", "site", "path", usual=True),
    # Data.
    e.LoaderSeen: _row(
        "iteration over a data loader",
        "dataset length sampler batches batch_size drop_last workers iterable distributed replicas "
        "shuffle seed sampler_drop_last total_size sampler_length own_order by_epoch replacement "
        "batch_sampler batches_given site",
        "loader",
        words={"length": "the number of samples in a loader's data set"},
    ),
    e.SamplerRefused: _row("sampler that raises", "error replicas site"),
    e.EpochBegan: _row(
        "epoch", "step sampler_epoch batches seed epochs_set joined site", "loader", "epoch"
    ),
    e.EpochEnded: _row(
        "end of an epoch", "batches samples backwards exhausted evaluated", "loader", "epoch",
        words={
            "batches": "the number of batches in an epoch",
            "samples": "the number of samples in an epoch",
            "backwards": "the number of batches in an epoch that a backward followed",
            "exhausted": "whether an epoch was read to its end",
            "evaluated": "the number of batches in an epoch that were evaluated",
        },
    ),
    # What went wrong.
    e.ExceptionRaised: _row("exception", "kind message"),
    e.ExceptionPassed: _row("exception that was caught", "kind message step site", "where"),
    e.ThreadFailed: _row("exception in a thread", "kind message", "thread"),
    e.SignalSent: _row("signal", "signal site"),
    e.RankExiting: _row("exit", "how status site"),
}  # fmt: skip
"""By kind of event, what is compared."""

_DIGESTS = "differing tensors are the fault itself: `analysis.replicas` compares them"
_DATA = "ranks read different data: `analysis.data` compares it"
_TIME = "times and amounts of memory differ by nature"
_CALLS = "`analysis.divergence` aligns the collectives of ranks, by group and number"
_OUTSIDE = "recorded beside the ranks, or of one process by itself"
_OURS = "of the doctor itself"

NOT_COMPARED: dict[str, tuple[type[Event], ...]] = {
    _DIGESTS: (
        e.Digests, e.OuterModule, e.OuterDigests, e.OuterStateTaken, e.LateBuffers, e.Sketch,
        e.BufferUpdates,
        e.MeshModel, e.MeshDigests, e.ShardStates, e.ClippedScaled,
        e.Averaged, e.Rewritten, e.ShardScales,
    ),
    _DATA: (
        e.ContentRead, e.RowsRead, e.RowsChosen, e.IndicesRead, e.ComparedValue, e.SaveDecided,
        e.EndDecided, e.WeightsKept, e.ResultWritten, e.TotalDivided,
        e.MetricUsed, e.ReducedMetric, e.LossValues,
    ),
    _TIME: (
        e.Pace, e.TimeLedger, e.Working, e.SyncTimes, e.SearchCost, e.ParameterUse, e.MemorySample,
        e.MemoryHeld, e.RankSample, e.NodeSample, e.MemoryLimit, e.DeviceMemory,
    ),
    _CALLS: (
        e.Site, e.Signature, e.MessageSize, e.CallSite, e.CallBlock, e.CallRun,
        e.ObjectsGathered, e.GatheredWhole, e.FlightLog, e.StepDraws, e.SharedOutputs,
        e.ResultDropped, e.TotalReducedAgain, e.NamesMissed, e.FlatGradients,
        e.AbsentGradients,
    ),
    _OUTSIDE: (
        e.MonitorStarted, e.NodeSilent, e.ProcessStarted, e.ProcessEnded, e.ProcessState,
        e.SpawnFailed,
        e.SpawnEnded, e.ExaminedInside, e.Stopped, e.StallSeen, e.StallOver, e.RankStood,
        e.DataParallelMade, e.Gathered,
    ),
    _OURS: (e.ProbeTrouble, e.NotObserved, e.ProbeCost, e.OptionsRead),
}  # fmt: skip
"""Why events are not compared here."""
