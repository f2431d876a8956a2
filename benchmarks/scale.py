"""How long `ddpdoctor report` takes over a run of thousands of ranks, and how much memory.

    python benchmarks/scale.py                          # writes benchmarks/scale.md
    python benchmarks/scale.py record /tmp/real --steps 1000
    python benchmarks/scale.py write /tmp/real /tmp/big --ranks 1024
    python benchmarks/scale.py measure /tmp/big

A real run of a few ranks (`scale_loop.py`) is recorded and multiplied: each rank of the large run
is one of the recorded ranks with other numbers, a share of the data of its own, and slightly other
times. The folder is that of the first of many nodes, with the records that the others sent.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpdoctor.events.pack import pack, unpack
from ddpdoctor.storage.run_folder import NODES, RunFolder, rank_stem

HERE = Path(__file__).parent
RECORDED = 4
"""Ranks of the real run."""
PER_NODE = 8
CORES = 32
SIZES = 256, 1024, 4096
STEPS = 1000

Json = dict[str, Any]

VARIANTS = 64
"""Ranks differ in their times in so many ways."""

TIMES = b'"event":"time-ledger"'
"""Its seconds add up."""

SECONDS = re.compile(rb'("\w+_s":)(\d+\.\d+)|("at":)(\d+\.\d+)')
PID_OF_RING = struct.Struct("<I"), 16


def record(place: Path, steps: int) -> Path:
    """A real run; returns its folder."""
    command = [sys.executable, "-m", "ddpdoctor", "run", "--nproc-per-node", str(RECORDED)]
    command += ["--out", str(place), "--no-live", str(HERE / "scale_loop.py"), str(steps)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return place


class Multiplied:
    """A recorded run as one of `ranks` ranks."""

    def __init__(self, recorded: Path, ranks: int) -> None:
        self.folder, self.ranks = RunFolder(recorded), ranks
        self.sources = [path for _, path in self.folder.rank_files()]
        self.rings = [path.with_suffix(".ring").read_bytes() for path in self.sources]
        self.events = [json_lines(path) for path in self.sources]
        self.lines = [[self._prepared(e) for e in events] for events in self.events]

    def write(self, path: Path) -> RunFolder:
        """The run folder, written at one go."""
        folder = RunFolder.create(path)
        (info := json.loads(self.folder.info_path.read_bytes())).update(
            world_size=self.ranks, nodes=-(-self.ranks // PER_NODE)
        )
        folder.info_path.write_text(json.dumps(info))
        (monitor,) = [json_lines(p) for _, p in self.folder.node_files()]
        for node in range(info["nodes"]):
            own = path / NODES / str(node) if node else path
            own.mkdir(parents=True, exist_ok=True)
            here = range(node * PER_NODE, min(self.ranks, (node + 1) * PER_NODE))
            (own / f"node-{node}.jsonl").write_bytes(self._monitored(monitor, node, here))
            for rank in here:
                self._write_rank(own / rank_stem(rank, self.ranks), rank)
        return folder

    def _write_rank(self, stem: Path, rank: int) -> None:
        source = rank % len(self.sources)
        lines = self._measured(source, rank // len(self.sources) % VARIANTS)
        told = (line if isinstance(line, bytes) else line(rank) for line in lines)
        stem.with_suffix(".jsonl").write_bytes(b"".join(told))
        ring = bytearray(self.rings[source])
        PID_OF_RING[0].pack_into(ring, PID_OF_RING[1], pid_of(rank))
        stem.with_suffix(".ring").write_bytes(ring)

    @functools.cache  # noqa: B019  (it lives as long as the process)
    def _measured(self, source: int, variant: int) -> list[bytes | Callable[[int], bytes]]:
        """The lines of a recorded rank with slightly other times."""
        jitter = random.Random(1000 * source + variant)
        faster, later = jitter.uniform(0.98, 1.02), jitter.uniform(0, 0.01)

        def moved(found: re.Match[bytes]) -> bytes:
            if found[1]:
                return b"%s%.9g" % (found[1], float(found[2]) * faster)
            return b"%s%.9f" % (found[3], float(found[4]) + later)

        return [
            SECONDS.sub(moved, x) if isinstance(x, bytes) and TIMES not in x else x
            for x in self.lines[source]
        ]

    def _prepared(self, event: Json) -> bytes | Callable[[int], bytes]:
        """The line of an event, or what makes it for a rank."""
        if event.get("ranks") == [*range(len(self.sources))]:
            event["ranks"] = [*range(self.ranks)]
        told: Callable[[Json, int], object] | None = getattr(
            self, "_" + event["event"].replace("-", "_"), None
        )
        if told is None:
            return encoded(event)

        def line(rank: int) -> bytes:
            changed = {**event}
            told(changed, rank)
            return encoded(changed)

        return line

    # What differs between ranks, event by event.

    def _rank_started(self, event: Json, rank: int) -> None:
        numbers = {"RANK": rank, "LOCAL_RANK": rank % PER_NODE, "WORLD_SIZE": self.ranks}
        told = {key: str(value) for key, value in numbers.items()}
        event.update(
            rank=rank, local_rank=rank % PER_NODE, world_size=self.ranks, pid=pid_of(rank),
            node=f"node{rank // PER_NODE}", environment={**event["environment"], **told},
        )  # fmt: skip

    def _init_entered(self, event: Json, rank: int) -> None:
        event.update(env_rank=rank, env_world_size=self.ranks, env_local_rank=rank % PER_NODE)

    def _loader(self, event: Json, rank: int) -> None:
        length = self._offset(event["length"], self.ranks)
        event.update(length=length, total_size=length, replicas=self.ranks, sampler_rank=rank)
        event["payloads"] = [[*p[:2], length, *p[3:]] for p in event["payloads"]]
        event["layers"] = [[*x[:3], length, *x[4:]] for x in event["layers"]]

    def _offset(self, length: int, rank: int) -> int:
        """Where the data of a rank begin, if each copy of the recorded ranks has data of its
        own."""
        return length * (rank // len(self.sources))

    def _epoch_ended(self, event: Json, rank: int) -> None:
        first, rest = event["indices"].split(":", 1)
        event["indices"] = f"{int(first) + self._offset(self._length, rank)}:{rest}"

    _indices = _epoch_ended

    def _content(self, event: Json, rank: int) -> None:
        offset = self._offset(self._length, rank)
        event["indices"] = pack(i + offset for i in unpack(event["indices"]))
        copy = rank // len(self.sources)
        event["columns"] = [pack(other(n, copy) for n in unpack(c)) for c in event["columns"]]

    def _threads(self, event: Json, rank: int) -> None:
        event["cpus"] = [*range(CORES)]

    def _forward_input(self, event: Json, rank: int) -> None:
        event["digest"] += rank // len(self.sources)

    @property
    def _length(self) -> int:
        """Of the recorded data set."""
        return next(int(e["length"]) for e in self.events[0] if e["event"] == "loader")

    def _monitored(self, monitor: list[Json], node: int, here: range) -> bytes:
        told = []
        for event in monitor:
            if "node" in event:
                event = {**event, "node": f"node{node}", "node_rank": node, "cores": CORES}
            if "rank" not in event:
                told.append(encoded(event))
                continue
            for rank in here:
                if rank % len(self.sources) == event["rank"]:
                    told.append(encoded({**event, "rank": rank, "pid": pid_of(rank)}))
        return b"".join(told).replace(
            b'"world_size":%d' % len(self.sources), b'"world_size":%d' % self.ranks
        )


def other(number: int, copy: int) -> int:
    """Another digest of 32 bits, signed; the same for 0."""
    return ((number ^ (copy * 2654435761)) + 2**31) % 2**32 - 2**31


def pid_of(rank: int) -> int:
    return 5000 + rank


def json_lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def encoded(event: Json) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def measure(folder: Path) -> tuple[float, float, float]:
    """Seconds, processor seconds and megabytes that `ddpdoctor report` takes.

    The reader tells its own peak: what the kernel tells a parent (`getrusage`, `wait4`) includes
    the size of the process that started it.
    """
    command = [sys.executable, "-c", READER, "report", str(folder)]
    told = subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wall, seconds, kilobytes = told.stderr.split()[-3:]
    return float(wall), float(seconds), int(kilobytes) / 1024


READER = """
import os, re, sys, time
begun = time.monotonic()
from ddpdoctor.cli import main
if main():
    sys.exit("ddpdoctor report failed")
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
wall, cpu = time.monotonic() - begun, sum(os.times()[:4])
print(wall, cpu, peak[1], file=sys.stderr)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    recording = commands.add_parser("record")
    recording.add_argument("place", type=Path)
    recording.add_argument("--steps", type=int, default=1000)
    writing = commands.add_parser("write")
    writing.add_argument("recorded", type=Path)
    writing.add_argument("place", type=Path)
    writing.add_argument("--ranks", type=int, default=256)
    commands.add_parser("measure").add_argument("place", type=Path)
    args = parser.parse_args()
    if args.command == "record":
        record(args.place, args.steps)
    elif args.command == "write":
        Multiplied(args.recorded, args.ranks).write(args.place)
    elif args.command == "measure":
        print("{:.1f} s, {:.1f} s of processor, {:.0f} MB".format(*measure(args.place)))
    else:
        table()


def table() -> None:
    """Writes `scale.md`."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        recorded = record(Path(place) / "real", STEPS)
        for ranks in SIZES:
            folder = Multiplied(recorded, ranks).write(Path(place) / str(ranks)).path
            wall, seconds, megabytes = measure(folder)
            rows.append(f"| {ranks:,} | {wall:.1f} | {seconds:.1f} | {megabytes:.0f} |")
            shutil.rmtree(folder)
    head = "| ranks | seconds | of processor (s) | memory (MB) |\n|---|---|---|---|\n"
    cores = len(os.sched_getaffinity(0))
    said = (
        f"\n\nA real run of {RECORDED} ranks and {STEPS:,} steps, multiplied; on {cores} cores.\n"
    )
    (HERE / "scale.md").write_text(head + "\n".join(rows) + said)


if __name__ == "__main__":
    main()
