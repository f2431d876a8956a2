"""Syntax trees of the user's files, each parsed and walked once."""

from __future__ import annotations

import ast
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")
N = TypeVar("N", bound=ast.AST)

LINES_LIMIT = 20_000
"""Longer files are not parsed: they are generated, and would take seconds within a step."""
FILES_LIMIT = 64
"""Trees that are kept: one takes about ten times the memory of its text."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Source:
    """A parsed source file.

    Attributes:
        tree: the whole module.
        lines: its text.
        assignments: how often each name is assigned.
        defined: functions and methods by name.
    """

    def __init__(self, tree: ast.Module, lines: list[str]) -> None:
        self.tree = tree
        self.lines = lines
        self._functions: dict[tuple[str, int], ast.AST | None] = {}
        self._parts: dict[ast.AST, list[ast.AST]] = {}
        self._found: dict[tuple[Any, ...], Any] = {}

    def once(self, find: Callable[..., T], *of: ast.AST) -> T:
        """The result of `find(self, *of)`, computed once per file."""
        key = find, *of
        if key not in self._found:
            self._found[key] = find(self, *of)
        found: T = self._found[key]
        return found

    def written(self, node: ast.expr) -> str:
        """An expression as written, on one line."""
        lines = [text.encode() for text in self.lines[node.lineno - 1 : node.end_lineno]]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return " ".join(b"".join(lines).decode(errors="replace").split())

    def keyword_line(self, keyword: str, block: list[ast.stmt]) -> int:
        """The line of the `else` or `finally` before a block, which no node of the tree has; 0 for
        an empty block."""
        line = block[0].lineno if block else 0
        while line and not self.lines[line - 1].lstrip().startswith(keyword):
            line -= 1
        return line

    def parts(self, node: ast.AST) -> list[ast.AST]:
        """`ast.walk` of a node of the file, computed once per node."""
        parts = self._parts.get(node)
        if parts is None:
            parts = self._parts[node] = list(ast.walk(node))
        return parts

    @property
    def nodes(self) -> list[ast.AST]:
        """`ast.walk` of the whole file."""
        return self.parts(self.tree)

    @cached_property
    def assignments(self) -> Assignments:
        return Assignments(self)

    @cached_property
    def imported(self) -> frozenset[str]:
        """The names of modules that it imports, and of what it imports from them."""
        every = (n.names for n in self.nodes if isinstance(n, (ast.Import, ast.ImportFrom)))
        return frozenset(a.asname or a.name for names in every for a in names)

    @cached_property
    def defined(self) -> dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Functions and methods by name."""
        found: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for node in self.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.setdefault(node.name, []).append(node)
        return found

    def around(self, line: int) -> list[ast.AST]:
        """The nodes on a line and around it, outer nodes first."""
        found: list[ast.AST] = [self.tree]
        for node in found:
            found += [child for child in ast.iter_child_nodes(node) if covers_line(child, line)]
        return found

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node that each node is a child of."""
        return {c: node for node in self.nodes for c in ast.iter_child_nodes(node)}

    def function(self, code: CodeType) -> ast.AST | None:
        """The definition that a code object was compiled from; the tree for a module's code; None
        if it is not found."""
        if code.co_name == "<module>":
            return self.tree
        key = code.co_name, code.co_firstlineno
        if key not in self._functions:
            self._functions[key] = self._function(*key)
        return self._functions[key]

    def _function(self, name: str, first: int) -> ast.AST | None:
        found = [
            node
            for node in self.around(first)
            if isinstance(node, Function)
            and getattr(node, "name", "<lambda>") == name
            and _first_line(node) == first
        ]
        return found[-1] if found else None


class Assignments:
    """How often a file assigns each name.

    Attributes:
        names: assignments to variables of this name.
        attributes: assignments to an attribute of this name, of any object.
        arguments: parameters of this name.
        declared: names that are `global` or `nonlocal` somewhere.
        lasting: names assigned at module level, outside of branches and loops.
    """

    def __init__(self, source: Source) -> None:
        self.names: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.arguments: Counter[str] = Counter()
        self.declared: set[str] = set()
        for node in source.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.names[node.id] += 1
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.attributes[node.attr] += 1
            elif isinstance(node, ast.arg):
                self.arguments[node.arg] += 1
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                self.declared.update(node.names)
        self.lasting = {
            node.id
            for statement in source.tree.body
            if isinstance(statement, (ast.Assign, ast.AnnAssign))
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }


def called_name(call: ast.Call) -> str:
    """The last name of what is called: `save` in `torch.save(x)`."""
    return last_name(call.func)


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name: `c` in `a.b.c`; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_call_of(call: ast.Call, called: CodeType | None) -> bool:
    """Whether a call is one of a function of the user's by its name; of one of `torch.distributed`
    that is not just asked for something (`get_rank`) for None."""
    name = called_name(call)
    if called is not None:
        return name == called.co_name
    asks = name.startswith(("get_", "is_"))
    return not asks and name in vars(sys.modules["torch.distributed"])


def given(call: ast.Call, *, but: Collection[str] = ()) -> list[ast.expr]:
    """The arguments of a call, without those of some names."""
    return [*call.args, *(k.value for k in call.keywords if k.arg not in but)]


def own_nodes(node: ast.AST) -> list[ast.AST]:
    """The nodes in the body of a function, without those of functions and classes defined in it;
    computed once per node."""
    return _own(node, ast.AST)


def own_of(node: ast.AST, *kinds: type[N]) -> list[N]:
    """Of `own_nodes` those of some kinds."""
    return _own(node, *kinds)


def _own(node: ast.AST, *kinds: type[Any]) -> list[Any]:
    # Kept in the node: functions of hundreds of lines are asked about hundreds of times.
    known: dict[tuple[type[Any], ...], list[Any]] = node.__dict__.setdefault("_own_nodes", {})
    if kinds not in known:
        every = known.get((ast.AST,)) or _walk_own(node)
        known[ast.AST,] = every
        known[kinds] = every if kinds == (ast.AST,) else [n for n in every if isinstance(n, kinds)]
    return known[kinds]


def calls_on(function: ast.AST, owner: str) -> list[tuple[ast.Call, str]]:
    """The calls in a function of an object's methods, with their names: `__call__` where the object
    itself is called. The object is given as it is written."""
    known: dict[str, list[tuple[ast.Call, str]]] | None = function.__dict__.get("_calls_on")
    if known is None:
        known = function.__dict__["_calls_on"] = {}
        for call in own_of(function, ast.Call):
            known.setdefault(_text(call.func), []).append((call, "__call__"))
            if isinstance(call.func, ast.Attribute):
                known.setdefault(_text(call.func.value), []).append((call, call.func.attr))
    return known.get(owner, [])


def _text(node: ast.expr) -> str:
    return dotted(node) or ast.unparse(node)


def _walk_own(node: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    ahead = [node]
    while ahead:
        found.append(ahead.pop())
        children = ast.iter_child_nodes(found[-1])
        ahead += reversed([c for c in children if not isinstance(c, (Function, Defined))])
    return found[1:]


def results_of(function: ast.AST | None) -> Iterator[ast.expr]:
    """What a function returns."""
    for node in own_of(function, ast.Return) if function is not None else ():
        if node.value is not None:
            yield node.value


def reaches(function: ast.AST, assigned: ast.AST, used: ast.AST) -> bool:
    """Whether a variable of a function may still have at one node what another one assigns: that
    comes first, or a loop goes through both."""
    first, then = getattr(assigned, "lineno", 0), getattr(used, "lineno", 0)
    return first <= then or any(
        covers_line(loop, first) and covers_line(loop, then)
        for loop in own_of(function, ast.For, ast.AsyncFor, ast.While)
    )


def without_gradients(node: ast.AST) -> bool:
    """Whether a node is `with torch.no_grad():` or the like."""
    items = node.items if isinstance(node, ast.With) else ()
    return any("no_grad" in (t := ast.unparse(i)) or "inference_mode" in t for i in items)


def other_arm(function: ast.AST, line: int, other: int) -> bool:
    """Whether two lines of a function are in two arms of one `if`."""
    for choice in own_of(function, ast.If):
        if choice.orelse:
            begin, end = choice.orelse[0].lineno, choice.end_lineno or 0
            if choice.lineno <= min(line, other) < begin <= max(line, other) <= end:
                return True
    return False


def dotted(node: ast.AST) -> str:
    """`a.b.c` as written; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return last_name(node)


