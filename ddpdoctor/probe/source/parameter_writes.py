"""Which statements of the program may write to parameters in place: those of the `step` of an
optimizer of its own, and those that update a copy of the weights (moving averages, a teacher).
And which one has set an option of a parameter group?"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from ...events import ParameterWrite
from ..recording.code_locations import classify
from ..recording.recorder import Recorder
from .ast_cache import Source, called_name, dotted, function_of, given, own_nodes
from .call_graph import called_by
from .call_resolver import (
    CALLS,
    DEPTH,
    Found,
    Scope,
    attribute,
    entered,
    resolve,
    searched,
    settings_in_frames,
)
from .statements import enclosing

MOST = 32
"""Statements that are kept, at most."""


class Write(NamedTuple):
    """A statement that writes in place, and the tensor that it names: `attn.q_proj.weight`, or `p`
    for the variable of a loop or an argument."""

    code: CodeType
    line: int
    target: str


def own_step(kind: type) -> CodeType | None:
    """The code of an optimizer's `step`, if it is the program's own; None for torch's and those of
    libraries."""
    step = inspect.unwrap(getattr(kind, "step", None))  # type: ignore[arg-type]
    if not isinstance(step, FunctionType):
        return None
    return step.__code__ if classify(step.__code__.co_filename) == "user" else None


def parameter_writes(kind: type) -> list[Write]:
    """The statements of an optimizer's own `step`, and of functions that it calls, that may write
    to parameters in place."""
    if own_step(kind) is None:
        return []
    step = inspect.unwrap(kind.step)  # type: ignore[attr-defined]
    codes = [step.__code__, *called_by([(step, kind)])]
    found = [write for code in codes for write in _writes(code)]
    return sorted(found, key=lambda w: (w.code.co_filename, w.line))[:MOST]


def own_step_sites(recorder: Recorder, kind: type) -> tuple[int, tuple[ParameterWrite, ...]]:
    """The site of an optimizer's own `step`, -1 for another's, and its writes to parameters."""
    step, sites = own_step(kind), recorder.sites
    if step is None:
        return -1, ()
    writes = (
        ParameterWrite(site=sites.number(w.code, w.line), target=w.target)
        for w in parameter_writes(kind)
    )
    return sites.number(step, definition_line(step)), tuple(writes)


def definition_line(code: CodeType) -> int:
    """The line of the `def` of a function, below its decorators."""
    return getattr(function_of(code), "lineno", code.co_firstlineno)


def _writes(code: CodeType) -> Iterator[Write]:
    function = function_of(code)
    if function is None:
        return
    nodes = own_nodes(function)
    given = {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
    for node in nodes:
        if isinstance(node, (ast.For, ast.comprehension)):
            given |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
    # A name that is assigned holds a new tensor or the optimizer's state, mostly.
    given -= {
        n.id
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for t in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for n in ast.walk(t)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    for node in nodes:
        target = _target(node)
        path = [part for part in dotted(target).split(".") if part != "data"] if target else []
        if not path or "grad" in path:
            continue
        if len(path) > 1 + (path[0] == "self") or path[0] in given - {"self"}:
            yield Write(code, node.lineno, ".".join(path))  # type: ignore[attr-defined]


def _target(node: ast.AST) -> ast.AST | None:
    """What a node writes to in place; None if it does not, as far as can be told."""
    if isinstance(node, ast.Call):
        name = called_name(node)
        if (
            not name.endswith("_")
            or name.endswith("__")
            or not isinstance(node.func, ast.Attribute)
        ):
            return None
        if name.startswith("_foreach"):
            return node.args[0] if node.args else None
        return node.func.value
    target: ast.AST | None = None
    if isinstance(node, ast.AugAssign):
        target = node.target
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        if not isinstance(target, ast.Subscript) and getattr(target, "attr", "") != "data":
            return None
    return target.value if isinstance(target, ast.Subscript) else target


_NO_NAMES = ("data", "grad", "module")


def paths_written(source: Source) -> frozenset[tuple[tuple[str, ...], int]]:
    """The attributes that statements of a file write to in place, without the variable that they
    are read from, and the line: `("head", "scale")` for `model.module.head.scale.data.clamp_(0)`.
    """
    targets = (_target(node) for node in source.nodes)
    paths = {(_path(t), t.lineno) for t in targets if isinstance(t, ast.expr)}
    return frozenset((path, line) for path, line in paths if path)


def _path(target: ast.AST) -> tuple[str, ...]:
    names: list[str] = []
    while isinstance(target, ast.Attribute):
        names += [target.attr] if target.attr not in _NO_NAMES else []
        target = target.value
    return tuple(reversed(names))


_READ_BY = ("parameters", "named_parameters", "state_dict", "modules", "named_modules", "children")
"""Methods of a module by which a program gets at its parameters."""
ENTERED = 60
"""Calls that are followed in one search."""
_NO_WRITES = ("requires_grad_", "detach_", "share_memory_")


def update_in_frames(
    frame: FrameType | None, is_user: Callable[[CodeType], bool], module: Any
) -> Found | None:
    """The statement that writes to the parameters of a module, in the running frames or in what
    they call: in the loop that runs, if there is one, the last before the line that is executing.

    `module.load_state_dict(...)` counts, and a library's `module.update(...)`.
    """
    for user, scope in searched(frame, lambda f: is_user(f.f_code)):
        search = _Updates(is_user, module)
        if (found := search.of(user.f_code, scope, user.f_lineno, DEPTH)) is not None:
            return found
    return None


class _Updates:
    """A search for writes to one module.

    Attributes:
        parts: ids of the module and its submodules.
        left: how many calls may still be followed.
    """

    def __init__(self, is_user: Callable[[CodeType], bool], module: Any) -> None:
        self.is_user = is_user
        self.module = module
        self.parts = {id(part) for part in module.modules()}
        self.left = ENTERED

    def of(self, code: CodeType, scope: Scope, line: int, depth: int) -> Found | None:
        """The likeliest write in a function or in what it calls; `line` is the one that runs."""
        function = function_of(code)
        nodes = own_nodes(function) if function is not None else []
        names = self._names(nodes, scope)
        rounds = [n for n in nodes if isinstance(n, (ast.For, ast.While)) and _covers(n, line)]

        def likeliest(node: ast.AST) -> tuple[int, bool, int]:
            at: int = node.lineno  # type: ignore[attr-defined]
            return sum(_covers(loop, at) for loop in rounds), at <= line, at

        calls = [n for n in nodes if isinstance(n, ast.Call)][:CALLS]
        writes = [n for n in nodes if self._writes(n, names, scope)]
        for node in sorted([*writes, *calls], key=likeliest, reverse=True):
            if node in writes:
                return Found(code, node.lineno)  # type: ignore[attr-defined]
            assert isinstance(node, ast.Call)
            inner = self._called(node, scope) if depth and self.left else None
            if inner is not None:
                self.left -= 1
                function_called, bound = inner
                found = self.of(function_called.__code__, bound, 1 << 30, depth - 1)
                if found is not None:
                    return replace(found, through=(*found.through, Found(code, node.lineno)))
        return None

    def _called(self, call: ast.Call, scope: Scope) -> tuple[FunctionType, Scope] | None:
        """The program's function that a call enters with the module, or with what holds it."""
        owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        if not any(self._holds(resolve(part, scope)) for part in (*owner, *given(call))):
            return None
        inner = entered(call, scope, unwrap=True)
        return inner if inner is not None and self.is_user(inner[0].__code__) else None

    def _is_part(self, value: Any) -> bool:
        return id(value) in self.parts

    def _holds(self, value: Any) -> bool:
        """Whether an object is the module, or one that has it in an attribute."""
        stored = getattr(value, "__dict__", None) if not isinstance(value, type) else None
        held = stored if type(stored) is dict else {}
        inside = held.get("_modules")
        every = [*held.values(), *(inside.values() if isinstance(inside, dict) else ())]
        return self._is_part(value) or any(each is self.module for each in every)

    def _names(self, nodes: list[ast.AST], scope: Scope) -> set[str]:
        """The variables that are given parameters of the module, or containers of them."""
        names: set[str] = set()

        def bind(target: ast.AST, value: ast.AST) -> None:
            pairs = _paired(target, value)
            for each, of in pairs:
                bind(each, of)
            if not pairs and self._reads(value, names, scope):
                names.update(n.id for n in ast.walk(target) if isinstance(n, ast.Name))

        for node in sorted(nodes, key=lambda n: getattr(n, "lineno", 0)):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                bind(node.targets[0], node.value)
            elif isinstance(node, (ast.For, ast.comprehension)):
                bind(node.target, node.iter)
        return names

    def _reads(self, value: ast.AST, names: set[str], scope: Scope) -> bool:
        """Whether an expression gets at parameters of the module."""
        return any(
            (isinstance(part, ast.Name) and part.id in names)
            or (isinstance(part, ast.Attribute) and self._reads_from(part, scope))
            for part in ast.walk(value)
        )

    def _reads_from(self, part: ast.Attribute, scope: Scope) -> bool:
        return part.attr in _READ_BY and self._is_part(resolve(part.value, scope))

    def _writes(self, node: ast.AST, names: set[str], scope: Scope) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = node.func.value, node.func.attr
            if name == "load_state_dict":
                return self._is_part(resolve(owner, scope))
            if name in _NO_WRITES or "grad" in name:
                return False
            if name.startswith("update") and self._holds(resolve(owner, scope)):
                inner = entered(node, scope)
                return inner is not None and not self.is_user(inner[0].__code__)
        target = _target(node)
        return target is not None and self._reaches(target, names, scope)

    def _reaches(self, target: ast.AST, names: set[str], scope: Scope) -> bool:
        """Whether what is written to is a parameter of the module: `p.data`, `kept[name]`,
        `teacher.head.weight`."""
        node: ast.AST = target
        while True:
            if isinstance(node, ast.Name):
                return node.id in names
            if isinstance(node, ast.Attribute):
                owner = resolve(node.value, scope)
                if self._is_part(owner) and attribute(owner, node.attr) is None:
                    return node.attr not in _READ_BY  # parameters are no plain attributes
                node = node.value
            elif isinstance(node, ast.Subscript):
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                # `p.data.mul_(m)` of `p.data.mul_(m).add_(q)`, or `teacher.state_dict()`
                if self._reads_from(node.func, scope):
                    return True
                node = node.func.value
            else:
                return isinstance(node, ast.Call) and any(
                    self._reads(part, names, scope) for part in given(node)
                )


