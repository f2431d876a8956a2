"""A variable or attribute that is missing, or None, on a rank because the program sets it under a
condition that did not hold there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...events import Unset
from ...report.findings import Related
from ...run import ranks_text
from .failures import Failure

NEVER_SET = "never-set"


@dataclass(frozen=True)
class MissingName:
    """
    Attributes:
        failure: of a rank that uses it.
    """

    failure: Failure
    unset: Unset
    rule = NEVER_SET

    def cause(self, ranks: Sequence[int]) -> str:
        """In words, for the ranks that fail like this."""
        none = "'NoneType'" in self.failure.message
        return (
            f"`{self.unset.name}` is {'None here: it is ' if none else ''}set only under "
            f"`{self.unset.under.label}`, which did not hold on {ranks_text(ranks)}"
        )

    @property
    def fix(self) -> str:
        return (
            f"set `{self.unset.name}` on every rank, before or out of "
            f"`{self.unset.under.opening}`; or use it only under the same condition"
        )

    @property
    def related(self) -> tuple[Related, ...]:
        where = self.failure.rank.location(self.unset.site)
        return (Related("set here only", where),) if where is not None else ()


def missing_name(failure: Failure) -> MissingName | None:
    """None where the failure is about no such name."""
    raised = failure.exception
    return MissingName(failure, raised.unset) if raised is not None and raised.unset else None
