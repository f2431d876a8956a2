"""Finds the line of the user's code that called, named or set an object, in the source of the
functions that are running.

Nothing of the user's is executed: names are looked up, properties are not evaluated. All searches
are bounded, as they run within a step.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

from ...events import Place
from ..recording.code_locations import Sites
from ..recording.frames import variables
from .ast_cache import function_of, given, other_arm, own_of, parts_of, without_gradients
from .dead_branches import never_runs
from .statements import enclosing

FRAMES = 12
"""Frames of the user's that are searched, innermost first."""
DEPTH = 3
"""How many calls are followed from a running function into those that it calls."""
CHANGERS = ("clear", "pop", "popitem", "update", "setdefault")
"""Methods that change a dictionary."""
CALLS = 400
"""Calls of one function that are searched."""


@dataclass(frozen=True)
class Bound:
    """A method and its object: what `owner.name` is, without running descriptors of the user's."""

    owner: Any
    function: types.FunctionType


@dataclass(frozen=True)
class Scope:
    """Where names are looked up: the variables of a function, then its globals."""

    names: Mapping[str, Any]
    others: Mapping[str, Any]

    def get(self, name: str) -> Any:
        return self.names[name] if name in self.names else self.others.get(name)


@dataclass(frozen=True)
class Found:
    """A line of code: the code object and the line number.

    Attributes:
        through: the calls that lead to it from a running function, innermost first, where the
            search has followed some.
    """

    code: CodeType
    line: int
    through: tuple[Found, ...] = field(default=(), compare=False)


def places_of(sites: Sites, found: Found) -> tuple[Place, ...]:
    """A line that was found and the calls that lead to it, innermost first, with the branches
    around each."""
    return tuple(
        Place(
            sites.number(one.code, one.line),
            tuple(s for s in enclosing(one.code.co_filename, one.line) if not s.is_loop),
        )
        for one in (found, *found.through)
    )


Wanted = Callable[[Any], bool]
Sets = Callable[[ast.AST, Scope], bool]
"""`Wanted` says whether an object is the one searched for; `Sets` whether a node is the statement
searched for."""


def first_argument(frame: FrameType) -> Any:
    """The first argument of the function of a frame (`self` of a method); None if it has none."""
    names = frame.f_code.co_varnames
    return variables(frame).get(names[0]) if names and frame.f_code.co_argcount else None


def call_in_frames(
    frame: FrameType | None, is_user: Callable[[CodeType], bool], wanted: Wanted
) -> Found | None:
    """The call whose target is `wanted`, in the running frames, innermost first.

    Methods of the wanted object itself are skipped: the line that called these is the answer.
    """
    for user, scope in searched(
        frame, lambda f: is_user(f.f_code) and not wanted(first_argument(f))
    ):
        found = _call_in(user.f_code, scope, is_user, wanted, user.f_lineno, DEPTH)
        if found is not None:
            return found
    return None


def searched(
    frame: FrameType | None, is_searched: Callable[[FrameType], bool]
) -> Iterator[tuple[FrameType, Scope]]:
    """The first `FRAMES` running frames to search, innermost first, with their names."""
    seen = 0
    while frame is not None and seen < FRAMES:
        if is_searched(frame):
            seen += 1
            yield frame, Scope(variables(frame), frame.f_globals)
        frame = frame.f_back


def setting_in_frames(
    frame: FrameType | None,
    is_user: Callable[[CodeType], bool],
    name: str,
    value: bool | None = None,
    *,
    after: Found | None = None,
) -> Found | None:
    """The statement that sets an attribute of a parameter or module (`p.requires_grad = True`,
    `p.requires_grad_()`), in the running frames or in what they call.

    Args:
        value: what it is set to; None for anything.
        after: a line at which it was not set yet.

    Returns:
        The last such statement before the line that is executing, else the last one; if a helper
        sets it to its argument, the line that passes it; if a library's function sets it, the line
        that calls that (`self.toggle_optimizer(optimizer)`). None if there are statements in
        several branches: it is not known which ran.
    """

    def wanted(node: ast.AST, scope: Scope) -> bool:
        return _sets(node, scope, name, value)

    settings = [
        found
        for found in (
            *settings_in_frames(frame, is_user, wanted, value),
            *_by_libraries(frame, is_user, wanted, name),
        )
        if after is None or found.code is not after.code or found.line > after.line
    ]
    found = next(iter(settings), None)
    node = function_of(found.code) if found is not None else None
    if found is None or node is None:
        return found
    others = (other.line for other in settings if other.code is found.code)
    return None if any(other_arm(node, line, found.line) for line in others) else found


def state_edit_in_frames(
    frame: FrameType | None, is_user: Callable[[CodeType], bool], optimizer: Any
) -> Found | None:
    """The statement that changes an optimizer's state (`optimizer.state.clear()`,
    `optimizer.state[p]["step"] = 0`); None unless there is exactly one."""

    def wanted(node: ast.AST, scope: Scope) -> bool:
        if isinstance(node, (ast.Assign, ast.Delete)):
            return any(_is_state(t, scope, optimizer) for t in node.targets)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changes = node.func.attr in CHANGERS or node.func.attr.endswith("_")
            return changes and _is_state(node.func.value, scope, optimizer)
        return False

    found = set(settings_in_frames(frame, is_user, wanted))
    return found.pop() if len(found) == 1 else None


