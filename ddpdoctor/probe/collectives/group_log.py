"""The calls of one process group that are not recorded yet, and those that recur in every step."""

from __future__ import annotations

from types import CodeType, FrameType


class GroupLog:
    """The calls of one group that are not recorded yet.

    Attributes:
        next: number of the next call.
        codes: signature and call site of each call of the current block.
        first, step: number of its first call, and the optimizer step then.
        block: number of the block that repeats; `run_codes`, `run_first` and `run_step` are its
            codes, and the first call and step of its first occurrence.
        repeat: how often it has occurred in a row, 0 for no block; `every`: once in so many steps.
        behind: the last so many calls are not in `codes` yet, see `CallLog.passed`.
    """

    def __init__(self) -> None:
        self.next = self.behind = 0
        self.codes: list[int] = []
        self.first = 0
        self.step = -1
        self.block = -1
        self.run_codes: list[int] = []
        self.run_first = 0
        self.run_step = -1
        self.every = 0
        self.repeat = 0


class Recurring:
    """A collective that DDP issues itself in every step on the fast path.

    Attributes:
        codes: its signature, and its last call site.
        outer: code and instruction of each frame above the one that was there last, as many as
            distinguish call sites; None before the first call.
    """

    __slots__ = ("codes", "group", "log", "outer", "signature")

    def __init__(self, group: int, log: GroupLog, signature: int) -> None:
        self.group = group
        self.log = log
        self.signature = signature
        self.codes = (signature, -1)
        self.outer: list[tuple[CodeType, int]] | None = None

    def still_at(self, frame: FrameType) -> bool:
        """Whether a frame at the same instruction as last time has the same callers."""
        if self.outer is None:
            return False
        above = frame.f_back
        for code, instruction in self.outer:
            if above is None or above.f_code is not code or above.f_lasti != instruction:
                return False
            above = above.f_back
        return True
