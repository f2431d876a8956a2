"""Are there ranks on other nodes, whose records are elsewhere? The first rank of each node then
meets the others, unless the launcher does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ....nodes.rank_meeting import RankMeeting
from ...collectives.process_groups import ProcessGroups
from ...recording import hooks
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from . import exits

_RESTART = re.compile(r"restart-(\d+)")


class OtherNodes(Watcher):
    lost = "the ranks of other nodes"
    after = (ProcessGroups,)

    def __init__(self) -> None:
        self.meeting: RankMeeting | None = None

    @on(ProcessGroups.formed)
    def _formed(self, recorder: Recorder, group: Any) -> None:
        come_s = recorder.options.get("ranks_come_s")
        if self.meeting is not None or come_s is None:
            return
        restart = _RESTART.fullmatch(recorder.directory.name)
        folder: Path = recorder.directory.parent if restart else recorder.directory
        attempt = int(restart[1]) if restart else 0
        from torch.distributed.distributed_c10d import _get_default_store

        store: Any = _get_default_store()
        rank, world = group.rank(), group.size()
        self.meeting = RankMeeting(
            store, folder, rank=rank, world=world, attempt=attempt, come_s=come_s
        )
        self.meeting.start()

    @on(hooks.left)
    def _left(self, recorder: Recorder, _: None) -> None:
        if self.meeting is not None:
            self.meeting.close(failed=exits.failed())