def _is_state(node: ast.AST, scope: Scope, optimizer: Any) -> bool:
    """Whether an expression is the state of the optimizer, or something in it."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute) and node.attr == "state":
            return resolve(node.value, scope) is optimizer
        node = node.value
    return False


def settings_in_frames(
    frame: FrameType | None,
    is_user: Callable[[CodeType], bool],
    wanted: Sets,
    value: bool | None = None,
) -> Iterator[Found]:
    for user, scope in searched(frame, lambda f: is_user(f.f_code)):
        yield from _settings(user.f_code, scope, is_user, wanted, value, user.f_lineno, 2)


def _settings(
    code: CodeType,
    scope: Scope,
    is_user: Callable[[CodeType], bool],
    wanted: Sets,
    value: bool | None,
    line: int,
    depth: int,
) -> Iterator[Found]:
    """The statements that are `wanted`, in a function and what it calls; the likeliest first."""
    node = function_of(code)
    if node is None:
        return
    lines = [n.lineno for n in parts_of(code) if wanted(n, scope)]  # type: ignore[attr-defined]
    for found in sorted(lines, key=lambda n: (n <= line, n), reverse=True):
        if not never_runs(code, found, scope.get):
            yield Found(code, found)
    for call in list(_calls(node))[:CALLS] if depth > 0 else ():
        inner = _into(call, scope, is_user)
        if inner is not None and not never_runs(code, call.lineno, scope.get):
            function, bound = inner
            within = function.__code__, bound, is_user, wanted, value, 1 << 30, depth - 1
            for setting in _settings(*within):
                passed = _passes_value(call, value) or _has_default(function, value)
                here = Found(code, call.lineno)
                yield here if passed else replace(setting, through=(*setting.through, here))


def _by_libraries(
    frame: FrameType | None, is_user: Callable[[CodeType], bool], wanted: Sets, name: str
) -> Iterator[Found]:
    """The calls in the running frames of functions that are not the user's and in which a statement
    is `wanted`: the last one before the line that is executing first."""

    def names_it(code: CodeType) -> bool:
        return name in code.co_names and not is_user(code)

    for user, scope in searched(frame, lambda f: is_user(f.f_code)):
        node = function_of(user.f_code)
        calls = list(_calls(node))[:CALLS] if node is not None else []
        line = user.f_lineno
        for call in sorted(calls, key=lambda c: (c.lineno <= line, c.lineno), reverse=True):
            inner = _into(call, scope, names_it)
            if inner is not None and not never_runs(user.f_code, call.lineno, scope.get):
                function, bound = inner
                if any(wanted(n, bound) for n in parts_of(function.__code__)):
                    yield Found(user.f_code, call.lineno)


# Whether a call has the constant `value` among its arguments.
def _passes_value(call: ast.Call, value: bool | None) -> bool:
    return value is not None and any(
        isinstance(a, ast.Constant) and a.value is value for a in given(call)
    )


def _has_default(function: types.FunctionType, value: bool | None) -> bool:
    """Whether one of a function's arguments is `value` unless it is passed."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return value is not None and any(default is value for default in defaults)


def _sets(node: ast.AST, scope: Scope, name: str, value: bool | None) -> bool:
    if isinstance(node, ast.Assign):
        target, new = node.targets[0], node.value
        if not isinstance(target, ast.Attribute) or target.attr != name:
            return False
        owner = target.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr != f"{name}_":
            return False
        owner = node.func.value
        new = next(iter(given(node)), ast.Constant(True))
    else:
        return False
    return not _is_input(owner, scope) and (value is None or resolve(new, scope) is value)


def _is_input(owner: ast.AST, scope: Scope) -> bool:
    """Whether an expression is a tensor that is no parameter, such as an input; also one that is
    created on the spot."""
    import torch

    made = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute)
    found = resolve(owner, scope)
    tensor = isinstance(found, torch.Tensor) and not isinstance(found, torch.nn.Parameter)
    return tensor or (made and found is None)


def assignment_in_frames(
    frame: FrameType | None,
    is_user: Callable[[CodeType], bool],
    wanted: Any,
    made_at: tuple[CodeType, int] | None = None,
) -> Found | None:
    """The first statement in the running frames that assigned an object to a name.

    Args:
        made_at: the line that created the object; if a statement there assigns it, that one is
            returned.

    Returns:
        None if there are statements in several branches: it is not known which ran.
    """
    for user, scope in searched(frame, lambda f: is_user(f.f_code)):
        node = function_of(user.f_code)
        naming = [
            found
            for found in (own_of(node, ast.Assign) if node is not None else ())
            if not isinstance(found.value, ast.Constant)
            and any(resolve(target, scope) is wanted for target in found.targets)
        ]
        if node is None or not naming:
            continue
        code, line = made_at or (None, 0)
        if code is not None and code.co_filename == user.f_code.co_filename:
            for statement in naming:
                if statement.lineno <= line <= (statement.end_lineno or 0):
                    return Found(user.f_code, statement.lineno)
        first = min(statement.lineno for statement in naming)
        unclear = any(other_arm(node, first, statement.lineno) for statement in naming)
        return None if unclear else Found(user.f_code, first)
    return None


