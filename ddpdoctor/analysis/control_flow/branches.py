"""The statements around a call: which branch led there, and whether two calls are on the same lines
or in two branches of one `if`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from ...events import CALLERS, CallSite, Place, Statement, Wrapped
from ...run import Location, Rank, listed, ranks_do
from ..calls.call_logs import BACKWARD, CallRecord
from ..calls.rank_conditions import OF_ANY_RANK, is_plain, on_rank, part_on_rank, unquoted

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_SIZE = re.compile(
    r"(?:\w+\.)*(?:(?:get_|n_?|num_)?(?:world_?size|procs?|processes|replicas)"
    r"|(?:is_|use_)?(?:ddp|dist|distributed)(?:_\w*(?:avail|init)\w*)?)"
    r"|(?:[\w.]*dist\w*\.)?is_(?:available|initialized)",
    re.IGNORECASE,
)
_SETTING = re.compile(
    r"(?:not )?(?:self\.)?(?:args|opts?|options|cfg|config|conf|hparams|settings|flags|FLAGS)"
    r"(?:\.\w+)+"
)
_BESIDE = re.compile(
    r"if|elif|and|or|not|is|None|True|False|int|bool|os\.(?:environ(?:\.get)?|getenv)"
)


def parts(head: Statement) -> str:
    """How a statement makes ranks diverge."""
    if head.kind == "past":
        return f"some ranks leave at `{head.text}`, before this call"
    if head.kind == "decorated":
        under = f", at `{head.of}`" if head.of else ""
        return f"`{head.text}` calls this function on some ranks only{under}"
    return f"only some ranks enter `{head.label}`"


def leading(head: Statement, leaving: Collection[int] = ()) -> str:
    """The label of a statement that makes ranks diverge.

    Args:
        leaving: the ranks that leave there, where that is known.
    """
    if head.kind == "decorated":
        return "runs this function on some ranks only"
    if head.kind != "past":
        return "the branch around the call"
    return f"{ranks_do(leaving, 'leave')} here" if leaving else "some ranks leave here"


def unbranched(head: Statement, what: str) -> str:
    """What to do about a call that some ranks do not make because of a statement.

    Args:
        what: `call all_reduce`.
    """
    if (found := part_on_rank(head)) and is_plain(found[1]):
        part, rest = found
        if head.kind == "past":
            return f"{what} on every rank: put it past `if {rest}:`, without `{part}`"
        if head.fed:
            return f"{what} on every rank, under `if {rest}:` without `{part}`{_with_uses(head)}"
        return (
            f"{what} on every rank: put this call alone under `if {rest}:`, and leave the rest of "
            f"the block under `{part}`"
        )
    if head.kind == "decorated":
        return (
            f"{what} on every rank: before this function is called, or in one without "
            f"`{head.text}`, and use the result here"
        )
    if head.kind == "past" and head.text.startswith("except"):
        return (
            f"{what} on every rank: where `{head.text}` catches an error, do not leave at once; "
            "`all_reduce` an error flag first, and leave on all ranks or on none"
        )
    if head.kind == "past" and not on_rank((head,)):
        return (
            f"{what} on every rank: move it before `{head.text}`, with every other collective that "
            "the ranks which leave miss, also those of DDP's backward; or leave there on all ranks "
            "or on none, by a condition that is equal on all of them (`all_reduce` it first): then "
            "all leave out what comes after it"
        )
    out_of = f"before `{head.text}`" if head.kind == "past" else f"out of `{head.label}`"
    shared = ""
    if head.kind in ("if", "elif") and not on_rank((head,)):
        shared = (
            ", or compute its condition from a value equal on all ranks (`all_reduce` it first)"
        )
    return f"{what} on every rank: move it {out_of}{_with_uses(head)}{shared}"


def in_forward(line: Location, op: str) -> bool:
    """Whether a line runs a part of a model that makes a collective: what the line calls makes it,
    and the line is in a `forward`."""
    return line.function.rpartition(".")[2] == "forward" and op not in line.source


def run_by_all(head: Statement, line: Location, op: str) -> str:
    """What to do about a part of a model that some ranks do not run because of a statement, where
    it makes a collective."""
    if on_rank((head,)):
        return unbranched(head, f"run `{line.source.strip()}`, which makes {op},")
    lacking = "leads past it" if head.kind == "past" else "does not lead there"
    return (
        f"run `{line.source.strip()}` ({line}) on every rank in every step, as it makes {op} "
        f"(FSDP does, or a layer such as SyncBatchNorm): where `{head.label}` {lacking}, give it "
        "an input of zeros, multiply what comes out by 0, and add that to the loss"
    )


def _with_uses(head: Statement) -> str:
    """What must move along with a call out of a branch that gives values to its variables."""
    names = listed([f"`{name}`" for name in head.fed])
    return f", together with the other lines of the block that use {names}" if names else ""


def unwrapped(head: Statement, made: CallRecord) -> str:
    """What to do about a wrapped model that some ranks do not run because of a statement."""
    if made.signature.op == BACKWARD:
        return (
            "run this backward on every rank or on none: let the condition depend on values that "
            "all ranks share (draw a random number on rank 0 and broadcast it, say), or multiply "
            "the loss by 0 where a rank has nothing to train on"
        )
    name = _wrapper(made)
    inner = f"`{name}.module(...)`" if name else "the inner module (`.module`)"
    return f"run the wrapped model on every rank, or use {inner} {where(head)}"


def _wrapper(made: CallRecord) -> str:
    """The program's name of the wrapped model, as on the line of the call, or the only one; empty
    where that is not certain."""
    source = made.location.source if made.location else ""
    names = {made.rank.names_of(w)[0] for w in made.rank.of(Wrapped)}
    called = [
        n for n in names - {""} | {"model"} if re.search(rf"(?<![\w.]){re.escape(n)}\(", source)
    ]
    if len(called) == 1:
        return called[0]
    return names.pop() if len(names) == 1 and made.signature.op == "DDP backward" else ""


def where(head: Statement) -> str:
    """Where the ranks are that enter a statement: `` under `if rank == 0:` ``."""
    return f"after `{head.text}`" if head.kind == "past" else f"under `{head.label}`"


def head_of(spot: Location, head: Statement) -> Location:
    """The line of a statement, given a line inside of it."""
    line = head.opener if head.kind == "past" else head.line
    return spot if line == spot.line else Location(spot.file, line, spot.function, head.text)


def condition(made: CallRecord) -> tuple[Place, Statement] | None:
    """The statement around (or before) a call that only some ranks enter, as its text asks for the
    rank; None for none."""
    return _telling((p, head) for p in places(made) for head in on_rank(p.inside))


def branch(made: CallRecord, *, past: bool = False) -> tuple[Place, Statement] | None:
    """The innermost branch around a call that ranks may take differently; None for none.

    Args:
        past: or one before it that leaves a function, or the round of a loop.
    """
    return _telling(
        (place, head)
        for place in places(made)
        for head in place.inside
        if (head.is_branch or (past and head.kind == "past")) and of_several_ranks(head)
    )


def of_several_ranks(head: Statement) -> bool:
    """Whether ranks may take a branch differently: not if its condition asks for the module's name,
    for the number of ranks, or for a setting of the program and nothing else."""
    test = unquoted(head.test or head.of)
    setting = _SETTING.fullmatch(test.removeprefix("if ").partition(":")[0].strip())
    return "__name__" not in head.label and not setting and not _on_size(head)


def _telling(heads: Iterable[tuple[Place, Statement]]) -> tuple[Place, Statement] | None:
    """The innermost statement whose other branches do not make the same call; None for none."""
    return next((h for h in heads if not h[1].matched), None)


def _on_size(head: Statement) -> bool:
    """Whether a condition depends on the number of ranks only, or on whether there are several,
    which is the same on all of them."""
    named = (
        name
        for name in _NAME.findall(OF_ANY_RANK.sub("is_distributed", unquoted(head.test or head.of)))
        if not _BESIDE.fullmatch(name)
    )
    sizes = [_SIZE.fullmatch(name) is not None for name in named]
    return bool(sizes) and all(sizes)


def finalizer(made: CallRecord) -> Location | None:
    """The line in a `__del__` that led to a call; None for none."""
    spots = map(made.location_at, range(len(places(made))))
    return next((spot for spot in spots if spot and spot.function == "__del__"), None)


def around(rank: Rank, site: CallSite | None) -> Iterator[tuple[int, Location, Statement]]:
    """The statements around a call, innermost first: how many callers up, the line that leads to
    the call there, and the statement."""
    for depth, place in enumerate(site.places if site else ()):
        spot = rank.location(place.site)
        for head in place.inside if spot else ():
            if spot is not None:
                yield depth, spot, head


def places(made: CallRecord) -> tuple[Place, ...]:
    return made.site.places if made.site else ()


def is_inside(rank: Rank, site: CallSite | None, file: str, line: int) -> bool:
    """Whether a call, or a line that led to it, is inside the statement at a line of a file."""
    return any(head.line == line and spot.file == file for _, spot, head in around(rank, site))


def arms(m: CallRecord, n: CallRecord) -> tuple[Statement, Statement] | None:
    """The two branches of one statement in which two calls are; None where they are in no such."""
    ours, theirs = (list(places(x)) for x in (m, n))
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
    two_branches = heads[0].line != heads[1].line and heads[0].opening == heads[1].opening
    return heads if two_branches and any(h.of or h.kind == "past" for h in heads) else None


def within(made: CallRecord, head: Statement) -> bool:
    """Whether a call, or a line that led to it, is inside of a statement."""
    return any(head in place.inside for place in places(made))


def avoided(call: CallRecord, made: CallRecord) -> bool:
    """Whether a rank is past the branch around a call without having made that call.

    Args:
        call: of another rank; made: the present call of the rank.
    """
    _, head = branch(call) or (None, None)
    if head is None or within(made, head) or head.kind not in ("if", "elif"):
        return False
    # The outermost, as a generator expression in the branch is a function of its own.
    inside = [place for place in places(call) if head in place.inside]
    return passed(made, call, inside[-1])


def makes(rank: Rank, spots: tuple[tuple[str, int], ...]) -> bool:
    """Whether a rank ever makes a call on these lines."""
    return any(
        tuple((at.file, at.line) for p in site.places if (at := rank.location(p.site))) == spots
        for site in rank.of(CallSite)
    )


def passed(made: CallRecord, call: CallRecord, inside: Place | None = None) -> bool:
    """Whether a rank is further down in a function, or in one that called it, without having made
    the call that another rank makes there.

    Args:
        made: the present call of the rank.
        inside: the line that led to `call` from which to look; its own line by default.
    """
    if not places(call) or made.step != call.step:
        return False
    inside = inside or places(call)[0]
    if makes(made.rank, call.spots):
        return False
    first, *callers = places(call)[places(call).index(inside) :]
    if _is_below(made, call.rank, first, ()):
        return True
    for place in callers:
        heads = _around(call.rank, place)
        if _is_below(made, call.rank, place, heads):
            return True
        if any(head.is_branch or head.kind == "past" for head in heads):
            return False  # this branch may have made them diverge
    return False


def _is_below(made: CallRecord, rank: Rank, place: Place, heads: tuple[Statement, ...]) -> bool:
    """Whether a call is further down in the function of a place, inside of all of `heads`."""
    spot = rank.location(place.site)
    return spot is not None and any(
        at is not None
        and (at.file, at.function) == (spot.file, spot.function)
        and at.line > spot.line
        and all(head in there.inside for head in heads)
        for there in places(made)
        for at in (made.rank.location(there.site),)
    )


def _around(rank: Rank, place: Place) -> tuple[Statement, ...]:
    """The statements around a place, without one in whose condition the place is."""
    spot = rank.location(place.site)
    line = spot.line if spot else -1
    return tuple(h for h in place.inside if h.line != line or not h.text.endswith(":"))


def begins_round(made: CallRecord, other: CallRecord) -> bool:
    """Whether a call comes before another one in each round of a loop around both."""
    for place in places(made):
        loops = {e.line for e in place.inside if e.is_loop}
        here = made.rank.location(place.site)
        for later in places(other):
            there = other.rank.location(later.site)
            if here and there and (here.file, here.function) == (there.file, there.function):
                both = any(e.line in loops for e in later.inside)
                if both and here.line < there.line:
                    return True
    return False


def _same_place(m: CallRecord, p: Place, n: CallRecord, q: Place) -> bool:
    return m.rank.location(p.site) == n.rank.location(q.site)


def same_lines(m: CallRecord, n: CallRecord) -> bool:
    """Whether the same lines led to two calls."""
    ours, theirs = places(m), places(n)
    return len(ours) == len(theirs) > 0 and all(
        _same_place(m, p, n, q) for p, q in zip(ours, theirs, strict=True)
    )


def called_apart(made: CallRecord, others: Iterable[CallRecord]) -> int:
    """How many callers up the line is that tells a call in a helper from the calls of other ranks:
    the outermost one that led to none of theirs; 0 for the call's own line.

    It is not looked for beyond a branch that may have made the ranks diverge.
    """
    rest = [m for m in others if not same_lines(m, made)]
    theirs = {m.location_at(n) for m in rest for n in range(CALLERS)}
    depths = range(min(made.helpers, _branched(made, rest)), 0, -1)
    return next((n for n in depths if rest and made.location_at(n) not in theirs), 0)


def _branched(made: CallRecord, rest: list[CallRecord]) -> int:
    """How many callers up the branch around a call is; `CALLERS` for none, where its condition is
    on the rank, and where the other ranks are known to enter the branch from other lines."""
    found = None if condition(made) else branch(made)
    if found is None:
        return CALLERS
    depth = places(made).index(found[0])
    spot, caller = made.location_at(depth), made.location_at(depth + 1)
    if spot is None or all(_enters(m.rank, spot.file, found[1].line, caller) for m in rest):
        return CALLERS
    return depth


def _enters(rank: Rank, file: str, line: int, caller: Location | None) -> bool:
    """Whether a rank has entered the statement at a line, but never from this caller."""
    sites = [site for site in rank.of(CallSite) if is_inside(rank, site, file, line)]
    places = (place for site in sites for place in site.places)
    return bool(sites) and all(rank.location(place.site) != caller for place in places)
