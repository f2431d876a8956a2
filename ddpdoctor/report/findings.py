"""What a check is, and what it may say."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from ..events.json_text import to_json
from ..run import Run
from ..run.location import Location
from .errors import ErrorKind

FINDINGS_SCHEMA = 1

Evidence = dict[str, object]
"""Figures that prove a finding: names to numbers, texts, lists or tables (lists of dicts)."""


class Severity(enum.Enum):
    """How bad it is: training is wrong or will crash; results or time are lost; advice."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


class Confidence(enum.Enum):
    PROVEN = "proven"
    SUSPECTED = "suspected"


class FixKind(enum.Enum):
    """How a proposed change may be applied."""

    SAFE = "safe"
    CHECK = "check before use"
    TEMPLATE = "template"


class Related(msgspec.Struct, frozen=True):
    """Another line that explains the finding: where it was wrapped, what the others did."""

    label: str
    location: Location


class Steps(msgspec.Struct, frozen=True):
    """Optimizer steps concerned, zero-based; `count` of them between `first` and `last`.

    Attributes:
        compared: where not every step from the first on could be judged: how many were.
        total: all that the optimizer concerned took; None where that is not one number.
    """

    first: int
    last: int
    count: int
    compared: int | None = None
    total: int | None = None

    @classmethod
    def of(cls, steps: Iterable[int], taken: int = 0) -> Steps | None:
        """From counts of steps. `taken`: all of a rank that ended well; what came after the last
        of them came after its steps each time."""
        known = sorted({s for s in steps if s >= 0})
        if known and known[-1] == taken > 0:
            known = sorted({max(0, s - 1) for s in known})
        return cls(known[0], known[-1], len(known)) if known else None


class Consequence(msgspec.Struct, frozen=True):
    """A finding that another one explains; it is printed under that one."""

    code: str
    check: str
    summary: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: what is wrong, where, on whom, why, and what to change.

    Attributes:
        ranks: the ranks at fault as far as that is known; all ranks where it is everyone's.
        subjects: names the user knows (parameters, data sets, files, devices).
        optimizers: numbers of those that step what it is about, where that is known.
        location: the user's line; `label` says what is wrong there, in a few words.
        summary: one sentence with the numbers, present tense; stands alone.
        fix: an action, as code where it can be; `fix_kind` says how it may be applied.
        evidence: the figures that prove it. An entry that another check reads (a `Condition`) has
            a typed value and a name that is a constant of the code.
        differed: what the ranks recorded differently before it, first; empty where they recorded
            the same, or where the finding says it itself; None where that was not asked.
        errors: what kind of error ended the rank, where one did and its text is a known one.
        rule: which rule of the check decided, in kebab-case; a name for life, the check's own where
            it has one rule only.
        deadlocked: no rank concerned can ever go on. Where it is proven, a run is stopped for it.
        attempt: the earlier attempt (`--max-restarts`) it was made in, and that found it alone;
            None for the last one.
        at: when it began, seconds on the run's clock (see `Run.started`); sorts findings.
    """

    code: str
    check: str
    severity: Severity
    summary: str
    cause: str
    fix: str
    confidence: Confidence = Confidence.PROVEN
    ranks: tuple[int, ...] = ()
    steps: Steps | None = None
    subjects: tuple[str, ...] = ()
    optimizers: tuple[int, ...] = ()
    location: Location | None = None
    label: str = ""
    related: tuple[Related, ...] = ()
    fix_kind: FixKind = FixKind.CHECK
    evidence: Evidence = {}
    differed: str | None = None
    errors: tuple[ErrorKind, ...] = ()
    rule: str = ""
    deadlocked: bool = False
    consequences: tuple[Consequence, ...] = ()
    attempt: int | None = None
    at: float = 0.0

    @property
    def elsewhere(self) -> str:
        """` (train.py:12)`, to be put after the summary; empty where that names the line itself."""
        named = self.location is None or str(self.location) in self.summary
        return "" if named else f" ({self.location})"


Requirement = Callable[[Run], str | None]
"""Tells why a run cannot be judged (`no optimizer step seen`); None where it can."""


@dataclass(frozen=True)
class Condition:
    """When one finding may follow from another.

    Attributes:
        words: for `ddpdoctor explain`: `on other ranks`.
        holds: called with the cause and what may follow from it.
    """

    words: str
    holds: Callable[[Finding, Finding], bool]


@dataclass(frozen=True)
class Effect:
    """Findings that are only consequences of one of the check that declares this.

    Attributes:
        checks: those that make them.
        of: rules of the declaring check that have this effect; any where it is empty.
        rules: rules of the other checks; any where it is empty.
        errors: the finding must be about one of these.
        when: all of these must hold.
    """

    checks: tuple[str, ...]
    of: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    errors: tuple[ErrorKind, ...] = ()
    when: tuple[Condition, ...] = ()

    def describe(self) -> str:
        """Which findings these are beside the checks' names, in words; empty for all."""
        parts = (
            self.of and f"from rule {' or '.join(self.of)}",
            self.rules and f"of rule {' or '.join(self.rules)}",
            self.errors and f"about this error: {' or '.join(e.value for e in self.errors)}",
            *(condition.words for condition in self.when),
        )
        return "; ".join(part for part in parts if part)

    def covers(self, mine: Finding, other: Finding) -> bool:
        """Whether `other` is such a consequence of `mine`."""
        return (
            other.check in self.checks
            and (not self.of or mine.rule in self.of)
            and (not self.rules or other.rule in self.rules)
            and (not self.errors or not set(self.errors).isdisjoint(other.errors))
            and all(condition.holds(mine, other) for condition in self.when)
        )