def _paired(target: ast.AST, value: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Which variable of a loop goes over which argument of `zip` or `enumerate`; empty for other
    values."""
    if not isinstance(target, (ast.Tuple, ast.List)) or not isinstance(value, ast.Call):
        return []
    how, parts = called_name(value), target.elts
    if how == "zip" and len(parts) == len(value.args):
        return list(zip(parts, value.args, strict=True))
    return [(parts[1], value.args[0])] if how == "enumerate" and value.args else []


def _covers(loop: ast.AST, line: int) -> bool:
    return loop.lineno < line <= (loop.end_lineno or 0)  # type: ignore[attr-defined]


def item_set_in_frames(
    frame: FrameType | None,
    is_user: Callable[[CodeType], bool],
    key: str,
    values: Collection[Any] = (),
) -> Found | None:
    """The statement that sets an item (`group["lr"] = rate`, `group["lr"] *= 0.5`), in the running
    frames or in what they call.

    Args:
        values: what the item is now; a statement that sets it to any other number did not run.

    Returns:
        The last such statement before the line that is executing, else the last one. None if there
        are several and that one is under a condition: it is not known which ran.
    """
    settings = settings_in_frames(
        frame, is_user, lambda node, scope: _sets_item(node, key) and _may_set(node, values)
    )
    found = next(settings, None)
    several = found is not None and any(_place(other) != _place(found) for other in settings)
    return None if found is None or (several and not _has_run(found, frame)) else found


def _place(found: Found) -> tuple[str, int]:
    """A line, also as a part of the function around its own."""
    return found.code.co_filename, found.line


def _may_set(node: Any, values: Collection[Any]) -> bool:
    """Whether an assignment may have set something to one of these values."""
    new = node.value if isinstance(node, ast.Assign) else None
    return not (values and isinstance(new, ast.Constant)) or new.value in values


def _has_run(found: Found, frame: FrameType | None) -> bool:
    """Whether a line, and the calls that lead to it, are under no condition other than those around
    the lines that are executing, and before these."""
    executing: dict[CodeType, int] = {}
    while frame is not None:
        executing.setdefault(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    for one in (found, *found.through):
        now, file = executing.get(one.code), one.code.co_filename
        around = enclosing(file, now) if now is not None else ()
        conditions = [s for s in enclosing(file, one.line) if not s.is_loop and s not in around]
        if conditions or (now is not None and one.line > now):
            return False
    return True


def _sets_item(node: ast.AST, key: str) -> bool:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    else:
        return False
    return any(
        isinstance(t, ast.Subscript) and isinstance(t.slice, ast.Constant) and t.slice.value == key
        for t in targets
    )
