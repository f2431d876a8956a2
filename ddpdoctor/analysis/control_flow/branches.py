"""The statements of the program around a call: which branch led there, and whether two calls stand
on the same lines or in the two arms of one `if`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...events import CALLERS, CallSite, Place, Statement, Wrapped
from ...run import Location, Rank
from ..calls.call_logs import CallRecord, lines
from ..calls.rank_conditions import PAST, on_rank, part_on_rank, unquoted

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_SIZE = re.compile(
    r"(?:\w+\.)*(?:(?:get_|n_?|num_)?(?:world_?size|procs?|processes|replicas)"
    r"|(?:is_|use_)?(?:ddp|dist|distributed)(?:_\w*(?:avail|init)\w*)?)"
    r"|(?:[\w.]*dist\w*\.)?is_(?:available|initialized)",
    re.IGNORECASE,
)
_BESIDE = re.compile(
    r"if|elif|else|and|or|not|is|None|True|False|int|bool|os\.(?:environ(?:\.get)?|getenv)"
)
_BRANCHES = ("if ", "elif ", "else:", "except", PAST)
_ARMS = ("else:", "elif ", "except", PAST)


def parts(head: Statement) -> str:
    """How a statement parts the ranks."""
    if head.text.startswith(PAST):
        return f"some ranks leave at `{opener(head)}`, before that call"
    return f"only some ranks enter `{head.text}`"


def leading(head: Statement) -> str:
    """What is written beside it."""
    past = head.text.startswith(PAST)
    return "some ranks leave here" if past else "the branch that leads there"


def unbranched(head: Statement, what: str) -> str:
    """What to do with a call that a statement keeps from some ranks."""
    if found := part_on_rank(head.text):
        part, rest = found
        where_to = f"{'past' if head.text.startswith(PAST) else 'under'} `if {rest}:`"
        return f"{what} on every rank: put it {where_to} (the same on all), without `{part}`"
    out_of = f"out of `{head.text}`"
    if head.text.startswith(PAST):
        out_of = f"in front of `{opener(head)}`"
    shared = ""
    if head.text.startswith(("if ", "elif ", PAST)) and not on_rank((head,)):
        shared = ", or make its condition from a value that is equal on all (`all_reduce` it first)"
    return f"{what} on every rank: move it {out_of}{shared}"


def unwrapped(head: Statement, made: CallRecord) -> str:
    """What to do with a wrapped model, of whose calls this is one, that it keeps from some."""
    name = _wrapper(made)
    inner = f"`{name}.module(...)`" if name else "the module in it (`.module`)"
    return f"run the wrapped model on every rank, or use {inner} {where(head)}"


def _wrapper(made: CallRecord) -> str:
    """What the program calls the wrapper there, where that is certain: as the line that calls it
    does, or as the only one that was made."""
    source = made.location.source if made.location else ""
    names = {made.rank.names_of(w)[0] for w in made.rank.of(Wrapped)}
    called = [
        n for n in names - {""} | {"model"} if re.search(rf"(?<![\w.]){re.escape(n)}\(", source)
    ]
    if len(called) == 1:
        return called[0]
    return names.pop() if len(names) == 1 and made.signature.op == "DDP backward" else ""


def where(head: Statement) -> str:
    """Where the ranks are that a statement lets through."""
    if head.text.startswith(PAST):
        return f"after `{opener(head)}`"
    return f"under `{head.text}`"


def head_of(spot: Location, head: Statement) -> Location:
    """The line of a statement, given one beneath it."""
    if head.text.startswith(PAST):
        return Location(spot.file, head.opener, spot.function, opener(head))
    if head.line == spot.line:
        return spot
    text = head.text.partition("  # ")[0] if head.text.startswith("else") else head.text
    return Location(spot.file, head.line, spot.function, text)


def condition(made: CallRecord) -> tuple[Place, Statement] | None:
    """The statement around a call (or past it) that only some ranks enter, as its text suggests."""
    places = made.site.places if made.site else ()
    return _telling((p, head) for p in places for head in on_rank(p.inside))


def branch(made: CallRecord) -> tuple[Place, Statement] | None:
    """The innermost branch around a call that may part the ranks; all run the same program."""
    return _telling(
        (place, head)
        for place in (made.site.places if made.site else ())
        for head in place.inside
        if head.text.startswith(("if ", "elif ", "else:", "except"))
        and "__name__" not in head.text
        and not _on_size(head.text)
    )


def _telling(heads: Iterable[tuple[Place, Statement]]) -> tuple[Place, Statement] | None:
    """The innermost of these whose other arms do not make the same call; the innermost of all where
    there is none."""
    found = list(heads)
    return next((h for h in found if not h[1].matched), found[0] if found else None)


def _on_size(text: str) -> bool:
    """Whether a statement asks for no more than how many ranks there are, or whether there are
    several: that is the same on all of them."""
    named = (name for name in _NAME.findall(unquoted(text)) if not _BESIDE.fullmatch(name))
    sizes = [_SIZE.fullmatch(name) is not None for name in named]
    return bool(sizes) and all(sizes)


def finalizer(made: CallRecord) -> Location | None:
    """The line in a `__del__` that led to a call."""
    depths = range(len(made.site.places) if made.site else 0)
    spots = (made.location_at(depth) for depth in depths)
    return next((spot for spot in spots if spot and spot.function == "__del__"), None)


def is_inside(rank: Rank, site: CallSite | None, file: str, line: int) -> bool:
    """Whether a place that communicates, or a line that led to it, is inside the statement at that
    line."""
    return any(
        enclosing.line == line and (at := rank.location(place.site)) and at.file == file
        for place in (site.places if site else ())
        for enclosing in place.inside
    )


def arms(m: CallRecord, n: CallRecord) -> tuple[Statement, Statement] | None:
    """The arms of one statement that two calls stand in, where that is so."""
    ours, theirs = (list(x.site.places) if x.site else [] for x in (m, n))
    if not ours or not theirs:
        return None
    while len(ours) > 1 and len(theirs) > 1 and _same_place(m, ours[-1], n, theirs[-1]):
        ours.pop()
        theirs.pop()
    x, y = ours[-1].inside, theirs[-1].inside
    depth = 0
    while depth < min(len(x), len(y)) and x[-1 - depth] == y[-1 - depth]:
        depth += 1
    if depth == len(x) or depth == len(y):
        return None
    heads = (x[-1 - depth], y[-1 - depth])
    apart = heads[0].line != heads[1].line and opener(heads[0]) == opener(heads[1])
    return heads if apart and any(h.text.startswith(_ARMS) for h in heads) else None


def opener(head: Statement) -> str:
    """The `if` (or `try`) that an arm belongs to; the probe writes it behind `else:`."""
    if head.text.startswith(("try:", "except")):
        return "try:"
    if head.text.startswith(("else:", "elif ")):
        return head.text.rpartition("  # ")[2]
    return head.text.removeprefix(PAST)


def within(made: CallRecord, head: Statement) -> bool:
    return any(head in place.inside for place in (made.site.places if made.site else ()))


def avoided(call: CallRecord, made: CallRecord) -> bool:
    """Whether a rank is past the branch around a call, without that call."""
    _, head = branch(call) or (None, None)
    if head is None or within(made, head) or not head.text.startswith(("if ", "elif ")):
        return False
    # The outermost: a generator expression under the branch is a function of its own.
    inside = [place for place in (call.site.places if call.site else ()) if head in place.inside]
    return passed(made, call, inside[-1])


def passed(made: CallRecord, call: CallRecord, inside: Place | None = None) -> bool:
    """Whether a rank is further down in a function, or in one that called it, without a call that
    another makes there."""
    if call.site is None or not call.site.places or made.step != call.step:
        return False
    inside = inside or call.site.places[0]
    if any(lines(made.rank, site) == call.text for site in made.rank.of(CallSite)):
        return False
    first, *callers = call.site.places[call.site.places.index(inside) :]
    if _is_below(made, call.rank, first, ()):
        return True
    for place in callers:
        around = _around(call.rank, place)
        if _is_below(made, call.rank, place, around):
            return True
        if any(head.text.startswith(_BRANCHES) for head in around):
            return False  # that may be what parted them
    return False


def _is_below(made: CallRecord, rank: Rank, place: Place, around: tuple[Statement, ...]) -> bool:
    """Whether a rank is further down in the function of a place, inside of all that is around
    that."""
    spot = rank.location(place.site)
    return spot is not None and any(
        at is not None
        and (at.file, at.function) == (spot.file, spot.function)
        and at.line > spot.line
        and all(head in there.inside for head in around)
        for there in (made.site.places if made.site else ())
        for at in (made.rank.location(there.site),)
    )


def _around(rank: Rank, place: Place) -> tuple[Statement, ...]:
    """The statements around a place, but for one in whose condition it is."""
    spot = rank.location(place.site)
    line = spot.line if spot else -1
    return tuple(h for h in place.inside if h.line != line or not h.text.endswith(":"))


def begins_round(made: CallRecord, other: CallRecord) -> bool:
    """Whether a call comes before another one in the rounds of a loop that both are in."""
    for place in made.site.places if made.site else ():
        loops = {e.line for e in place.inside if e.text.startswith(("for ", "while "))}
        here = made.rank.location(place.site)
        for later in other.site.places if other.site else ():
            there = other.rank.location(later.site)
            if here and there and (here.file, here.function) == (there.file, there.function):
                both = any(e.line in loops for e in later.inside)
                if both and here.line < there.line:
                    return True
    return False


def _same_place(m: CallRecord, p: Place, n: CallRecord, q: Place) -> bool:
    return m.rank.location(p.site) == n.rank.location(q.site)


def same_lines(m: CallRecord, n: CallRecord) -> bool:
    """Whether two calls were led to by the same lines."""
    ours, theirs = (x.site.places if x.site else () for x in (m, n))
    return len(ours) == len(theirs) > 0 and all(
        _same_place(m, p, n, q) for p, q in zip(ours, theirs, strict=True)
    )


def called_apart(made: CallRecord, others: Iterable[CallRecord]) -> int:
    """How many callers up the outermost line stands, from the caller of a helper down to the call,
    on which those are not that were led to theirs by other lines; none beyond a branch that may
    have parted them."""
    rest = [m for m in others if not same_lines(m, made)]
    theirs = {m.location_at(n) for m in rest for n in range(CALLERS)}
    depths = range(min(made.helpers, _branched(made, rest)), 0, -1)
    return next((n for n in depths if rest and made.location_at(n) not in theirs), 0)


def _branched(made: CallRecord, rest: list[CallRecord]) -> int:
    """How many callers up the branch is that leads to a call, `CALLERS` for none: where a condition
    on the rank does not say who makes it, and the others are not known to enter that branch from
    other lines."""
    found = None if condition(made) else branch(made)
    if found is None or made.site is None:
        return CALLERS
    depth = made.site.places.index(found[0])
    spot, caller = made.location_at(depth), made.location_at(depth + 1)
    if spot is None or all(_enters(m.rank, spot.file, found[1].line, caller) for m in rest):
        return CALLERS
    return depth


def _enters(rank: Rank, file: str, line: int, caller: Location | None) -> bool:
    """Whether a rank has entered the statement at that line, but never from that caller."""
    sites = [site for site in rank.of(CallSite) if is_inside(rank, site, file, line)]
    places = (place for site in sites for place in site.places)
    return bool(sites) and all(rank.location(place.site) != caller for place in places)
