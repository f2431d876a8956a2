"""Are parameters sharded over a device mesh, so that several ranks may need equal inputs?

Looked at before each optimizer's first step (tensor and context parallelism feed ranks equally).
"""

from __future__ import annotations

import time
from typing import Any

from ....events import ShardedOver
from ...recording.recorder import Recorder
from ...recording.torch_compat import group_ranks, may_share_inputs, sharding_mesh
from ...recording.watcher import Watcher
from ...training.module_origins import ModuleOrigins
from ...training.records import Step


class Sharding(Watcher):
    """
    Attributes:
        shares_inputs: some parameter's sharding may need equal inputs on several ranks.
        optimizers: those looked at.
    """

    lost = "over which meshes parameters are sharded"

    def __init__(self) -> None:
        self.shares_inputs = False
        self.optimizers: set[int] = set()

    def look(self, recorder: Recorder, step: Step) -> None:
        """Look at the parameters of an optimizer before its first step."""
        if step.known.number not in self.optimizers:
            self.optimizers.add(step.known.number)
            optimizer = step.optimizer()
            groups = optimizer.param_groups if optimizer is not None else ()
            self._look(recorder, [p for g in groups for p in g["params"]])

    def _look(self, recorder: Recorder, parameters: list[Any]) -> None:
        if not any(hasattr(p, "device_mesh") for p in parameters):
            return
        meshes = [
            m
            for module in ModuleOrigins.current.living_modules()
            if (m := sharding_mesh(module)) is not None
        ]
        if any(may_share_inputs(p, meshes) for p in parameters):
            self.shares_inputs = True
            return
        mesh = next(p.device_mesh for p in parameters if hasattr(p, "device_mesh"))
        if mesh.ndim > 1 and mesh in meshes:
            groups = (group_ranks(mesh.get_group(n)) for n in range(mesh.ndim))
            ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
            recorder.emit(
                ShardedOver(at=time.monotonic(), ranks=ranks, groups=tuple(groups)), vital=True
            )
