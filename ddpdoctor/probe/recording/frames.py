"""Frames of the user's: wrappers are kept out of what is seen of a call (tracebacks, the places of
warnings), and to look at variables leaves nothing behind."""

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
    """Take the caller, a wrapper that is about to re-raise `error`, out of its traceback.

    Python 3.10 re-raises with the traceback that it had, and the wrapper stays.
    """
    trace = error.__traceback__
    if trace is not None and trace.tb_frame is sys._getframe(1):
        # Not by assignment: the user's class may be frozen.
        BaseException.with_traceback(error, trace.tb_next)


def disguise(wrapper: Any, original: Any) -> Any:
    """Have `warnings` pass over a wrapper, so that `stacklevel` still means the user's line; it is
    pickled, printed and inspected as the original.

    Warnings pass over the frames of the import system, which they know by the names of their files.
    """
    wrapper.__annotations__ = {}
    functools.update_wrapper(wrapper, original)
    with contextlib.suppress(TypeError, ValueError):  # what C++ has made may have none
        wrapper.__signature__ = inspect.signature(original)
    code = wrapper.__code__
    if code not in _disguised:
        name = f"{code.co_filename}(importlib._bootstrap)"
        _disguised[code] = code.replace(co_filename=name)
    wrapper.__code__ = _disguised[code]
    return wrapper


def named(original: Any, name: str) -> Any:
    """A method of a C++ class, for a wrapper to call.

    Where a class of the user's derives from that class without a method of that name, C++ takes
    the wrapper for one and calls it, unless the call comes from a method of that name.
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
    """Whether the function calls `locals()`: before Python 3.13 that is the dictionary which its
    frame keeps, and looking at it changes it under the program's hands."""
    if sys.version_info >= (3, 13) or "locals" not in code.co_names:
        return False
    return any(
        i.argval == "locals" and i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        for i in dis.get_instructions(code)
    )


def variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a running frame; none where they are out of reach.

    Before Python 3.13 a frame keeps the dictionary that is made of them, and with it whatever they
    were.
    """
    code = frame.f_code
    if sys.version_info >= (3, 13) or not code.co_flags & CO_OPTIMIZED:
        return dict(frame.f_locals)
    if out_of_reach(code):
        return {}
    kept = frame.f_locals
    found = dict(kept)
    if sys.gettrace() is None:  # else it is written back after the tracing function
        kept.clear()
    return found


def updates_statistics() -> bool:
    """Whether torch's `update_bn` is running in this thread."""
    module = sys.modules.get("torch.optim.swa_utils")
    code = inspect.unwrap(module.update_bn).__code__ if module is not None else None
    frame: FrameType | None = sys._getframe(1)
    while code is not None and frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return code is not None and frame is not None
