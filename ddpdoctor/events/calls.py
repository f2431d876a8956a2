"""Collectives as each rank issued them; its ring (`storage.call_ring`) also has the last ones."""

from __future__ import annotations

import ast
import contextlib
import re

import msgspec

from .base import Event, Part


class Signature(Event, frozen=True, tag="signature"):
    """The arguments of calls that refer to it by `id`. Recorded before the first such call.

    Attributes:
        op: torch's name (`all_reduce`), or `DDP()`, `DDP forward`, `DDP backward` for what a
            wrapped model communicates itself.
        numel: elements of the tensor, -1 if ranks may differ or there is none.
        device: type of its device (`cpu`, `cuda`).
        root: global rank of source or destination, -1 if there is none.
        ranks: members, for `new_group`.
        sends, receives: for `batch_isend_irecv`, the peer of each message.
        model: number of the wrapped model that communicates, -1 if it may be several; models: in a
            backward through several, the numbers of all of them, empty if unknown.
        rebuilds: a forward in which DDP also broadcasts the order of its new buckets.
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
    models: tuple[int, ...] = ()
    rebuilds: bool = False

    @property
    def text(self) -> str:
        """`all_reduce(SUM, float32[2, 3])`."""
        parts = [self.reduce_op] if self.reduce_op else []
        parts += ["rebuilds its buckets"] if self.rebuilds else []
        if self.root >= 0:
            parts.append(f"root {self.root}")
        if self.dtype:
            sizes = ", ".join(map(str, self.shape))
            parts.append(f"{self.dtype}[{sizes}]")
        if self.ranks:
            parts.append(f"ranks {list(self.ranks)}")
        return f"{self.op}({', '.join(parts)})" if parts else self.op


class MessageSize(Event, frozen=True, tag="message-size"):
    """This rank sends, or receives, a tensor of this size for the first time, to or from that peer.

    Attributes:
        sends: else it receives.
        peer: global rank, -1 for any.
        numel, dtype, bytes: of the tensor.
        step: optimizer steps of this process before it.
    """

    RANKS = ("peer",)

    sends: bool
    peer: int
    group: int
    numel: int
    dtype: str
    bytes: int
    step: int
    site: int


class Way(Part, frozen=True):
    """A jump over lines: `continue`, `break`, or the handler of an exception.

    Attributes:
        line, text: of the handler, or of the statement around the jump.
        first, last: the range of lines that it may skip.
        set_line, set_by: of the statement under which the flag is set that the jump asks for; 0
            where it asks for no flag.
        set_in: the function of that statement, where it is another one.
        around: line and text of the branches around the statement, in the loop or, with `set_by`,
            around that one, innermost first.
    """

    line: int
    text: str
    first: int
    last: int
    set_line: int = 0
    set_by: str = ""
    set_in: str = ""
    around: tuple[tuple[int, str], ...] = ()


class Statement(Part, frozen=True):
    """A statement that decides whether a line runs (part of `Place`).

    It is a statement around the line, a condition inside the line, or an earlier `if` whose body
    leaves the function or the iteration of the loop ("past").

    Attributes:
        line: of its head; for a past one, of the statement that leaves.
        text: its head; `if x` for `f() if x else y`.
        ways: for a loop, the jumps that cut an iteration short; for a `try`, its handlers after
            which the program goes on.
        broken: for a loop, whether it has `exits`; older records lack those.
        opener: for a later arm of a statement (`else`, `except`, `case`), the line of that
            statement; for a past one, the line of its head. Older records have it for `else` and
            `elif` only.
        exits: for a loop, the statements that end it.
        matched: for an arm of an `if`, every other arm makes the same calls as that line.
        kind: the keyword of its head; `past` for a past one, `after` for the `else` of a loop or a
            `try`, `decorated` for a decorator whose wrapper, in a library, calls the function under
            a condition. Empty in older records, whose `text` says all: see `_of_older_record`.
        test: the condition of an `if`, `elif`, `while`, past or decorated one; what a `match`
            matches.
        of: for a later arm, the head of the statement that it belongs to; for a decorated one, that
            of the statement in the wrapper.
        fed: for a branch, variables of the line to which the branch has given values before it.
    """

    line: int
    text: str
    ways: tuple[Way, ...] = ()
    broken: bool = False
    opener: int = 0
    exits: tuple[Way, ...] = ()
    matched: bool = False
    kind: str = ""
    test: str = ""
    of: str = ""
    fed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.kind:
            for name, value in _of_older_record(self.text).items():
                msgspec.structs.force_setattr(self, name, value)

    @property
    def is_loop(self) -> bool:
        return self.kind in ("for", "while")

    @property
    def is_branch(self) -> bool:
        """Whether it may be entered on some ranks only, by a condition or an exception."""
        return self.kind in ("if", "elif", "else", "after", "except", "case")

    @property
    def opening(self) -> str:
        """The head of the statement that it is an arm of; its own for the first arm."""
        return self.of or self.text

    @property
    def label(self) -> str:
        """Its head, after `else` with that of the `if`: `else:  # if x:`."""
        return f"{self.text}  # {self.of}" if self.kind in ("elif", "else", "after") else self.text


def _of_older_record(text: str) -> dict[str, str]:
    """The fields of a `Statement` that older records hold within its text, as `past if x:` and
    `else:  # if x:`."""
    code = text.removeprefix("past ")
    word = re.match(r"(?:async )?(\w+)", code)
    keyword = word[1] if word else ""
    kind = "past" if code != text else keyword or "?"
    of = "try:" if kind == "except" else ""
    if kind in ("elif", "else"):
        code, _, of = code.partition("  # ")
        kind = "after" if kind == "else" and of and not of.startswith("if ") else kind
    condition = kind in ("if", "elif", "while", "past")
    test = code.removeprefix(keyword).strip().removesuffix(":") if condition else ""
    if ":" in test:  # with the body on the same line
        with contextlib.suppress(SyntaxError, ValueError):
            node = ast.parse(f"if {test}").body[0]
            test = ast.unparse(node.test) if isinstance(node, ast.If) else test
    return {"kind": kind, "text": code, "test": test, "of": of}


class FlagSet(Part, frozen=True):
    """A statement that sets an attribute to true or false in a branch (part of `Place`).

    Attributes:
        tests: the conditions around it, innermost first.
    """

    line: int
    text: str
    tests: tuple[str, ...]


class Place(Part, frozen=True):
    """A line of the user and the statements around it in its function, innermost first.

    Attributes:
        flags: of the same function, the first few statements that set a flag which other code may
            read.
        hands_on: the line passes only values computed from the arguments of its function.
        rounds: of the loops over a `range` or a list around it, by line: how many rounds they have
            by the values that their variables had when the line ran first.
    """

    site: int
    inside: tuple[Statement, ...] = ()
    hands_on: bool = False
    rounds: dict[int, int] = {}
    flags: tuple[FlagSet, ...] = ()


CALLERS = 4
"""Maximal number of places in a `CallSite`."""


class CallSite(Event, frozen=True, tag="call-site"):
    """A line that communicates, and the user's lines that called it. Calls refer to it by `id`.

    The callers matter where all collectives go through one helper function.

    Attributes:
        places: innermost first; `CALLERS` at most.
        thread: the name of the thread that was there first, empty for the main one.
        shadows: it is at the end of torch's `Join`, where a rank that is done answers the calls of
            other ranks, whatever their lines.
        internal: torch itself makes the call (DDP, `Join`, a sharded optimizer), not the line of
            the program; None where that was not recorded.
        started: if the thread has no line of the user and so no places, the line that started it.
        key: in a loop over names, the variable that selects what is sent, as `name = 'loss'`.
        through: the function or property of a library that the line uses and that communicates,
            empty where the line calls the collective itself.
        set_at: the only line that puts an entry of that name into a dictionary, where there is one.
        within: the class of the innermost module whose `forward` leads to the line.
    """

    id: int
    places: tuple[Place, ...]
    thread: str = ""
    shadows: bool = False
    started: int = -1
    key: str = ""
    internal: bool | None = None
    through: str = ""
    set_at: Place | None = None
    within: str = ""

    @property
    def line(self) -> int:
        """The site to show for it."""
        return self.places[0].site if self.places else self.started


class ObjectsGathered(Event, frozen=True, tag="objects-gathered"):
    """Objects were gathered at a call site, larger than all before at that site.

    Attributes:
        call_site: number of the `CallSite`.
        entries: upper bound for the numbers and characters in the objects, all parts together.
    """

    call_site: int
    entries: int


class GatheredWhole(Event, frozen=True, tag="gathered-whole"):
    """Tensors are gathered at a call site, and nothing in the code that can run after it selects
    among their rows. Recorded once for each such site.

    Attributes:
        call_site: number of the `CallSite`.
        by: the module of a library that the program called for it, empty for torch itself.
    """

    call_site: int
    by: str = ""


class ResultDropped(Event, frozen=True, tag="result-dropped"):
    """Values are gathered, or reduced in a copy, and nothing uses the result. Recorded the second
    time that a line does so.

    Attributes:
        name: of the variable, or of the function that returns the result; `site` the line of the
            collective.
        dropped_site: the line that drops the result.
        op: the collective; `step`: optimizer steps of this process before it.
        copy: they are reduced in a copy.
        learns: they require gradients, in a place where torch records what is computed of them.
        handle: it is the handle of an asynchronous call that is dropped, so that nobody waits.
    """

    name: str
    site: int
    dropped_site: int
    step: int
    op: str = "all_reduce"
    copy: bool = True
    learns: bool = False
    handle: bool = False


class TotalReducedAgain(Event, frozen=True, tag="total-reduced-again"):
    """A total is summed over the ranks, and the sum is summed again: with something added, some
    times in a row at one line, or as it is, at another line. Recorded once for a line.

    Attributes:
        site: the line of the collective; first_site: the one that summed it before, -1 where that
            is the same line.
        passed: the value before each of these calls, and `summed` after it; of several numbers
            that are passed together, their sum.
        step: optimizer steps of this process before the last one.
    """

    site: int
    passed: tuple[float, ...]
    summed: tuple[float, ...]
    step: int
    first_site: int = -1


class SharedOutputs(Event, frozen=True, tag="shared-outputs"):
    """Tensors of the list that a collective writes to are one tensor, and the program reads the
    list afterwards. Recorded the first time that a line makes such a call.

    Attributes:
        site: the line of the call; made_site: that of `[tensor] * n`, -1 where that was not found.
        outputs: entries of the list, of which so many are `distinct` tensors.
        step: optimizer steps of this process before it.
    """

    op: str
    site: int
    outputs: int
    distinct: int
    made_site: int = -1
    step: int = 0


class CallBlock(Event, frozen=True, tag="call-block"):
    """A sequence of calls in one group, for `CallRun` to refer to.

    Attributes:
        codes: signature and call site of each call, one after the other: `s0, p0, s1, p1, ...`.
    """

    id: int
    codes: tuple[int, ...]


class CallRun(Event, frozen=True, tag="call-run"):
    """The calls of a block, `repeat` times, from number `first` of the group on.

    Attributes:
        step: steps of all optimizers together before the first call; `every` is the number of
            further ones per repetition.
    """

    group: int
    first: int
    block: int
    repeat: int = 1
    step: int = -1
    every: int = 1


class FlightEntry(Part, frozen=True):
    """One collective or message in torch's flight recorder (part of `FlightLog`).

    Attributes:
        sequence: its number in the group, from 1; -1 for a message.
        retired: it is done. (torch calls retired what its watchdog let go of, done or timed out.)
        peer: of a message; -1 else.
    """

    sequence: int
    op: str
    sizes: str
    dtypes: str
    retired: bool
    peer: int = -1


class FlightLog(Event, frozen=True, tag="flight-log"):
    """The last collectives of a group in torch's flight recorder, DDP's own included, and its last
    messages.

    Read while the main thread made no progress.

    Attributes:
        backend: the one that recorded them. What gloo calls retired may have failed.
    """

    group: str
    entries: tuple[FlightEntry, ...] = ()
    messages: tuple[FlightEntry, ...] = ()
    last_enqueued: int = -1
    last_completed: int = -1
    backend: str = ""
