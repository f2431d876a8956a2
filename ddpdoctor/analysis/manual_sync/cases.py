"""What may be wrong with copies that no wrapper synchronises: a case is what was found, a rule is a
row of the table that says of it what it is and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...report.findings import Check, Confidence, Evidence, Finding, Related, Severity, Steps
from ...run import Location, named, plural
from .copies import Copies, Rows, step_of

SHOWN = 20
"""Steps that evidence lists at most."""

Text = str | Callable[[Any], str]
"""What a rule says, or a function of the case that says it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table.

    Attributes:
        name: of the rule, which several scopes may share (a whole model, some parameters).
        when: says when the rule decides, for the check's page.
        spots: names of the lines that it may point to, the best one first (see `Case.spot`).
        related: texts and names of related lines.
        severity: of the finding; `confidence` likewise.
    """

    name: str
    when: str
    summary: Text
    cause: Text
    fix: Text
    label: Text = ""
    evidence: Callable[[Any], Evidence]
    spots: tuple[str, ...] = ("step", "made")
    related: tuple[tuple[Text, str], ...] = (("created here", "made"),)
    severity: Severity | Callable[[Any], Severity] = Severity.ERROR
    confidence: Confidence | Callable[[Any], Confidence] = Confidence.PROVEN


@dataclass(frozen=True)
class Case:
    """What was found about copies.

    Attributes:
        look: the first look at which they are known to differ.
        positions: the parameters that it is about.
        others: parameters of the model that are treated as they should be.
        since: the first step that is not synchronised, where an earlier one was.
        blamed: the ranks at fault; empty for all.
        beside: another optimizer's part of the model, which is synchronised.
    """

    rule: Rule
    copies: Copies
    look: Rows
    positions: Sequence[int]
    others: Sequence[int] = ()
    since: int = -1
    blamed: tuple[int, ...] = ()
    beside: Copies | None = None

    @property
    def begin(self) -> int:
        return step_of(self.look)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.blamed or tuple(self.copies.members)

    @property
    def subjects(self) -> tuple[str, ...]:
        return tuple(self.copies.names[i] for i in self.positions)

    @property
    def optimizers(self) -> tuple[int, ...]:
        """Optimizers whose other findings this one may explain; none: any."""
        return ()

    @property
    def kind(self) -> str:
        return self.copies.first[1].kind or "a set of parameters"

    @property
    def steps(self) -> Steps | None:
        taken = max(r.steps_of(e.optimizer) for r, e in self.copies.members.values())
        last = max(self.begin, taken - 1)
        return Steps(self.begin, last, last - self.begin + 1)

    @property
    def at(self) -> float:
        members = self.copies.members
        return min(members[n][0].wall(state.at) for n, state in self.look.items())

    @property
    def compared(self) -> list[int]:
        """The steps at which each parameter was compared."""
        return [step_of(look) for look in self.copies.close]

    @property
    def they_differ(self) -> str:
        """`head.bias of Net differs between ranks`."""
        verb = plural(len(self.positions), "differs", "differ")
        return f"{named(self.copies.names, self.positions)} of {self.kind} {verb} between ranks"

    def spot(self, name: str) -> Location | None:
        """A line of the program, on the first rank that knows it best."""
        rank, event = self.copies.first
        if name == "running":
            ran = ((n, s) for n, s in self.copies.last.items() if s.running)
            return next((self.copies.members[n][0].location(s.running_site) for n, s in ran), None)
        first = (self.beside or self.copies).looks[0][rank.rank]
        sites = {
            "made": event.site,
            "step": event.step_site,
            "step of a module": event.step_site if event.kind else -1,
            "exchange": first.exchange_site,
        }
        return rank.location(sites[name])

    def finding(self, check: Check) -> Finding:
        rule = self.rule
        places = [(text, self.spot(name)) for text, name in rule.related]
        severity, confidence = rule.severity, rule.confidence
        return check.finding(
            rule=rule.name,
            severity=severity(self) if callable(severity) else severity,
            confidence=confidence(self) if callable(confidence) else confidence,
            ranks=self.ranks,
            steps=self.steps,
            subjects=self.subjects,
            optimizers=self.optimizers,
            location=next((spot for n in rule.spots if (spot := self.spot(n))), None),
            label=self.say(rule.label),
            related=tuple(Related(self.say(text), spot) for text, spot in places if spot),
            summary=self.say(rule.summary),
            cause=self.say(rule.cause),
            fix=self.say(rule.fix),
            evidence=rule.evidence(self),
            at=self.at,
        )

    def say(self, text: Text) -> str:
        return text if isinstance(text, str) else text(self)
