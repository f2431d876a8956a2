"""The statements around a line of the user's code: branches, loops, and what leaves them."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import structs

from ...events import FlagSet, Statement, Way
from .ast_cache import Defined, Source, covers_line, dotted, last_name, source_of

WAYS_LIMIT = 8
AROUND_LIMIT, PAST_LIMIT = 8, 6
"""Jumps per loop, statements around a line, and `if`s passed before it that are recorded: a call
site is one line of the record, and must stay short."""
TEXT_LIMIT = 200
FED_LIMIT = 2
_NO_VALUE = ("eval", "train", "to", "print", "info", "warning", "debug", "log", "write")
"""Methods that put nothing into their object that a later line would read."""
FLAGS_LIMIT, FLAG_TESTS = 2, 4
"""Statements that set a flag, per function, and conditions around each."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_PLAIN = re.compile(r"""(?:[^'"#]|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")*""")
"""Matches the code before a comment."""
_ASKS = re.compile(r"is_\w+$|(?:get_)?(?:(?:local|global|group|node)_)?rank$")
"""Names of functions that ask for the rank: calls of them are no collectives."""
_EXITS = ("exit", "sys.exit", "os._exit")
_ROUNDS = ("for", "while")
_BRANCHES = ("if", "elif", "else", "after", "except", "case")


_Setting = tuple[str, int, bool, ast.expr]
"""A function, and in it an assignment (see `_assignments`)."""


class Arm(NamedTuple):
    """One block of a compound statement: the body of an `if`, its `else`, a handler.

    Attributes:
        kind: as in `Statement`.
        line: of its head.
    """

    kind: str
    line: int
    body: list[ast.stmt]
    test: ast.expr | None = None

    @property
    def end(self) -> int:
        return self.body[-1].end_lineno or 0


class _Level(NamedTuple):
    """A block with a line in it: its statements up to the one with the line, and the statement it
    is an arm of (None for the body of a function or a file)."""

    block: list[ast.stmt]
    node: ast.stmt | None = None
    arm: Arm | None = None


def enclosing(file: str, line: int) -> tuple[Statement, ...]:
    """The statements around a line, innermost first: with the conditions within its expression, and
    the `if`s before it that leave the block. Empty where the file has no source that parses."""
    source = source_of(file)
    levels = _levels(source, line) if source is not None else []
    if source is None or not levels or not levels[-1].block:
        return ()
    innermost = levels[-1].block[-1]
    found = [
        Statement(line=line, kind="if", test=test, text=f"if {test}"[:TEXT_LIMIT])
        for test in _conditions(source, innermost, line)
    ]
    made = {c for c in _called(innermost) if c not in vars(builtins)}
    past, before = 0, list[ast.stmt]()
    used = _used(innermost) - source.once(_imported, source.tree)
    for level in reversed(levels):
        before += level.block[:-1]
        left = list(itertools.islice(_early_leaves(source, level.block), PAST_LIMIT - past))
        past += len(left)
        found += left
        if level.node is not None and level.arm is not None:
            found.append(_statement(source, level.node, level.arm, made, used & _changed(before)))
    return tuple(found[: AROUND_LIMIT + past])


def early_exits_before(file: str, line: int) -> tuple[int, ...]:
    """The lines of the `if`s that a line is behind, and whose bodies return or exit."""
    source = source_of(file)
    return tuple(
        choice.lineno
        for level in (reversed(_levels(source, line)) if source is not None else ())
        for choice in _leaving(level.block)
        if isinstance(choice.body[-1], ast.Return) or _exit_of(choice.body[-1])
    )


def _levels(source: Source, line: int) -> list[_Level]:
    """The blocks around a line within its function, outermost first."""
    found: list[_Level] = []
    node: ast.stmt | None = None
    arm: Arm | None = None
    block = source.tree.body
    while True:
        here = next((n for n, s in enumerate(block) if covers_line(s, line)), -1)
        found.append(_Level(block[: here + 1], node, arm))
        if here < 0:
            return found
        node = block[here]
        if isinstance(node, Defined):
            if not any(covers_line(s, line) for s in node.body):
                return found
            found.clear()
            block, node, arm = node.body, None, None
            continue
        arms = _arms(source, node)
        arm = next((a for a in arms if any(covers_line(s, line) for s in a.body)), None)
        if arm is None:  # within a head; that of an `elif` is reached only past those before it
            late = (a for a in arms if a.kind == "elif" and a.test and covers_line(a.test, line))
            return found + [_Level([node], node, a) for a in late]
        block = arm.body


def _arms(source: Source, node: ast.stmt) -> list[Arm]:
    """The blocks of a compound statement, in the order of the text; empty for a simple one."""
    if isinstance(node, ast.If):
        arms = [Arm("if", node.lineno, node.body, node.test)]
        rest = node.orelse
        while rest and isinstance(last := rest[0], ast.If):
            if not _head(source, last.lineno).startswith("elif"):
                break
            arms.append(Arm("elif", last.lineno, last.body, last.test))
            rest = last.orelse
        return [*arms, *([Arm("else", source.keyword_line("else", rest), rest)] if rest else [])]
    if isinstance(node, ast.Match):
        return [Arm("case", c.pattern.lineno, c.body, node.subject) for c in node.cases]
    kind = _KINDS.get(type(node).__name__)
    if kind is None:
        return []
    body: list[ast.stmt] = getattr(node, "body", [])
    arms = [Arm(kind, node.lineno, body, getattr(node, "test", None))]
    arms += [Arm("except", h.lineno, h.body) for h in getattr(node, "handlers", ())]
    for kind, keyword, field in (("after", "else", "orelse"), ("finally", "finally", "finalbody")):
        body = getattr(node, field, [])
        if line := source.keyword_line(keyword, body):
            arms.append(Arm(kind, line, body))
    return arms


_KINDS = {
    "For": "for", "AsyncFor": "for", "While": "while", "With": "with", "AsyncWith": "with",
    "Try": "try", "TryStar": "try",
}  # fmt: skip


def _statement(
    source: Source, node: ast.stmt, arm: Arm, made: set[str], fed: set[str]
) -> Statement:
    """The record of a statement around a line that makes the calls `made`, and to some of whose
    variables it gives values."""
    arms = _arms(source, node)
    ways: list[Way] = []
    exits: list[Way] = []
    first = arms[0]
    if arm.kind in _ROUNDS:
        ways, exits = source.once(_jumps, node)
    elif arm.kind == "try":
        ways = [_past_handler(source, a, arm) for a in arms if a.kind == "except" and _swallows(a)]
    later = arm.line != node.lineno
    return Statement(
        line=arm.line,
        text=_head(source, arm.line, arm.test),
        ways=tuple(ways[:WAYS_LIMIT]),
        broken=bool(exits),
        opener=node.lineno if later else 0,
        exits=tuple(exits[:WAYS_LIMIT]),
        matched=bool(made)
        and arms[-1].kind == "else"
        and all(
            made <= {c for s in a.body for c in _called(s)} for a in arms if a.line != arm.line
        ),
        kind=arm.kind,
        test=source.written(arm.test)[:TEXT_LIMIT] if arm.test is not None else "",
        of=_head(source, node.lineno, first.test) if later else "",
        fed=tuple(sorted(fed)[:FED_LIMIT]) if arm.kind in _BRANCHES else (),
    )


def _used(node: ast.stmt) -> set[str]:
    """The variables that a statement reads, and the objects whose methods it calls."""
    reads = (n for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Load))
    names = {dotted(n) for n in reads if isinstance(n, (ast.Name, ast.Attribute))} - {""}
    return names | {name.rpartition(".")[0] for name in names} - {"", "self"}


def _imported(source: Source, tree: ast.AST) -> set[str]:
    """The names that a file imports."""
    imports = (n for n in source.nodes if isinstance(n, (ast.Import, ast.ImportFrom)))
    return {(a.asname or a.name).partition(".")[0] for n in imports for a in n.names}


def _changed(block: list[ast.stmt]) -> set[str]:
    """The variables to which statements give values, and the objects that they call, or methods of
    which they call, for nothing but an effect."""
    found: set[str] = set()
    for node in (n for statement in block for n in ast.walk(statement)):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found.add(dotted(node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = dotted(node.value.func)
            owner, _, method = function.rpartition(".")
            if method not in _NO_VALUE:
                found.add(owner or function)
    return found - {""}


def _early_leaves(source: Source, block: list[ast.stmt]) -> Iterator[Statement]:
    """The branches before the last statement of a block that leave it, the last one first."""
    for node in reversed(block[:-1]):
        for leave, arm in _leaves_in(source, node, None, False):
            yield Statement(
                line=leave.lineno,
                text=_head(source, arm.line, arm.test),
                opener=arm.line,
                kind="past",
                test=source.written(arm.test)[:TEXT_LIMIT] if arm.test is not None else "",
            )


def _leaves_in(
    source: Source, node: ast.stmt, branch: Arm | None, nested: bool
) -> Iterator[tuple[ast.stmt, Arm]]:
    """The statements in a branch of a statement that leave the block it is in; each with the
    innermost branch around it. An exception that is raised deeper inside is left out: it is on
    record itself.

    Args:
        branch: the innermost one around the statement; nested: it is in a loop of the block.
    """
    if isinstance(node, Defined):
        return
    jumps = isinstance(node, (ast.Continue, ast.Break)) and not nested
    raises = isinstance(node, ast.Raise) and branch is not None and branch.kind == "if"
    if branch is not None and (jumps or raises or isinstance(node, ast.Return) or _exit_of(node)):
        yield node, branch
    for arm in _arms(source, node):
        inner = arm if arm.kind in _BRANCHES else branch
        for each in arm.body:
            yield from _leaves_in(source, each, inner, nested or arm.kind in _ROUNDS)


def _leaving(block: list[ast.stmt]) -> Iterator[ast.If]:
    """The `if`s without `else` before the last statement of a block whose bodies leave the block;
    the last one first."""
    for node in reversed(block[:-1]):
        if isinstance(node, ast.If) and not node.orelse and _leaves(node.body[-1]):
            yield node


def _jumps(source: Source, node: ast.stmt) -> tuple[list[Way], list[Way]]:
    """The jumps that cut a round of a loop short (`continue`, handlers), and those that end the
    loop (`break`, `return`; not `sys.exit` and `os._exit`, which are recorded when called)."""
    ways: list[Way] = []
    exits: list[Way] = []
    loop = _arms(source, node)[0]

    def search(block: Arm, tried: int, nested: bool, outer: tuple[Arm, ...] = ()) -> None:
        around = tuple((arm.line, _head(source, arm.line, arm.test)) for arm in outer)
        for node in block.body:
            if isinstance(node, Defined):
                continue
            if isinstance(node, ast.Continue) and not nested:
                first = tried if block.kind == "except" else node.lineno
                ways.append(_way(source, block.line, first + 1, loop.end))
            ends = isinstance(node, ast.Return) or _exit_of(node) == "exit"
            if ends or (isinstance(node, ast.Break) and not nested):
                head = block.line if block.kind in _BRANCHES else node.lineno
                way = _way(source, head, node.lineno + 1, loop.end)
                way = structs.replace(way, around=around)
                test = block.test if block.kind in ("if", "elif") else None
                exits.extend(_decided(source, way, test, loop, True) or [way])
            arms = _arms(source, node)
            for arm in arms:
                if arm.kind == "except" and not nested and _swallows(arm) and not _ends_round(arm):
                    ways.append(_past_handler(source, arm, arms[0]))
                inner = (block, *outer) if block.kind in _BRANCHES else outer
                search(arm, node.lineno, nested or arm.kind in _ROUNDS, inner)

    search(loop, loop.line, False)
    if loop.kind == "while":
        head = _way(source, loop.line, loop.line, loop.end)
        exits += _decided(source, head, loop.test, loop, False)
    return sorted(ways, key=lambda w: w.line), exits


def _decided(source: Source, way: Way, test: ast.expr | None, loop: Arm, ends: bool) -> list[Way]:
    """A jump under a flag, once for each statement that sets the flag, which decides: in the loop,
    or else, for an attribute, in any function of the file. Empty where the condition is no flag
    that they set to true or false.

    Args:
        ends: the value of the condition with which the loop ends.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, ends = test.operand, not ends
    flag = dotted(test) if test is not None else ""
    values = [("", *found) for found in _set_in(source, loop, flag)] if flag else []
    if not values and "." in flag:
        values = source.once(_attributes_set, source.tree).get(flag.rpartition(".")[2], [])
    if not all(isinstance(v, (ast.Compare, ast.BoolOp)) or _is_bool(v) for *_, v in values):
        return []
    return [
        structs.replace(
            way,
            set_line=line,
            set_by=_head(source, line),
            set_in=function,
            around=tuple(_branches(source, line, 0 if function else loop.line)),
        )
        for function, line, branched, value in values
        if not isinstance(value, ast.Constant) or (branched and value.value is ends)
    ]


def _branches(source: Source, line: int, after: int) -> Iterator[tuple[int, str]]:
    """Line and head of the branches around a line, innermost first, that begin after another."""
    for level in reversed(_levels(source, line)):
        arm = level.arm
        if arm is not None and arm.kind in _BRANCHES and arm.line > after:
            yield arm.line, _head(source, arm.line, arm.test)


def _attributes_set(source: Source, tree: ast.AST) -> dict[str, list[_Setting]]:
    """By its name, where the functions of a file set an attribute, of whatever object; but for
    constructors, which set what is true at first."""
    found: dict[str, list[_Setting]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != "__init__":
            for line, branched, value, name in _assignments(source, Arm("", 0, node.body)):
                owner, _, attribute = name.rpartition(".")
                if owner:
                    found.setdefault(attribute, []).append((node.name, line, branched, value))
    return found


def flags_set(file: str, line: int) -> tuple[FlagSet, ...]:
    """The statements in the function around a line that set an attribute to true or false under
    a condition."""
    source = source_of(file)
    around = source.around(line) if source is not None else ()
    function = next((n for n in reversed(around) if isinstance(n, _FUNCTIONS)), None)
    return source.once(_flags_of, function) if source and function is not None else ()


def _flags_of(source: Source, function: ast.AST) -> tuple[FlagSet, ...]:
    found = []
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or not _is_bool(node.value):
            continue
        if not any(isinstance(target, ast.Attribute) for target in node.targets):
            continue
        around = [level for level in reversed(_levels(source, node.lineno)) if level.arm]
        tests = [_test_of(source, a) for level in around if (a := level.arm) and a.test is not None]
        if tests:
            text = source.lines[node.lineno - 1].strip()[:TEXT_LIMIT]
            found.append(FlagSet(node.lineno, text, tuple(tests[:FLAG_TESTS])))
    return tuple(found[:FLAGS_LIMIT])


def _test_of(source: Source, arm: Arm) -> str:
    assert arm.test is not None
    return source.written(arm.test)[:TEXT_LIMIT]


def _set_in(source: Source, block: Arm, flag: str) -> Iterator[tuple[int, bool, ast.expr]]:
    """The assignments to a name in a block, without the name."""
    return (each[:3] for each in _assignments(source, block) if each[3] == flag)


def _assignments(
    source: Source, block: Arm, branch: int = 0
) -> Iterator[tuple[int, bool, ast.expr, str]]:
    """The assignments in a block: the line of the innermost branch around each, or its own, whether
    it is in a branch, the value, and the name."""
    for node in block.body:
        if isinstance(node, ast.Assign):
            constant = isinstance(node.value, ast.Constant)
            line = branch if constant and branch else node.lineno
            yield from ((line, branch > 0, node.value, dotted(t)) for t in node.targets)
        for arm in () if isinstance(node, Defined) else _arms(source, node):
            yield from _assignments(source, arm, arm.line if arm.kind in _BRANCHES else branch)


def _is_bool(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, bool)


def _way(source: Source, line: int, first: int, last: int) -> Way:
    return Way(line=line, text=_head(source, line), first=first, last=last)


def _past_handler(source: Source, handler: Arm, tried: Arm) -> Way:
    return _way(source, handler.line, tried.line + 1, tried.end)


def _swallows(handler: Arm) -> bool:
    """Whether the program goes on after a handler."""
    return not any(
        isinstance(n, ast.Raise) or _exit_of(n) for s in handler.body for n in ast.walk(s)
    )


def _ends_round(handler: Arm) -> bool:
    jumps = (ast.Continue, ast.Break, ast.Return)
    return any(isinstance(n, jumps) for s in handler.body for n in ast.walk(s))


def _leaves(node: ast.stmt) -> bool:
    jumps = (ast.Return, ast.Continue, ast.Break, ast.Raise)
    return isinstance(node, jumps) or bool(_exit_of(node))


def _exit_of(node: ast.AST) -> str:
    """`sys.exit` for a statement that calls it; empty for one that does not end the program."""
    call = node.value if isinstance(node, ast.Expr) else None
    name = dotted(call.func) if isinstance(call, ast.Call) else ""
    return name if name in _EXITS else ""


def _called(node: ast.AST) -> set[str]:
    """The functions that are called in a statement, as written."""
    calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
    return {dotted(func) or last_name(func) for func in calls} - {""}


def _conditions(source: Source, statement: ast.stmt, line: int) -> list[str]:
    """The conditions within an expression under which all calls on a line are made, innermost
    first, as in `f() if x else y` or `x and f()`. Empty if a call is made unconditionally, or in
    both cases."""
    own = [n for n in ast.iter_child_nodes(statement) if isinstance(n, (ast.expr, ast.withitem))]
    nodes = [n for part in own for n in ast.walk(part)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and covers_line(n, line)]
    calls = [call for call in calls if not _is_plain(call)]
    found: list[str] = []
    for choice in nodes if calls else ():
        if isinstance(choice, ast.IfExp):
            if _are_in(choice.body, calls):
                found.append(source.written(choice.test))
            elif _are_in(choice.orelse, calls):
                found.append(_negated(source, choice.test))
        elif isinstance(choice, ast.BoolOp) and _are_in(choice.values[-1], calls):
            before = choice.values[:-1]
            if isinstance(choice.op, ast.And):
                found.append(" and ".join(map(source.written, before)))
            elif len(before) == 1:
                found.append(_negated(source, before[0]))
    return found[::-1]


def _is_plain(call: ast.Call) -> bool:
    """Whether a call is no communication: of a built-in function, or of one that asks for the
    rank."""
    name = last_name(call.func)
    built_in = isinstance(call.func, ast.Name) and name in vars(builtins)
    return built_in or _ASKS.match(name) is not None


def _are_in(node: ast.expr, calls: list[ast.Call]) -> bool:
    within = {*ast.walk(node)}
    return all(call in within for call in calls)


def _negated(source: Source, test: ast.expr) -> str:
    loose = isinstance(test, (ast.BoolOp, ast.Compare, ast.IfExp, ast.Lambda, ast.NamedExpr))
    return f"not ({source.written(test)})" if loose else f"not {source.written(test)}"


def _head(source: Source, line: int, test: ast.expr | None = None) -> str:
    """The line of a head without indentation and comment; `if x:` where its condition goes on."""
    code = source.lines[line - 1].strip()
    if test is not None and line <= test.lineno and line < (test.end_lineno or 0):
        return f"{code.split()[0]} {source.written(test)}:"[:TEXT_LIMIT]
    plain = _PLAIN.match(code)
    commented = plain is not None and code[plain.end() :].startswith("#")
    return (plain[0].rstrip() if plain and commented else code)[:TEXT_LIMIT]
