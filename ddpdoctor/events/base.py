"""The base classes of all records."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """A record of a rank or a monitor: one line of JSON in the run folder.

    Subclasses are the vocabulary: each has a `tag` that is for life. Fields may be added with a
    default, never renamed or dropped, so that older folders stay readable.

    Two kinds of numbers differ between ranks and are translated when a run is read: fields called
    `model`, `models` and `optimizer` (see `run.align_numbers`), and those that `RANKS` names, which
    hold the program's ranks and get the launcher's numbers (see `run.subgroup_ranks`).

    Attributes:
        at: seconds on the node's monotonic clock (`time.monotonic`), comparable between the
            processes of one node; `RankStarted` ties it to the wall clock.
    """

    RANKS: ClassVar[tuple[str, ...]] = ("ranks",)

    at: float

    def describe(self) -> str:
        """One line for the rank's log, empty if the log does not show this event."""
        return ""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """A value inside an event; never a record of its own. Written compactly, as an array."""


class Site(Event, frozen=True, tag="site"):
    """A line of the user's code; other events refer to it by `id`. Recorded once per rank.

    Attributes:
        file: absolute path.
        text: the line as written, so that a report needs no source beside it.
    """

    id: int
    file: str
    line: int
    function: str
    text: str = ""
