"""Does one of several ranks train without a process group, and without other means to communicate?

Known libraries are looked up in `sys.modules` at the first step. Unknown means (sockets, files)
show in their effect: parameters change between steps, or gradients by more than one factor.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ....events import TrainsAlone
from ...collectives.sync_points import SyncPoints
from ...recording import hooks
from ...recording.code_locations import own_files
from ...recording.devices import hands_off
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder, write_probe_error
from ...recording.watcher import Activate, Watcher, on
from ...recording.weak_references import Reference
from ...source.dead_branches import call_under_condition
from ...tensors.collective_payload import memory_of
from ...tensors.digests import readable, sums
from ...tensors.pending_digests import Arrivals, Waiting
from ...tensors.tensor_watch import grad_of, spread, writes
from ...training import lifecycle
from ...training.optimizers import Optimizers
from ...training.records import Backward, Optimizer, Step

OTHER_LAYERS = (
    "mpi4py", "horovod", "ray", "deepspeed", "hivemind", "oneccl_bindings_for_pytorch", "byteps",
    "bagua", "cupy.cuda.nccl", "zmq", "nccl", "ucp", "multiprocess.managers",
)  # fmt: skip

STORE = "a store of torch.distributed"
SHARED = "parameters in shared memory"
PARAMETERS = "parameters that change between steps"
GRADIENTS = "gradients that change before the step"

VALUES = 4
"""Values read of each sampled gradient."""

EVERY = 32
"""Gradients are compared before each of the first `EVERY` steps, and then before one in `EVERY`."""

OPTIMIZERS_AT_MOST = 8


class NoProcessGroup(Watcher):
    """What is watched of a rank without a process group.

    Attributes:
        asked: the first step was looked at.
        since: time of that step.
        optimizers: optimizers with sampled parameters in `parameters`.
        versions: memory and version of the sampled parameters after the last step.
        values: some of their values then, None if not read.
        gradients: some values of their gradients after the last backward, None if not read.
        waiting: values of parameters before and after, on their way from a device.
    """

    lost = "whether ranks without a process group are connected by other means"

    def __init__(self) -> None:
        self.asked = False
        self.since = 0.0
        self.optimizers: list[Optimizer] = []
        self.parameters: list[Reference] = []
        self.versions: list[tuple[int, int]] | None = None
        self.values: Waiting | None = None
        self.gradients: list[list[float]] | None = None
        self.waiting: Arrivals[None] = Arrivals()
        # Enabled for a rank without a process group, until a means to communicate is found.
        self._following = Subscriptions()

    def activate_with(self, activate: Activate) -> None:
        """Let the first optimizer step activate a process whose environment names it one of several
        ranks: without `init_process_group` nothing else does."""

        def ask() -> None:
            rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
            helper = "DDPDOCTOR_OWNER" in os.environ or "DDPDOCTOR_DIR" not in os.environ
            if not helper and rank.isdecimal() and size.isdecimal() and int(size) > 1:
                try:
                    activate(int(rank), int(size), None)
                except Exception as error:  # training goes on, unobserved
                    write_probe_error(error)

        Optimizers.current.at_first_step(ask)

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        if self.asked:
            return
        self.asked = True
        if int(os.environ.get("WORLD_SIZE") or 1) > 1 and not _has_group():
            self.since = time.monotonic()
            self._emit(recorder, step.site, self._other_layers(step.optimizer()))

    def _emit(self, recorder: Recorder, site: int, layers: tuple[str, ...]) -> None:
        event = TrainsAlone(at=time.monotonic(), step=recorder.step, site=site, layers=layers)
        found = ((f, call_under_condition(f, "init_process_group")) for f in own_files())
        file, call = next(((f, c) for f, c in found if c is not None), ("", None))
        if call is not None:
            line, condition = call
            place = recorder.sites.place(file, line, "")
            event = msgspec.structs.replace(event, init_site=place, condition=condition)
        recorder.emit(event, vital=True)
        self._following.enable(not layers)

    def _other_layers(self, optimizer: Any) -> tuple[str, ...]:
        found = [name for name in OTHER_LAYERS if name in sys.modules]
        rpc = sys.modules.get("torch.distributed.rpc")
        if rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", lambda: False)():
            found.append("torch.distributed.rpc")
        if any(p.is_cpu and p.is_shared() for p in _parameters_of(optimizer)):
            found.append(SHARED)
        if SyncPoints.current.stored_at > self.since:
            found.append(STORE)
        return tuple(found)

    @on(lifecycle.backward_ends, during="_following")
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        self.gradients = None
        if (recorder.step < EVERY or recorder.step % EVERY == 0) and not hands_off():
            self.gradients = [_values(g) for g in self._gradients()]

    def _gradients(self) -> list[Any]:
        return [grad_of(ref()) for ref in self.parameters]

    @on(lifecycle.step_begins, during="_following")
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        found = ""
        if SyncPoints.current.stored_at > self.since:
            found = STORE
        elif self._parameters_changed():
            found = PARAMETERS
        elif not step.closure and self._gradients_changed():
            found = GRADIENTS
        if found:
            self._emit(recorder, step.site, (found,))
        elif step.known not in self.optimizers and len(self.optimizers) < OPTIMIZERS_AT_MOST:
            self.optimizers.append(step.known)
            held = [
                p
                for p in _parameters_of(step.optimizer())
                if p.requires_grad and p.is_floating_point()
            ]
            self.parameters += [Reference(p) for p in spread(held)]

    @on(lifecycle.step_ends, during="_following")
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        self.gradients = self.versions = self.values = None
        if not hands_off():
            self.versions = self._versions()
            self.values = self._some_values() if step.due or recorder.affordable() else None

    def _versions(self) -> list[tuple[int, int]]:
        alive = [ref() for ref in self.parameters]
        return [(memory_of(p), writes(p)) if p is not None else (0, 0) for p in alive]

    def _some_values(self) -> Waiting:
        import torch

        alive = [ref() for ref in self.parameters]
        with torch.inference_mode():
            pieces = [
                None if p is None or not p.is_contiguous() else p.view(-1)[-2:] for p in alive
            ]
        return Waiting(sums(pieces)[0])

    def _parameters_changed(self) -> bool:
        """Whether the sampled parameters changed since the last step.

        Values are compared if they were read: a program may swap the weights (for averaged ones)
        and swap them back, which changes memory and versions only."""
        if self.versions is None or hands_off():
            return False
        if self.values is None:
            return self.versions != self._versions()
        self.waiting.add(None, self.values, self._some_values())
        return any([before != now for _, (before, now) in self.waiting.take()])

    def _gradients_changed(self) -> bool:
        """Whether gradients changed since the backward by more than one factor each: clipping and
        scaling are no communication."""
        before, self.gradients = self.gradients, None
        if before is None or hands_off():
            return False
        gradients = self._gradients()
        exact = all(g is None or g.element_size() >= 4 for g in gradients)  # else half precision
        return not_just_scaled(before, [_values(g) for g in gradients], 1e-4 if exact else 0.05)

    @on(hooks.leaving, during="_following")
    def _leaving(self, recorder: Recorder, _: None) -> None:
        """Look again at the end: libraries may be loaded, or a store used, after the first step."""
        last = self.optimizers[-1] if self.optimizers else None
        if layers := self._other_layers(last.reference() if last is not None else None):
            self._emit(
                recorder,
                last.step.site if last is not None and last.step is not None else -1,
                layers,
            )


def _has_group() -> bool:
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())


def _parameters_of(optimizer: Any) -> list[Any]:
    groups = () if optimizer is None else optimizer.param_groups
    return [p for group in groups for p in group["params"]]


def _values(gradient: Any) -> list[float]:
    import torch

    if gradient is None or not gradient.numel() or not readable(gradient):
        return []
    with torch.inference_mode():
        step = max(1, gradient.numel() // VALUES)
        return [float(v) for v in gradient.reshape(-1)[::step][:VALUES].tolist()]


def not_just_scaled(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], tolerance: float
) -> bool:
    """Whether the values of some tensor are not the old ones times one factor.

    Tensors with a single value are compared as if they were one tensor. Empty rows are skipped.
    """
    rows = [list(zip(a, b, strict=True)) for a, b in zip(before, after, strict=False) if a and b]
    alone = [row[0] for row in rows if len(row) == 1]
    return any(_ratios_differ(row, tolerance) for row in [*(r for r in rows if len(r) > 1), alone])


def _ratios_differ(pairs: list[tuple[float, float]], tolerance: float) -> bool:
    if not all(math.isfinite(v) for pair in pairs for v in pair):
        return False
    if any(not old and new for old, new in pairs):
        return True
    ratios = [new / old for old, new in pairs if old]
    return bool(ratios) and max(ratios) - min(ratios) > tolerance * max(map(abs, ratios))
