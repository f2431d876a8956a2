"""DDP101."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ddpdoctor.analysis.process.rank_claims import Claim, claims, meetings, unentered
from ddpdoctor.events import StepDone, Wrapped
from ddpdoctor.report.findings import Check, Confidence, Finding, Related, Severity
from ddpdoctor.run import Run, ranks_do, ranks_text

_LOCAL = ("localhost", "127.", "::1", "[::1]", "tcp://localhost", "tcp://127.", "file:")


class RankMismatch(Check):
    """Ranks or world size do not fit together

    ## What it finds
    Processes that tell `init_process_group` a rank or a world size that cannot be right: two
    processes with one rank, ranks that disagree on how many they are, a rank beyond the world size,
    a world of more processes than were started, a world of one for each of them.

    ## How it knows
    At each `init_process_group`, before it can block, the process records its arguments, `RANK`,
    `WORLD_SIZE` and `LOCAL_RANK` as the script left them, and the address at which it is to meet
    the others. That is compared with the environment in which the process started, which is what
    the launcher (torchrun, Slurm, MPI) told it, or with the number of processes that
    `torch.multiprocessing.spawn` started together, and with what the others said that meet at the
    same address. The finding is proven; but worlds of one may be meant, so that they are suspected,
    and only where all that were seen take optimizer steps on a model in a wrapper such as
    DistributedDataParallel.

    ## Why it hurts
    The group waits for ranks that do not exist, or two processes answer for one: the run hangs in
    `init_process_group`, fails there, or each process trains alone on all of the data.

    ## How to fix it
    Let torchrun say it: call `init_process_group(backend)` without rank and world size. Use
    `int(os.environ["RANK"])` where a rank is needed and `LOCAL_RANK` for the device alone.

    ## When it stays quiet
    Explicit arguments that fit together, also where they are not the launcher's: smaller groups
    that each meet at an address of their own, another order of the ranks, a script that spawns
    its own processes under a launcher.
    """

    code = "DDP101"
    name = "rank-mismatch"
    family = "launch"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return unentered(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        found = claims(run)
        for members in meetings(found).values():
            problem = _problem(members, run)
            if problem is not None:
                yield self._report(run, members, problem)
                return  # later meetings stumble over the first
        if alone := _each_alone(found):
            yield self._report(run, alone[1], alone, confidence=Confidence.SUSPECTED)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check in ("rendezvous-stall", "group-never-formed"):
            return True
        if other.check == "first-failure" and other.location == mine.location:
            return set(other.ranks) <= set(mine.ranks)
        # Where no group came to exist, whatever else went wrong came of it.
        return mine.evidence.get("groups formed") == 0 and other.code.startswith("DDP6")

    def _report(
        self, run: Run, members: list[Claim], problem: tuple[str, list[Claim]], **more: object
    ) -> Finding:
        text, wrong = problem
        first = wrong[0]
        ranks = {c.process.rank for c in wrong}
        return self.finding(
            ranks=tuple(sorted(ranks)),
            location=first.process.location(first.event.site),
            label=f"rank {first.rank} of {first.world_size}",
            summary=text,
            cause=_cause(wrong),
            related=_set_at(first),
            fix=_fix(members),
            evidence={
                "processes": [_row(c) for c in sorted(members, key=_order)],
                "groups formed": max(
                    Counter(c.rank for c in members if c.ready).values(), default=0
                ),
                "stuck": run.stall is not None and _all_came(members),
            },
            at=first.process.wall(first.event.at),
            **more,
        )


def _each_alone(found: list[Claim]) -> tuple[str, list[Claim]] | None:
    """Whether every process that was started beside others trains a wrapped model in a world of
    its own, which has nobody to synchronise with."""
    count = len({id(c.process) for c in found})
    started = _started_together(found)
    if count < 2 or not started or any(c.world_size > 1 for c in found):
        return None
    if not all(c.ready and c.process.of(Wrapped) and c.process.of(StepDone) for c in found):
        return None
    return f"each of {count} processes trains in a world of 1, but {started}", found


def _started_together(found: list[Claim]) -> str:
    """Who started these processes, and how many of them at once; empty where each is on its own."""
    reported = {c.launched for c in found}
    if len(reported) > 1 and all(size > 1 for _, size in reported):
        return f"the launcher started {max(size for _, size in reported)}"
    spawned = {c.process.started.spawned if c.process.started else 0 for c in found}
    if len(spawned) == 1 and max(spawned) > 1:
        return f"`torch.multiprocessing.spawn` started {max(spawned)} together"
    return ""


def _problem(members: list[Claim], run: Run) -> tuple[str, list[Claim]] | None:
    """What is wrong with a meeting, and which claims are at fault."""
    by_rank: dict[int, list[Claim]] = {}
    for claim in members:
        by_rank.setdefault(claim.rank, []).append(claim)
    doubled = {r: c for r, c in by_rank.items() if len(c) > 1}
    worlds = sorted({c.world_size for c in members})
    differing = [c for c in members if c.differs()]
    if doubled:
        rank, double = next(iter(doubled.items()))
        wrong = [c for c in double if c.differs()] or double
        return (
            f"{len(double)} processes claim to be rank {rank} of {double[0].world_size}"
            + (f" (also {ranks_text(set(doubled) - {rank})})" if len(doubled) > 1 else ""),
            wrong,
        )
    if len(worlds) > 1:
        said = ", ".join(
            f"{ranks_do((c.rank for c in members if c.world_size == w), 'say')} {w}" for w in worlds
        )
        return f"the ranks disagree on the world size: {said}", differing or members
    world = worlds[0]
    beyond = [c for c in members if c.rank >= world]
    if beyond:
        do = "do" if len(beyond) > 1 else "does"
        named = ranks_text(c.rank for c in beyond)
        return (f"{named} {do} not exist in a world of {world}", beyond)
    if any(c.ready for c in members) or len(members) == world:
        return None
    started = _started(members)
    if differing and len(members) < world:
        return (
            f"{ranks_do(by_rank, 'wait')} for a world of {world}, but the launcher started "
            f"{differing[0].given_world}",
            differing,
        )
    if started and started < world:
        return (
            f"{ranks_do(by_rank, 'wait')} for a world of {world}, but {started} processes "
            "were spawned, all on this machine",
            members,
        )
    return None


def _started(members: list[Claim]) -> int:
    """How many processes there can be, where that is certain: spawned to meet on this machine."""
    counts = {c.process.started.spawned for c in members if c.process.started}
    launched = any(c.given_world > 0 for c in members)
    local = all(c.event.rendezvous.startswith(_LOCAL) for c in members)
    return counts.pop() if len(counts) == 1 and local and not launched else 0


def _all_came(members: list[Claim]) -> bool:
    """Whether nobody can come who would make it fit: as many wait as the world has, two of them
    with one rank; or every process there is waits, at an address of the launcher's own that no
    other launcher knows."""
    if any(c.ready for c in members):
        return False
    if len({c.rank for c in members}) < len(members) >= max(c.world_size for c in members):
        return True
    if spawned := _started(members):
        return len(members) >= spawned
    return all(len(members) >= c.given_world > 0 and c.at_launchers() for c in members)


def _cause(wrong: list[Claim]) -> str:
    said = [c for c in wrong if c.launched[1] > 0 and c.launched != (c.rank, c.world_size)]
    claim = next(iter(said), wrong[0])
    how = "as an argument" if claim.event.rank >= 0 or claim.event.world_size > 0 else (
        "in the environment, which the script has changed"
    )  # fmt: skip
    if not said:
        others = "do not fit to it" if claim.world_size > 1 else "have groups of their own"
        return f"init_process_group was told so {how}, and other processes {others}"
    rank, size = claim.launched
    reported = f"the launcher had said rank {rank} of {size}"
    if len({(c.rank, c.world_size, c.launched[1]) for c in said}) == 1:
        reported = f"the launcher had said {ranks_text({c.launched[0] for c in said})} of {size}"
    local = claim.event.env_local_rank
    if claim.rank != rank and claim.rank == local and claim.world_size == size:
        return f"the local rank ({local}) is used as the rank; {reported}"
    return f"init_process_group was told rank {claim.rank} of {claim.world_size} {how}; {reported}"


def _fix(members: list[Claim]) -> str:
    spawned = {c.process.started.spawned for c in members if c.process.started}
    if spawned and all(spawned):
        return (
            "pass the number that `torch.multiprocessing.spawn` gives each process as its first "
            "argument: `init_process_group(backend, rank=number, world_size=nprocs)`, with spawn's "
            f"own `nprocs` ({max(spawned)} here); on several nodes `rank=node * nprocs + number` "
            "and `world_size=nodes * nprocs`"
        )
    return (
        "let torchrun say it: `init_process_group(backend)` without rank and world_size; elsewhere "
        '`int(os.environ["RANK"])` and `int(os.environ["WORLD_SIZE"])`, and `LOCAL_RANK` for the '
        "device alone"
    )


def _set_at(claim: Claim) -> tuple[Related, ...]:
    """The lines by which the program itself sets what is claimed."""
    event = claim.event
    given = {"RANK": event.rank >= 0, "WORLD_SIZE": event.world_size > 0}
    spots = {
        n: claim.process.location(s) for n, s in event.set_at.items() if not given.get(n, True)
    }
    return tuple(Related(f"sets {name}", spot) for name, spot in spots.items() if spot)


def _order(claim: Claim) -> tuple[int, int]:
    started = claim.process.started
    return claim.launched[0], started.pid if started else 0


def _row(claim: Claim) -> dict[str, object]:
    started = claim.process.started
    rank, size = claim.launched
    return {
        "pid": started.pid if started else 0,
        "node": claim.process.node,
        "said": f"rank {claim.rank} of {claim.world_size}",
        "launcher": f"rank {rank} of {size}" if rank >= 0 else "-",
        "meets at": claim.event.rendezvous,
    }
