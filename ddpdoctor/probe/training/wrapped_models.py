"""Wraps the constructor of DistributedDataParallel: records what it was given, and keeps the list
of wrapped models."""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
import weakref
from typing import Any

from msgspec import structs

from ...events import Submodule, Tensor, Wrapped
from ..collectives.process_groups import ProcessGroups
from ..recording.recorder import Recorder
from ..recording.torch_compat import ignored_by_ddp
from ..recording.watcher import Args, Error, Kwargs, Watcher
from ..recording.weak_references import Reference, WeakIdentityMap
from ..source.call_resolver import Found, setting_in_frames
from ..tensors.shared_memory import shared_memory
from . import lifecycle
from .module_origins import ModuleOrigins
from .tracked_model import Model


class WrappedModels(Watcher):
    """The wrapped models of this process.

    Attributes:
        all: in order of wrapping.
        live: those whose wrapper exists; `gone`: whose wrapper is gone. Without superseded ones.
    """

    lost = "models wrapped in DistributedDataParallel"

    def __init__(self) -> None:
        self.all: list[Model] = []
        self._live: list[Model] = []
        self.gone: list[Model] = []
        self.by_wrapper: WeakIdentityMap[Model] = WeakIdentityMap()

    def live(self) -> list[Model]:
        """Models whose wrapper exists, without superseded ones."""
        for model in self._live:
            if model.wrapper is None or model.wrapper() is None:
                self._refresh()
                break
        return self._live

    def _refresh(self) -> None:
        """Fill `live` and `gone` again."""
        known = [m for m in self.all if m.wrapper is not None and not m.superseded]
        self._live = [m for m in known if m.ddp() is not None]
        self.gone = [m for m in known if m.ddp() is None]

    def supersede(self, model: Model) -> None:
        """Mark other wrappers of a module as superseded: this one was just created or called, and
        the others may live on unused."""
        for other in self.all:
            other.superseded |= other.inner() is model.inner()
        model.superseded = False
        self._refresh()

    def count(self) -> int:
        """How many models were wrapped so far."""
        return len(self.all)

    def discarded(self) -> list[Model]:
        """Models that are alive, but whose wrapper is gone, with no other wrapper around them."""
        current = self.live()
        if not self.gone:
            return []
        taken = {id(m.inner()) for m in current}
        return [m for m in self.gone if m.inner() is not None and id(m.inner()) not in taken]

    def covered(self) -> set[int]:
        """Ids of all parameters that a wrapper was given, or that a wrapped model has by now."""
        given = {id(p) for m in self.all for ref in m.parameters if (p := ref()) is not None}
        now = {id(p) for m in self.live() if (i := m.inner()) is not None for p in i.parameters()}
        return given | now

    def of_wrapper(self, wrapper: Any) -> Model | None:
        """The model of a DDP object; None if its wrapping was not seen."""
        return self.by_wrapper.get(wrapper)

    def install(self) -> None:
        from torch.nn.parallel.distributed import DistributedDataParallel

        self.around(DistributedDataParallel, "__init__", before=self._wrapping, after=self._wrapped)
        self.around(DistributedDataParallel, "_set_static_graph", before=_owner, after=self._static)

    def _wrapping(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        """Record what is about to be wrapped; before the constructor, which may hang or abort."""
        given = arguments(args, kwargs)
        module = given.get("module")
        if module is None:
            return None
        return self._emit(recorder, module, given), weakref.ref(args[0])

    def _emit(
        self, recorder: Recorder, module: Any, given: dict[str, Any], *, adopted: bool = False
    ) -> Model:
        ignored = ignored_by_ddp(module)
        named = list(module.named_parameters())
        expected = [i for i, (n, p) in enumerate(named) if p.requires_grad and n not in ignored]
        model = Model(len(self.all), module, [p for _, p in named], expected)
        model.ignored = frozenset(i for i, (n, _) in enumerate(named) if n in ignored)
        model.names = [n for n, _ in named]
        model.buffers = {n: tuple(b.shape) for n, b in module.named_buffers(remove_duplicate=False)}
        model.trainable = [p.requires_grad for _, p in named]
        model.group = ProcessGroups.current.number_of(_group(given))
        frame = recorder.sites.user_frame(sys._getframe(1))
        model.made_at = None if frame is None or adopted else Found(frame.f_code, frame.f_lineno)
        self.all.append(model)
        recorder.emit(
            Wrapped(
                at=time.monotonic(),
                model=model.number,
                wrapper="DistributedDataParallel",
                kind=type(module).__name__,
                group=model.group,
                site=recorder.site(),
                parameters=_tensors(module, named, ignored),
                buffers=_buffers(module, ignored),
                modules=_submodules(module),
                options={
                    k: v
                    for k, v in given.items()
                    if isinstance(v, (bool, int, float, str)) or v is None
                },
                device=str(named[0][1].device) if named else "",
                frozen_site=-1 if adopted or all(model.trainable) else _frozen_site(recorder),
                adopted=adopted,
                forward=_has_forward(module),
                by="" if adopted else recorder.sites.library_called(),
                memory=shared_memory(p for _, p in named),
            )
        )
        return model

    def _wrapped(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if token is None or error is not None:
            return
        model, reference = token
        if (wrapper := reference()) is not None:
            self._complete(recorder, model, wrapper)

    def _static(self, recorder: Recorder, wrapper: Any, result: Any, error: Error) -> None:
        """A program may call that after the constructor, as before there was an option."""
        if error is None and (model := self.by_wrapper.get(wrapper)) is not None:
            model.static_graph = model.rebuilds = True

    def _complete(self, recorder: Recorder, model: Model, wrapper: Any) -> None:
        model.wrapper = weakref.ref(wrapper)
        _localized(model, wrapper.module)
        self.supersede(model)
        model.find_unused = bool(wrapper.find_unused_parameters)
        model.static_graph = bool(wrapper.static_graph)
        model.bucket_view = bool(wrapper.gradient_as_bucket_view)
        model.rebuilds = model.static_graph or not model.find_unused
        self.by_wrapper[wrapper] = model
        lifecycle.wrapped.fire(recorder, model)

    def adopted(self, recorder: Recorder, wrapper: Any) -> Model:
        """Record a model that was wrapped before torch was; the site is the current line."""
        known = (
            "process_group", "find_unused_parameters", "static_graph", "gradient_as_bucket_view",
            "broadcast_buffers",
        )  # fmt: skip
        given = {name: getattr(wrapper, name) for name in known if hasattr(wrapper, name)}
        model = self._emit(recorder, wrapper.module, given, adopted=True)
        self._complete(recorder, model, wrapper)
        return model


def _owner(recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
    return args[0]


def _localized(model: Model, module: Any) -> None:
    """Take note of the parameters that DDP's constructor put in the place of DTensors (`DDP(...,
    device_mesh=)`): these are the ones that it averages."""
    now = dict(module.named_parameters())
    for position, name in enumerate(model.names):
        parameter = now.get(name)
        if hasattr(parameter, "_st_info"):
            model.parameters[position] = Reference(parameter)


def _has_forward(module: Any) -> bool:
    import torch.nn

    own = getattr(type(module), "forward", None)
    return own is not torch.nn.Module.forward or "forward" in vars(module)


def _frozen_site(recorder: Recorder) -> int:
    found = setting_in_frames(
        sys._getframe(1), lambda code: recorder.sites.kind(code) == "user", "requires_grad", False
    )
    return recorder.sites.number(found.code, found.line) if found else -1


def arguments(args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The arguments of DDP's constructor by name, with defaults."""
    from torch.nn.parallel.distributed import DistributedDataParallel

    given = dict(zip(("self", "module"), args, strict=False)) | kwargs
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(DistributedDataParallel.__init__)
        bound = signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
    return {k: v for k, v in given.items() if k != "self"}


def _group(given: dict[str, Any]) -> Any:
    mesh = given.get("device_mesh")
    if given.get("process_group") is None and mesh is not None:
        return mesh.get_group(mesh_dim=0)
    return given.get("process_group")


def _submodules(module: Any) -> tuple[Submodule, ...]:
    """The submodules that have parameters, themselves or in submodules of theirs."""
    holders = {""}
    listed = list(module.named_modules())
    for name, part in listed:
        if part._parameters:
            words = name.split(".")
            holders.update(".".join(words[:n]) for n in range(1, len(words) + 1))
    return tuple(
        Submodule(name=name, kind=type(part).__name__, site=ModuleOrigins.current.origin_site(part))
        for name, part in listed
        if name in holders
    )


def _tensors(
    module: Any, named: list[tuple[str, Any]], ignored: frozenset[str]
) -> tuple[Tensor, ...]:
    owners = dict(module.named_modules())
    tensors = []
    for name, parameter in named:
        owner, _, last = name.rpartition(".")
        site = (
            ModuleOrigins.current.parameter_site(owners.get(owner), last) if owner in owners else -1
        )
        tensors.append(_tensor(name, parameter, parameter.requires_grad, name in ignored, site))
    return tuple(tensors)


def _buffers(module: Any, ignored: frozenset[str]) -> tuple[Tensor, ...]:
    left_out = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    return tuple(
        structs.replace(_tensor(n, b, False, n in ignored), kept=n not in left_out)
        for n, b in module.named_buffers()
    )


def _tensor(name: str, value: Any, trainable: bool, ignored: bool, site: int = -1) -> Tensor:
    return Tensor(
        name=name,
        shape=tuple(int(n) for n in value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        trainable=trainable,
        ignored=ignored,
        site=site,
    )


def buffer_of(name: str, buffer: Any) -> Tensor:
    """The record of a buffer."""
    return _tensor(name, buffer, False, False)


def tensor_of(name: str, parameter: Any) -> Tensor:
    """The record of a parameter."""
    return _tensor(name, parameter, bool(parameter.requires_grad), False)


def evaluating() -> bool:
    """Whether the program seems to evaluate now: gradients are off, or every model is in evaluation
    mode."""
    import torch

    if not torch.is_grad_enabled():
        return True
    training = [
        m.training for model in WrappedModels.current.live() if (m := model.inner()) is not None
    ]
    return bool(training) and not any(training)
