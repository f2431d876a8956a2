"""Which model is it that a loss trains, where it is sharded and no wrapper of DDP's announces its
forwards?"""

from __future__ import annotations

import time
from typing import Any

from ....events import ShardedModel
from ....events.amp import told_at
from ...recording.recorder import Recorder
from ...recording.torch_compat import averages_over, flattened
from ...recording.watcher import Watcher
from ...recording.weak_references import Reference, WeakIdentityMap
from ...training.module_origins import ModuleOrigins, sharded_roots


class Sharded:
    """A model of `fully_shard` or `FullyShardedDataParallel`, as far as losses are concerned.

    Attributes:
        number: negative.
        forwards: outermost backwards of this process so far: the ranks of such a model run equally
            many, or wait for each other.
    """

    pending = True
    leading = ()
    expected = ()
    parameters = ()

    def __init__(self, number: int) -> None:
        self.number = number
        self.forwards = 0

    def ddp(self) -> None:
        """It has no wrapper of DDP's."""


class ShardedModels(Watcher):
    """
    Attributes:
        known: by outermost sharded module; None for one whose gradients are not averaged.
        roots: the outermost sharded modules that are trained, when last searched for;
            `registrations` of parameters in the process then.
    """

    lost = "losses of sharded models"

    def __init__(self) -> None:
        self.known: WeakIdentityMap[Sharded | None] = WeakIdentityMap()
        self.roots: list[Reference] = []
        self.registrations = -1

    def trained(self, recorder: Recorder, backwards: int) -> list[Sharded]:
        """The sharded model that a backward belongs to, if there is only one that is trained.

        Args:
            backwards: outermost ones of this process before it.
        """
        if ModuleOrigins.current.registrations != self.registrations or told_at(backwards):
            self.registrations = ModuleOrigins.current.registrations
            found = [m for m in sharded_roots() if any(p.requires_grad for p in m.parameters())]
            self.roots = [Reference(module) for module in found]
        module = self.roots[0]() if len(self.roots) == 1 else None
        if module is None:
            return []
        if module not in self.known:
            self.known[module] = self._seen(recorder, module)
        model = self.known[module]
        if model is None:
            return []
        model.forwards = backwards + 1
        return [model]

    def _seen(self, recorder: Recorder, module: Any) -> Sharded | None:
        ranks = averages_over(module)
        if len(ranks) < 2:
            return None
        whole = flattened(module)
        model = Sharded(-1 - len(self.known))
        recorder.emit(
            ShardedModel(
                at=time.monotonic(),
                model=model.number,
                kind=type(getattr(module, "module", module)).__name__.removeprefix("FSDP"),
                wrapper="FullyShardedDataParallel" if whole else "fully_shard",
                ranks=ranks,
                site=ModuleOrigins.current.origin_site(module),
            )
        )
        return model
