"""Writes the recording of a run that never was, and measures how long `report` takes over it.

    python benchmarks/synthetic.py write /tmp/big --ranks 256 --steps 1000
    python benchmarks/synthetic.py measure --ranks 256 --steps 1000

What a rank records is what the probe records of a clean data-parallel training: one model, one
loader, one optimizer. Ranks differ where they do in reality: pids, times, who waits how long.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.events import (
    SCHEMA,
    EpochBegan,
    EpochEnded,
    Event,
    GroupReady,
    InitEntered,
    LoaderSeen,
    MonitorStarted,
    NodeSample,
    OptimizerSeen,
    ProbeCost,
    ProcessEnded,
    ProcessStarted,
    RankExiting,
    RankSample,
    RankStarted,
    Site,
    StepDone,
    Submodule,
    Tensor,
    TorchLoaded,
    Wrapped,
    encode,
)
from ddpdoctor.events.pack import pack_ascending
from ddpdoctor.storage.run_folder import RunFolder, RunInfo, rank_stem

PER_NODE = 8
LAYERS = 48
BATCH = 8
STEPS_PER_EPOCH = 250
STEP_S = 0.2
START, WALL = 1000.0, 1_750_000_000.0

LINES = (
    "dist.init_process_group('nccl')",
    "model = DDP(Net().cuda())",
    "optimizer = AdamW(model.parameters())",
    "loader = DataLoader(data, sampler=sampler)",
    "for batch in loader:",
    "optimizer.step()",
)


def write(path: Path, ranks: int, steps: int) -> RunFolder:
    """A run folder of that size, written at one go."""
    folder = RunFolder.create(path)
    seconds = steps * STEP_S
    folder.write_info(
        RunInfo(
            schema_version=SCHEMA,
            id="synthetic",
            command=["torchrun", "train.py"],
            started_at="2025-06-15T15:06:40+0000",
            ended_at="2025-06-15T15:10:00+0000",
            tool_version="0.1.0",
            world_size=ranks,
            nodes=-(-ranks // PER_NODE),
            torch="2.13.0",
            exit_code=0,
            outcome="completed",
        )
    )
    for rank in range(ranks):
        events = rank_events(rank, ranks, steps)
        target = path / f"{rank_stem(rank, ranks)}.jsonl"
        target.write_bytes(b"".join(encode(e) for e in events))
    for node in range(-(-ranks // PER_NODE)):
        here = range(node * PER_NODE, min(ranks, (node + 1) * PER_NODE))
        lines = (encode(e) for e in node_events(node, list(here), ranks, seconds))
        folder.node_path(node).write_bytes(b"".join(lines))
    return folder


def rank_events(rank: int, ranks: int, steps: int) -> Iterator[Event]:
    """What one rank records, in order."""
    jitter = random.Random(rank)
    yield RankStarted(
        at=START,
        schema=SCHEMA,
        wall=WALL,
        rank=rank,
        local_rank=rank % PER_NODE,
        world_size=ranks,
        pid=pid_of(rank),
        node=f"node{rank // PER_NODE}",
        argv=("train.py",),
        cwd="/home/user/project",
        python="3.11.4",
        environment={f"NCCL_SETTING_{i}": "value" for i in range(20)},
        cores=64,
    )
    yield TorchLoaded(at=START + 3, torch="2.13.0", cuda="12.8", nccl="2.27.3", threads=1)
    for number, text in enumerate(LINES):
        yield Site(
            at=START + 4,
            id=number,
            file="/home/user/project/train.py",
            line=10 * (number + 1),
            function="main",
            text=text,
        )
    yield InitEntered(
        at=START + 4, backend="nccl", init_method="", rank=-1, world_size=-1, env_rank=rank,
        env_world_size=ranks, env_local_rank=rank % PER_NODE, timeout_s=600.0, site=0,
    )  # fmt: skip
    yield GroupReady(
        at=START + 5, group=0, name="0", backend="nccl", ranks=tuple(range(ranks)), member=True,
        site=0,
    )  # fmt: skip
    yield wrapped(rank)
    yield LoaderSeen(
        at=START + 7, loader=0, site=3, loop_site=4, dataset="ImageFolder",
        length=STEPS_PER_EPOCH * BATCH * ranks, sampler="DistributedSampler",
        batches=STEPS_PER_EPOCH, batch_size=BATCH, workers=4, distributed=True, replicas=ranks,
        sampler_rank=rank, shuffle=True, seed=0, total_size=STEPS_PER_EPOCH * BATCH * ranks,
        sampler_site=3,
    )  # fmt: skip
    yield from training(rank, ranks, steps, jitter)
    end = START + 10 + steps * STEP_S
    yield ProbeCost(at=end, own_s=0.002 * steps * STEP_S, wall_s=end - START, events=steps)
    yield RankExiting(at=end, how="return")


def training(rank: int, ranks: int, steps: int, jitter: random.Random) -> Iterator[Event]:
    yield OptimizerSeen(
        at=START + 9, optimizer=0, kind="AdamW", site=2, models=(0,), parameters=2 * LAYERS
    )
    for step in range(steps):
        at = START + 10 + step * STEP_S
        if step % STEPS_PER_EPOCH == 0:
            epoch = step // STEPS_PER_EPOCH
            yield EpochBegan(at=at, loader=0, epoch=epoch, step=step, site=4, sampler_epoch=epoch)
        compute = 0.15 + jitter.random() * 0.02
        yield StepDone(
            at=at + STEP_S, optimizer=0, step=step, site=5, wall_s=STEP_S, data_s=0.002,
            forward_s=compute / 3, backward_s=STEP_S - compute, optimizer_s=0.01,
            backwards=1, synced=1,
        )  # fmt: skip
        if (step + 1) % STEPS_PER_EPOCH == 0 or step + 1 == steps:
            epoch, batches = step // STEPS_PER_EPOCH, step % STEPS_PER_EPOCH + 1
            yield EpochEnded(
                at=at + STEP_S, loader=0, epoch=epoch, batches=batches, samples=batches * BATCH,
                backwards=batches, exhausted=batches == STEPS_PER_EPOCH,
                indices=pack_ascending(array("q", shard(rank, ranks, epoch)[: batches * BATCH])),
            )  # fmt: skip


def shard(rank: int, ranks: int, epoch: int) -> list[int]:
    """This rank's part of a shuffled data set: `a * i + b` visits every index once."""
    length = STEPS_PER_EPOCH * BATCH * ranks
    return [(i * 100_003 + epoch) % length for i in range(rank, length, ranks)]


