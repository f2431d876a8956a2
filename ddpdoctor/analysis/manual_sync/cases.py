"""What may be wrong with copies that no wrapper synchronises: a case is what was found, a rule is
the row of the table that says of it what it is and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

import msgspec

from ...report.findings import Check, Confidence, Evidence, Finding, Related, Severity, Steps
from ...run import Location, named, plural, ranks_text
from ..replicas.causes import Cause
from .copies import Copies, Rows, step_of

SHOWN = 20
"""Steps that evidence lists at most."""


class Template(Formatter):
    """Templates in which a number chooses words: `{c.few:its gradient|their gradients}`."""

    def format_field(self, value: object, words: str) -> str:
        return words.split("|")[value != 1] if "|" in words else format(value, words)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table. Its texts are templates in which `c` is the case.

    Attributes:
        name: of the rule, which several scopes share (the model, layers, some parameters).
        when: says when the rule decides, for the check's page.
        spots: names of the lines that it may point to, the best one first (see `Case.spot`).
        related: texts and names of related lines.
    """

    name: str
    when: str
    severity: Severity = Severity.ERROR
    confidence: Confidence = Confidence.PROVEN
    spots: tuple[str, ...] = ("step", "made")
    label: str = ""
    related: tuple[tuple[str, str], ...] = (("created here", "made"),)
    summary: str
    cause: str
    fix: str
    evidence: Callable[[Any], Evidence]


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
        remarks: templates that go on with the cause.
        example: names for these.
        load: what some ranks alone load, where that explains it.
    """

    rule: Rule
    copies: Copies
    look: Rows
    positions: Sequence[int]
    others: Sequence[int] = ()
    since: int = -1
    blamed: tuple[int, ...] = ()
    beside: Copies | None = None
    remarks: tuple[str, ...] = ()
    example: tuple[str, ...] = ()
    load: Cause | None = None

    def finding(self, check: Check) -> Finding:
        rule, load = self.rule, self.load
        spots = map(self.spot, rule.spots)
        places = [(text, self.spot(name)) for text, name in rule.related]
        found = check.finding(
            rule=rule.name,
            severity=self.severity,
            confidence=self.confidence,
            ranks=self.ranks,
            steps=self.steps,
            subjects=self.subjects,
            optimizers=self.optimizers,
            location=next((spot for spot in spots if spot is not None), None),
            label=self.say(rule.label),
            related=tuple(Related(self.say(text), spot) for text, spot in places if spot),
            summary=self.say(rule.summary),
            cause=self.say(rule.cause, *self.remarks),
            fix=self.say(rule.fix),
            evidence=rule.evidence(self),
            at=self.at,
        )
        if load is None:
            return found
        return msgspec.structs.replace(
            found, rule=load.rule, ranks=load.ranks, location=load.location, label=load.label,
            related=(*load.related, *found.related), cause=load.text, fix=load.fix,
            evidence={**found.evidence, **load.evidence},
        )  # fmt: skip

    def say(self, *templates: str) -> str:
        return Template().format("".join(templates), c=self)

    def spot(self, name: str) -> Location | None:
        """A line of the program, on the first rank or on the first that knows it."""
        rank, event = self.copies.first
        if name == "running":
            ran = ((n, s) for n, s in self.copies.last.items() if s.running)
            return next((self.copies.members[n][0].location(s.running_site) for n, s in ran), None)
        if name == "clip":
            clips = ((n, s) for k in self.copies.looks for n, s in k.items() if s.unclipped)
            return next((self.copies.members[n][0].location(s.clip_site) for n, s in clips), None)
        first = (self.beside or self.copies).looks[0][rank.rank]
        sites = {
            "made": event.site,
            "step": event.step_site,
            "step of a module": event.step_site if event.kind else -1,
            "exchange": first.exchange_site,
        }
        return rank.location(sites[name])

    @property
    def severity(self) -> Severity:
        return self.rule.severity

    @property
    def confidence(self) -> Confidence:
        return self.rule.confidence

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.blamed or tuple(self.copies.members)

    @property
    def steps(self) -> Steps | None:
        taken = max(r.steps_of(e.optimizer) for r, e in self.copies.members.values())
        last = max(self.begin, taken - 1)
        return Steps(self.begin, last, last - self.begin + 1)

    @property
    def subjects(self) -> tuple[str, ...]:
        return tuple(self.copies.names[i] for i in self.positions)

    @property
    def optimizers(self) -> tuple[int, ...]:
        """Optimizers whose other findings this one may explain; none: any."""
        return ()

    @property
    def at(self) -> float:
        members = self.copies.members
        return min(members[n][0].wall(state.at) for n, state in self.look.items())

    # Values for the texts.

    @property
    def begin(self) -> int:
        return step_of(self.look)

    @property
    def compared(self) -> list[int]:
        """The steps at which each parameter was compared."""
        return [step_of(look) for look in self.copies.close]

    @property
    def looked(self) -> list[int]:
        """The first steps at which the whole model was compared."""
        return [step_of(look) for look in self.copies.looks][:SHOWN]

    @property
    def kind(self) -> str:
        return self.copies.first[1].kind or "a set of parameters"

    @property
    def few(self) -> int:
        return len(self.positions)

    @property
    def rest(self) -> int:
        return len(self.beside.names if self.beside else self.others)

    @property
    def count(self) -> int:
        return len(self.copies.names)

    @property
    def of_them(self) -> str:
        """`of 9 parameters`, or of those whose gradients were followed."""
        followed = self.few + self.rest
        if followed >= self.count:
            return f"of {self.count} parameters"
        return f"of {followed} parameters followed ({self.count} in all)"

    @property
    def they_differ(self) -> str:
        """`head.bias of Net differs between ranks`."""
        verb = plural(self.few, "differs", "differ")
        return f"{named(self.copies.names, self.positions)} of {self.kind} {verb} between ranks"

    @property
    def who(self) -> str:
        return ranks_text(self.ranks)

    @property
    def many(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class WithoutGradient(Case):
    """At a step, ranks have no gradients of different parameters.

    Attributes:
        step: the first such step; wall: when it was.
        lacking: by rank, the parameters that others have a gradient of.
    """

    step: int = 0
    wall: float = 0.0
    lacking: dict[int, list[int]] = field(default_factory=dict)

    @property
    def begin(self) -> int:
        return self.step

    @property
    def at(self) -> float:
        return self.wall

    @property
    def rows(self) -> list[dict[str, object]]:
        return [
            {"rank": n, "parameters": named(self.copies.names, positions)}
            for n, positions in self.lacking.items()
        ]
