"""A rank of several that trains without a process group, and its other ways to the others.

What no list of libraries knows (sockets, files, a store) shows in what it is for: somebody else
than the optimizer changes the parameters, or the gradients otherwise than by one factor.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ....events import TrainsAlone
from ...collectives import sync_points
from ...recording import hooks
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder, complain
from ...recording.weak_references import Reference
from ...tensors.digests import capturing, sums
from ...tensors.gradient_versions import memory_of, some
from ...tensors.pending_digests import Waiting
from ...training import lifecycle, optimizers
from ...training.records import Backward, Optimizer, Step

LOST = "whether ranks without a process group are connected by other means"

OTHER_LAYERS = (
    "mpi4py", "horovod", "ray", "deepspeed", "hivemind", "oneccl_bindings_for_pytorch", "byteps",
    "bagua", "cupy.cuda.nccl", "zmq", "nccl", "ucp", "multiprocess.managers",
)  # fmt: skip

STORE = "a store of torch.distributed"
SHARED = "parameters in shared memory"
PARAMETERS = "parameters that change between steps"
GRADIENTS = "gradients that change before the step"

VALUES = 4
"""Of each gradient that is looked at."""

EVERY = 32
"""Gradients are looked at before the first so many steps, and then before one in so many."""

OPTIMIZERS_AT_MOST = 8


class _Alone:
    """Of a rank that was told of.

    Attributes:
        optimizers: those whose parameters are among `parameters`, a few of each.
        standing: where these lie, and their versions, after the last step; `totals` some of their
            values then, None where they were not read.
        gradients: some of theirs after the last backward, None where they were not read.
        waiting: values of parameters before and after, on their way from a device.
    """

    def __init__(self) -> None:
        self.asked = False
        self.since = 0.0
        self.optimizers: list[Optimizer] = []
        self.parameters: list[Reference] = []
        self.standing: list[tuple[int, int]] | None = None
        self.totals: Waiting | None = None
        self.gradients: list[list[float]] | None = None
        self.waiting: list[tuple[Waiting, Waiting]] = []


_alone = _Alone()
_following = Subscriptions()
"""Of a rank without a group, until a way to the others shows."""


def install() -> None:
    _alone.__init__()  # type: ignore[misc]
    lifecycle.step_due.subscribe(_step_due, lost=LOST)
    _following[:] = (
        lifecycle.backward_ends.subscribe(_backward_ends, lost=LOST, awake=False),
        lifecycle.step_begins.subscribe(_step_begins, lost=LOST, awake=False),
        lifecycle.step_ends.subscribe(_step_ends, lost=LOST, awake=False),
        hooks.leaving.subscribe(_leaving, lost=LOST, awake=False),
    )


def activate_with(activate: Callable[[int, int, str | None], None]) -> None:
    """Let its first step make a process a rank that has named itself one of several: those that a
    script starts itself have nobody who does so before them."""

    def ask() -> None:
        rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        helper = "DDPDOCTOR_OWNER" in os.environ or "DDPDOCTOR_DIR" not in os.environ
        if not helper and rank.isdecimal() and size.isdecimal() and int(size) > 1:
            try:
                activate(int(rank), int(size), None)
            except Exception as error:  # training goes on, unobserved
                complain(error)

    optimizers.at_first_step(ask)


def _step_due(recorder: Recorder, step: Step) -> None:
    if _alone.asked:
        return
    _alone.asked = True
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and not _has_group():
        _alone.since = time.monotonic()
        _emit(recorder, step.site, _other_layers(step.optimizer()))


def _emit(recorder: Recorder, site: int, layers: tuple[str, ...]) -> None:
    event = TrainsAlone(at=time.monotonic(), step=recorder.step, site=site, layers=layers)
    recorder.emit(event, vital=True)
    _following.enable(not layers)


def _has_group() -> bool:
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())


def _other_layers(optimizer: Any) -> tuple[str, ...]:
    found = [name for name in OTHER_LAYERS if name in sys.modules]
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", lambda: False)():
        found.append("torch.distributed.rpc")
    if any(p.is_cpu and p.is_shared() for p in _held(optimizer)):
        found.append(SHARED)
    if sync_points.stored_at() > _alone.since:
        found.append(STORE)
    return tuple(found)


def _held(optimizer: Any) -> list[Any]:
    groups = () if optimizer is None else optimizer.param_groups
    return [p for group in groups for p in group["params"]]


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    _alone.gradients = None
    if (recorder.step < EVERY or recorder.step % EVERY == 0) and not capturing():
        _alone.gradients = [_values(g) for g in _gradients()]


def _gradients() -> list[Any]:
    return [None if p is None else p.grad for ref in _alone.parameters for p in (ref(),)]


def _values(gradient: Any) -> list[float]:
    import torch

    if gradient is None or gradient.layout is not torch.strided or not gradient.numel():
        return []
    with torch.inference_mode():
        step = max(1, gradient.numel() // VALUES)
        return [float(v) for v in gradient.reshape(-1)[::step][:VALUES].tolist()]


def _step_begins(recorder: Recorder, step: Step) -> None:
    found = ""
    if sync_points.stored_at() > _alone.since:
        found = STORE
    elif _parameters_changed():
        found = PARAMETERS
    elif not step.closure and _gradients_changed():
        found = GRADIENTS
    if found:
        _emit(recorder, step.site, (found,))
    elif step.known not in _alone.optimizers and len(_alone.optimizers) < OPTIMIZERS_AT_MOST:
        _alone.optimizers.append(step.known)
        held = [p for p in _held(step.optimizer()) if p.requires_grad and p.is_floating_point()]
        _alone.parameters += [Reference(p) for p in some(held)]


def _step_ends(recorder: Recorder, step: Step) -> None:
    _alone.gradients = _alone.standing = _alone.totals = None
    if not capturing():
        _alone.standing = _standing()
        _alone.totals = _totals() if step.due or recorder.affordable() else None


def _standing() -> list[tuple[int, int]]:
    alive = [ref() for ref in _alone.parameters]
    return [(memory_of(p), p._version) if p is not None else (0, 0) for p in alive]


def _totals() -> Waiting:
    import torch

    alive = [ref() for ref in _alone.parameters]
    with torch.inference_mode():
        pieces = [None if p is None or not p.is_contiguous() else p.view(-1)[-2:] for p in alive]
    return Waiting(sums(pieces)[0])


def _parameters_changed() -> bool:
    """By their values, where these were read: programs exchange a model for another and back."""
    if _alone.standing is None or capturing():
        return False
    if _alone.totals is None:
        return _alone.standing != _standing()
    _alone.waiting.append((_alone.totals, _totals()))
    changed = False
    while _alone.waiting and all(one.ready() for one in _alone.waiting[0]):
        before, now = _alone.waiting.pop(0)
        changed |= before.values != now.values
    return changed


def _gradients_changed() -> bool:
    """Otherwise than by one factor: clipping and scaling exchange nothing."""
    before, _alone.gradients = _alone.gradients, None
    if before is None or capturing():
        return False
    gradients = _gradients()
    exact = all(g is None or g.element_size() >= 4 for g in gradients)
    return otherwise_than_scaled(before, [_values(g) for g in gradients], 1e-4 if exact else 0.05)


def otherwise_than_scaled(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], tolerance: float
) -> bool:
    """Whether some tensor's values are not what they were times one number of its own. Those of
    one value only stand together; what is gone or new tells nothing."""
    rows = [list(zip(a, b, strict=True)) for a, b in zip(before, after, strict=False) if a and b]
    alone = [row[0] for row in rows if len(row) == 1]
    return any(_unlike(row, tolerance) for row in [*(r for r in rows if len(r) > 1), alone])


def _unlike(pairs: list[tuple[float, float]], tolerance: float) -> bool:
    if not all(math.isfinite(v) for pair in pairs for v in pair):
        return False
    if any(not old and new for old, new in pairs):
        return True
    ratios = [new / old for old, new in pairs if old]
    return bool(ratios) and max(ratios) - min(ratios) > tolerance * max(map(abs, ratios))


def _leaving(recorder: Recorder, _: None) -> None:
    """Some is loaded, or used, only later."""
    last = _alone.optimizers[-1] if _alone.optimizers else None
    if layers := _other_layers(last.reference() if last is not None else None):
        _emit(
            recorder, last.step.site if last is not None and last.step is not None else -1, layers
        )
