"""What the rank is doing when it is in no collective (its phase), in the ring's header.

Forwards, backwards and the end of steps are entered by `ddp_collectives`, with their calls.
"""

from __future__ import annotations

import time
from typing import Any

from ...storage.call_ring import Phase, State
from ..collectives import process_groups
from ..collectives.call_log import NEW_GROUPS, call_log_of
from ..collectives.process_groups import ProcessGroups
from ..recording import hooks
from ..recording.recorder import Recorder
from ..recording.stopwatch import loading
from ..recording.watcher import Args, Error, Kwargs, Watcher, on
from . import lifecycle
from .records import Loading
from .wrapped_models import evaluating


class Phases(Watcher):
    lost = "where a rank that stands still is"

    def install(self) -> None:
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d
        from torch.utils.data import DataLoader

        for moment, phase in (
            (lifecycle.loading_begins, Phase.DATA),
            (lifecycle.loading_ends, Phase.USER),
            (lifecycle.step_begins, Phase.OPTIMIZER),
            (hooks.leaving, Phase.LEAVING),
        ):
            # On the fast path `loaders` and `optimizers` enter their phases themselves.
            moment.subscribe(self._enters(phase), fast_path=phase is Phase.LEAVING, lost=self.lost)
        self.around(
            ProcessGroups.current.holders(),
            "init_process_group",
            before=self._joins,
            after=self._joined,
        )
        self.around(
            ProcessGroups.current.holders(),
            "new_group",
            before=self._makes_group,
            after=self._made_group,
        )
        self.around(
            (c10d, dist), "destroy_process_group", before=self._destroys, after=self._destroyed
        )
        self.around(DataLoader, "__iter__", before=self._starts, after=self._started)

    @on(lifecycle.loading_begins, fast_path=False, lost="which time is spent in evaluations")
    def _loading_begins(self, recorder: Recorder, _: Loading) -> None:
        if log := recorder.call_log or call_log_of(recorder):
            log.ring.evaluating(evaluating())

    def _enters(self, phase: Phase) -> Any:
        def enters(recorder: Recorder, moment: Any) -> None:
            if log := recorder.call_log or call_log_of(recorder):
                log.ring.phase(phase, -1 if moment is None else moment.site)

        return enters

    def _starts(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        """An iteration over a loader begins: it may start workers."""
        log = call_log_of(recorder)
        if log is None:
            return None
        recorder.catch_up()
        site, now = recorder.site(), time.monotonic()
        log.ring.enter(Phase.DATA, site, now)
        log.ring.evaluating(evaluating())
        return log, site, now

    def _started(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if token is not None:
            log, site, began = token
            now = time.monotonic()
            loading.ns += int((now - began) * 1e9)
            log.ring.enter(Phase.USER, site, now)

    def _joins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        _enter(recorder, Phase.INIT, recorder.site())

    def _destroys(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        _enter(recorder, Phase.LEAVING, recorder.site())

    def _joined(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        _enter(recorder, Phase.USER, -1)

    def _destroyed(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        _enter(recorder, Phase.USER, recorder.site())

    def _makes_group(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        """Log `new_group`: a collective of the whole world, unless it uses local
        synchronisation."""
        log = call_log_of(recorder)
        local = args[4] if len(args) > 4 else kwargs.get("use_local_synchronization", False)
        if log is None or local:
            return None
        members = tuple(sorted(int(r) for r in process_groups.asked_for(args, kwargs) or ()))
        return log.collective(NEW_GROUPS, "new_group", log.here(), ranks=members)

    def _made_group(self, recorder: Recorder, number: Any, result: Any, error: Error) -> None:
        if number is not None and (log := call_log_of(recorder)):
            log.ring.mark(number, State.DONE if error is None else State.FAILED)


def _enter(recorder: Recorder, phase: Phase, site: int) -> None:
    if log := call_log_of(recorder):
        log.ring.phase(phase, site)
