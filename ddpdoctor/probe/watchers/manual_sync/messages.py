"""Which sizes have the messages that this rank sends and receives?"""

from __future__ import annotations

import time

from ....events import MessageSize
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from .limits import MESSAGE_SIZES


class Messages(Watcher):
    """
    Attributes:
        seen: the messages recorded: each size once for each direction, peer and group.
    """

    lost = "sizes of messages"

    def __init__(self) -> None:
        self.seen: set[tuple[object, ...]] = set()

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: Call) -> None:
        for function, peer, tensor in call.messages:
            sends, numel, dtype = "send" in function, tensor.numel(), str(tensor.dtype)
            key = sends, peer, call.group, numel, dtype
            if key not in self.seen and len(self.seen) < MESSAGE_SIZES and call.group >= 0:
                self.seen.add(key)
                recorder.emit(
                    MessageSize(
                        at=time.monotonic(),
                        sends=sends,
                        peer=peer,
                        group=call.group,
                        numel=numel,
                        dtype=dtype.removeprefix("torch."),
                        bytes=numel * tensor.element_size(),
                        step=recorder.step,
                        site=recorder.site(),
                    )
                )
