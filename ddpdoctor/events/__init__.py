"""The vocabulary: everything that can stand in a run folder, typed, frozen and versioned.

One module per thing that is watched. A new event is a new class there; nothing else to edit.
"""

from __future__ import annotations

from .amp import Hyperparameters, ScalerStep, SchedulerStep
from .base import Event, Part, Site
from .calls import (
    CALLERS,
    CallBlock,
    CallRun,
    CallSite,
    Enclosing,
    FlightEntry,
    FlightLog,
    Place,
    Signature,
    Way,
)
from .codec import decode, encode
from .communication import SyncTimes
from .data import (
    ContentRead,
    EpochBegan,
    EpochEnded,
    ForwardInput,
    IndicesRead,
    Layer,
    LoaderSeen,
    Payload,
    SamplerRefused,
    ShardedOver,
)
from .devices import (
    DataParallelMade,
    DeviceMemory,
    DeviceTouched,
    DeviceUsed,
    Gathered,
    GatheredTensor,
)
from .drift import Averaged, Clipped, Digests, Edited, Loaded, Replica, Sketch, StateTaken
from .files import FileLocked, FileRead, FileWritten
from .groups import GroupDestroyed, GroupReady, InitEntered
from .memory import MemoryHeld, MemorySample
from .model import (
    Bypassed,
    CommHook,
    ModulesSkipped,
    ParametersChanged,
    ParameterUse,
    ReadyTwice,
    SearchCost,
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
    MemoryLimit,
    MonitorStarted,
    NodeSample,
    ProcessEnded,
    ProcessStarted,
    ProcessState,
    RankSample,
    Stopped,
)
from .numerics import NonFinite
from .optimizer import OptimizerSeen, Ownership, StepDone
from .pace import Pace
from .process import (
    ExceptionRaised,
    Frame,
    NotObserved,
    ProbeCost,
    ProbeTrouble,
    RankExiting,
    RankStarted,
    Relayed,
    TorchLoaded,
)
from .stall import RankStood, StackFrame, StallOver, StallSeen, Worker
from .surroundings import ProgramSeen, ThreadsSeen, TrainsAlone
from .sync import BatchSeen, Carried, GradientReduced, LossScaled, SyncPattern

SCHEMA = 1
"""Version of the records. Raised when a reader of the old ones would misread the new ones."""

__all__ = [
    "CALLERS",
    "SCHEMA",
    "Averaged",
    "BatchSeen",
    "Bypassed",
    "CallBlock",
    "CallRun",
    "CallSite",
    "Carried",
    "Clipped",
    "CommHook",
    "ContentRead",
    "Digests",
    "Edited",
    "Enclosing",
    "DataParallelMade",
    "DeviceMemory",
    "DeviceTouched",
    "DeviceUsed",
    "EpochBegan",
    "EpochEnded",
    "Event",
    "ExceptionRaised",
    "FileLocked",
    "FileRead",
    "FileWritten",
    "FlightEntry",
    "FlightLog",
    "ForwardInput",
    "Frame",
    "GradientReduced",
    "Gathered",
    "GatheredTensor",
    "GroupDestroyed",
    "GroupReady",
    "Hyperparameters",
    "IndicesRead",
    "InitEntered",
    "Loaded",
    "Layer",
    "LoaderSeen",
    "LossScaled",
    "MemoryHeld",
    "MemoryLimit",
    "MemorySample",
    "ModulesSkipped",
    "MonitorStarted",
    "NodeSample",
    "NonFinite",
    "NotObserved",
    "OptimizerSeen",
    "Ownership",
    "Pace",
    "ParameterUse",
    "ParametersChanged",
    "Part",
    "Payload",
    "Place",
    "ProbeCost",
    "ProbeTrouble",
    "ProcessEnded",
    "ProcessStarted",
    "ProcessState",
    "ProgramSeen",
    "RankExiting",
    "RankSample",
    "RankStarted",
    "RankStood",
    "ReadyTwice",
    "Relayed",
    "Replica",
    "SamplerRefused",
    "ShardedOver",
    "ScalerStep",
    "SchedulerStep",
    "SearchCost",
    "Signature",
    "Site",
    "Sketch",
    "StackFrame",
    "StallOver",
    "StallSeen",
    "StateTaken",
    "StaticGraphBroken",
    "StepDone",
    "Stopped",
    "Submodule",
    "SyncPattern",
    "SyncTimes",
    "Tensor",
    "ThreadsSeen",
    "TorchLoaded",
    "TrainsAlone",
    "UnusedParameters",
    "Unwrapped",
    "UnwrappedState",
    "Way",
    "Worker",
    "Wrapped",
    "ZeroGradients",
    "decode",
    "encode",
]
