"""The vocabulary: everything that can stand in a run folder, typed, frozen and versioned.

One module per thing that is watched. A new event is a class there, imported here: nothing else is
edited, the codec knows every class that exists. `INDEX.md` lists the events by question.
"""

from __future__ import annotations

from .amp import (
    ClippedScaled,
    Hyperparameters,
    Logged,
    MetricUsed,
    OptionsRead,
    ReducedMetric,
    ScalerStep,
    ScheduleEnded,
    SchedulerStep,
)
from .base import Event, Part, Site
from .calls import (
    CALLERS,
    CallBlock,
    CallRun,
    CallSite,
    FlagSet,
    FlightEntry,
    FlightLog,
    GatheredWhole,
    MessageSize,
    ObjectsGathered,
    Place,
    ResultDropped,
    SharedOutputs,
    Signature,
    Statement,
    TotalReducedAgain,
    Way,
)
from .codec import decode, encode
from .data import (
    ComparedValue,
    ContentRead,
    EndDecided,
    EpochBegan,
    EpochEnded,
    IndicesRead,
    Layer,
    LoaderSeen,
    Payload,
    PerProcess,
    ResultWritten,
    RowsChosen,
    RowsRead,
    SamplerRefused,
    SaveDecided,
    Seeded,
    StepDraws,
    TotalDivided,
    WeightsKept,
    WorkerRandom,
)
from .devices import (
    DataParallelMade,
    DeviceMemory,
    DeviceTouched,
    DeviceUsed,
    Gathered,
    GatheredTensor,
)
from .drift import (
    BufferUpdates,
    Clipped,
    Digests,
    Edited,
    LateBuffers,
    Loaded,
    MeshDigests,
    MeshModel,
    NamesMissed,
    OuterDigests,
    OuterModule,
    OuterStateTaken,
    Replica,
    Rewritten,
    Sketch,
    StateTaken,
    TrainingMode,
)
from .files import FileLocked, FileRead, FileRemoved, FileWritten, FolderMade, SavedPart
from .groups import GroupDestroyed, GroupReady, InitEntered, ShardedOver
from .memory import MemoryHeld, MemorySample
from .model import (
    Bypassed,
    ModulesSkipped,
    Named,
    ParametersChanged,
    ParameterUse,
    ReadyTwice,
    SentBuffers,
    StaticGraphBroken,
    Submodule,
    Tensor,
    UnusedParameters,
    Unwrapped,
    UnwrappedState,
    Wrapped,
    ZeroGradients,
)
from .node import (
    STOPPED_STATES,
    ChildMemory,
    ExaminedInside,
    MemoryLimit,
    MonitorStarted,
    NodeSample,
    NodeSilent,
    ProcessEnded,
    ProcessStarted,
    ProcessState,
    RankSample,
    SpawnEnded,
    SpawnFailed,
    Stopped,
)
from .numerics import ForwardInput, LossValues, NonFinite
from .optimizer import OptimizerSeen, Ownership, ParameterWrite, StepDone
from .process import (
    ExceptionPassed,
    ExceptionRaised,
    Frame,
    NotObserved,
    ProbeCost,
    ProbeTrouble,
    RankExiting,
    RankStarted,
    Relayed,
    SignalSent,
    ThreadFailed,
    TorchLoaded,
    Unset,
    Watched,
)
from .stall import RankStood, StackFrame, StallOver, StallSeen, Worker
from .surroundings import ProgramSeen, ThreadsSeen, TrainsAlone
from .sync import (
    AbsentGradients,
    Averaged,
    BatchSeen,
    Carried,
    EditedBeforeSync,
    FlatGradients,
    GatheredInGraph,
    GatheredWithoutGradient,
    GradientReduced,
    KeptBack,
    LossCounted,
    LossMeans,
    LossMultiplied,
    LossScaled,
    ReducedInGraph,
    ShardedModel,
    ShardScales,
    ShardStates,
    SteppedInside,
    SyncPattern,
)
from .timing import Account, CommHook, Pace, SearchCost, SyncTimes, TimeLedger, Working

SCHEMA = 1
"""Version of the records. Raised when a reader of the old ones would misread the new ones."""