class Check(ABC):
    """A rule over a finished or running run. One class, one file, one code.

    The class docstring is the page that `ddpdoctor explain` prints; its headings are *What it
    finds*, *How it knows*, *Why it hurts*, *How to fix it* and *When it stays quiet*. A check is a
    pure function of the run: no torch, no files, no clock, no printing.

    `rules` are those that may decide, each with a phrase that says when it does; a check with one
    rule only has none, and its findings carry its own name. `requires` says what must be on record
    for a judgement. `effects` are what its findings explain: these are printed under them.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    family: ClassVar[str]
    severity: ClassVar[Severity]
    rules: ClassVar[Mapping[str, str]] = {}
    requires: ClassVar[tuple[Requirement, ...]] = ()
    effects: ClassVar[tuple[Effect, ...]] = ()

    @abstractmethod
    def examine(self, run: Run) -> Iterable[Finding]:
        """The findings of this check; one per fault."""

    def unobserved(self, run: Run) -> str | None:
        """The first of its requirements that this run does not meet, None where it meets all."""
        return next((why for requirement in self.requires if (why := requirement(run))), None)

    def left_out(self, run: Run) -> str | None:
        """What of this run is not judged though the rest is, and why; None where all of it is."""
        return None

    def tables(self, run: Run) -> Iterable[Table]:
        """Facts to show in the report even when all is well."""
        return ()

    def explains(self, mine: Finding, other: Finding) -> bool:
        """Whether `other`, made by another check, is only a consequence of `mine`."""
        return other.check != mine.check and any(e.covers(mine, other) for e in self.effects)

    def finding(self, **fields: object) -> Finding:
        """A finding of this check; `code`, `check`, and where they are left out `severity` and
        `rule`, are filled in."""
        fields.setdefault("severity", self.severity)
        fields.setdefault("rule", self.name)
        return Finding(code=self.code, check=self.name, **fields)  # type: ignore[arg-type]


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the report: how a rank ended and what it did last. Of a run that was not examined
    much is not known, and None or `unknown`.

    Attributes:
        waiting_in_step_s: of a step, in collectives and for other ranks; None where that is not
            seen on the host.
        steps: of the optimizer that took the most; where optimizers follow each other (`in_turn`),
            of one after the other.
        host_memory_peak_bytes: and of its device: the most that it was seen to hold.
        stood: where it stood when something ended it.
    """

    rank: int
    node: str
    local_rank: int | None
    pid: int | None
    device: str
    state: str
    exit_code: int | None
    signal: str | None
    steps: int | None
    step_time_s: float | None = None
    waiting_in_step_s: float | None = None
    host_memory_peak_bytes: int | None = None
    device_memory_peak_bytes: int | None = None
    last: str = ""
    stood: str = ""
    in_turn: bool = False


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The head of the report.

    Attributes:
        stopped_by: in words, where somebody stopped the run: `Ctrl-C`, `SIGTERM`, `the doctor`.
        earlier: a sentence for each attempt before this one (`--max-restarts`).
    """

    id: str
    command: tuple[str, ...]
    started_at: str
    ended_at: str | None
    world_size: int
    outcome: str
    exit_code: int | None
    torch: str
    backend: str
    folder: str = ""
    machine: tuple[str, ...] = ()
    stopped_by: str = ""
    earlier: tuple[str, ...] = ()


class Skipped(msgspec.Struct, frozen=True):
    check: str
    reason: str


class Unobserved(msgspec.Struct, frozen=True):
    """Ranks of which nothing is known but that they ran, why, and what to do about it."""

    ranks: tuple[int, ...]
    reason: str
    help: str


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """What was examined and what was not, and why; `partly`: what was, but for this.

    Attributes:
        lost: what the records lack, in sentences, unobserved ranks among it.
    """

    examined: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    partly: tuple[Skipped, ...] = ()
    lost: tuple[str, ...] = ()
    unobserved: tuple[Unobserved, ...] = ()


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """The doctor's own share of the time of the rank in which it is largest; None where no rank was
    observed.

    Attributes:
        later_percent: of the time after the first steps, at which it looks closely; None where
            that is too short to tell.
        own_s, wall_s: what `measured_percent` is made of, the seconds of the doctor and those of
            the rank; `start_s`: what of `own_s` it took to start; `device_s`: what the device of
            the rank worked for the doctor, estimated.
    """

    budget_percent: float
    measured_percent: float | None = None
    later_percent: float | None = None
    own_s: float | None = None
    wall_s: float | None = None
    start_s: float | None = None
    device_s: float | None = None


class Tool(msgspec.Struct, frozen=True):
    name: str
    version: str


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Facts worth showing even when all is well (what every rank consumed, say)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank's time went: a row of the time ledger.

    Attributes:
        wall_s: from the start of the process to the last record.
        accounts: seconds, which add up to `wall_s`.
        waiting_for: seconds of `waiting`, by the rank that came last.
    """

    rank: int
    wall_s: float
    accounts: dict[str, float]
    waiting_for: dict[str, float] = {}


