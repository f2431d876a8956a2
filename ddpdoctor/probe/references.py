"""References to the user's tensors: nothing is kept alive by them, or from being swapped.

`torch.utils.swap_tensors` refuses tensors that somebody refers to weakly. The probe wants what an
object is by then, so its own references do not count.
"""

from __future__ import annotations

import weakref
from typing import Any

from .patching import replace

LOST = "nothing, but tensors that the probe knows cannot be swapped"


class Reference(weakref.ref[Any]):
    """Of the probe's own, never one that others share."""

    __slots__ = ()


class _Others:
    """The module `weakref` without the probe's references."""

    def __getattr__(self, name: str) -> Any:
        return getattr(weakref, name)

    @staticmethod
    def getweakrefs(of: Any) -> list[Any]:
        return [one for one in weakref.getweakrefs(of) if type(one) is not Reference]


def install() -> None:
    import torch.utils

    if vars(torch.utils).get("weakref") is weakref:
        replace(torch.utils, "weakref", _Others())
