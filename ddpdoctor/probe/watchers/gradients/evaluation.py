"""Do all ranks evaluate the same weights?

Parameters and buffers are digested at the first forward without gradients after training. Programs
may call the inner model, or a part of it, and not the wrapper; a global forward hook sees that, and
is registered only between a call of `eval()` and the model's next forward.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from ....events.drift import AGAIN
from ...recording import hooks
from ...recording.hooks import Subscriptions
from ...recording.patching import on_restore
from ...recording.recorder import Recorder, guarded, shielded
from ...recording.torch_compat import compiling
from ...recording.watcher import Args, Kwargs, Watcher, on
from ...tensors.pending_digests import Arrivals, Row
from ...training import lifecycle
from ...training.forwards import Forwards
from ...training.records import Forward, Step
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from . import replica_digests
from .limits import RARELY
from .replica_digests import ReplicaDigests


class Evaluated:
    """The evaluations of a model since its last forward with gradients.

    Attributes:
        forwards: forwards with gradients before them; -1 before the first evaluation.
        times: evaluations recorded since, not counting the first.
        begun: `eval()` was called, and no forward has followed yet.
    """

    def __init__(self) -> None:
        self.forwards = -1
        self.times = 0
        self.begun = False


class Evaluation(Watcher):
    """Digests what is evaluated.

    Attributes:
        evaluated, in_parts: by model, its evaluations as a whole, and those of its parts.
        pending: records of digests that are on their way; meanwhile `settling` is enabled.
        handle: of the global forward hook, None while nothing waits for it.
        models: models in evaluation mode whose next forward is recorded; `parts` submodules that
            were put there on their own.
        forwards: subscription to forwards of wrappers, which end the wait.
    """

    lost = "drift at evaluation"
    after = (ReplicaDigests,)

    def __init__(self) -> None:
        self.evaluated: defaultdict[int, Evaluated] = defaultdict(Evaluated)
        self.in_parts: defaultdict[int, Evaluated] = defaultdict(Evaluated)
        self.pending: Arrivals[Callable[[], None]] = Arrivals()
        self.settling = Subscriptions()
        self.handle: Any = None
        self.models: set[Model] = set()
        self.parts: list[tuple[weakref.ref[Any], Model]] = []
        self.forwards = Subscriptions()

    def install(self) -> None:
        import torch.nn

        self.around(torch.nn.Module, "eval", before=self._eval_called)
        on_restore(self._remove)

    def _eval_called(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        import torch

        module = args[0]
        for model in WrappedModels.current.live():
            inner = model.inner()
            if inner is None:
                continue
            whole = module is inner or module is model.ddp()
            if not (whole or module._modules):
                continue  # a layer, most likely frozen
            parts = list(inner.modules())
            if not (whole or any(module is part for part in parts)):
                continue
            if whole:
                self.evaluated[model.number].begun = True
            if compiling() or any(
                hasattr(m, "_orig_mod") or isinstance(m, torch.jit.ScriptModule) for m in parts
            ):
                return  # a global hook would make torch.compile compile it again
            if whole:
                self.models.add(model)
            elif not any(part() is module for part, _ in self.parts):
                self.parts.append((weakref.ref(module), model))
            if self.handle is None:
                register = torch.nn.modules.module.register_module_forward_pre_hook
                self.handle = register(shielded("evaluation", self._called, self.lost))
                self.forwards.enable()

    def _called(self, module: Any, args: Any) -> None:
        import torch

        if module.training or torch.is_grad_enabled() or Forwards.current.running():
            return
        model = next((m for m in self.models if m.inner() is module), None)
        part = next((p for p in self.parts if p[0]() is module), None)
        if model is not None:
            guarded("evaluation", partial(self._model_called, model=model), lost=self.lost)
        elif part is not None:
            called = partial(self._part_called, module=module, part=part)
            guarded("evaluation", called, lost=self.lost)

    def _part_called(
        self, recorder: Recorder, module: Any, part: tuple[weakref.ref[Any], Model]
    ) -> None:
        self.parts[:] = (p for p in self.parts if p is not part)
        self._record_part(recorder, module, part[1], recorder.site())
        self._remove_if_idle()

    def _record_part(self, recorder: Recorder, module: Any, model: Model, site: int) -> None:
        """Digest the buffers of a part that is evaluated; other parts are still in training."""
        known = self.in_parts[model.number]
        if known.forwards != model.forwards:
            often = model.forwards - max(0, known.forwards) < RARELY
            known.forwards, known.times = model.forwards, AGAIN if often else 0
        if known.times >= AGAIN:
            return
        key, known.times = AGAIN * model.forwards + known.times, known.times + 1
        own = {id(buffer) for buffer in module.buffers()}
        buffers = [b if id(b) in own else None for b in replica_digests.buffers(model)]
        self._digest(recorder, model, key, buffers, kind="buffers", point="part", site=site)
        self._emit()

    def _model_called(self, recorder: Recorder, model: Model) -> None:
        self._stop_waiting_for(model)
        self._record_evaluation(recorder, model, recorder.site())

    @on(lifecycle.trial_ends)
    def _trial_ends(self, recorder: Recorder, forward: Forward) -> None:
        if not (forward.grad_enabled or forward.error is not None or forward.wrapper.training):
            self._record_evaluation(recorder, forward.model, forward.site)

    def _record_evaluation(self, recorder: Recorder, model: Model, site: int) -> None:
        """Digest a model at its first forward without gradients after training.

        Later evaluations without training in between are recorded if `eval()` was called again, up
        to `AGAIN` times: other weights may have been loaded by then."""
        known = self.evaluated[model.number]
        begun, known.begun = known.begun, False
        if known.forwards != model.forwards:
            known.forwards, known.times = model.forwards, 0
            ReplicaDigests.current.look_whole(model)
        elif not begun or known.times == AGAIN - 1:
            return
        else:
            known.times += 1
        parameters = [ref() for ref in model.parameters]
        kinds = {
            "parameters": [None if i in model.ignored else p for i, p in enumerate(parameters)],
            "buffers": replica_digests.buffers(model),
        }
        point, key = "again", AGAIN * model.forwards + known.times
        if not known.times:
            point, key = "eval", model.forwards
        for kind, tensors in kinds.items():
            self._digest(recorder, model, key, tensors, kind=kind, point=point, site=site)
        self._emit()

    def _digest(
        self, recorder: Recorder, model: Model, key: int, tensors: list[Any], **where: Any
    ) -> None:
        waiting = replica_digests.digest(recorder, tensors)
        if waiting is not None:
            rows, step = [Row(key, 1, model.synced_backwards, waiting)], recorder.step
            write = partial(replica_digests.write, recorder, rows, model.number, -1, step=step)
            self.pending.add(partial(write, **where), waiting)

    def _emit(self, *, wait: bool = False) -> None:
        for write, _ in self.pending.take(wait=wait):
            write()
        self.settling.enable(bool(self.pending))

    @on(lifecycle.step_begins, during="settling")
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        self._emit()

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self._emit(wait=True)

    @on(lifecycle.forward_begins, during="forwards")
    def _forward_begins(self, recorder: Recorder, forward: Forward) -> None:
        self._stop_waiting_for(forward.model)

    def _stop_waiting_for(self, model: Model) -> None:
        self.models.discard(model)
        self.parts[:] = (p for p in self.parts if p[1] is not model)
        self._remove_if_idle()

    def _remove_if_idle(self) -> None:
        if not (self.models or self.parts):
            self._remove()

    def _remove(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.remove()
            self.forwards.disable()
