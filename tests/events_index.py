"""The index of events by question, written by `make readme` to `ddpdoctor/events/INDEX.md`.

`QUESTIONS` is kept by hand: a test asks that every event stands under at least one of them. Who
records an event and who reads it is taken from the code.
"""

from __future__ import annotations

import ast
import re
from functools import cache

import layers

EVENTS = layers.PACKAGE / "events"
INDEX = EVENTS / "INDEX.md"

QUESTIONS: dict[str, str] = {
    "Which line of the user's code was it?": "Site CallSite",
    "Who is this rank, and what does it run with?": (
        "RankStarted TorchLoaded ProgramSeen ThreadsSeen DeviceUsed ShardedOver"
    ),
    "How did a process start and end?": (
        "ProcessStarted ProcessEnded ProcessState RankExiting SignalSent Stopped SpawnFailed"
        " SpawnEnded ExaminedInside MonitorStarted NodeSilent"
    ),
    "Which exceptions were there?": "ExceptionRaised ExceptionPassed ThreadFailed SamplerRefused",
    "Which process groups are there?": "InitEntered GroupReady GroupDestroyed TrainsAlone",
    "Which collectives did a rank call, and with what?": (
        "Signature CallSite CallBlock CallRun MessageSize ObjectsGathered GatheredWhole FlightLog"
        " SharedOutputs ResultDropped TotalReducedAgain"
    ),
    "Where did ranks stand when nothing moved?": "StallSeen StallOver RankStood FlightLog",
    "What was wrapped, and how?": (
        "Wrapped Named CommHook ShardedOver ParametersChanged DataParallelMade Unwrapped"
    ),
    "What happened in a forward?": (
        "ForwardInput BatchSeen ShardedModel ModulesSkipped SentBuffers Gathered SearchCost"
        " TrainingMode"
    ),
    "What happened in a backward?": (
        "UnusedParameters ParameterUse Bypassed ReadyTwice StaticGraphBroken SteppedInside"
        " LossScaled LossMultiplied LossCounted LossMeans ReducedInGraph GatheredInGraph"
        " GatheredWithoutGradient NonFinite"
        " LossValues"
    ),
    "Were gradients synchronised?": (
        "SyncPattern Carried Bypassed KeptBack GradientReduced Averaged UnwrappedState CommHook"
        " AbsentGradients"
        " SyncTimes EditedBeforeSync ShardScales FlatGradients"
    ),
    "What did an optimizer step do, and when?": (
        "OptimizerSeen StepDone Ownership Hyperparameters OptionsRead SchedulerStep ScheduleEnded"
        " ScalerStep ZeroGradients"
    ),
    "Are parameters, buffers and optimizer states equal on all ranks?": (
        "Replica Digests Sketch LateBuffers BufferUpdates UnwrappedState OuterModule OuterDigests"
        " MeshModel MeshDigests ShardStates"
    ),
    "What changed tensors besides the optimizer?": (
        "Loaded NamesMissed StateTaken OuterStateTaken Edited Rewritten Clipped Averaged"
        " ClippedScaled"
    ),
    "What did a loader deliver to a rank?": (
        "LoaderSeen StepDraws Seeded EpochBegan IndicesRead EpochEnded ContentRead RowsRead"
        " RowsChosen ForwardInput"
        " ComparedValue SaveDecided WeightsKept EndDecided ResultWritten MetricUsed ReducedMetric"
        " TotalDivided SamplerRefused"
    ),
    "Where did NaN and infinity arise?": "NonFinite ScalerStep",
    "Which files did ranks touch?": "FileWritten FileRead FileLocked FileRemoved FolderMade "
    "SavedPart StateTaken",
    "How much memory, and which device?": (
        "MemorySample MemoryHeld RankSample NodeSample MemoryLimit DeviceUsed DeviceTouched"
        " DeviceMemory Gathered"
    ),
    "Where did the time go?": "StepDone TimeLedger Working Pace SyncTimes SearchCost RankSample",
    "What did the doctor itself miss, and cost?": "ProbeTrouble NotObserved ProbeCost",
}


