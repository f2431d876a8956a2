"""Does anything in the program's code select among the rows that a collective has just gathered, as
by `rows[:length]`?

Nothing of the user's is executed. Only what can run after the call is searched: the rest of each
running function, with the whole of the loops that the call is in, and the functions called there.
Whatever might select counts, so that a `False` can be relied upon.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Callable, Iterator
from functools import cached_property
from types import CodeType, FrameType

from ..recording.code_locations import own_files
from .ast_cache import covers_line, function_of, last_name, parts_of, source_of
from .call_resolver import Bound, Scope, resolve, searched

FUNCTIONS_AT_MOST = 200
"""Functions that are searched: with more, one of them may select."""

FILES_AT_MOST = 40
"""Files of the program that are searched for a function of which only the name is known."""

SELECTING = re.compile(
    r"chunk|compress|dict|drop(_duplicates|na)?|filter|fromkeys|groupby|head|index_select|islice"
    r"|masked_select|narrow|nonzero|scatter_?|select|set|(tensor_)?split|take(_along_dim)?|trim"
    r"|truncate|unique(_consecutive)?|where"
)
"""Functions that select rows, or may do so."""

Kind = Callable[[CodeType], str]
"""`Sites.kind`: whether a function is the doctor's or torch's, a library's, or the user's."""


def may_select(frame: FrameType | None, kind: Kind) -> bool:
    """Whether some of the rows may be left out that the current call gathers; also where a
    function has no source."""
    while frame is not None and (found := kind(frame.f_code)) != "user":
        if found == "library" and _library_selects(frame.f_code):
            return True
        frame = frame.f_back
    running = list(searched(frame, lambda f: kind(f.f_code) == "user"))
    search = _Search(kind, {user.f_code for user, _ in running})
    return any(search.after(user, scope) for user, scope in running)


def _library_selects(code: CodeType) -> bool:
    """Whether a function between the program and the collective takes the first rows of something,
    as Accelerate's `gather_for_metrics` does."""
    return any(isinstance(n, ast.Slice) and n.upper is not None for n in parts_of(code))


class _Search:
    """One search; each function is looked at once."""

    def __init__(self, kind: Kind, running: set[CodeType]) -> None:
        self._kind = kind
        self._seen = running  # of these only the rest is looked at
        self._names: dict[str, bool] = {}

    def after(self, frame: FrameType, scope: Scope) -> bool:
        """Whether what a running function does from its current line on may select rows."""
        code, line = frame.f_code, frame.f_lineno
        if function_of(code) is None:
            return True
        loops = (n for n in parts_of(code) if isinstance(n, (ast.For, ast.While)))
        first = min((n.lineno for n in loops if covers_line(n, line)), default=line)
        nodes = [n for n in parts_of(code) if getattr(n, "end_lineno", 0) >= first]
        return self._any([n for n in nodes if not isinstance(n, ast.ClassDef)], scope)

    def _function(self, function: types.FunctionType, owner: object) -> bool:
        function = inspect.unwrap(function)
        code = getattr(function, "__code__", None)
        if code is None:
            return True
        if self._kind(code) != "user" or code in self._seen:
            return False
        self._seen.add(code)
        if function_of(code) is None or len(self._seen) > FUNCTIONS_AT_MOST:
            return True
        names = {code.co_varnames[0]: owner} if owner is not None and code.co_argcount else {}
        return self._any(parts_of(code), Scope(names, function.__globals__))

    def _named(self, name: str, scope: Scope) -> bool:
        """Whether a function of that name in some file of the program may select: of a call of an
        object that is not known every one may be meant."""
        if name not in self._names:
            files = self._files
            self._names[name] = len(files) > FILES_AT_MOST or any(
                _selects(part, scope, set())
                for file in files
                if (source := source_of(file)) is not None
                for function in source.defined.get(name, ())
                for part in source.parts(function)
            )
        return self._names[name]

    @cached_property
    def _files(self) -> list[str]:
        return own_files()

    def _any(self, nodes: list[ast.AST], scope: Scope) -> bool:
        tests = {n.test for n in nodes if isinstance(n, (ast.If, ast.While, ast.IfExp, ast.Assert))}
        if any(_selects(n, scope, tests) for n in nodes):
            return True
        for call in (n for n in nodes if isinstance(n, ast.Call)):
            target = resolve(call.func, scope)
            if target is None and self._named(last_name(call.func), scope):
                return True
            if any(self._function(made, owner) for made, owner in _functions(target)):
                return True
        return False


def _functions(target: object) -> Iterator[tuple[types.FunctionType, object]]:
    """The functions that a call of an object enters, each with the object that it is a method of:
    of a class its constructor, of an object its `__call__` or `forward`."""
    if isinstance(target, types.MethodType) and isinstance(target.__func__, types.FunctionType):
        yield target.__func__, target.__self__
    elif isinstance(target, Bound):
        yield target.function, target.owner
    elif isinstance(target, types.FunctionType):
        yield target, None
    elif target is not None:
        owner = target if isinstance(target, type) else type(target)
        names = ("__init__",) if isinstance(target, type) else ("__call__", "forward")
        for name in names:
            found = inspect.getattr_static(owner, name, None)
            if isinstance(found, types.FunctionType):
                yield found, None if isinstance(target, type) else target


def _selects(node: ast.AST, scope: Scope, tests: set[ast.expr]) -> bool:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        index = node.slice
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        return any(_chooses(part, scope) for part in parts)
    if isinstance(node, ast.Call):
        return bool(SELECTING.fullmatch(last_name(node.func)))
    if isinstance(node, ast.Compare):
        order = isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn))
        fixed = isinstance(node.comparators[0], ast.Constant)
        return order and not fixed and node not in tests
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        return any(made.ifs for made in node.generators)
    if isinstance(node, ast.If):
        inner = [n for statement in node.body for n in ast.walk(statement)]
        ordered = isinstance(node.test, ast.Compare)
        return ordered and any(isinstance(n, (ast.Continue, ast.Break)) for n in inner)
    return isinstance(node, (ast.DictComp, ast.SetComp, ast.Set, ast.Match))


def _chooses(index: ast.expr, scope: Scope) -> bool:
    """Whether an index selects some rows; a constant, or a name for a text, does not."""
    if isinstance(index, ast.Slice):
        return index.upper is not None
    if isinstance(index, (ast.Constant, ast.UnaryOp, ast.JoinedStr)):
        return False
    return not isinstance(resolve(index, scope), str)