def _call_in(
    code: CodeType,
    scope: Scope,
    is_user: Callable[[CodeType], bool],
    wanted: Wanted,
    line: int,
    depth: int,
) -> Found | None:
    node = function_of(code)
    if node is None:
        return None
    calls = [c for c in list(_calls(node))[:CALLS] if not other_arm(node, c.lineno, line)]
    # The forward precedes the backward: the last call before it, or (in a loop) the last one.
    calls.sort(key=lambda call: (call.lineno <= line, call.lineno), reverse=True)
    for call in calls:
        if wanted(resolve(call.func, scope)):
            return Found(code, call.lineno)
    if depth > 0:
        for call in calls:
            inner = _into(call, scope, is_user)
            if inner is not None:
                function, bound = inner
                found = _call_in(function.__code__, bound, is_user, wanted, 1 << 30, depth - 1)
                if found is not None:
                    return found
    return None


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """The calls in a function's body, without those under `no_grad`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if without_gradients(child):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from _calls(child)


def _into(
    call: ast.Call, scope: Scope, is_user: Callable[[CodeType], bool]
) -> tuple[types.FunctionType, Scope] | None:
    """The user's function that a call enters, and the scope of its arguments; None for any other
    call."""
    found = entered(call, scope)
    return found if found is not None and is_user(found[0].__code__) else None


def entered(
    call: ast.Call, scope: Scope, *, unwrap: bool = False
) -> tuple[types.FunctionType, Scope] | None:
    """The function that a call enters, and the scope of its arguments; None for what is no function
    in Python.

    Args:
        unwrap: enter the function within a decorator such as `torch.no_grad()`.
    """
    target = resolve(call.func, scope)
    if isinstance(target, types.MethodType) and isinstance(target.__func__, types.FunctionType):
        target = Bound(target.__self__, target.__func__)
    function = target.function if isinstance(target, Bound) else target
    if unwrap and callable(function):
        function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):
        return None
    values = [resolve(a, scope) for a in call.args if not isinstance(a, ast.Starred)]
    if isinstance(target, Bound):
        values.insert(0, target.owner)
    code, defaults = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    names = dict(zip(positional[code.co_argcount - len(defaults) :], defaults, strict=True))
    names.update(function.__kwdefaults__ or {})
    names.update(zip(code.co_varnames, values, strict=False))
    names.update({k.arg: resolve(k.value, scope) for k in call.keywords if k.arg})
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return function, Scope(names, function.__globals__)


def resolve(node: ast.AST, scope: Scope) -> Any:
    """The object that an expression stands for; None if that would need code to run."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        return attribute(resolve(node.value, scope), node.attr)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Subscript):
        return _item(resolve(node.value, scope), resolve(node.slice, scope))
    if isinstance(node, ast.Call):  # of calls only `getattr(model, "module", model)`
        return _unwrapped(node, scope)
    if isinstance(node, ast.IfExp):
        return resolve(node.body, scope)
    return None


def _unwrapped(node: ast.Call, scope: Scope) -> Any:
    """The object that `getattr(model, "module", model)` stands for; None for other calls."""
    if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) >= 2:
        name = resolve(node.args[1], scope)
        if isinstance(name, str):
            return attribute(resolve(node.args[0], scope), name)
    return None


def attribute(owner: Any, name: str) -> Any:
    """The value of `owner.name`; None if it is computed (by a property, say) and not stored."""
    if owner is None:
        return None
    if isinstance(owner, types.ModuleType):
        return vars(owner).get(name)
    stored = getattr(owner, "__dict__", None) if not isinstance(owner, type) else None
    if isinstance(stored, dict):
        if name in stored:
            return stored[name]
        modules = stored.get("_modules")
        if isinstance(modules, dict) and name in modules:
            return modules[name]
    kind = owner if isinstance(owner, type) else type(owner)
    for base in kind.__mro__:
        value = vars(base).get(name)
        if isinstance(value, types.FunctionType):
            return Bound(owner, value)
        if value is not None:
            return None if isinstance(value, property) else value
    return None


def _item(owner: Any, key: Any) -> Any:
    """The value of `owner[key]` for modules, dictionaries, lists and tuples; None for others."""
    stored = getattr(owner, "__dict__", {}).get("_modules") if owner is not None else None
    if isinstance(stored, dict):
        owner = stored
        key = str(key) if isinstance(key, int) else key
    if isinstance(owner, dict) and isinstance(key, (str, int)):
        return dict.get(owner, key)  # not the `get` of a class of the user's
    if type(owner) in (list, tuple) and isinstance(key, int) and -len(owner) <= key < len(owner):
        return owner[key]
    return None
