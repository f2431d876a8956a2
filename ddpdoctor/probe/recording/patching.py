"""Wraps functions of torch (`around`), and restores them all (`restore`).

If a wrapper of ours fails, the original is called as if it were not there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

from .frames import disguise, named, unframe
from .recorder import Failure, Recorder, current, run_hook, write_probe_error
from .torch_compat import compiler_in_use, interposed, scripted_as, skip_frames, uncompiled

Before = Callable[[Recorder, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[Recorder, Any, Any, BaseException | None], None]
"""`Before` is called with (recorder, args, kwargs); `After` with (recorder, what `before` returned,
the result, the exception or None)."""


class Gate(Protocol):
    """Says whether a wrapper calls its hooks now (`looking`)."""

    looking: bool


class Expecting(Protocol):
    """Has a plan of the step that takes the fast path (`expected`), or None."""

    expected: Any


class FastPathHooks(Protocol):
    """The hooks of a call in a step on the fast path (see `SteadyState`).

    Attributes:
        steady: they are called only while a step is on the fast path, or may be.
        begins: called with (recorder, args, kwargs); returns None if this is not the call that
            comes next on the fast path, else a token for `ends`, or for `after` if the call fails.
        ends: called with (recorder, the token, the result).
        failed: called with (recorder, exception) if one of these raises.
    """

    steady: Expecting
    begins: Callable[..., Any]
    ends: Callable[..., None]
    failed: Callable[..., None]


class _Never:
    expected = None


NEVER = _Never()
"""For functions without a fast path."""

_undo: list[tuple[Any, str, Any]] = []


def replace(owner: Any, name: str, new: Any) -> None:
    """Set an attribute and keep the old value for `restore`."""
    namespace = vars(owner)
    old = namespace.get(name, getattr(owner, name))
    _undo.append((owner, name, old))
    setattr(owner, name, new)
    if (forget := scripted_as(new, old)) is not None:
        on_restore(forget)


def around(
    owners: Any,
    name: str,
    *,
    before: Before | None = None,
    after: After | None = None,
    lost: str = "",
    traced: bool = False,
    only: Gate | None = None,
    fast_path: FastPathHooks | None = None,
) -> None:
    """Call `before` and `after` around every call of `owner.name` in a rank.

    The original is called exactly once, with the same arguments, and its exceptions pass through.
    Failures in `before` or `after` are recorded and never reach the user. A failure of `before` is
    not recorded if the call itself raises over its arguments: then nothing was lost.

    Args:
        owners: the class or module that has the function, or a tuple of those that share it.
        lost: what is not observed if a hook fails, for the report.
        traced: torch.compile traces callers of this function: it must see the original, and
            compile neither the wrapper nor the hooks. Needs torch._dynamo to be imported.
        only: no hook is called while its `looking` is False. An attribute rather than a function,
            which could raise outside of any guard.
        fast_path: called in place of `before` and `after` in a step on the fast path.
    """
    holders = owners if isinstance(owners, tuple) else (owners,)
    original = vars(holders[0]).get(name) or getattr(holders[0], name)
    foreign = isinstance(holders[0], type) and not isinstance(original, FunctionType)
    call = named(original, name) if foreign else original
    part = f"{holders[0].__name__}.{name}"
    # What this wraps for torch.compile costs microseconds: used only while a compiler is active.
    hidden, compiler = (uncompiled(run_hook), compiler_in_use) if traced else (run_hook, None)
    steady = NEVER if fast_path is None else fast_path.steady
    clock = time.perf_counter_ns

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = current.recorder
        if recorder is None or (only is not None and not only.looking):
            try:
                return call(*args, **kwargs)
            except BaseException as error:
                unframe(error)
                raise
        token: Any = None
        failure: Exception | None = None
        run = run_hook
        # torch's distributed checkpoints call methods as `partial(Module.state_dict, self=model)`.
        given = args or ((kwargs["self"],) if "self" in kwargs else ())
        if steady.expected is not None and interposed.compiler() is None:
            began = clock()
            try:
                token = fast_path.begins(recorder, given, kwargs)  # type: ignore[union-attr]
            except Exception as error:
                fast_path.failed(recorder, error)  # type: ignore[union-attr]
            recorder.own_ns += clock() - began
        expected = token is not None
        if not expected:
            if compiler is not None:
                compiler.now = compiler.ask()
                if compiler.now is not None:
                    run = hidden
            if before is not None:
                token = run(recorder, part, None, before, given, kwargs)
                if type(token) is Failure:
                    token, failure = None, token.error
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            if not (failure and refused(error)):
                if failure is not None:
                    recorder.trouble(part, failure, lost)
                if after is not None:
                    run(recorder, part, lost, after, token, None, error)
            unframe(error)
            raise
        if expected:
            began = clock()
            try:
                fast_path.ends(recorder, token, result)  # type: ignore[union-attr]
            except Exception as error:
                fast_path.failed(recorder, error)  # type: ignore[union-attr]
            recorder.own_ns += clock() - began
            return result
        if failure is not None:
            recorder.trouble(part, failure, lost)
        if after is not None:
            run(recorder, part, lost, after, token, result, None)
        return result

    disguise(wrapper, original)
    if not _wrappers:
        _wrappers.append(wrapper)
    wrapper.__ddpdoctor__ = True  # type: ignore[attr-defined]
    if isinstance(holders[0], ModuleType) and isinstance(original, (MethodType, BuiltinMethodType)):
        wrapper.__qualname__ = (
            name  # pickled by name, as `random.seed`, a method of a hidden object
        )
    new = uncompiled(wrapper, within=False) if traced else wrapper
    for holder in holders:
        if vars(holder).get(name) is original:
            replace(holder, name, new)


def hide_hooks() -> None:
    """Keep torch.compile from tracing the wrappers; call it once torch._dynamo is imported."""
    # One wrapper stands for all: torch skips by code object, and they share theirs.
    if _wrappers:
        skip_frames(run_hook, unframe, _wrappers[0])


_wrappers: list[Any] = []
"""The first wrapper that was made."""


def refused(error: BaseException) -> bool:
    """Whether an exception is of a kind that torch raises over wrong arguments."""
    return isinstance(error, (TypeError, ValueError, AttributeError))


def replace_copies() -> None:
    """Replace the copies of wrapped functions in modules that did `from torch import ...`."""
    new = {id(old): getattr(owner, name) for owner, name, old in _undo if name and callable(old)}
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] in ("torch", "ddpdoctor") or not isinstance(module, ModuleType):
            continue
        if is_lazy(module):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and id(value) in new:
                replace(module, name, new[id(value)])


def is_lazy(module: ModuleType) -> bool:
    """Whether a module is imported on first access to an attribute (`importlib.util.LazyLoader`),
    so that looking at it would import it."""
    return type(module).__getattribute__ is not ModuleType.__getattribute__


def on_restore(undo: Callable[[], None]) -> None:
    """Have `restore` call `undo`, which takes back what `replace` did not do."""
    _undo.append((undo, "", None))


def restore() -> None:
    """Undo every change, newest first: a function may be wrapped more than once. Those that cannot
    be undone are written down, and the others undone."""
    while _undo:
        owner, name, old = _undo.pop()
        try:
            if name:
                setattr(owner, name, old)
            else:
                owner()
        except Exception as error:
            write_probe_error(error)
