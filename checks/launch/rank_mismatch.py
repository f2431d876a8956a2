"""DDP101: rank or world size passed to `init_process_group` cannot be right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ddpdoctor.analysis.process.rank_claims import Claim, claims, meetings, set_at, unentered
from ddpdoctor.events import StepDone, Wrapped
from ddpdoctor.report.declarations import CALLS, STOPPED, Condition, Effect, When
from ddpdoctor.report.findings import Check, Confidence, Finding, Severity
from ddpdoctor.run import Run, listed, ranks_do, ranks_text

_LOCAL = ("localhost", "127.", "::1", "[::1]", "tcp://localhost", "tcp://127.", "file:")
"""How an address begins at which only processes of this machine meet."""

GROUPS_FORMED = "groups formed"
"""The evidence that says how many process groups were created at this address."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with the processes that meet at one address.

    Attributes:
        rule: which rule of the check found it.
        text: what is wrong, in a sentence.
        wrong: the calls at fault.
    """

    rule: str
    text: str
    wrong: list[Claim]


class RankMismatch(Check):
    """Inconsistent ranks or world size

    ## What it finds
    Processes that call `init_process_group` with a rank or a world size that cannot be right: two
    processes with the same rank, different world sizes, a rank beyond the world size, a world size
    above the number of processes, a world size of 1 in each of several processes.

    ## How it knows
    At each `init_process_group`, before it can block, the process records its arguments, the
    current `RANK`, `WORLD_SIZE` and `LOCAL_RANK`, and the rendezvous address. These are compared

    - with the environment in which the process started, as the launcher (torchrun, Slurm, MPI) set
      it
    - with the number of processes that `torch.multiprocessing.spawn` started together
    - with the values of the other processes at the same address

    The finding is proven. A world size of 1 may be intended: it is suspected only, and reported
    only if every process takes optimizer steps on a model in a wrapper such as
    DistributedDataParallel.

    ## Why it hurts
    The group waits for ranks that do not exist, or two processes act as the same rank. The run
    hangs or fails in `init_process_group`, or each process trains alone on all of the data.

    ## How to fix it
    Let torchrun set them: call `init_process_group(backend)` without rank and world size. Use
    `int(os.environ["RANK"])` where a rank is needed, and `LOCAL_RANK` only for the device.

    ## When it stays quiet
    - explicit arguments that are consistent, even if they are not the launcher's: smaller groups
      with separate addresses, another order of the ranks, a script that spawns its own processes
      under a launcher
    """

    code = "DDP101"
    name = "rank-mismatch"
    family = "launch"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "duplicate-rank": "several processes have the same rank",
        "world-size-disagreement": "ranks that meet at one address have different world sizes",
        "rank-out-of-range": "a rank is not below its world size",
        "world-larger-than-launched": "the world size is above the number of launched processes",
        "world-larger-than-spawned": "the world size is above the number of spawned processes",
        "world-of-one": "processes that were started together each train with a world size of 1",
    }
    requires = (unentered,)
    effects = (
        Effect(("rendezvous-stall", "group-never-formed")),
        Effect(("first-failure",), when=(When.SAME_LINE, When.WITHIN_RANKS)),
        # If no group was ever created, all failures of collectives follow from that.
        Effect(
            (*STOPPED, *CALLS),
            when=(
                Condition(
                    "if no group was formed", lambda mine, _: mine.evidence.get(GROUPS_FORMED) == 0
                ),
            ),
        ),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        found = claims(run)
        for members in meetings(found).values():
            problem = _problem(members)
            if problem is not None:
                yield self._report(run, members, problem)
                return  # problems at later addresses follow from the first
        if alone := _world_of_one(found):
            yield self._report(run, found, alone, confidence=Confidence.SUSPECTED)

    def _report(self, run: Run, members: list[Claim], problem: Problem, **more: object) -> Finding:
        first = problem.wrong[0]
        ranks = {c.process.rank for c in problem.wrong}
        stuck = run.stall is not None and _nobody_else_can_come(members)
        return self.finding(
            rule=problem.rule,
            ranks=tuple(sorted(ranks)),
            location=first.process.location(first.event.site),
            label=f"rank {first.rank} of {first.world_size}",
            summary=problem.text,
            cause=_cause(problem.wrong),
            related=set_at(first),
            fix=_fix(members),
            evidence={
                "processes": [_row(c) for c in sorted(members, key=_order)],
                # Each rank can be in a group once: the rank with most groups counts them.
                GROUPS_FORMED: max(Counter(c.rank for c in members if c.ready).values(), default=0),
                "stuck": stuck,
            },
            deadlocked=stuck,
            at=first.process.wall(first.event.at),
            **more,
        )


def _world_of_one(found: list[Claim]) -> Problem | None:
    """The problem of processes that were started together and each train a wrapped model with a
    world size of 1, so that no gradient is ever synchronised; None where it is not so."""
    count = len({id(c.process) for c in found})
    started = _started_together(found)
    if count < 2 or not started or any(c.world_size > 1 for c in found):
        return None
    if not all(c.ready and c.process.of(Wrapped) and c.process.of(StepDone) for c in found):
        return None
    text = f"each of {count} processes trains with world_size=1, but {started}"
    return Problem("world-of-one", text, found)


def _started_together(found: list[Claim]) -> str:
    """Who started these processes and how many at once, in a phrase; empty if each was started
    separately."""
    reported = {c.launched for c in found}
    if len(reported) > 1 and all(size > 1 for _, size in reported):
        return f"the launcher started {max(size for _, size in reported)}"
    spawned = {c.process.started.spawned if c.process.started else 0 for c in found}
    if len(spawned) == 1 and max(spawned) > 1:
        return f"`torch.multiprocessing.spawn` started {max(spawned)} together"
    return ""


def _problem(members: list[Claim]) -> Problem | None:
    """What is wrong with the processes that meet at one address. In this order, since a duplicate
    rank often comes with a wrong world size, and is the plainer fault."""
    by_rank: dict[int, list[Claim]] = {}
    for claim in members:
        by_rank.setdefault(claim.rank, []).append(claim)
    doubled = {r: c for r, c in by_rank.items() if len(c) > 1}
    worlds = sorted({c.world_size for c in members})
    differing = [c for c in members if c.differs()]
    if doubled:
        rank, double = next(iter(doubled.items()))
        wrong = [c for c in double if c.differs()] or double
        return Problem(
            "duplicate-rank",
            f"{len(double)} processes call init_process_group as rank {rank} of "
            f"{double[0].world_size}"
            + (f"; the same for {ranks_text(set(doubled) - {rank})}" if len(doubled) > 1 else ""),
            wrong,
        )
    if len(worlds) > 1:
        sizes = listed(
            [f"{w} on {ranks_text(c.rank for c in members if c.world_size == w)}" for w in worlds]
        )
        text = f"world_size differs between ranks: {sizes}"
        return Problem("world-size-disagreement", text, differing or members)
    world = worlds[0]
    beyond = [c for c in members if c.rank >= world]
    if beyond:
        verb = "is" if len(beyond) == 1 else "are"
        text = f"{ranks_text(c.rank for c in beyond)} {verb} out of range for world_size={world}"
        return Problem("rank-out-of-range", text, beyond)
    if any(c.ready for c in members) or len(members) == world:
        return None
    started = _started(members)
    if differing and len(members) < world:
        return Problem(
            "world-larger-than-launched",
            f"{ranks_do(by_rank, 'wait')} for {world} ranks, but the launcher started "
            f"{differing[0].given_world}",
            differing,
        )
    if started and started < world:
        return Problem(
            "world-larger-than-spawned",
            f"{ranks_do(by_rank, 'wait')} for {world} ranks, but only {started} processes "
            "were spawned, all on this machine",
            members,
        )
    return None


def _started(members: list[Claim]) -> int:
    """How many processes there can be at most: the number spawned, if they meet on this machine
    and no launcher is involved; else 0, for not known."""
    counts = {c.process.started.spawned for c in members if c.process.started}
    launched = any(c.given_world > 0 for c in members)
    local = all(c.event.rendezvous.startswith(_LOCAL) for c in members)
    return counts.pop() if len(counts) == 1 and local and not launched else 0


def _nobody_else_can_come(members: list[Claim]) -> bool:
    """Whether no further process can complete the group: as many wait as the world size says, two
    of them with the same rank; or every process waits that exists, at an address of their launcher
    that no other launcher knows."""
    if any(c.ready for c in members):
        return False
    if len({c.rank for c in members}) < len(members) >= max(c.world_size for c in members):
        return True
    if spawned := _started(members):
        return len(members) >= spawned
    return all(len(members) >= c.given_world > 0 and c.at_launchers() for c in members)


def _cause(wrong: list[Claim]) -> str:
    """Where the wrong values come from, against what the launcher set."""
    said = [c for c in wrong if c.launched[1] > 0 and c.launched != (c.rank, c.world_size)]
    claim = next(iter(said), wrong[0])
    how = "in its arguments" if claim.event.rank >= 0 or claim.event.world_size > 0 else (
        "from environment variables that the script has changed"
    )  # fmt: skip
    if not said:
        others = "do not match" if claim.world_size > 1 else "have separate groups"
        return f"init_process_group gets these values {how}; other processes {others}"
    rank, size = claim.launched
    launched = f"the launcher set rank {rank} of {size}"
    if len({(c.rank, c.world_size, c.launched[1]) for c in said}) == 1:
        launched = f"the launcher set {ranks_text({c.launched[0] for c in said})} of {size}"
    local = claim.event.env_local_rank
    if claim.rank != rank and claim.rank == local and claim.world_size == size:
        return f"the local rank ({local}) is used as the global rank; {launched}"
    return f"init_process_group gets rank {claim.rank} of {claim.world_size} {how}; {launched}"


def _fix(members: list[Claim]) -> str:
    spawned = {c.process.started.spawned for c in members if c.process.started}
    if spawned and all(spawned):
        return (
            "use the process index that `torch.multiprocessing.spawn` passes as first argument: "
            "`init_process_group(backend, rank=index, world_size=nprocs)`, with spawn's `nprocs` "
            f"({max(spawned)} here); on several nodes `rank=node * nprocs + index` and "
            "`world_size=nodes * nprocs`"
        )
    return (
        "let torchrun set them: `init_process_group(backend)` without rank and world_size; "
        'elsewhere use `int(os.environ["RANK"])` and `int(os.environ["WORLD_SIZE"])`, and '
        "`LOCAL_RANK` only for the device"
    )


def _order(claim: Claim) -> tuple[int, int]:
    started = claim.process.started
    return claim.launched[0], started.pid if started else 0


def _row(claim: Claim) -> dict[str, object]:
    started = claim.process.started
    rank, size = claim.launched
    return {
        "pid": started.pid if started else 0,
        "node": claim.process.node,
        "init_process_group": f"rank {claim.rank} of {claim.world_size}",
        "launcher": f"rank {rank} of {size}" if rank >= 0 else "-",
        "rendezvous": claim.event.rendezvous,
    }
