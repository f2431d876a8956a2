"""What a timeline consists of, ready to print: positions are in percent of its width."""

from __future__ import annotations

from dataclasses import dataclass

from .ledger_bars import NAMES

BARS = {**NAMES, "ddp": "forward or backward of DDP", "open": "a call that is never left"}
"""The meaning of bars whose class does not say it."""

MARKS = {
    "wait": "leads from a rank that waits to the one it waits for",
    "band": "the step of the finding",
    "flag": "a finding begins",
    "fails": "the rank raises an error",
    "leaves": "the rank leaves",
}


@dataclass(frozen=True)
class Bar:
    """A stretch of time in percent of the window; `kind` is a class of the style sheet, `label`
    stands in it."""

    x: float
    width: float
    y: int
    kind: str
    said: str
    label: str = ""


@dataclass(frozen=True)
class Mark:
    """A moment: a rank fails or leaves, a finding begins."""

    x: float
    y: int
    said: str
    kind: str
    label: str


@dataclass(frozen=True)
class Wait:
    """Ranks of one lane wait for the rank of another one until a moment, or for ever."""

    x: float
    y1: int
    y2: int
    said: str


@dataclass(frozen=True)
class Window:
    """One stretch of the run.

    Attributes:
        name: of its place in the page; title: `The last steps`.
        finding: the place of the one that it is about; empty for none.
        ranks: shown; band: the step of the finding.
        ticks: of the axis, in seconds since the first rank started.
        more: what is not drawn.
    """

    name: str
    title: str
    finding: str
    ranks: tuple[str, ...]
    bars: tuple[Bar, ...]
    waits: tuple[Wait, ...]
    marks: tuple[Mark, ...]
    ticks: tuple[tuple[float, str], ...]
    height: int
    more: str
    kinds: tuple[str, ...]

    @property
    def keys(self) -> list[tuple[str, str]]:
        """The classes of all that is drawn, each with its meaning."""
        drawn = {bar.kind for bar in self.bars} | {mark.kind for mark in self.marks}
        marks = drawn | ({"wait"} if self.waits else set())
        return [(k, BARS.get(k, k)) for k in self.kinds] + [
            (kind, said) for kind, said in MARKS.items() if kind in marks
        ]
