"""Which parameters of an optimizer does it train outside of wrappers?"""

from __future__ import annotations

from typing import Any

from ...training.wrapped_models import WrappedModels


def unwrapped_parameters(optimizer: Any) -> list[Any]:
    """Those that belong to no wrapped model; none where the optimizer holds shards."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(map(sharded, parameters)):
        return []
    covered = WrappedModels.current.covered()
    return [p for p in parameters if _trained(p) and id(p) not in covered]


def sharded(parameter: Any) -> bool:
    """Whether each rank holds a piece of this parameter: DTensor (FSDP2, tensor parallelism) or a
    flat parameter of FSDP1."""
    return (
        hasattr(parameter, "device_mesh")
        or hasattr(parameter, "_fsdp_flattened")
        or type(parameter).__name__ == "FlatParameter"
    )


def _trained(parameter: Any) -> bool:
    """Whether a parameter is trained. One with a gradient is, even if frozen now: some programs
    freeze a model while its optimizer steps."""
    trained = parameter.requires_grad or parameter.grad is not None
    return bool(trained and parameter.is_floating_point())
