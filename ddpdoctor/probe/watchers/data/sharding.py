"""Are parameters sharded over a device mesh, so that several ranks may need equal inputs?

Looked at before each optimizer's first step (tensor and context parallelism feed ranks equally).
"""

from __future__ import annotations

import time
from typing import Any

from ....events import ShardedOver
from ...recording.recorder import Recorder
from ...recording.torch_compat import group_ranks, may_share_inputs, sharding_mesh
from ...training import module_origins
from ...training.records import Step


class _Seen:
    shares_inputs = False
    optimizers: set[int] = set()


def forget() -> None:
    _Seen.shares_inputs = False
    _Seen.optimizers.clear()


def shares_inputs() -> bool:
    """Whether some parameter's sharding may need equal inputs on several ranks."""
    return _Seen.shares_inputs


def look(recorder: Recorder, step: Step) -> None:
    """Look at the parameters of an optimizer before its first step."""
    if step.known.number not in _Seen.optimizers:
        _Seen.optimizers.add(step.known.number)
        optimizer = step.optimizer()
        groups = optimizer.param_groups if optimizer is not None else ()
        _look(recorder, [p for g in groups for p in g["params"]])


def _look(recorder: Recorder, parameters: list[Any]) -> None:
    if not any(hasattr(p, "device_mesh") for p in parameters):
        return
    meshes = [
        m for module in module_origins.living_modules() if (m := sharding_mesh(module)) is not None
    ]
    if any(may_share_inputs(p, meshes) for p in parameters):
        _Seen.shares_inputs = True
        return
    mesh = next(p.device_mesh for p in parameters if hasattr(p, "device_mesh"))
    if mesh.ndim > 1 and mesh in meshes:
        groups = (group_ranks(mesh.get_group(n)) for n in range(mesh.ndim))
        ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        recorder.emit(
            ShardedOver(at=time.monotonic(), ranks=ranks, groups=tuple(groups)), vital=True
        )
