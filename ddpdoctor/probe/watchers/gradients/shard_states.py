"""Does each rank get the optimizer state of its own shards when one is loaded?

Before the first step after a load, this rank's shards of the parameters, and their state, are
digested.
"""

from __future__ import annotations

import time
from typing import Any

from msgspec.structs import replace

from ....events import ShardStates as Recorded
from ....events.pack import pack
from ...recording import hooks
from ...recording.devices import hands_off
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.torch_compat import placements, shard
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...recording.weak_references import WeakIdentityMap
from ...tensors.digests import sums
from ...tensors.pending_digests import Arrivals, Waiting
from ...training import lifecycle
from ...training.module_origins import ModuleOrigins
from ...training.records import Step
from .limits import SHARD_STATES, SHARDS_DIGESTED
from .shard_scales import ShardScaling


class ShardStates(Watcher):
    """
    Attributes:
        loaded: optimizers that have got a state since their last step, with the line.
        loads: looked at so far.
        waiting: what is written once its digests have come from a device.
    """

    lost = "states of sharded optimizers that are loaded"

    def __init__(self) -> None:
        self.loaded: WeakIdentityMap[int] = WeakIdentityMap()
        self.loads = 0
        self.waiting: Arrivals[Recorded] = Arrivals()
        self._looking = Subscriptions()

    def install(self) -> None:
        from torch.optim import Optimizer

        self.around(Optimizer, "load_state_dict", before=self._loads, after=self._loaded)

    def _loads(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        return args[0], recorder.site()

    def _loaded(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        optimizer, site = token
        if error is None and self.loads < SHARD_STATES:
            self.loaded[optimizer] = site
            self._looking.enable()

    @on(lifecycle.step_begins, during="_looking")
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        self._write(recorder)
        optimizer = step.optimizer()
        site = None if optimizer is None else self.loaded.get(optimizer)
        if site is not None and not hands_off():
            del self.loaded[optimizer]
            self._digest(recorder, step, optimizer, site)
            self._write(recorder)
        if not len(self.loaded) and not len(self.waiting):
            self._looking.disable()

    def _digest(self, recorder: Recorder, step: Step, optimizer: Any, site: int) -> None:
        flat = {id(p) for p in _flat()}
        every = [p for group in optimizer.param_groups for p in group["params"]]
        mine = [p for p in every if id(p) in flat or _is_sharded(p)][:SHARDS_DIGESTED]
        states = [_state(optimizer, p) for p in mine]
        if not any(state is not None for state in states):
            return
        self.loads += 1
        names, _ = ModuleOrigins.current.named_roots(mine)
        event = Recorded(
            at=time.monotonic(),
            optimizer=step.known.number,
            step=step.number,
            names=tuple(names.get(id(p), f"parameter {n}") for n, p in enumerate(mine)),
            values="",
            states="",
            site=site,
        )
        held = Waiting(sums([shard(p.detach()) for p in mine])[0])
        self.waiting.add(event, held, Waiting(sums(states)[0]))

    def _write(self, recorder: Recorder, *, wait: bool = False) -> None:
        for event, (values, states) in self.waiting.take(wait=wait):
            recorder.emit(replace(event, values=pack(values), states=pack(states)), vital=True)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self._write(recorder, wait=True)


def _flat() -> list[Any]:
    """The parameters of `FullyShardedDataParallel`."""
    known = (r() for every in ShardScaling.current.flat.values() for r in every)
    alive = [flat for flat in known if flat is not None]
    return [p for flat in alive for p in (flat, *(getattr(flat, "_params", None) or ()))]


def _is_sharded(parameter: Any) -> bool:
    mesh, places = placements(parameter)
    return mesh is not None and any(place.is_shard() for place in places)


def _state(optimizer: Any, parameter: Any) -> Any:
    """The first state of a parameter that has its shape, as momentum has; None for none, or for one
    with the same number everywhere, which is the same for every shard."""
    shape = shard(parameter).shape
    kept = (shard(v) for v in optimizer.state.get(parameter, {}).values() if hasattr(v, "shape"))
    found = next((value for value in kept if value.shape == shape and value.numel() > 1), None)
    if found is None or (found.is_cpu and bool((found == found.flatten()[0]).all())):
        return None
    return found
