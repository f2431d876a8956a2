"""Which inputs do models of `fully_shard` get, and which ranks should divide the data?"""

from __future__ import annotations

from typing import Any

from ...recording.recorder import Recorder
from ...recording.torch_compat import (
    fully_shards,
    in_sharded_forward,
    shard_forwards,
    sharding_mesh,
)
from ...recording.watcher import Args, Kwargs, Watcher, on
from ...recording.weak_references import WeakIdentityMap
from ...training import lifecycle
from ...training.records import Step
from .forward_inputs import ForwardInputs


class ShardedForwards(Watcher):
    """
    Attributes:
        followed: forwards of modules of `fully_shard` are followed. No sooner than at the first
            step is it known that there are any.
        ranks: by outermost module, those that ought to divide its inputs among them.
    """

    lost = "what models of fully_shard were given"
    after = (ForwardInputs,)  # records them

    def __init__(self) -> None:
        self.followed = False
        self.ranks: WeakIdentityMap[tuple[int, ...]] = WeakIdentityMap()

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        states = shard_forwards() if not self.followed and fully_shards() else None
        if states is not None:
            self.followed = True
            self.around(states, "_root_pre_forward", before=self._forward_begins)

    def _forward_begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        state, module, given, named = args
        if in_sharded_forward(state):
            return
        ranks = self.ranks.get(module)
        if ranks is None:
            ranks = self.ranks[module] = _ranks(module)
        ForwardInputs.current.sharded_forward(recorder, module, given, named, ranks)


def _ranks(module: Any) -> tuple[int, ...]:
    """The ranks over which a module, or the first sharded one in it, is sharded or replicated."""
    meshes = (m for part in module.modules() if (m := sharding_mesh(part)) is not None)
    mesh = next(meshes, None)
    return () if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))
