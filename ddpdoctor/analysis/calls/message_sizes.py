"""Messages that one rank sends in a size in which the other never receives any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...events import MessageSize
from ...run import Rank, Run


@dataclass(frozen=True)
class SizeMismatch:
    """A message, and one that the other rank receives from its sender."""

    sender: Rank
    sent: MessageSize
    receiver: Rank
    received: MessageSize

    @property
    def same_size(self) -> bool:
        """Whether only the dtypes differ."""
        return self.sent.numel == self.received.numel


def message_mismatches(run: Run) -> Iterator[SizeMismatch]:
    """For each two ranks the first message that cannot arrive as it was sent. In a run that did not
    complete, a message of another size may just not have been received yet."""
    completed = run.outcome() == "completed"
    for sender in run.ranks.values():
        for number in sorted({e.peer for e in sender.of(MessageSize) if e.sends and e.peer >= 0}):
            receiver = run.ranks.get(number)
            if receiver is None:
                continue
            received = _messages(receiver, sender.rank)
            sent = _messages(sender, number, sends=True)
            if not received or any(e.peer < 0 for e in receiver.of(MessageSize) if not e.sends):
                continue
            fits = [e for e in sent if any(_fits(e, other) for other in received)]
            lost = [e for e in sent if e not in fits]
            if lost and (completed or not fits):
                first = lost[0]
                spare = [e for e in received if not any(_fits(one, e) for one in sent)]
                yield SizeMismatch(sender, first, receiver, (spare or received)[0])


def _messages(rank: Rank, peer: int, *, sends: bool = False) -> list[MessageSize]:
    return [e for e in rank.of(MessageSize) if e.sends is sends and e.peer == peer]


def _fits(sent: MessageSize, received: MessageSize) -> bool:
    """Whether nothing is lost or read as another type: equal bytes may be sent as plain memory."""
    if sent.bytes != received.bytes:
        return False
    return sent.dtype == received.dtype or "int8" in sent.dtype + received.dtype