class Suppressed(msgspec.Struct, frozen=True):
    """A finding that the user does not want counted, why, and where that stands: a line, a file."""

    finding: Finding
    reason: str
    where: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is reported about a run: `findings.json`, and what every format shows.

    Attributes:
        lost: a sentence on the time of the ranks, where much of it was lost.
        suppressed: findings that do not count.
        unused_suppressions: what asks for a finding not to be counted that was not made.
    """

    schema_version: int
    tool: Tool
    run: RunSummary
    ranks: tuple[RankState, ...]
    findings: tuple[Finding, ...]
    overhead: Overhead
    coverage: Coverage
    tables: tuple[Table, ...] = ()
    ledger: tuple[RankTimes, ...] = ()
    lost: str = ""
    suppressed: tuple[Suppressed, ...] = ()
    unused_suppressions: tuple[str, ...] = ()

    def worst(self) -> Severity | None:
        """The worst severity found, or None where nothing was."""
        return min((f.severity for f in self.findings), key=lambda s: s.rank, default=None)

    def to_json(self) -> bytes:
        """The content of `findings.json`."""
        return msgspec.json.format(to_json(self), indent=2)

    def to_dict(self) -> dict[str, object]:
        """The content of `findings.json` as plain dictionaries and lists."""
        return msgspec.json.decode(to_json(self), type=dict[str, object])
