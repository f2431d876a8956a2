"""Explanations, and what they answer: who is at fault, and what the report says of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...report.findings import Evidence, Related, Steps
from ...run import Location, ranks_text
from ..calls.call_logs import CallRecord

WHO = "{who}"
"""In a label: the ranks at fault, also those of other groups and rounds with the same fault."""


@dataclass(frozen=True)
class Attribution:
    """The answer of the explanation that `rule` names. Nothing changes it afterwards.

    Attributes:
        culprits: the ranks at fault; all where nothing tells.
        call: the call to point at, where there is one; location: its line, or that of the statement
            that led around it.
        cause: why, without what follows from it.
        steps: where they are not those of the call.
        check: the check that reports it, where there are several.
    """

    rule: str
    culprits: tuple[int, ...]
    location: Location | None
    label: str
    summary: str
    cause: str
    fix: str
    call: CallRecord | None = None
    related: tuple[Related, ...] = ()
    subjects: tuple[str, ...] = ()
    steps: Steps | None = None
    evidence: Evidence = field(default_factory=dict)
    check: str = ""

    def fields(self, culprits: Collection[int] = ()) -> dict[str, object]:
        """The fields of the finding; `culprits`: with those of other groups and rounds."""
        ranks = tuple(sorted(culprits)) or self.culprits
        return {
            "rule": self.rule,
            "ranks": ranks,
            "steps": self.steps,
            "subjects": self.subjects,
            "location": self.location,
            "label": self.label.replace(WHO, ranks_text(ranks)),
            "related": self.related,
            "summary": self.summary,
            "cause": self.cause,
            "fix": self.fix,
            "evidence": self.evidence,
        }


T = TypeVar("T")


class Explanation(ABC, Generic[T]):
    """One rule: when it holds, whom it blames, and what it says.

    Attributes:
        rule: its name in findings, for life; text: when it decides (`ddpdoctor explain`).
    """

    rule: str
    text: str

    @abstractmethod
    def explain(self, why: T, /) -> Attribution | None:
        """Who is at fault; None where this rule does not hold."""


def first(explanations: Iterable[Explanation[T]], why: T) -> Attribution:
    """The answer of the first explanation that holds."""
    answers = (one.explain(why) for one in explanations)
    return next(answer for answer in answers if answer is not None)
