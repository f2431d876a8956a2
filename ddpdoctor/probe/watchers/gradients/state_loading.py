"""When are weights, optimizer and scheduler states loaded or saved, and at which line?

DDP makes weights equal at the wrap; what is loaded afterwards, or into an optimizer or a model
without a wrapper, only the program can make equal. After each load the whole wrapped model is
digested at the next step.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import weakref
from collections import Counter
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from msgspec.structs import replace

from ....events import CALLERS, Loaded, NamesMissed, Place, StateTaken
from ...recording.names_in_frames import named
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...source.call_resolver import Found, places_of
from ...source.parameter_writes import update_in_frames
from ...training import lifecycle
from ...training.optimizers import Optimizers
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from ..manual_sync.exchanges import Exchanges
from ..manual_sync.unwrapped import optimizers_of
from .limits import EARLY_LOADS, LOADS_EMITTED, LOADS_SEARCHED
from .replica_digests import ReplicaDigests

PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What wrappers put before, or into, the names of a model."""


class MissedNames(Watcher):
    """
    Attributes:
        modules: those into which a state was loaded that has the names of a wrapper, by number.
        emitted: events recorded.
    """

    lost = "states that are loaded by other names"

    def __init__(self) -> None:
        self.modules: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.emitted = 0

    def install(self) -> None:
        import torch.nn

        self.around(torch.nn.Module, "load_state_dict", before=self._loads, after=self._loaded)

    def _loads(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        state = args[1] if len(args) > 1 else kwargs.get("state_dict")
        return args[0], state, recorder.site()

    def _loaded(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        missing = getattr(result, "missing_keys", None)
        if error is not None or missing is None or self.emitted >= LOADS_EMITTED:
            return
        module, state, site = token
        given = len(state) if isinstance(state, dict) else -1
        found = _prefix(missing, result.unexpected_keys) if missing else None
        if found is None and missing and given == len(result.unexpected_keys):
            found = "", False, len(missing)
        if found is None and module not in self.modules:
            return
        prefix, extra, missed = found or ("", False, 0)
        self.emitted += 1
        recorder.emit(
            NamesMissed(
                at=time.monotonic(),
                module=self.modules.setdefault(module, len(self.modules)),
                kind=type(module).__name__,
                missed=missed,
                of=sum(1 for _ in module.named_parameters()),
                prefix=prefix,
                extra=extra,
                step=recorder.step,
                site=site,
                given=given,
            )
        )


def _prefix(missing: list[str], unexpected: list[str]) -> tuple[str, bool, int] | None:
    """The prefix that tells missing names from unexpected ones, whether these have it, and of how
    many names; None where that explains fewer than half of the missing ones."""
    for prefix in PREFIXES:
        for extra, longer, shorter in ((True, unexpected, missing), (False, missing, unexpected)):
            plain = {name.replace(prefix, "") for name in longer if prefix in name}
            missed = len(plain.intersection(shorter))
            if 2 * missed > len(missing):
                return prefix, extra, missed
    return None


@dataclass(frozen=True)
class Load:
    """A load into something that no wrapper is known to train.

    Attributes:
        event: without the model, or the optimizer.
        into: the module, or the optimizer.
        exchanged: what was exchanged before it, see `Exchanges.mark`.
    """

    event: Loaded
    into: weakref.ref[Any]
    exchanged: tuple[int, int]

    @property
    def parameters(self) -> set[int]:
        into = self.into()
        return set() if into is None else _parameter_ids(into)


class StateLoading(Watcher):
    """
    Attributes:
        depth, saving: nesting of `load_state_dict` and `state_dict` calls; modules call those of
            their children.
        emitted: loads recorded; searched: those of which the source was searched.
        taken: calls of `state_dict`, by line.
        early: loads before the model was wrapped, or trained without a wrapper. The wrap makes
            weights equal but not the optimizer's state.
        places: of loads, by the lines that led to them.
    """

    lost = "loads of weights and optimizer states"

    def __init__(self) -> None:
        self.depth = 0
        self.emitted = self.searched = 0
        self.saving = 0
        self.taken: Counter[int] = Counter()
        self.early: list[Load] = []
        self.places: dict[tuple[tuple[CodeType, int], ...], tuple[Place, ...]] = {}

    def install(self) -> None:
        import torch.amp
        import torch.nn
        from torch.optim import Optimizer, lr_scheduler

        self.depth = self.emitted = self.saving = self.searched = 0
        self.taken = Counter()
        self.early = []
        self.places = {}
        self.around(
            torch.nn.Module, "load_state_dict", before=self._load_module, after=self._load_ends
        )
        self.around(
            torch.nn.Module,
            "state_dict",
            before=self._state_dict_begins,
            after=self._state_dict_ends,
            lost="checkpoints",
        )
        self.around(
            Optimizer, "load_state_dict", before=self._load_optimizer, after=self._load_ends
        )
        scaler = torch.amp.GradScaler
        self.around(scaler, "load_state_dict", before=self._load_scaler, after=self._load_ends)
        for kind in vars(lr_scheduler).values():
            own = isinstance(kind, type) and kind is not Optimizer  # `lr_scheduler` imports it
            if own and "load_state_dict" in vars(kind):
                self.around(
                    kind, "load_state_dict", before=self._load_scheduler, after=self._load_ends
                )

    def _load_module(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        self.depth += 1
        if self.depth > 1:
            return None
        owners, fields = _owners(args[0]), {}
        if owners:
            assigned = bool(args[3] if len(args) > 3 else kwargs.get("assign", False))
            state = args[1] if len(args) > 1 else kwargs.get("state_dict")
            fields = {
                "assigned": assigned,
                "own": _is_own(state, args[0]),
                "update": self._update(recorder, args[0], state),
            }
        return "weights", owners, recorder.site(), fields, args[0]

    def _update(self, recorder: Recorder, module: Any, state: Any) -> tuple[Place, ...]:
        """The line that writes to the module from which weights are loaded during training."""
        if not recorder.step or self.searched >= LOADS_SEARCHED or not isinstance(state, dict):
            return ()
        self.searched += 1
        frame, kind = sys._getframe(1), recorder.sites.kind
        source = _holder(state, module, frame, recorder)
        found = None
        if source is not None:
            found = update_in_frames(frame, lambda code: kind(code) == "user", source)
        return () if found is None else places_of(recorder.sites, found)

    def _load_optimizer(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        self.depth += 1
        return None if self.depth > 1 else self._for_optimizer(recorder, "optimizer", args[0])

    def _load_scheduler(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        self.depth += 1
        optimizer = getattr(args[0], "optimizer", None)
        if self.depth > 1 or optimizer is None:
            return None
        return self._for_optimizer(recorder, "scheduler", optimizer)

    def _for_optimizer(self, recorder: Recorder, what: str, optimizer: Any) -> Any:
        made = {"made": Optimizers.current.made_at(optimizer)} if what == "optimizer" else {}
        return what, _owners(optimizer), recorder.site(), made, optimizer

    def _load_scaler(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        self.depth += 1
        return None if self.depth > 1 else ("scaler", [None], recorder.site(), {}, None)

    @on(lifecycle.wrapped)
    def _wrapped(self, recorder: Recorder, model: Model) -> None:
        mine = {id(p) for ref in model.parameters if (p := ref()) is not None}
        for load in self.early:
            if load.event.what != "weights" and mine & load.parameters:
                recorder.emit(replace(load.event, model=model.number))

    @on(lifecycle.unwrapped)
    def _unwrapped(self, recorder: Recorder, trained: tuple[int, list[Any]]) -> None:
        optimizer, parameters = trained
        mine = {id(p) for p in parameters}
        for load in self.early:
            sent = load.event.what == "weights" and Exchanges.current.all_carried_since(
                load.exchanged, parameters
            )
            if not sent and mine & load.parameters:
                recorder.emit(replace(load.event, optimizer=optimizer))

    def _load_ends(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        self.depth = max(0, self.depth - 1)
        if token is None or error is not None:
            return
        what, owners, site, fields, into = token
        at, places = time.monotonic(), self._places(recorder)
        event = Loaded(
            at=at, what=what, model=-1, step=recorder.step, site=site, places=places, **fields
        )
        trained = [] if owners else optimizers_of(_parameter_ids(into))
        if not (owners or trained) and len(self.early) < EARLY_LOADS:
            self.early.append(Load(event, weakref.ref(into), Exchanges.current.mark()))
        for model in owners:
            if model is not None:
                ReplicaDigests.current.look_whole(model)
                event = replace(event, model=model.number)
            self._emit(recorder, event)
        for optimizer in trained:
            self._emit(recorder, replace(event, optimizer=optimizer))

    def _emit(self, recorder: Recorder, event: Loaded) -> None:
        self.emitted += 1
        if self.emitted <= LOADS_EMITTED:
            recorder.emit(event)

    def _places(self, recorder: Recorder) -> tuple[Place, ...]:
        """The line that loads and the calls that lead to it."""
        lines = tuple(recorder.sites.user_lines(sys._getframe(1), CALLERS))
        if lines and lines not in self.places:
            first, *through = (Found(*line) for line in lines)
            found = dataclasses.replace(first, through=tuple(through))
            self.places[lines] = places_of(recorder.sites, found)
        return self.places.get(lines, ())

    def _state_dict_begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        self.saving += 1  # modules ask their children
        if self.saving > 1 or not WrappedModels.current.count():
            return
        for model in WrappedModels.current.live():
            if args[0] is model.inner() or (model.wrapper and args[0] is model.wrapper()):
                ReplicaDigests.current.look_whole(model)
                site = recorder.site()
                call, self.taken[site] = self.taken[site], self.taken[site] + 1
                if call < 20 or call & (call - 1) == 0:
                    recorder.emit(
                        StateTaken(
                            at=time.monotonic(),
                            model=model.number,
                            step=recorder.step,
                            forwards=model.forwards,
                            site=site,
                            call=call,
                        )
                    )

    def _state_dict_ends(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        self.saving = max(0, self.saving - 1)


def _parameter_ids(into: Any) -> set[int]:
    """Identities of the parameters of an optimizer, or of a module."""
    if hasattr(into, "param_groups"):
        return {id(p) for group in into.param_groups for p in group["params"]}
    return {id(p) for p in into.parameters()}


def _is_own(state: Any, module: Any) -> bool:
    """Whether the tensors of a state are those of the module."""
    if not isinstance(state, dict):
        return False
    given = {t.data_ptr() for t in state.values() if type(t) in _tensors()} - {0}
    return bool(given) and given <= {
        p.data_ptr() for p in (*module.parameters(), *module.buffers())
    }


def _tensors() -> tuple[type, ...]:
    import torch

    return torch.Tensor, torch.nn.Parameter


def _holder(state: dict[str, Any], target: Any, frame: FrameType, recorder: Recorder) -> Any:
    """The module that the running code has a name for and whose parameters a state is, not a copy
    of them; None for no other than the one that it is loaded into."""
    import torch

    tensors = _tensors()
    storages = {t.data_ptr() for t in state.values() if type(t) in tensors} - {0}
    for one in named(frame, recorder.sites):
        if storages and issubclass(type(one.value), torch.nn.Module) and one.value is not target:
            first: Any = next(one.value.parameters(), None)
            if type(first) in tensors and first.data_ptr() in storages:
                apart = all(part is not target for part in one.value.modules())
                return one.value if apart else None
    return None


def _owners(into: Any) -> list[Model]:
    """The wrapped models that hold parameters of an optimizer, or of a module."""
    if not WrappedModels.current.count():
        return []
    parameters = _parameter_ids(into)
    return [
        model
        for model in WrappedModels.current.live()
        if any((p := ref()) is not None and id(p) in parameters for ref in model.parameters)
    ]
