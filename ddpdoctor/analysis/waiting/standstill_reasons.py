"""What is on record of ranks that all stand in one collective, or wait for messages."""

from __future__ import annotations

from dataclasses import dataclass

from ...events.operations import operation
from ...run import Location, ranks_text
from . import shared_groups, stale_store
from .device_waits import Mismatch, mismatch
from .shared_groups import shared_group
from .snapshot import RankSnapshot, Snapshot
from .unwaited_sends import KEEP_HANDLES, unwaited_send


@dataclass(frozen=True)
class Reason:
    """What is on record of ranks that stand still, beyond where they are.

    Attributes:
        ranks: those at fault; empty where that is all of them.
        proven: they can never go on.
    """

    rule: str
    line: Location | None
    label: str
    cause: str
    fix: str
    ranks: tuple[int, ...] = ()
    proven: bool = False


def reason_for(
    now: Snapshot, stands: list[RankSnapshot], least: RankSnapshot, rule: str
) -> Reason | None:
    """Why all ranks stand in the same collective, or wait for messages; None where nothing says."""
    if rule == "same-collective":
        if again := stale_store.formed_again(stands):
            label = "the group was formed again here"
            return Reason("group-formed-again", again, label, stale_store.CAUSE, stale_store.FIX)
        if shared := shared_group(now, least.key):
            return Reason(
                "several-threads",
                shared.line,
                f"thread {shared.thread} uses {shared.key}",
                shared.cause,
                shared_groups.FIX,
                proven=shared.mixed,
            )
        if least.key and least.key.on_device and least.call and not least.call.index:
            return Reason(
                "first-collective",
                None,
                "",
                f"all ranks are in the same collective, the first one of {least.key}, which "
                "connects their devices: that takes long, or the network or the devices do not "
                "deliver",
                "give it more time with `--hang-after 60`; if it does not end, run with "
                "`NCCL_DEBUG=INFO` and see which connection is missing; on one machine try "
                "`NCCL_P2P_DISABLE=1`, between machines set `NCCL_SOCKET_IFNAME`",
            )
    importing = [s for s in stands if s.computes and s.stood and s.stood.importing]
    if importing and len(importing) < len(stands):
        first = importing[0]
        return Reason(
            "importing",
            first.location,
            f"rank {first.rank.rank} is importing modules here",
            f"{ranks_text([s.rank.rank for s in importing])} "
            f"{'is' if len(importing) == 1 else 'are'} still importing modules, which takes long "
            "where the file system is slow or cold",
            "wait, or install the packages on a local disk of each machine",
            tuple(s.rank.rank for s in importing),
        )
    if rule == "own-code" and (found := mismatch(now.known)):
        return _different_on_device(found)
    if rule == "waiting-messages":
        for stand in stands:
            peer = now.by_rank.get(stand.call.peer) if stand.call else None
            sent = unwaited_send(now, peer, (stand.rank.rank,)) if peer else None
            if sent is not None and peer is not None and _receives(stand):
                sender, receiver = peer.rank.rank, stand.rank.rank
                return Reason(
                    "unwaited-send",
                    sent.location,
                    "the handle is not waited for",
                    f"rank {sender} sent with `isend` to rank {receiver}, which waits {stand.doing}"
                    ", and did not wait for the handle: a message whose handle is gone may be lost",
                    KEEP_HANDLES,
                    (sender,),
                )
    return None


def _different_on_device(found: Mismatch) -> Reason:
    rows = {r: f"{e.op} of {e.sizes}" for r, e in found.by_rank.items()}
    each = "; ".join(f"rank {rank}: {what}" for rank, what in rows.items())
    return Reason(
        "different-on-device",
        None,
        "",
        f"the ranks issued the same calls, but torch's flight recorder has their devices in "
        f"different ones, at number {found.number} of {found.key}: {each}",
        "see that the ranks have models of equal parameters and buffers, in the same order, and "
        "that the backward of every rank reaches the same ones",
        proven=True,
    )


def _receives(stand: RankSnapshot) -> bool:
    return stand.made is not None and operation(stand.made.signature.op).receives
