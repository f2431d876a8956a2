"""Collectives as each rank issued them. The ring (`storage.call_ring`) holds the last ones."""

from __future__ import annotations

from .base import Event, Part


class Signature(Event, frozen=True, tag="signature"):
    """What a call was made with; calls refer to it by `id`. Recorded before the first such call.

    Attributes:
        op: torch's name (`all_reduce`), or `DDP()`, `DDP forward`, `DDP backward` for what a
            wrapped model communicates itself.
        numel: elements of the tensor, -1 where ranks may differ or there is none.
        device: its type (`cpu`, `cuda`).
        root: global rank of source or destination, -1 where there is none.
        ranks: members, for `new_group`.
        sends, receives: the other sides of a batch's messages, one for each.
        model: number of the wrapped model that communicates, -1 where it may be several.
    """

    RANKS = ("ranks", "root", "sends", "receives")

    id: int
    op: str
    numel: int = -1
    dtype: str = ""
    device: str = ""
    reduce_op: str = ""
    root: int = -1
    shape: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    model: int = -1

    @property
    def text(self) -> str:
        """`all_reduce(SUM, float32[2, 3])`."""
        parts = [self.reduce_op] if self.reduce_op else []
        if self.root >= 0:
            parts.append(f"root {self.root}")
        if self.dtype:
            sizes = ", ".join(map(str, self.shape))
            parts.append(f"{self.dtype}[{sizes}]")
        if self.ranks:
            parts.append(f"ranks {list(self.ranks)}")
        return f"{self.op}({', '.join(parts)})" if parts else self.op


class Way(Part, frozen=True):
    """A statement that leaves out lines: `continue`, `break`, or the handler of an exception.

    Attributes:
        line, text: those of the handler, or of the statement that the `continue` is under.
        first, last: the lines that it leaves out, or may leave out.
    """

    line: int
    text: str
    first: int
    last: int


class Statement(Part, frozen=True):
    """A statement around a line (part of `Place`), or one before it whose body leaves the function
    or the round of the loop, so that all that follows is its other arm; or the condition of an
    expression on that line.

    Attributes:
        line: of its head; of one that is past, of the statement that leaves.
        text: its head; `else:  # if x:` of an arm of `if x:`, `past if x:` of one that is past,
            `if x` of `f() if x else y`.
        ways: of a loop, how a round of it is cut short; of a `try`, its handlers that go on.
        broken: of a loop, whether it has `exits`; older records have no more than that.
        opener: of an `else` or `elif`, the line of the statement that it belongs to; of one that is
            past, the line of its head.
        exits: of a loop, the statements that end it.
        matched: of an arm of an `if`, every other arm makes the calls of that line, too.
    """

    line: int
    text: str
    ways: tuple[Way, ...] = ()
    broken: bool = False
    opener: int = 0
    exits: tuple[Way, ...] = ()
    matched: bool = False


class Place(Part, frozen=True):
    """A line of the user's: the statements around it in its function, innermost first.

    Attributes:
        hands_on: what the line passes is made of the arguments of its function alone.
    """

    site: int
    inside: tuple[Statement, ...] = ()
    hands_on: bool = False


CALLERS = 4
"""Places that a `CallSite` has at most."""


class CallSite(Event, frozen=True, tag="call-site"):
    """A place that communicates, and the user's lines that led to it.

    Calls refer to it by `id`. A helper that every collective goes through tells nothing by itself:
    who called it does.

    Attributes:
        places: innermost first; `CALLERS` at most.
        thread: the name of the thread that was there first, empty for the main one.
        shadows: at the end of torch's `Join`, where a rank that is done answers the calls of those
            that are not, whatever their lines.
        started: the line that started the thread, where none of the user's led from there: then
            there are no places.
        key: in a loop over names the one that chooses what is sent, as `name = 'loss'`.
    """

    id: int
    places: tuple[Place, ...]
    thread: str = ""
    shadows: bool = False
    started: int = -1
    key: str = ""

    @property
    def line(self) -> int:
        """The line to show."""
        return self.places[0].site if self.places else self.started


class ObjectsGathered(Event, frozen=True, tag="objects-gathered"):
    """Objects were gathered at a call site, larger ones than any there before.

    Attributes:
        call_site: the `CallSite`.
        entries: numbers and letters that they hold, at most, all parts together.
    """

    call_site: int
    entries: int


class CallBlock(Event, frozen=True, tag="call-block"):
    """A sequence of calls in one group, for `CallRun` to refer to.

    Attributes:
        codes: signature and call site of each call, one after the other: `s0, p0, s1, p1, ...`.
    """

    id: int
    codes: tuple[int, ...]


class CallRun(Event, frozen=True, tag="call-run"):
    """`repeat` times the calls of a block, from index `first` of the group on.

    Attributes:
        step: optimizer steps taken when the first of them was made; `every` so many steps more at
            each repetition.
    """

    group: int
    first: int
    block: int
    repeat: int = 1
    step: int = -1
    every: int = 1


class FlightEntry(Part, frozen=True):
    """One collective in torch's flight recorder (part of `FlightLog`)."""

    sequence: int
    op: str
    sizes: str
    dtypes: str
    retired: bool


class FlightLog(Event, frozen=True, tag="flight-log"):
    """The last collectives of a group in torch's flight recorder, DDP's own included.

    Taken while the main thread stood still.
    """

    group: str
    entries: tuple[FlightEntry, ...] = ()
    last_enqueued: int = -1
    last_completed: int = -1
