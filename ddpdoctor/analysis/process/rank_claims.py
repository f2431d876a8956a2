"""The rank, world size and address of every `init_process_group`, and what the launcher set."""

from __future__ import annotations

from dataclasses import dataclass

from ...events import GroupReady, InitEntered, RankExiting
from ...report.findings import Related
from ...run import Rank, Run

_SCHEDULERS = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


@dataclass(frozen=True)
class Claim:
    """One `init_process_group` of one process.

    Attributes:
        rank, world_size: those of the call, from its arguments or the environment.
        given_rank, given_world: those the launcher set for this process; -1 where it set none.
        ready: the process group was created.
        until: when the process ended, seconds on the run's clock; infinite if that is not known.
    """

    process: Rank
    event: InitEntered
    rank: int
    world_size: int
    given_rank: int
    given_world: int
    ready: bool
    until: float

    def differs(self) -> bool:
        """Whether rank or world size are not those that the launcher set."""
        reported = self.given_rank >= 0 and self.given_world > 0
        return reported and (self.rank, self.world_size) != (self.given_rank, self.given_world)

    @property
    def launched(self) -> tuple[int, int]:
        """Rank and world size as the launcher or the scheduler set them; -1 where neither did."""
        started = self.process.started
        if self.given_rank >= 0 or started is None or started.spawned:
            return self.given_rank, self.given_world
        reported = started.environment
        pairs = ((_number(reported.get(r)), _number(reported.get(n))) for r, n in _SCHEDULERS)
        return next((pair for pair in pairs if min(pair) >= 0), (-1, -1))

    def at_launchers(self) -> bool:
        """Whether the rendezvous address is `MASTER_ADDR:MASTER_PORT` of the launcher."""
        reported = self.process.started.environment if self.process.started else {}
        return (
            self.event.rendezvous == f"{reported.get('MASTER_ADDR')}:{reported.get('MASTER_PORT')}"
        )


def unentered(run: Run) -> str | None:
    """Why it is not known how the ranks called `init_process_group`; None where it is."""
    if run.any(InitEntered):
        return None
    if run.any(GroupReady):
        return "init_process_group was called before ddpdoctor was active"
    return "init_process_group was never called"


def claims(run: Run) -> list[Claim]:
    """The claims of all processes, oldest first, without those that leave the rank to the backend
    (MPI)."""
    found = [claim for p in run.processes() for e in p.of(InitEntered) if (claim := _claim(p, e))]
    return sorted(found, key=lambda c: c.process.wall(c.event.at))


def _claim(process: Rank, event: InitEntered) -> Claim | None:
    """The claim of one call; None where it has no rank or no world size."""
    rank = event.rank if event.rank >= 0 else event.env_rank
    world = event.world_size if event.world_size > 0 else event.env_world_size
    if rank < 0 or world <= 0:
        return None
    started = process.started
    environment = started.environment if started else {}
    return Claim(
        process=process,
        event=event,
        rank=rank,
        world_size=world,
        given_rank=_number(environment.get("RANK")),
        given_world=_number(environment.get("WORLD_SIZE")),
        ready=any(g.group == 0 and g.at >= event.at for g in process.of(GroupReady)),
        until=_until(process),
    )


def _until(process: Rank) -> float:
    """When a process ended, seconds on the run's clock; infinite where that was not recorded."""
    leaving = process.latest(RankExiting)
    if leaving is not None:
        return process.wall(leaving.at)
    return process.ended.wall if process.ended else float("inf")


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else -1


def set_at(claim: Claim) -> tuple[Related, ...]:
    """The lines of the program that set `RANK` or `WORLD_SIZE`, where these were used."""
    event = claim.event
    given = {"RANK": event.rank >= 0, "WORLD_SIZE": event.world_size > 0}
    spots = {
        n: claim.process.location(s) for n, s in event.set_at.items() if not given.get(n, True)
    }
    return tuple(Related(f"sets {name}", spot) for name, spot in spots.items() if spot)


def meetings(found: list[Claim]) -> dict[str, list[Claim]]:
    """Claims by rendezvous, `address#number`. An address that is used again after all its processes
    have ended is another rendezvous, unless one launcher started them all and the earlier ones left
    without a group: then these were to meet the later ones."""
    by_place: dict[str, list[list[Claim]]] = {}
    for claim in found:
        rounds = by_place.setdefault(claim.event.rendezvous, [])
        began = claim.process.wall(claim.event.at)
        mine = {id(c.process) for c in rounds[-1]} if rounds else set()
        over = bool(rounds) and began > max(c.until for c in rounds[-1])
        if not rounds or id(claim.process) in mine or (over and not _awaited(claim, rounds[-1])):
            rounds.append([])
        rounds[-1].append(claim)
    return {
        f"{place}#{number}": members
        for place, rounds in by_place.items()
        for number, members in enumerate(rounds)
    }


def _awaited(claim: Claim, before: list[Claim]) -> bool:
    """Whether the ended processes `before` were to form a group with this one, and formed none."""
    given = {c.given_rank for c in before}
    reported = claim.given_rank >= 0 and {c.given_world for c in before} == {claim.given_world}
    alone = not any(c.ready for c in before)
    return reported and alone and -1 not in given and claim.given_rank not in given