def attribute_of(owner: ast.expr, read: ast.Attribute) -> ast.Attribute:
    """The same attribute of an object."""
    return ast.copy_location(ast.Attribute(owner, read.attr, ast.Load()), owner)


def owner_of(call: ast.Call) -> str:
    """The object whose method a call runs, as it is written; empty if it is no such name."""
    return dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def covers_line(node: ast.AST, line: int) -> bool:
    """Whether a node spans a line. True for nodes without a position, such as `ast.arguments`."""
    return _first_line(node, line) <= line <= (getattr(node, "end_lineno", None) or line)


def spans(node: ast.AST, line: int) -> bool:
    """`covers_line`; False for nodes without a position."""
    return hasattr(node, "lineno") and covers_line(node, line)


def _first_line(node: ast.AST, unknown: int = 0) -> int:
    """The first line of a node: that of its first decorator, if it has one."""
    first: int = getattr(node, "lineno", unknown)
    if isinstance(node, Defined) and node.decorator_list:
        return min(first, *(d.lineno for d in node.decorator_list))
    return first


_known: dict[str, tuple[list[str], Source | None]] = {}


def function_of(code: CodeType) -> ast.AST | None:
    """The definition that a code object was compiled from; the whole file for a module's code."""
    source = source_of(code.co_filename)
    return source.function(code) if source is not None else None


def parts_of(code: CodeType) -> list[ast.AST]:
    """All nodes of the definition that a code object was compiled from; empty without source."""
    source, node = source_of(code.co_filename), function_of(code)
    return source.parts(node) if source is not None and node is not None else []


def parsed_files() -> list[str]:
    """The files that were parsed so far."""
    return [file for file, (_, source) in _known.items() if source is not None]


def source_of(file: str) -> Source | None:
    """The parsed file; None if it has no source, or none that parses. Parsed again only if the text
    has changed: a notebook runs a changed cell under the same file name."""
    lines = linecache.getlines(file)
    if not lines:
        return None
    known = _known.get(file)
    # linecache usually returns the same list: then the lines are not compared.
    if known is None or (known[0] is not lines and known[0] != lines):
        known = _known[file] = lines, _parsed(lines)
        if len(_known) > FILES_LIMIT:
            _known.pop(next(iter(_known)), None)
    return known[1]


def _parsed(lines: list[str]) -> Source | None:
    if len(lines) > LINES_LIMIT:
        return None
    try:
        return Source(ast.parse("".join(lines)), lines)
    except (SyntaxError, ValueError, RecursionError):
        return None
