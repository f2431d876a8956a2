"""Literal time ledgers, for the tests of what reads them.

    LedgerOf(0).steps(8, forward=0.1).steps(16, outside=0.5, waits=0.2).events

Each call of `steps` spends seconds on accounts and records the sums; each account has one line.
"""

from __future__ import annotations

from recordings import START, site

from ddpdoctor.events import Account, Event, TimeLedger
from ddpdoctor.events.timing import EVALUATING, LONG_S, SAVING
from ddpdoctor.storage.call_ring import Phase

SITES = [
    site(1, "train.py", 10, "for batch in loader:"),
    site(2, "train.py", 11, "loss = model(batch)"),
    site(3, "train.py", 12, "loss.backward()"),
    site(4, "train.py", 13, "optimizer.step()"),
    site(5, "train.py", 20, "for batch in validation:"),
    site(6, "train.py", 30, "torch.save(state, path)"),
]

ACCOUNTS = {
    "start": (Phase.START, -1),
    "loading": (Phase.DATA, 1),
    "forward": (Phase.FORWARD, 2),
    "backward": (Phase.BACKWARD, 3),
    "optimizer": (Phase.OPTIMIZER, 4),
    "outside": (Phase.USER, 4),
    "evaluation": (Phase.DATA | EVALUATING, 5),
    "checkpoint": (SAVING, 6),
    "leaving": (Phase.LEAVING, 4),
}
"""Phase and line of each."""


class LedgerOf:
    """The records of one rank, which started with a second of start-up."""

    def __init__(self, start_s: float = 1.0) -> None:
        self.spent = {"start": start_s}
        self.waited = 0.0
        self.doctor_s = 0.0
        self.long: dict[str, tuple[int, float, int, int, float]] = {}
        self.step = 0
        self.events: list[Event] = [*SITES]

    def steps(
        self,
        until: int,
        *,
        waits: float = 0.0,
        doctor: float = 0.0,
        timed: bool = True,
        **spent: float,
    ) -> LedgerOf:
        """Up to so many steps: seconds by account, each in one stretch."""
        for name, seconds in spent.items():
            self.spent[name] = self.spent.get(name, 0.0) + seconds
            if seconds >= LONG_S:
                count, long_s, first, _, most = self.long.get(name, (0, 0.0, self.step, 0, 0.0))
                most = max(most, seconds)
                self.long[name] = count + 1, long_s + seconds, first, self.step, most
        self.waited += waits
        self.doctor_s += doctor
        self.step = until
        wall_s = sum(self.spent.values()) + self.waited + self.doctor_s
        accounts = [
            Account(*ACCOUNTS[name], seconds, 0.0, *self.long.get(name, (0, 0.0, -1, -1, 0.0)))
            for name, seconds in self.spent.items()
        ]
        waiting = Account(Phase.BACKWARD, 3, 0.0, self.waited)
        self.events.append(
            TimeLedger(
                at=START + wall_s,
                step=until,
                wall_s=wall_s,
                doctor_s=self.doctor_s,
                accounts=(*accounts, waiting),
                backwards_timed=timed,
            )
        )
        return self
