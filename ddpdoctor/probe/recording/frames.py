"""Python frames: keeps the probe's wrappers out of tracebacks and warnings, and reads the variables
of the user's frames without leaving anything on them."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any

_disguised: dict[CodeType, CodeType] = {}


def unframe(error: BaseException) -> None:
    """Remove the caller, a wrapper about to re-raise `error`, from the traceback.

    Has no effect on Python 3.10, which restores the traceback when it re-raises.
    """
    trace = error.__traceback__
    if trace is not None and trace.tb_frame is sys._getframe(1):
        # Not `error.__traceback__ = ...`: the user's class may be a frozen data class.
        BaseException.with_traceback(error, trace.tb_next)


def disguise(wrapper: Any, original: Any) -> Any:
    """Make a wrapper look like the original to `pickle`, `inspect` and `warnings`; returns it.

    `warnings` skips the frames of the import system, which it knows by the names of their files, so
    the wrapper's code gets such a name: `stacklevel=2` in torch then still means the user's line.
    """
    wrapper.__annotations__ = {}
    functools.update_wrapper(wrapper, original)
    with contextlib.suppress(TypeError, ValueError):  # functions from C++ may have none
        wrapper.__signature__ = inspect.signature(original)
    code = wrapper.__code__
    if code not in _disguised:
        name = f"{code.co_filename}(importlib._bootstrap)"
        _disguised[code] = code.replace(co_filename=name)
    wrapper.__code__ = _disguised[code]
    return wrapper


def named(original: Any, name: str) -> Any:
    """A method of a C++ class as a Python function of that name, for a wrapper to call.

    pybind11 looks for a Python override in classes derived from the C++ class, takes the wrapper
    for one, and would call it again without end. It does not if the calling function has the
    method's name.
    """

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            unframe(error)
            raise

    method.__code__ = method.__code__.replace(co_name=name)
    return disguise(method, original)


def out_of_reach(code: CodeType) -> bool:
    """Whether a function calls `locals()`, so that its variables must not be read.

    Before Python 3.13 `locals()` returns the one dictionary that its frame keeps, and reading
    `f_locals` updates it while the program uses it.
    """
    if sys.version_info >= (3, 13) or "locals" not in code.co_names:
        return False
    return any(
        i.argval == "locals" and i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        for i in dis.get_instructions(code)
    )


def variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a running frame; empty if they are `out_of_reach`."""
    code = frame.f_code
    if sys.version_info >= (3, 13) or not code.co_flags & CO_OPTIMIZED:
        return dict(frame.f_locals)
    if out_of_reach(code):
        return {}
    # Before Python 3.13 the frame keeps this dictionary, and would keep alive what is in it.
    kept = frame.f_locals
    found = dict(kept)
    if sys.gettrace() is None:  # after a trace function the dictionary is written back to the frame
        kept.clear()
    return found


def updates_statistics() -> bool:
    """Whether `torch.optim.swa_utils.update_bn` is running in this thread."""
    module = sys.modules.get("torch.optim.swa_utils")
    code = inspect.unwrap(module.update_bn).__code__ if module is not None else None
    frame: FrameType | None = sys._getframe(1)
    while code is not None and frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return code is not None and frame is not None
