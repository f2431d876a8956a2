"""Ranks in `init_process_group`: at which address each waits, and where the missing ones are."""

from __future__ import annotations

from ...events import GroupReady, InitEntered, RankExiting, RankStood
from ...run import Location, Rank, Run, shorten


def waiting_at(waiting: list[Rank]) -> dict[str, list[int]]:
    """The addresses at which ranks wait, and which do, where these cannot be one: other ports or
    files. Empty where they may be one: a machine may have several names."""
    places: dict[str, list[int]] = {}
    for rank in waiting:
        entered = rank.latest(InitEntered)
        places.setdefault(entered.rendezvous if entered else "", []).append(rank.rank)
    stores = {p if p.startswith("file://") else _port(p) for p in places}
    return places if len(stores) > 1 and "" not in stores else {}


def _port(place: str) -> str:
    """The port of `host:port` or `tcp://host:port`; empty where it names none."""
    port = place.rpartition(":")[2]
    return port if port.isdigit() else ""


def port_set_at(rank: Rank) -> Location | None:
    """The line of the program that set the port, or else the address."""
    entered = rank.latest(InitEntered)
    sites = entered.set_at if entered else {}
    return next(
        (rank.location(sites[n]) for n in ("MASTER_PORT", "MASTER_ADDR") if n in sites), None
    )


def has_no_store(rank: Rank) -> bool:
    """Whether a rank under torchrun was given another `tcp://` address than that of torchrun's
    store. All ranks then connect as clients to a store that none of them opens."""
    entered, reported = rank.latest(InitEntered), rank.started.environment if rank.started else {}
    own = f"tcp://{reported.get('MASTER_ADDR')}:{reported.get('MASTER_PORT')}"
    elastic = reported.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = entered.rendezvous if entered else ""
    return elastic and place.startswith("tcp://") and place != own


def last_line(run: Run, rank: Rank) -> Location | None:
    """The line at which a rank left, or where it was when its stack was taken."""
    if (leaving := left_early(rank)) and (spot := rank.location(leaving.site)):
        return spot
    stood = stood_of(run, rank)
    frame = stood.user_frame if stood else None
    if frame is None:
        return None
    return Location(shorten(frame.file, rank.cwd), frame.line, frame.function, frame.text)


def stood_of(run: Run, rank: Rank) -> RankStood | None:
    """Where a rank was when the run stalled; None where that was not recorded."""
    stood = (e for node in run.nodes.values() for e in node.of(RankStood))
    mine = [e for e in stood if e.rank == rank.rank and e.attempt == run.attempt]
    return mine[-1] if mine else None


def left_early(rank: Rank) -> RankExiting | None:
    """How a rank exited; None if it did not, or if it failed."""
    leaving = rank.latest(RankExiting)
    fine = leaving is not None and leaving.how != "exception" and not leaving.status
    return leaving if fine else None


def same_store(rank: Rank) -> bool:
    """Whether a rank's last two groups use the same store, one that outlives them: torchrun's, or
    a file."""
    before, entered = rank.of(InitEntered)[-2:]
    reported = rank.started.environment if rank.started else {}
    place = entered.rendezvous
    lasts = place.startswith("file://") or reported.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return lasts and before.rendezvous == place


def has_formed(rank: Rank) -> bool:
    """Whether a rank's latest `init_process_group` returned."""
    since = rank.of(InitEntered)[-1].at
    return any(e.at >= since for e in rank.of(GroupReady))


def expected_world(rank: Rank) -> int:
    """The world size that a rank waits for; 0 where that is not known."""
    entered = rank.latest(InitEntered)
    if entered is None:
        return 0
    return entered.world_size if entered.world_size > 0 else max(entered.env_world_size, 0)
