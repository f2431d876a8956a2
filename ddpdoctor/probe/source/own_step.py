"""The `step` of an optimizer that is a class of the program's own, and which of its statements may
write to parameters in place."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import NamedTuple

from ...events import ParameterWrite
from ..recording.code_locations import classify
from ..recording.recorder import Recorder
from .ast_cache import called_name, dotted, function_of, own_nodes
from .call_graph import called_by

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
    nodes = list(own_nodes(function))
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
