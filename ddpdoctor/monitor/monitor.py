"""The monitor, one per node: reads the run folder, watches the ranks' processes, samples memory.

It runs inside the supervisor, does not import torch, and raises no errors: if it fails, only
observations are lost.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from ..events import (
    SCHEMA,
    STOPPED_STATES,
    ChildMemory,
    Event,
    MemoryLimit,
    MonitorStarted,
    NodeSample,
    ProbeTrouble,
    ProcessEnded,
    ProcessStarted,
    ProcessState,
    RankExiting,
    RankSample,
    RankStood,
    StallOver,
    StallSeen,
    Stopped,
)
from ..report import registry
from ..report.findings import Check
from ..run import Facts, Recording, Run
from ..storage import stack_dumps
from ..storage.run_folder import EventWriter, RunFolder
from . import system
from .late_ranks import LateRanks
from .stall_detector import StallDetector
from .stop_agreement import Judge

if TYPE_CHECKING:
    from ..config import Options

FORKED_SHARE, MOST_FORKED = 0.01, 16
"""The share of the time that may go into reading the memory that children share with their rank,
and of how many children of a rank it is read."""

SAMPLE_S = 1.0
SAMPLES_PER_AGE = 600
"""Samples are written at least `age / SAMPLES_PER_AGE` apart, so that files of long runs are small:
a day has 3,600 samples, not 86,400."""

_GRACE_S = 1.0


@dataclass
class Watched:
    """A rank's process.

    Attributes:
        born: start time in clock ticks, which tells it from a later process with the same pid.
        gone: when it was found to have ended, on the monotonic clock.
    """

    rank: int
    pid: int
    attempt: int
    born: int
    state: str = "R"
    gone: float | None = None
    exit_code: int | None = None
    sample: RankSample | None = None
    unwritten: bool = False
    threads: dict[int, int] = field(default_factory=dict)
    looked: float = 0.0
    forked_next: float = 0.0

    def runnable(self, now: float, threads: dict[int, int]) -> float | None:
        """How many threads ran or waited for a core since the last call, on average (see
        `RankSample`); None where that is not known."""
        before, self.threads = self.threads, threads
        since, self.looked = now - self.looked, now
        if not before or not threads or since <= 0:
            return None
        spent = sum(ns - before[t] for t, ns in threads.items() if t in before)
        return round(max(0, spent) / since / 1e9, 3)


class Monitor:
    """Call `tick` about four times a second, `finish` once at the end.

    Attributes:
        run: the latest attempt, as recorded in the folder so far.
        troubles: the monitor's own errors, each once.
        watched: the processes of this node's ranks, by pid.
        unheard: other nodes' records are late: nothing can be concluded from them.
    """

    def __init__(
        self, folder: RunFolder, node_rank: int, options: Options, *, launcher: str = "run"
    ) -> None:
        self.folder = folder
        self.node_rank = node_rank
        self.options = options
        self.launcher = launcher
        self.unheard = False
        self.recording = Recording(folder)
        self._verdicts = Judge(folder)
        self.run: Run | None = None
        self.watched: dict[int, Watched] = {}
        self.troubles: list[str] = []
        self._writer: EventWriter | None = None
        self._began = time.monotonic()
        self._sampled = self._written = -SAMPLE_S
        self._oom_kills: int | None = None
        self._reaped: dict[int, int] = {}
        self._recorded: set[int] = set()
        self._swept: set[int] = set()
        self._gpus = system.Gpus()
        self._tree = system.Tree()
        self._late_ranks = LateRanks()
        self.stall_detector = StallDetector(options, self._write, lambda: _hang_checks(options))

    def start(self) -> None:
        """Open the node's file, the first that is free from `node_rank` on: several nodes may
        record in one folder, and only the rendezvous numbers them.

        Raises:
            OSError: it cannot be made.
        """
        while self._writer is None:
            try:
                self._writer = EventWriter(self.folder.node_path(self.node_rank))
            except FileExistsError:
                self.node_rank += 1
        try:
            self._introduce()
        except Exception as error:
            self.failed(error)

    def _introduce(self) -> None:
        """Record the machine."""
        self._write(
            MonitorStarted(
                at=time.monotonic(),
                schema=SCHEMA,
                wall=time.time(),
                node=platform.node(),
                node_rank=self.node_rank,
                pid=os.getpid(),
                cores=system.cores(),
                memory_bytes=system.memory_bytes(),
                gpus=self._gpus.names,
                cpu_quota=system.cpu_quota(),
                gpu_uuids=self._gpus.uuids,
                gpu_memory_bytes=self._gpus.memory,
                driver=self._gpus.driver,
                gpu_trouble=self._gpus.trouble,
                divided=self._gpus.divided,
            )
        )
        self._check_memory_limit(always=True)

    def tick(self) -> str | None:
        """Look once. Returns why the run has to be stopped, or None to let it continue."""
        try:
            attempt = self.folder.attempts()[-1]
            self.run = self.recording.refresh(attempt)
            self._discover(self.run)
            self._look_at_processes()
            self._judge_for_ranks(attempt)
            now = time.monotonic()
            pids = self.rank_pids()
            live = [r for r in self.run.ranks.values() if r.pid in pids]
            self._late_ranks.look(live, self._began, now)
            if now - self._sampled >= SAMPLE_S:
                self._sampled = now
                self._sample(now)
            return self._spawned_twice(self.run) or self.judge(self.run)
        except Exception as error:
            self.failed(error)
            return None

    def judge(self, run: Run) -> str | None:
        """Why the run has to be stopped because it is deadlocked or stalled, or None."""
        if self.unheard and self.options.on_hang != "stop":
            return None
        return self.stall_detector.look(run, self.rank_pids())

    def _spawned_twice(self, run: Run) -> str | None:
        """Why the run has to be stopped because a script spawned its ranks in each of torchrun's
        processes, where they can never form a group; None otherwise."""
        if self.launcher != "run" or self.options.on_hang == "report":
            return None
        alive = self.rank_pids()
        for rank in run.ranks.values():
            claims = [c.started for c in (rank, *rank.twins) if c.started]
            spawned = [c for c in claims if c.spawned and c.pid in alive]
            parents = {stat.parent for c in spawned if (stat := system.stat(c.pid))}
            if len(parents) > 1:
                script = " ".join(spawned[0].argv)
                return (
                    f"the script starts its own ranks in each of torchrun's processes, so "
                    f"{len(parents)} processes are rank {rank.rank}; "
                    f"type ddpdoctor exec -- python {script}"
                )
        return None

    @property
    def ranks_wait(self) -> bool:
        """Whether ranks may be waiting for the monitor's verdict; `tick` more often then."""
        return self._verdicts.asked

    def _judge_for_ranks(self, attempt: int) -> None:
        if self.run and self.run.nodes and min(self.run.nodes) != self.node_rank:
            return  # one node's monitor judges for all that share the folder
        if attempt != self._verdicts.attempt:
            self._verdicts = Judge(self.folder, attempt)
        try:
            self._verdicts.look(self.run, lambda: self.recording.refresh(attempt))
        except Exception as error:
            self.failed(error)

    def record(self, event: Event) -> None:
        """Write down what was observed elsewhere in the process of the monitor."""
        self._write(event)

    def stopped(self, by: str, reason: str) -> None:
        """Record that the run is about to be stopped."""
        self._write(Stopped(at=time.monotonic(), by=by, reason=reason))

    def reaped(self, pid: int, code: int) -> None:
        """Take the exit code (as `Popen.returncode`) of a child that the supervisor waited for."""
        self._reaped[pid] = code

    def swept(self, pids: set[int]) -> None:
        """Take the ranks that the supervisor ends because their launcher is gone."""
        self._swept |= pids

    def rank_pids(self) -> set[int]:
        """Pids of this node's ranks that were alive at the last look."""
        return {w.pid for w in self.watched.values() if w.gone is None}

    @property
    def begun(self) -> bool:
        """Whether any rank of this node was seen, or its launcher has recorded starting one."""
        own = self.run.nodes.get(self.node_rank) if self.run else None
        return bool(self.watched or (own and own.of(ProcessStarted)))

    def finish(self) -> None:
        """Look for the last time, after the launcher's process has ended, and close the file."""
        self.settle()
        if self._writer:
            self._writer.close()
            self._writer = None
        self._gpus.close()

    def settle(self) -> None:
        """The ranks have ended: write what is known of that. A second time only what is new."""
        self.tick()
        try:
            for watched in self.watched.values():
                self._flush(watched)
                # A zombie cannot be waited for while threads of it are still there.
                if watched.gone is not None or watched.state == "Z":
                    self._record_end(watched)
            self._check_memory_limit(always=True)
        except Exception as error:
            self.failed(error)
        try:
            if self.run is not None:
                run = self.recording.refresh(self.run.attempt)
                self.stall_detector.finish(run, set(self.watched))
        except Exception as error:
            self.failed(error)

    def _discover(self, run: Run) -> None:
        """Find the ranks of this node: those that torchrun started, and those that recorded it."""
        own = run.nodes.get(self.node_rank, Facts())
        for started in own.of(ProcessStarted):
            self._watch(started.rank, started.pid, started.attempt)
        if self.launcher == "run" and own.of(ProcessStarted):
            # The rank itself may be a child of what was started (`--no-python wrapper.sh`).
            places = {e.rank for e in own.of(ProcessStarted)}
        else:
            places = {p.rank for p in run.processes()}
        for one in run.processes():
            said = one.started
            if said and said.rank in places and said.node == platform.node():
                self._watch(said.rank, said.pid, said.attempt)

    def _watch(self, rank: int, pid: int, attempt: int) -> None:
        if pid in self.watched or pid <= 0:
            return
        stat = system.stat(pid)
        seen = Watched(rank, pid, attempt, born=stat.born if stat else 0)
        if stat is None:  # ended between two looks
            seen.gone = time.monotonic()
        self.watched[pid] = seen

    def _look_at_processes(self) -> None:
        now = time.monotonic()
        for watched in self.watched.values():
            if watched.gone is not None:
                if self.launcher == "exec" and now - watched.gone >= _GRACE_S:
                    self._record_end(watched)
                continue
            stat = system.stat(watched.pid)
            if stat is None or stat.born != watched.born:
                watched.gone = now
                self._flush(watched)
                self._check_memory_limit()
                continue
            if stat.state == "Z":
                watched.exit_code = stat.exit_code
            odd = (*STOPPED_STATES, "Z")
            if stat.state != watched.state and (stat.state in odd or watched.state in odd):
                self._write(
                    ProcessState(
                        at=now,
                        rank=watched.rank,
                        pid=watched.pid,
                        state=stat.state,
                        attempt=watched.attempt,
                    )
                )
            watched.state = stat.state

    def _record_end(self, watched: Watched) -> None:
        """Record the end of a process, unless it is on record already."""
        known = self._known_end(watched)
        if known is not None and known.pid == watched.pid:
            return
        code = self._reaped.get(watched.pid, watched.exit_code)
        silent = False
        if known is None and code is None:
            code, silent = self._last_words(watched.pid)
        if known is not None:  # the wrapper around it ended like this
            status, number, by_launcher = known.status, known.signal, known.by_launcher
        else:
            status = code if code is not None and code >= 0 else None
            number, by_launcher = (
                (-code if code is not None and code < 0 else None),
                (watched.pid in self._swept),
            )
        ended = ProcessEnded(
            at=watched.gone or time.monotonic(),
            rank=watched.rank,
            pid=watched.pid,
            wall=time.time(),
            status=status,
            signal=number,
            by_launcher=by_launcher,
            attempt=watched.attempt,
            silent=silent,
        )
        self._write(ended)
        # The file is read back only at the next look.
        self._recorded.add(watched.pid)

    def _last_words(self, pid: int) -> tuple[int | None, bool]:
        """What is known of the end of a rank that recorded none: minus the number of the signal by
        which it crashed (None where unknown), and whether it left no stacks either."""
        for one in self.run.processes() if self.run else ():
            if one.started and one.started.pid == pid and not one.latest(RankExiting):
                dump = stack_dumps.read(stack_dumps.beside(one.path))
                crash = stack_dumps.fatal_signal(dump)
                return (-crash if crash else None), not dump
        return None, False

    def _known_end(self, watched: Watched) -> ProcessEnded | None:
        if watched.pid in self._recorded:
            return ProcessEnded(at=0, rank=watched.rank, pid=watched.pid, wall=0)
        own = self.run.nodes.get(self.node_rank) if self.run else None
        ends = [
            e
            for e in (own.of(ProcessEnded) if own else [])
            if (e.rank, e.attempt) == (watched.rank, watched.attempt)
        ]
        # Under torchrun what was started is written down, and the rank may be a child of it.
        wrapper = ends[0] if ends and self.launcher == "run" else None
        return next((e for e in ends if e.pid == watched.pid), wrapper)

    def _sample(self, now: float) -> None:
        held = self._gpus.by_process()
        write = now - self._written >= max(SAMPLE_S, (now - self._began) / SAMPLES_PER_AGE)
        self._tree.look()
        for watched in self.watched.values():
            if watched.gone is not None:
                continue
            use = self._tree.memory(watched.pid)
            if use is None:
                continue
            gpu: dict[int, int] = {}
            for pid in use.pids:
                for index, size in held.get(pid, {}).items():
                    gpu[index] = gpu.get(index, 0) + size
            forked = self._forked(watched, use.pids[1:]) if write else ()
            watched.sample = RankSample(
                at=now,
                rank=watched.rank,
                pid=watched.pid,
                rss_bytes=use.own,
                children=len(use.pids) - 1,
                children_bytes=use.children,
                gpu_bytes=gpu,
                attempt=watched.attempt,
                runnable=watched.runnable(now, system.runnable_ns(use.pids)),
                forked=forked,
            )
            watched.unwritten = True
            if write:
                self._flush(watched)
        if write:
            self._written = now
            used, busy = self._gpus.used()
            self._write(
                NodeSample(
                    at=now,
                    available_bytes=system.available_bytes(),
                    gpu_used_bytes=used,
                    gpu_busy_percent=busy,
                    orphans=system.orphans(),
                )
            )

    def _forked(self, watched: Watched, pids: tuple[int, ...]) -> tuple[ChildMemory, ...]:
        """What the descendants of a rank share with no other process; nothing while reading that of
        all ranks would cost more than `FORKED_SHARE` of the time."""
        begin = time.monotonic()
        if not pids or begin < watched.forked_next:
            return ()
        found = [(pid, system.private_memory(pid)) for pid in pids[:MOST_FORKED]]
        spent = time.monotonic() - begin
        watched.forked_next = begin + spent * len(self.watched) / FORKED_SHARE
        return tuple(
            ChildMemory(pid=pid, rss_bytes=sizes[0], private_bytes=sizes[1])
            for pid, sizes in found
            if sizes
        )

    def _flush(self, watched: Watched) -> None:
        """Write the latest sample of a process: of one that died, the last is the one to have."""
        if watched.sample and watched.unwritten:
            watched.unwritten = False
            self._write(watched.sample)

    def _check_memory_limit(self, always: bool = False) -> None:
        seen = system.control_group_memory()
        if always or seen.oom_kills != self._oom_kills:
            self._write(
                MemoryLimit(
                    at=time.monotonic(),
                    limit_bytes=seen.limit,
                    used_bytes=seen.used,
                    oom_kills=seen.oom_kills,
                )
            )
        self._oom_kills = seen.oom_kills

    def _write(self, event: Event) -> None:
        if self._writer:
            vital = isinstance(
                event, ProcessEnded | Stopped | MemoryLimit | RankStood | StallSeen | StallOver
            )
            self._writer.write(event, vital=vital)

    def failed(self, error: Exception) -> None:
        """Something of ours went wrong: write it down once."""
        text = repr(error)
        if text not in self.troubles:
            self.troubles.append(text)
            with contextlib.suppress(Exception):
                self._write(ProbeTrouble(at=time.monotonic(), part="monitor", error=text))


@cache
def _hang_checks(options: Options) -> tuple[Check, ...]:
    chosen = registry.select(options.select, options.ignore)
    at_start = ("rank-mismatch", "rendezvous-stall")
    return tuple(c for c in chosen if c.family == "hang" or c.name in at_start)
