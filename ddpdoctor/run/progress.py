"""How far a run is while it goes on: its speed, its epoch, what each rank does and waits for.

Everything is read from the last records of a rank, so that a long run costs no more than a short
one. Times are seconds on the clock of the rank that is asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..events import EpochBegan, EpochEnded, OptimizerSeen, Pace, RankSample, Signature, StepDone
from ..storage.call_ring import Phase
from .last_activity import whereabouts
from .rank import Rank
from .run import Run
from .steps import recorded_total, total_steps

LATELY_S, BEFORE_S = 30.0, 300.0
FEWEST_STEPS = 8
"""Fewer steps tell no speed."""
LATE = 3.0
"""A step that takes so many times as long as those before may be none any more: time counts on."""
LAST_PACES = 8

_PHASES = {
    Phase.START: "starting",
    Phase.USER: "own code",
    Phase.DATA: "loading",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.INIT: "init_process_group",
    Phase.LEAVING: "leaving",
}


@dataclass(frozen=True)
class Speed:
    """Steps per second of all optimizers together: lately, and in the minutes before, where there
    were enough of them."""

    per_second: float
    before: float | None = None


@dataclass(frozen=True)
class Epoch:
    """The iteration of a loader that a rank is in.

    Attributes:
        number: from 0; done: batches trained on so far, about, of `batches`.
        left_s: until they are all done at the present speed; None while it stands still.
    """

    number: int
    done: int
    batches: int
    left_s: float | None


def clock(rank: Rank) -> float:
    """What time it is for a rank."""
    return time.time() - rank.wall(0.0)


def speed(rank: Rank, now: float) -> Speed | None:
    """How fast a rank takes steps; None before it has taken some."""
    spans = _spans(rank, now)
    count, begin, end = next(spans)
    if count < FEWEST_STEPS:
        return None
    waited = now - end
    if waited > LATE * (end - begin) / count:
        end = now
    earlier, since, until = next(spans)
    before = earlier / (until - since) if earlier >= FEWEST_STEPS and until > since else None
    return Speed(count / (end - begin), before) if end > begin else None


def _spans(rank: Rank, now: float) -> Iterator[tuple[int, float, float]]:
    """The steps of the last `LATELY_S`, then those of `BEFORE_S` before them: how many, since when
    and until when. The first step on record began with the program and is left out."""
    taken = rank.of(StepDone)
    place, since = len(taken) - 1, now
    for length in (LATELY_S, BEFORE_S):
        count, until = 0, taken[place].at if place >= 0 else now
        while place > 0 and (taken[place].at > since - length or count < FEWEST_STEPS):
            count += taken[place].count
            place -= 1
        since = taken[place].at if place >= 0 else now
        yield count, since, until


def epoch(rank: Rank, now: float) -> Epoch | None:
    """The epoch in which a rank trains, where the length of its loader is known."""
    over = {(e.loader, e.epoch): e for e in rank.of(EpochEnded)}
    total = total_steps(rank)
    for began in reversed(rank.of(EpochBegan)):
        if (began.loader, began.epoch) in over or began.batches <= 0 or total <= began.step:
            continue
        each = _batches_a_step(rank, began, over)
        if each is None:
            return None
        done = min(began.batches, round((total - began.step) * each))
        fast = speed(rank, now)
        moves = fast.per_second * each if fast else 0.0
        return Epoch(
            began.epoch, done, began.batches, (began.batches - done) / moves if moves else None
        )
    return None


def _batches_a_step(
    rank: Rank, began: EpochBegan, over: dict[tuple[int, int], EpochEnded]
) -> float | None:
    """Batches for each optimizer step: as in the epoch before, else one for each backward; None
    where several optimizers step and no epoch was seen to its end."""
    last = over.get((began.loader, began.epoch - 1))
    first = next(
        (e for e in rank.of(EpochBegan) if (e.loader, e.epoch) == (began.loader, began.epoch - 1)),
        None,
    )
    if last and first and began.step > first.step:
        return last.batches / (began.step - first.step)
    lately = rank.of(StepDone)[-FEWEST_STEPS:]
    steps, backwards = sum(e.count for e in lately), sum(e.backwards for e in lately)
    if len(rank.of(OptimizerSeen)) > 1 or not steps or not backwards:
        return None
    return backwards / steps


def waiting_share(rank: Rank) -> float | None:
    """The share of its last steps that a rank waited for others; None where that is not seen."""
    lately = rank.of(Pace)[-LAST_PACES:]
    whole = sum(e.count * e.wall_s for e in lately)
    if rank.waits_on_gpu or whole <= 0:
        return None
    return sum(e.count * e.waited_s for e in lately) / whole


def memory(run: Run) -> dict[int, int]:
    """By rank, the bytes that it holds: on its GPUs, where it uses any, else on the host with its
    workers."""
    pids = {r.pid: r.rank for r in run.ranks.values() if r.pid}
    found: dict[int, int] = {}
    for node in run.nodes.values():
        for sample in reversed(node.of(RankSample)[-4 * len(pids) :]):
            rank = pids.get(sample.pid)
            if rank is not None and rank not in found:
                device = sum(sample.gpu_bytes.values())
                found[rank] = device or sample.rss_bytes + sample.children_bytes
    return found


def doing(run: Run, rank: Rank) -> str:
    """What a rank that goes on does now: `in barrier at train.py:31 for 28 s`, `backward`."""
    if stands := whereabouts(run, rank, live=True):
        return stands
    if (ring := rank.ring) is None:
        return "starting" if not recorded_total(rank) else ""
    call = next((c for c in reversed(ring.last_calls) if c.inside), None)
    op = next((s.op for s in rank.of(Signature) if call and s.id == call.signature), "")
    if op:
        return op
    place = rank.location(ring.phase_site)
    word = "after" if ring.phase is Phase.USER else "at"
    return _PHASES.get(ring.phase, "") + (f" {word} {place}" if place else "")
