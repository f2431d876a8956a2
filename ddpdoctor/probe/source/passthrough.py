"""Whether a function hands on what it was given: then its caller says what that is."""

from __future__ import annotations

import ast
import inspect
import sys
from types import CodeType

from .ast_cache import Defined, source_of
from .source_text import last_name, parts_of

LINES_LIMIT = 100
"""A helper is no longer than that."""
_CHOICES = (ast.IfExp, ast.BoolOp, ast.Compare)
_APART = ("group", "async_op")
"""Arguments that say nothing of what is sent."""
_OF_MANY = ("len", "sum", "min", "max", "any", "all")
"""What these make of an argument is one value of another kind, and not what was given."""
_LISTS_RANKS = "new_group"
"""What is computed for this is not what was given: the ranks of each group are to be listed."""


def passes_through(code: CodeType, line: int, called: CodeType | None) -> bool:
    """Whether what a call on that line passes is made of the arguments of the function that it is
    in, and of nothing else that may differ between ranks.

    Args:
        called: the function of the user's that is called there; None where it is one of torch's.
    """
    parts = _definition(code, line) if _parameters(code) else []
    call = _call(parts, line, called)
    if call is None:
        return False
    values = _Values(parts, line, code)
    passed = [*call.args, *(k.value for k in call.keywords if k.arg not in _APART)]
    varying = [p for p in passed if not _is_constant(p)]
    if not varying or not all(values.given(p) for p in varying):
        return False
    return not (called is None and last_name(call.func) == _LISTS_RANKS and values.computed)


def _parameters(code: CodeType) -> set[str]:
    """The names of its arguments."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return {*code.co_varnames[:count]} - {"self", "cls"}


def _arguments(node: ast.AST, code: CodeType) -> set[str]:
    """The same without the object of a method, whatever it is called: what that holds was not
    given in this call."""
    names = _parameters(code)
    static = any(map(_is_static, getattr(node, "decorator_list", ())))
    if code.co_argcount and _is_in_class(node, code) and not static:
        names.discard(code.co_varnames[0])
    return names


def _is_static(decorator: ast.expr) -> bool:
    return last_name(decorator) == "staticmethod"


def _is_in_class(node: ast.AST, code: CodeType) -> bool:
    """Whether the function is defined in the body of a class."""
    source = source_of(code.co_filename)
    around = source.around(code.co_firstlineno) if source is not None else []
    outer = [n for n in around if isinstance(n, Defined) and n is not node]
    return bool(outer) and isinstance(outer[-1], ast.ClassDef)


def _definition(code: CodeType, line: int) -> list[ast.AST]:
    """The function and what it consists of."""
    if not 0 <= line - code.co_firstlineno <= LINES_LIMIT:
        return []
    parts = parts_of(code)
    return parts if parts and isinstance(parts[0], ast.FunctionDef) else []


def _call(parts: list[ast.AST], line: int, called: CodeType | None) -> ast.Call | None:
    """The call on that line that is meant, or the only one."""
    torchs = vars(sys.modules["torch.distributed"])
    calls = [n for n in parts if isinstance(n, ast.Call)]
    calls = [n for n in calls if n.lineno <= line <= (n.end_lineno or 0)]
    for call in calls:
        name = last_name(call.func)
        if name in torchs if called is None else name == called.co_name:
            return call
    return calls[0] if len(calls) == 1 else None


def _is_constant(node: ast.expr) -> bool:
    """`1.0`, `SUM`, `dist.ReduceOp.SUM`."""
    return isinstance(node, ast.Constant) or last_name(node).isupper()


class _Values:
    """What the variables of a function are made of, up to a line.

    Attributes:
        computed: of those that were asked for, whether any is the result of an operator.
    """

    def __init__(self, parts: list[ast.AST], line: int, code: CodeType) -> None:
        self._arguments = _arguments(parts[0], code)
        self._variables = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        self._assigned: dict[str, list[ast.expr | None]] = {}
        self._asked: set[str] = set()
        self.computed = False
        values: dict[ast.expr, ast.expr] = {}
        for n in parts:
            if isinstance(n, ast.Assign):
                values |= dict.fromkeys(n.targets, n.value)
            elif isinstance(n, ast.AnnAssign) and n.value is not None:
                values[n.target] = n.value
            elif isinstance(n, ast.AugAssign):  # which leaves it what it is
                values[n.target] = n.target
        for n in parts:
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.lineno <= line:
                self._assigned.setdefault(n.id, []).append(values.get(n))

    def given(self, value: ast.expr | None) -> bool:
        """Whether it is made of arguments. Once it is not of one value, ask for no other."""
        if value is None:  # of a loop, or unpacked
            return False
        parts = list(ast.walk(value))
        names = {n.id for n in parts if isinstance(n, ast.Name)}
        own = names & (self._variables | self._assigned.keys())
        self.computed |= any(isinstance(n, ast.BinOp) for n in parts)
        chosen = any(isinstance(n, _CHOICES) for n in parts)
        called = (n.func for n in parts if isinstance(n, ast.Call))
        one_of_many = any(isinstance(f, ast.Name) and f.id in _OF_MANY for f in called)
        if not own or chosen or one_of_many or any("rank" in last_name(n) for n in parts[1:]):
            return False
        new, self._asked = own - self._asked, self._asked | own
        return all(map(self._is_given, new))

    def _is_given(self, name: str) -> bool:
        assigned = self._assigned.get(name)
        return name in self._arguments if assigned is None else all(map(self.given, assigned))
