"""The statements around a line of the user's code: branches, loops, and what leaves them.

Read from indentation rather than a syntax tree: this runs for every call site, also in files that
are too large to parse within a step.
"""

from __future__ import annotations

import builtins
import linecache
import re
from collections.abc import Iterator

from ...events import Statement, Way
from .conditional_calls import conditions

_OPENS = ("if ", "elif ", "else:", "for ", "while ", "with ", "try:", "except", "finally:", "match")
_LOOPS = ("for ", "while ", "async for ")
_BRANCHES = ("if ", "elif ", "else:", "except")
_DEFINES = ("def ", "async def ", "class ")
_CONTINUES = re.compile(r"(?:^|[:;]\s*)continue\s*(?:;|$)")
_BREAKS = re.compile(r"(?:^|[:;]\s*)break\s*(?:;|$)")
_RETURNS = re.compile(r"(?:^|[:;]\s*)(?:return\b|(?:sys\.|os\._)?exit\()")
_ENDS = re.compile(r"(?:^|[:;]\s*)(?:return\b|exit\()")
"""Matches what ends a loop. Not `sys.exit` and `os._exit`: these are recorded when they are called.
"""
_RAISES = re.compile(r"(?:^|[:;]\s*)(?:raise\b|(?:sys\.|os\._)?exit\()")
_LEAVES = re.compile(r"(?:^|[:;]\s*)(?:return\b|continue\b|break\b|raise\b|(?:sys\.|os\._)?exit\()")
_PLAIN = re.compile(r"""(?:[^'"#]|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")*""")
"""Matches the code before a comment."""
_CALLED = re.compile(r"([A-Za-z_][\w.]*)\(")
WAYS_LIMIT = 8
AROUND_LIMIT, PAST_LIMIT = 8, 6
"""Jumps per loop, statements around a line, and `if`s passed before it that are recorded: a call
site is one line of the record, and must stay short."""


def enclosing(file: str, line: int) -> tuple[Statement, ...]:
    """The statements around a line, innermost first: with the conditions within its expression, and
    (as `past if x`) the `if`s before it that leave the block."""
    lines = linecache.getlines(file)
    if not 0 < line <= len(lines):
        return ()
    found = [Statement(line=line, text=text[:200]) for text in conditions(lines, line)]
    past = 0
    inner = start = line
    if not lines[line - 1].strip().startswith(("if ", "elif ", "else:")):
        start -= 1  # for `if x: f()` on one line, the line itself is a statement around the call
    for number in _outwards(lines, start, _indent(lines[line - 1]) + (start == line)):
        left = list(_early_leaves(lines, number, inner))[: PAST_LIMIT - past]
        found += left
        past += len(left)
        inner = number
        head = _code(lines[number - 1])
        if head.startswith(_DEFINES):
            break
        if not head.startswith(_OPENS):
            continue
        ways: tuple[Way, ...] = ()
        exits: tuple[Way, ...] = ()
        if head.startswith(_LOOPS):
            ways, exits = _loop_jumps(lines, number)
        elif head.startswith("try:"):
            ways = tuple(_handlers(lines, number))
        opener = 0
        if head.startswith(("else:", "elif ")):
            opener = _opener(lines, number, _indent(lines[number - 1]))
            head = f"{head}  # {_code(lines[opener - 1]) if opener else ''}"
        found.append(
            Statement(
                line=number,
                text=head[:200],
                opener=opener,
                ways=ways[:WAYS_LIMIT],
                broken=bool(exits),
                exits=exits[:WAYS_LIMIT],
                matched=_is_matched(lines, number, opener or number, line),
            )
        )
    return tuple(found[: AROUND_LIMIT + past])


def early_exits_before(file: str, line: int) -> tuple[int, ...]:
    """The lines of the `if`s that a line is behind, and whose bodies return or exit."""
    lines = linecache.getlines(file)
    past = (head for head in enclosing(file, line) if head.text.startswith("past "))
    return tuple(h.opener for h in past if _RETURNS.search(_code(lines[h.line - 1])))


def _outwards(lines: list[str], start: int, depth: int) -> Iterator[int]:
    """The lines from `start` upwards, each indented less than the one before."""
    for number in range(start, 0, -1):
        if not depth:
            return
        text = lines[number - 1]
        if _indent(text) < depth and _code(text):
            depth = _indent(text)
            yield number


def _early_leaves(lines: list[str], head: int, line: int) -> Iterator[Statement]:
    """The `if`s without `else` between the head of a block and a line in it whose bodies leave the
    block; the last one first."""
    depth = _indent(lines[line - 1])
    arm = ""  # the statement at that depth below
    for number in range(line - 1, head, -1):
        text = lines[number - 1]
        code = _code(text)
        if not code or _indent(text) != depth:
            continue
        if code.startswith("if ") and not arm.startswith(("elif ", "else:")):
            last = _last_of(lines, number)
            if _LEAVES.search(_code(lines[last - 1])):
                yield Statement(line=last, text=f"past {code}"[:200], opener=number)
        arm = code


def _last_of(lines: list[str], head: int) -> int:
    """The line on which the last statement of a block begins; for `if x: f()`, its own line."""
    body = [n for n in range(head + 1, _end(lines, head) + 1) if _code(lines[n - 1])]
    depth = min((_indent(lines[n - 1]) for n in body), default=0)
    closing = (")", "]", "}")
    begins = (
        n for n in reversed(body)
        if _indent(lines[n - 1]) == depth and not _code(lines[n - 1]).startswith(closing)
    )  # fmt: skip
    return next(begins, head)