WHEN: dict[str, str] = {
    "once": (
        "Site Signature CallSite CallBlock RankStarted TorchLoaded ProgramSeen MonitorStarted"
        " MeshModel MessageSize GatheredWhole SharedOutputs ResultDropped TotalReducedAgain"
        " ExaminedInside DeviceUsed ShardedOver LoaderSeen Replica OptimizerSeen Named"
        " ScheduleEnded OptionsRead ShardedModel"
    ),
    "every time": (
        "NodeSilent CallRun InitEntered GroupReady GroupDestroyed ProcessStarted ProcessEnded"
        " RankExiting"
        " ExceptionRaised ThreadFailed SignalSent SpawnFailed SpawnEnded Stopped StallSeen"
        " StallOver RankStood FlightLog SamplerRefused EpochBegan IndicesRead EpochEnded StepDone"
        " Wrapped CommHook Unwrapped DataParallelMade ReadyTwice"
    ),
    "when it changes": (
        "SyncPattern Hyperparameters ScalerStep Ownership ModulesSkipped ParametersChanged"
        " ThreadsSeen Gathered ProcessState Carried ObjectsGathered UnusedParameters BatchSeen"
        " TrainingMode ShardScales LossMeans AbsentGradients"
    ),
    "sampled, the same steps on all ranks": (
        "Digests OuterDigests MeshDigests Sketch LateBuffers BufferUpdates ForwardInput"
        " ContentRead RowsRead RowsChosen"
        " UnwrappedState Averaged Pace ZeroGradients LossValues"
    ),
    "sampled in time": (
        "MemorySample RankSample NodeSample MemoryLimit DeviceMemory SyncTimes SearchCost"
        " ParameterUse ProbeCost TimeLedger Working"
    ),
    "the first few": (
        "ExceptionPassed FileWritten FileRead FileLocked FileRemoved FolderMade Loaded StateTaken"
        " SavedPart"
        " OuterModule OuterStateTaken Clipped SchedulerStep MetricUsed ReducedMetric"
        " Edited Rewritten NonFinite Bypassed LossScaled LossMultiplied LossCounted ReducedInGraph"
        " GatheredInGraph GatheredWithoutGradient GradientReduced SteppedInside KeptBack"
        " StepDraws StaticGraphBroken SentBuffers MemoryHeld DeviceTouched TrainsAlone ProbeTrouble"
        " NotObserved EditedBeforeSync ComparedValue SaveDecided TotalDivided Seeded NamesMissed"
        " EndDecided ResultWritten FlatGradients ShardStates ClippedScaled WeightsKept"
    ),
}
"""How complete the records of an event are; its docstring says it exactly."""


@cache
def events() -> dict[str, tuple[str, str, str]]:
    """By class: the module it stands in, its tag, and the first sentence of its docstring."""
    found = {}
    for path in sorted(EVENTS.glob("*.py")):
        for node in ast.parse(path.read_bytes()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            tags = [k.value for k in node.keywords if k.arg == "tag"]
            if tags and isinstance(tags[0], ast.Constant):
                text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
                first = re.split(r"(?<=[a-z`)])[.:] (?=[A-Z]|[a-z])", text)[0].rstrip(".")
                found[node.name] = (path.stem, str(tags[0].value), first)
    return found


@cache
def users() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """By event, the modules that record it, and the checks and analyses that read it."""
    record: dict[str, list[str]] = {name: [] for name in events()}
    read: dict[str, list[str]] = {name: [] for name in events()}
    for module, path in layers.MODULES.items():
        part = module.split(".")[1] if "." in module else ""
        tree = ast.parse(path.read_bytes())
        made = {n.func.id for n in ast.walk(tree)
                if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}  # fmt: skip
        named = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        for name in events():
            if part in ("probe", "monitor", "launch", "embedded") and name in made:
                record[name].append(module.removeprefix("ddpdoctor."))
            elif part in ("checks", "analysis", "run") and name in named:
                read[name].append(module.rpartition(".")[2])
    return record, read


def text() -> str:
    """The index as Markdown."""
    record, read = users()
    when = {name: words for words, names in WHEN.items() for name in names.split()}
    lines = [
        "# Events by question",
        "",
        "Written by `make readme` from `tests/events_index.py`; fields are in the docstrings.",
    ]
    for question, names in QUESTIONS.items():
        lines += ["", f"## {question}", "", "| event | what it says | recorded | by | read by |"]
        lines.append("|---|---|---|---|---|")
        for name in names.split():
            module, _, first = events()[name]
            readers = read[name][:8] + (["..."] if len(read[name]) > 8 else [])
            lines.append(
                f"| [`{name}`]({module}.py) | {first} | {when[name]} | {', '.join(record[name])} "
                f"| {', '.join(readers)} |"
            )
    return "\n".join(lines) + "\n"
