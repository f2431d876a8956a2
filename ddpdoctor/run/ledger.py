"""Where the time of every rank went, and for whom the ranks waited.

Ranks that synchronise take equally long for a stretch of steps. Of the time that they wait in
collectives in it, what the rank that waits least waits, too, is communication; what the others wait
longer, they wait for that rank, which came last.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..events import Account, TimeLedger
from ..events.timing import EVALUATING, SAVING
from ..storage.call_ring import Phase
from .phrases import counted, ranks_text
from .rank import Rank

START, LOADING, FORWARD, BACKWARD, OPTIMIZER = (
    "start-up", "loading", "forward", "backward", "optimizer",
)  # fmt: skip
OUTSIDE, EVALUATION, CHECKPOINT = "outside", "evaluation", "checkpoint"
WAITING, COMMUNICATION, DOCTOR = "waiting", "communication", "doctor"

ACCOUNTS = (
    START, LOADING, FORWARD, BACKWARD, OPTIMIZER, OUTSIDE, EVALUATION, CHECKPOINT, WAITING,
    COMMUNICATION, DOCTOR,
)  # fmt: skip
"""The accounts, in the order in which they are shown."""

TITLES = {OUTSIDE: "other code"}
"""Names of accounts as people read them, where that is not the one in the records."""

LOSSES = (LOADING, COMMUNICATION, DOCTOR)
"""Accounts in which a rank does not train, but for waiting for others."""

SHOWN_SHARE = 0.01
"""Accounts that are a smaller share of the time on every rank are shown together."""

SAID = 0.1
"""Losses of less than that many ranks are not worth a word."""

MOST_SAID = 2

MUCH = 0.25
"""A run that loses that share of the time of its ranks is told so, also where no check found a
fault."""

_PHASES = {
    Phase.START: START,
    Phase.INIT: START,
    Phase.DATA: LOADING,
    Phase.FORWARD: FORWARD,
    Phase.BACKWARD: BACKWARD,
    Phase.OPTIMIZER: OPTIMIZER,
}

_TRAINING = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True)
class Line:
    """The time that a rank spent in one account at, or after, one line.

    Attributes:
        stretches, long_s, first, last, longest_s: as of `Account`.
    """

    account: str
    site: int
    own_s: float
    stretches: int
    long_s: float
    first: int
    last: int
    longest_s: float = 0.0


@dataclass(frozen=True)
class RankTime:
    """Where one rank's time went.

    Attributes:
        wall_s: from the start of the process to the last record; the accounts add up to it.
        waited_for: seconds of `waiting`, by the rank that came last.
        untimed_s: seconds of `backward` in which DDP may have waited: in backwards of short steps
            that is not timed.
    """

    rank: int
    wall_s: float
    accounts: Mapping[str, float]
    waited_for: Mapping[int, float]
    lines: tuple[Line, ...]
    untimed_s: float = 0.0

    @property
    def training_s(self) -> float:
        """Without the start-up."""
        return self.wall_s - self.accounts.get(START, 0.0)


@dataclass(frozen=True)
class Ledger:
    """The time of all ranks that recorded it.

    Attributes:
        stretches: the ranges of steps in which ranks were compared.
    """

    ranks: Mapping[int, RankTime] = field(default_factory=dict)
    stretches: int = 0

    @property
    def training_s(self) -> float:
        """Of the rank that trained longest."""
        return max((r.training_s for r in self.ranks.values()), default=0.0)

    def lost_for(self, rank: int) -> float:
        """For how many seconds the other ranks waited for one, on average."""
        waited = [r.waited_for.get(rank, 0.0) for r in self.ranks.values() if r.rank != rank]
        return sum(waited) / len(waited) if waited else 0.0

    def shown(self) -> list[str]:
        """The accounts that are a visible share of the time on some rank."""
        ranks = self.ranks.values()
        return [a for a in ACCOUNTS if any(r.accounts[a] >= SHOWN_SHARE * r.wall_s for r in ranks)]

    def efficiency(self) -> str:
        """`4 ranks did the work of 2.9: they worked for 73 % of their time, 17 % was lost waiting
        for rank 2, 10 % to loading`."""
        whole = self.training_s
        if len(self.ranks) < 2 or whole <= 0:
            return ""
        if sum(r.untimed_s for r in self.ranks.values()) >= SAID * whole:
            return "training includes waiting in `backward`: it is not timed in short steps"
        lost = self._lost()
        work = len(self.ranks) - sum(lost.values())
        worst = sorted(((s, what) for what, s in lost.items() if s >= SAID), reverse=True)
        shares = [(s / len(self.ranks), what) for s, what in worst[:MOST_SAID]]
        rest = sum(lost.values()) / len(self.ranks) - sum(share for share, _ in shares)
        shares += [(rest, "otherwise")] * (rest >= SAID / len(self.ranks))
        parts = [(f"{share:.0%}".replace("%", " %"), what) for share, what in shares]
        said = f"{counted(len(self.ranks), 'rank')} did the work of {max(work, 0.0):.1f}"
        if not parts:
            return said
        (share, what), *others = parts
        lost_to = [f"{share} was lost {what}", *(" ".join(other) for other in others)]
        used = f"{max(work, 0.0) / len(self.ranks):.0%}".replace("%", " %")
        return f"{said}: they worked for {used} of their time, {', '.join(lost_to)}"

    def much_lost(self) -> str:
        """`efficiency` of a run in which ranks lost a considerable share of their time in ways that
        are known; else empty."""
        timed = self.efficiency() and sum(r.untimed_s for r in self.ranks.values()) < (
            SAID * self.training_s
        )
        much = timed and sum(self._lost().values()) >= MUCH * len(self.ranks)
        return self.efficiency() if much else ""

    def _lost(self) -> dict[str, float]:
        """What was lost to what, in ranks: 1 is as much as one rank could do in the whole time."""
        whole = self.training_s
        lost: dict[str, float] = {}
        for rank in self.ranks:
            waited = sum(r.waited_for.get(rank, 0.0) for r in self.ranks.values())
            lost[f"waiting for {ranks_text([rank])}"] = waited / whole
        for name in LOSSES:
            spent = sum(r.accounts.get(name, 0.0) for r in self.ranks.values())
            lost[f"to {'the doctor' if name == DOCTOR else name}"] = spent / whole
        absent = len(self.ranks) - sum(r.training_s for r in self.ranks.values()) / whole
        longest = max(r.wall_s for r in self.ranks.values())
        ended = min(absent, sum(longest - r.wall_s for r in self.ranks.values()) / whole)
        lost["as ranks ended earlier"] = ended
        lost["as ranks began training later"] = absent - ended
        return lost


def ledger_of(ranks: Mapping[int, Rank]) -> Ledger:
    """The ledger of a run; without ranks that have not recorded their time."""
    every = {n: rank.of(TimeLedger) for n, rank in ranks.items()}
    every = {n: records for n, records in every.items() if records}
    waited: dict[int, dict[int, float]] = {n: defaultdict(float) for n in every}
    stretches = 0
    for stretch in _stretches(every) if len(every) > 1 else ():
        stretches += 1
        last = min(stretch, key=lambda n: stretch[n])
        for n, seconds in stretch.items():
            if (longer := round(seconds - stretch[last], 6)) > 0:
                waited[n][last] += longer
    return Ledger({n: _rank_time(n, r, waited[n]) for n, r in every.items()}, stretches)


def _stretches(every: Mapping[int, list[TimeLedger]]) -> Iterator[dict[int, float]]:
    """By rank, the seconds waited in collectives between two records that all ranks made after
    equally many steps; last what follows the last of these."""
    # The first record of a step was made when it ended, another one at the end of the run.
    by_step = {n: {e.step: e for e in reversed(records)} for n, records in every.items()}
    before = dict.fromkeys(every, 0.0)
    trains = {n: _trains(records[-1]) for n, records in every.items()}
    for step in sorted(set.intersection(*(set(t) for t in by_step.values()))):
        now = {n: _waited(table[step], trains[n]) for n, table in by_step.items()}
        yield {n: now[n] - before[n] for n in now}
        before = now
    yield {n: _waited(records[-1], trains[n]) - before[n] for n, records in every.items()}


def _waited(record: TimeLedger, trains: bool) -> float:
    """Seconds waited in collectives, without the start-up."""
    return sum(a.waited_s for a in record.accounts if not _starting(a, trains))


def _trains(record: TimeLedger) -> bool:
    """Whether the rank came to a phase of training: an actor or a server of others does not."""
    return any(a.phase in _TRAINING for a in record.accounts)


def _starting(account: Account, trains: bool) -> bool:
    if account.phase in (Phase.START, Phase.INIT):
        return True
    return trains and account.phase == Phase.USER and account.site < 0


def _untimed(records: list[TimeLedger]) -> float:
    """Seconds of backwards in which waiting was not timed."""
    spent = [sum(a.own_s for a in e.accounts if a.phase == Phase.BACKWARD) for e in records]
    gained = [now - before for before, now in itertools.pairwise((0.0, *spent))]
    return sum(s for e, s in zip(records, gained, strict=True) if not e.backwards_timed)


def _rank_time(number: int, records: list[TimeLedger], waited_for: Mapping[int, float]) -> RankTime:
    record = records[-1]
    accounts = dict.fromkeys(ACCOUNTS, 0.0)
    lines = []
    loops = {a.site for a in record.accounts if a.phase == Phase.DATA}
    wraps = any(a.phase == Phase.FORWARD for a in record.accounts)
    trains = _trains(record)
    for account in record.accounts:
        name = START if _starting(account, trains) else _name(account)
        if name == OUTSIDE and not wraps and account.site in loops:
            name = FORWARD  # no wrapper whose forward would be seen
        accounts[name] += account.own_s + (account.waited_s if name == START else 0.0)
        lines.append(
            Line(
                name,
                account.site,
                account.own_s,
                account.stretches,
                account.long_s,
                account.first,
                account.last,
                account.longest_s,
            )
        )
    accounts[WAITING] = sum(waited_for.values())
    accounts[COMMUNICATION] = _waited(record, trains) - accounts[WAITING]
    accounts[DOCTOR] = record.doctor_s
    _balance(accounts)
    untimed_s = _untimed(records) if wraps else 0.0
    return RankTime(number, record.wall_s, accounts, dict(waited_for), tuple(lines), untimed_s)


def _balance(accounts: dict[str, float]) -> None:
    """Take what is missing in an account from others: the doctor's time is taken out of the account
    that was open at its end, and waiting for collectives that overlap may be counted twice."""
    for name, seconds in accounts.items():
        missing = -min(0.0, seconds)
        accounts[name] += missing
        for source in (DOCTOR, COMMUNICATION, WAITING):
            taken = min(missing, max(0.0, accounts[source]))
            accounts[source] -= taken
            missing -= taken


def _name(account: Account) -> str:
    """The account to which a phase after the start-up belongs."""
    if account.phase == SAVING:
        return CHECKPOINT
    if account.phase & EVALUATING:
        return EVALUATION
    return _PHASES.get(Phase(account.phase), OUTSIDE)
