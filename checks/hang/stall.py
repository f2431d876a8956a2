"""DDP609."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.events import FlightLog
from ddpdoctor.findings import Check, Confidence, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Run, ranks_text

from ._scene import Scene, Stand, scene
from ._waiting import across_groups, cycle, gone, in_init, merged_stacks, missing, victims


class Stall(Check):
    """No rank makes progress

    ## What it finds
    A run that stands still without a rank that the others wait for: all ranks are in the same
    collective (the network, or the devices), all are in their own code, or they wait for each other
    in a ring (`recv` on both sides). The stacks are merged:
    equal ones are shown once, the least progressed first.

    ## Why it hurts
    The job holds its machines and does nothing.

    ## How to fix it
    A ring: let one side send first, or use `batch_isend_irecv`. All in one collective: look at the
    network and, on GPUs, at peer-to-peer access (`NCCL_P2P_DISABLE=1` tells). Otherwise the stacks
    say where the program is.

    ## When it stays quiet
    Pauses for evaluation and checkpoints: the stall time is learned from the run.
    """

    code = "DDP609"
    name = "stall"
    family = "hang"
    severity = Severity.WARNING

    def examine(self, run: Run) -> Iterable[Finding]:
        now = scene(run)
        ring = cycle(now)
        if ring and across_groups([now.stands[r] for r in ring]):
            return  # told by collective-mismatch
        if ring:
            yield self._ring(now, [now.stands[r] for r in ring])
        elif now.stall is not None and not missing(now) and not gone(now) and not in_init(now):
            yield self._still(now)

    def _ring(self, now: Scene, ring: list[Stand]) -> Finding:
        first = ring[0]
        ranks = tuple(sorted(s.rank.rank for s in ring))
        told = ", ".join(
            f"rank {s.rank.rank} waits {s.doing} for rank {o.rank.rank}"
            for s, o in zip(ring, [*ring[1:], ring[0]], strict=True)
        )
        return self.finding(
            severity=Severity.ERROR,
            ranks=ranks,
            location=first.location,
            label=f"rank {first.rank.rank} waits here",
            summary=f"ranks wait for each other, so that none can go on: {told}",
            cause="every one of them waits for a message that is only sent afterwards",
            fix="let one side send first and the other receive first, or use "
            "`dist.batch_isend_irecv`",
            fix_kind=FixKind.CHECK,
            evidence={
                "cycle": " -> ".join(str(s.rank.rank) for s in (*ring, first)),
                "stuck": not now.failed,
                **victims(ring),
                "stacks": merged_stacks(now),
            },
            at=now.at - max(s.still_s for s in ring),
        )

    def _still(self, now: Scene) -> Finding:
        stands = [s for s in now.stands.values() if not s.gone]
        waited = max((s.still_s for s in stands), default=0.0)
        calls = {(s.key, s.call.index, s.made.signature.op) for s in stands if s.call and s.made}
        together = len(calls) == 1 and all(s.blocked for s in stands)
        ranks = tuple(s.rank.rank for s in stands)
        least = min(stands, key=lambda s: (s.rank.steps, s.rank.ring.count if s.rank.ring else 0))
        return self.finding(
            ranks=ranks,
            confidence=Confidence.SUSPECTED,
            steps=Steps.of([least.rank.steps]) if least.rank.steps else None,
            location=least.location,
            label=f"{ranks_text([least.rank.rank])} is here",
            summary=f"no rank has made progress for {waited:.0f} s: "
            + (f"all are {least.doing}" if together else _doing(stands, least)),
            cause="all ranks are in the same collective, so nobody is missing: the network or the "
            "devices do not deliver"
            if together
            else "nobody waits for another rank; the stacks say where each of them is",
            fix="check the network between the nodes; on GPUs try NCCL_P2P_DISABLE=1"
            if together
            else "look at the lines in the stacks",
            fix_kind=FixKind.CHECK,
            evidence={
                "waited_s": round(waited, 1),
                "hang_after_s": round(now.hang_after, 1),
                "stacks": merged_stacks(now),
                "flight_recorder": _pending(now),
            },
            at=now.at - waited,
        )


def _doing(stands: list[Stand], least: Stand) -> str:
    """Where all are, if all wait; else the least progressed."""
    rows: dict[str, list[int]] = {}
    for stand in stands if all(s.blocked for s in stands) else [least]:
        rows.setdefault(stand.doing, []).append(stand.rank.rank)
    told = list(rows.items())[:4]
    return ", ".join(f"{ranks_text(r)} {'is' if len(r) == 1 else 'are'} {d}" for d, r in told)


def _pending(now: Scene) -> list[str]:
    """Collectives that torch's flight recorder has as not finished."""
    lines = []
    for stand in now.stands.values():
        log = stand.rank.latest(FlightLog)
        for entry in log.entries if log else ():
            if not entry.retired:
                lines.append(f"rank {stand.rank.rank}: {entry.sequence} {entry.op} {entry.sizes}")
    return lines[:20]