def wrapped(rank: int) -> Wrapped:
    names = [f"layers.{n}" for n in range(LAYERS)]
    return Wrapped(
        at=START + 6,
        model=0,
        wrapper="DistributedDataParallel",
        kind="Net",
        group=0,
        site=1,
        parameters=tuple(
            Tensor(name=f"{name}.{part}", shape=shape, dtype="float32")
            for name in names
            for part, shape in (("weight", (1024, 1024)), ("bias", (1024,)))
        ),
        modules=tuple(Submodule(name=name, kind="Linear", site=1) for name in names),
        device=f"cuda:{rank % PER_NODE}",
    )


def node_events(node: int, here: list[int], ranks: int, seconds: float) -> Iterator[Event]:
    """What a node's monitor records."""
    name = f"node{node}"
    yield MonitorStarted(at=START, schema=SCHEMA, wall=WALL, node=name, node_rank=node, pid=999)
    for rank in here:
        yield ProcessStarted(
            at=START, rank=rank, local_rank=rank % PER_NODE, pid=pid_of(rank), wall=WALL,
            world_size=ranks,
        )  # fmt: skip
    for second in range(int(seconds)):
        at = START + second
        for rank in here:
            gpu = {rank % PER_NODE: 20_000_000_000}
            yield RankSample(
                at=at, rank=rank, pid=pid_of(rank), rss_bytes=3_000_000_000, gpu_bytes=gpu
            )
        yield NodeSample(at=at, available_bytes=200_000_000_000)
    for rank in here:
        yield ProcessEnded(
            at=START + seconds, rank=rank, pid=pid_of(rank), wall=WALL + seconds, status=0
        )


def pid_of(rank: int) -> int:
    return 5000 + rank


def measure(ranks: int, steps: int) -> tuple[float, float]:
    """Processor seconds and megabytes that `ddpdoctor report` takes over such a run.

    Processor time, since the reader has one thread and a busy machine would measure its neighbours.
    The reader tells its own peak: what the kernel tells a parent (`getrusage`, `wait4`) includes
    the size of the process that started it.
    """
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "run"
        write(path, ranks, steps)
        command = [sys.executable, "-c", READER, "report", str(path)]
        told = subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    seconds, kilobytes = told.stderr.split()[-2:]
    return float(seconds), int(kilobytes) / 1024


READER = """
import re, sys, time
from ddpdoctor.cli import main
if main():
    sys.exit("ddpdoctor report failed")
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(time.process_time(), peak[1], file=sys.stderr)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing, measuring = commands.add_parser("write"), commands.add_parser("measure")
    writing.add_argument("path", type=Path)
    for command in (writing, measuring):
        command.add_argument("--ranks", type=int, default=256)
        command.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    if args.command == "write":
        write(args.path, args.ranks, args.steps)
        return
    seconds, megabytes = measure(args.ranks, args.steps)
    print(
        f"report over {args.ranks} ranks x {args.steps} steps: {seconds:.1f} s, {megabytes:.0f} MB"
    )


if __name__ == "__main__":
    main()
