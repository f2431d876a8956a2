"""Backwards: which models they belong to, whether they communicated, what got no gradient."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from . import models, moments
from .accumulators import FiringWatch
from .models import Model
from .moments import Backward
from .patching import around
from .recorder import Recorder, recorder
from .torch_private import sequence_number

LOST = "backwards, and with them unused parameters and unsynchronised steps"

ALWAYS_EXAMINED = 8
"""The first backwards of a model are examined whole; later ones one in a stride by model size, the
same on every rank."""

PARAMETERS_PER_BACKWARD = 2
SAMPLED = 4
"""Parameters looked at where a backward is not examined: enough to tell whose it is."""


class _Backwards:
    depth = 0
    nested = 0
    count = 0
    synced = 0
    seconds = 0.0


_state = _Backwards()


def running() -> bool:
    """Whether a backward is running."""
    return _state.depth > 0


def count() -> int:
    """Outermost backwards so far in this process."""
    return _state.count


def synced() -> int:
    """Those that communicated."""
    return _state.synced


def take_seconds() -> float:
    spent, _state.seconds = _state.seconds, 0.0
    return spent


def install() -> None:
    import torch.autograd

    _state.depth = _state.count = _state.synced = 0
    around(torch.autograd, "backward", before=_begins, after=_ends, lost=LOST)


class Snapshot:
    """A model before a backward: enough to tell whether that backward was its, what it reached,
    and whether it communicated.

    Attributes:
        expected: a forward of the wrapper waits for this backward.
        firing: what becomes ready, where the backward is examined whole.
    """

    def __init__(self, model: Model, backward: Backward) -> None:
        self.model = model
        wrapper = model.wrapper() if model.wrapper else None
        self.expected = bool(model.pending) and wrapper is not None
        self.positions = _sample(model, backward.number)
        self.before = self._versions()
        self.group = getattr(wrapper, "process_group", None)
        self.sequence = sequence_number(self.group)
        self.firing: FiringWatch | None = None
        parameters = model.live_parameters() if self.expected and _due(model) else None
        if parameters is not None:
            chosen = [parameters[i] for i in model.expected]
            self.firing = FiringWatch(chosen, model.expected)

    def _versions(self) -> list[tuple[int, int]]:
        versions = []
        for position in self.positions:
            parameter = self.model.parameters[position]()
            grad = None if parameter is None else parameter.grad
            versions.append((0, -1) if grad is None else (id(grad), grad._version))
        return versions

    def touched(self) -> bool:
        """Whether the backward reached parameters of the model."""
        return bool(self.firing and self.firing.counts) or self._versions() != self.before

    def untouched(self) -> tuple[int, ...] | None:
        """Positions whose gradient never became ready; None where that was not watched."""
        if self.firing is None:
            return None
        return tuple(p for p in self.model.expected if p not in self.firing.counts)

    def communicated(self) -> bool:
        return sequence_number(self.group) != self.sequence


def _begins(active: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _state.depth += 1
    if _state.depth > 1:  # re-entrant checkpointing runs backward inside backward
        _state.nested += 1
        return None
    _state.nested = 0
    tensors = args[0] if args else kwargs.get("tensors", ())
    roots = tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)
    backward = Backward(_state.count, active.site(), roots, time.monotonic())
    moments.backward_begins.happens(active, backward)
    watched = [*models.live(), *models.discarded()]
    snapshots = [Snapshot(model, backward) for model in watched]
    for snapshot in snapshots:
        if snapshot.firing is not None and snapshot.model.pending_sync:
            snapshot.firing.on_complete = partial(_complete, active, backward, snapshot.model)
    return backward, snapshots


def _sample(model: Model, number: int) -> list[int]:
    count = len(model.expected)
    step = max(1, count // SAMPLED)
    return [model.expected[(start + number) % count] for start in range(0, count, step)]


def _due(model: Model) -> bool:
    stride = max(1, len(model.expected) // PARAMETERS_PER_BACKWARD)
    window, place = divmod(model.synced_backwards, stride)
    # The place moves from window to window: a branch taken every k-th step must not hide.
    return model.synced_backwards < ALWAYS_EXAMINED or place == window % stride


def _complete(active: Recorder, backward: Backward, model: Model) -> None:
    if recorder() is active:
        moments.gradients_ready.happens(active, (backward, model))


def _ends(active: Recorder, token: Any, result: Any, error: BaseException | None) -> None:
    _state.depth -= 1
    if token is None:
        return
    backward, snapshots = token
    _state.seconds += time.monotonic() - backward.began
    backward.error, backward.nested = error, _state.nested
    for snapshot in snapshots:
        if snapshot.firing is not None:
            snapshot.firing.stop()
            backward.fired[snapshot.model.number] = snapshot.firing.counts
    if error is None:
        _state.count += 1
        waiting = sum(snapshot.expected for snapshot in snapshots)
        for snapshot in snapshots:
            _attribute(backward, snapshot, alone=waiting == 1)
        _state.synced += bool(backward.synced)
    moments.backward_ends.happens(active, backward)


def _attribute(backward: Backward, snapshot: Snapshot, *, alone: bool) -> None:
    """Tell whether this backward was (also) that model's, and what it left out."""
    model = snapshot.model
    communicated, touched = snapshot.communicated(), snapshot.touched()
    if communicated and (snapshot.expected or touched):
        backward.synced.add(model.number)
    if not touched and not (alone and snapshot.expected and communicated):
        return  # this backward was of another model: its own is still to come
    model.backwards += 1
    if not snapshot.expected:
        backward.unannounced.append((model, communicated))
        return
    backward.models.append(model)
    backward.expected_sync[model.number] = model.pending_sync
    model.synced_backwards += model.pending_sync
    model.pending, model.pending_sync = 0, False
    untouched = snapshot.untouched()
    if untouched is not None:
        backward.untouched[model.number] = untouched