def _loop_jumps(lines: list[str], loop: int) -> tuple[tuple[Way, ...], tuple[Way, ...]]:
    """The jumps that cut a round of a loop short (`continue`, handlers), and those that end the
    loop (`break`, `return`)."""
    ways = []
    exits = []
    end = _end(lines, loop)
    inner, inner_depth = "", -1
    for number in range(loop + 1, end + 1):
        text = lines[number - 1]
        code = _code(text)
        if not code:
            continue
        if _indent(text) <= inner_depth:
            inner, inner_depth = "", -1
        if inner.startswith(_DEFINES):
            continue
        if _ENDS.search(code) or (not inner and _BREAKS.search(code)):
            exits.append(_exit(lines, number, end))
        if inner:
            continue
        if _CONTINUES.search(code):
            ways.append(_continue(lines, number, end))
        elif code.startswith("try:"):
            ways += [w for w in _handlers(lines, number) if not _leaves(lines, w.line)]
        elif code.startswith((*_LOOPS, *_DEFINES)):
            inner, inner_depth = code, _indent(text)
    return tuple(sorted(ways, key=lambda w: w.line)), tuple(exits)


def _continue(lines: list[str], number: int, end: int) -> Way:
    """A `continue`, with the statement that it is under and the lines that it skips; under an
    exception handler, these include the `try`."""
    head = _governing_line(lines, number)
    under = _code(lines[head - 1])
    tried = _try_line(lines, head) if under.startswith("except") else number
    return Way(line=head, text=under[:200], first=tried + 1, last=end)


def _exit(lines: list[str], number: int, end: int) -> Way:
    """A `break` or `return`, with the branch that it is under, if any."""
    head = _governing_line(lines, number)
    if not _code(lines[head - 1]).startswith(_BRANCHES):
        head = number
    return Way(line=head, text=_code(lines[head - 1])[:200], first=number + 1, last=end)


def _governing_line(lines: list[str], number: int) -> int:
    """The line of the statement that a line is under; its own for `if x: break`."""
    if _code(lines[number - 1]).startswith(_BRANCHES):
        return number
    return next(_outwards(lines, number - 1, _indent(lines[number - 1])), number)


def _handlers(lines: list[str], tried: int) -> Iterator[Way]:
    """The handlers of a `try` that swallow the exception."""
    depth = _indent(lines[tried - 1])
    number = _end(lines, tried) + 1
    last = number - 1
    while number <= len(lines):
        text = lines[number - 1]
        code = _code(text)
        if code:
            if _indent(text) != depth or not code.startswith("except"):
                return
            end = _end(lines, number)
            body = [_code(t) for t in lines[number - 1 : end]]
            if not any(_RAISES.search(c) for c in body):
                yield Way(line=number, text=code[:200], first=tried + 1, last=last)
            number = end
        number += 1


def _leaves(lines: list[str], handler: int) -> bool:
    """Whether a handler in a loop ends the round or the loop itself."""
    body = [_code(t) for t in lines[handler - 1 : _end(lines, handler)]]
    return any(p.search(c) for c in body for p in (_CONTINUES, _BREAKS, _RETURNS))


def _try_line(lines: list[str], handler: int) -> int:
    """The line of the `try` that a handler belongs to."""
    depth = _indent(lines[handler - 1])
    for number in range(handler - 1, 0, -1):
        text = lines[number - 1]
        if _indent(text) == depth and _code(text).startswith("try:"):
            return number
    return handler


def _end(lines: list[str], head: int) -> int:
    """The last line of the block that a statement opens."""
    depth, end = _indent(lines[head - 1]), head
    for number in range(head + 1, len(lines) + 1):
        if not _code(lines[number - 1]):
            continue
        if _indent(lines[number - 1]) <= depth:
            break
        end = number
    return end


def _opener(lines: list[str], number: int, depth: int) -> int:
    """The line of the statement that an `else:` belongs to, 0 for none."""
    for line in range(number - 1, 0, -1):
        text = lines[line - 1]
        if text.strip() and _indent(text) == depth:
            if _code(text).startswith(("if ", "for ", "while ", "try:")):
                return line
        elif text.strip() and _indent(text) < depth:
            break
    return 0


def _is_matched(lines: list[str], arm: int, opener: int, line: int) -> bool:
    """Whether an `if` has an `else`, and all its other arms make the calls of a line too (built-in
    functions, which do not communicate, aside): then the branch makes no difference to them."""
    made = set(_CALLED.findall(_code(lines[line - 1]))) - set(dir(builtins))
    if not made or line == arm or not _code(lines[opener - 1]).startswith("if "):
        return False
    heads = list(_chain(lines, opener))
    others = ("".join(map(_code, lines[n : _end(lines, n)])) for n in heads if n != arm)
    complete = _code(lines[heads[-1] - 1]).startswith("else:")
    return complete and all(made <= set(_CALLED.findall(body)) for body in others)


def _chain(lines: list[str], opener: int) -> Iterator[int]:
    """The lines of an `if`, its `elif`s and its `else`."""
    number = opener
    depth = _indent(lines[opener - 1])
    while True:
        yield number
        after = range(_end(lines, number) + 1, len(lines) + 1)
        number = next((n for n in after if _code(lines[n - 1])), 0)
        if not number or _indent(lines[number - 1]) != depth:
            return
        if not _code(lines[number - 1]).startswith(("elif ", "else:")):
            return


def _code(text: str) -> str:
    """A line without indentation and comment."""
    code = text.strip()
    plain = _PLAIN.match(code)
    if plain is not None and code[plain.end() :].startswith("#"):
        return plain[0].rstrip()
    return code.partition("  #")[0].rstrip()  # quotes do not match: within a long string


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
