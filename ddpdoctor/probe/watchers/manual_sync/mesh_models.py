"""What does each rank hold of a model of DTensors, or of `FullyShardedDataParallel`, and do ranks
with the same part hold it equally?

Before some steps of optimizers that hold DTensors, what this rank holds of each parameter and of
its gradient is digested.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from msgspec.structs import replace

from ....events import MeshDigests, MeshModel
from ....events.drift import full
from ....events.pack import pack
from ...recording import hooks
from ...recording.devices import hands_off
from ...recording.import_hooks import when_imported
from ...recording.recorder import Recorder
from ...recording.torch_compat import (
    FULLY_SHARDED,
    group_ranks,
    placements,
    replicated_over,
    root_mesh,
    shard,
    sharding_mesh,
)
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...recording.weak_references import Reference
from ...tensors.digests import some_values, sums
from ...tensors.pending_digests import Arrivals, Waiting
from ...training import lifecycle
from ...training.module_origins import ModuleOrigins
from ...training.records import Step
from ...training.wrapped_models import WrappedModels
from .limits import MESH_ELEMENTS, MESH_PARAMETERS
from .parallelism import Parallelism


class _Flat(NamedTuple):
    """A tensor of `FullyShardedDataParallel` of which several ranks hold the same part.

    Attributes:
        module: what was wrapped.
        name: its first parameter in the tensor.
        replicas: the ranks that hold the same part; shards: those that hold the other parts.
    """

    tensor: Reference
    module: Reference
    name: str
    replicas: tuple[int, ...]
    shards: tuple[int, ...]

    def mesh(self, rank: int) -> list[int]:
        """All ranks, a row for each replica. Groups are regular, as those of a mesh are."""
        return [r - rank + s for r in self.replicas for s in self.shards]


class MeshModels(Watcher):
    """
    Attributes:
        known: by number of the optimizer, its parameters; empty where there is nothing to compare.
        flat: the tensors of `FullyShardedDataParallel` that several ranks hold alike.
    """

    lost = "models of DTensors"

    def __init__(self) -> None:
        self.known: dict[int, list[Reference]] = {}
        self.waiting: Arrivals[MeshDigests] = Arrivals()
        self.flat: list[_Flat] = []

    def install(self) -> None:
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        self.around((c10d, dist), "destroy_process_group", before=self._destroying)
        when_imported(FULLY_SHARDED, self._watch, lost=self.lost)

    def _watch(self, module: Any) -> None:
        wrapper = module.FullyShardedDataParallel
        self.around(wrapper, "__init__", before=_wrapping, after=self._wrapped)

    def _wrapped(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        wrapper, module = token
        tensor = None if error is not None else wrapper._flat_param
        if tensor is None:
            return
        parts = group_ranks(wrapper.process_group)
        replicas, shards = replicated_over(wrapper, parts)
        if len(replicas) > 1 and module is not None:
            name = next(iter(getattr(tensor, "_fqns", ())), "")
            self.flat.append(_Flat(Reference(tensor), Reference(module), name, replicas, shards))

    @on(lifecycle.step_begins, fast_path=False)
    @on(lifecycle.fast_step_due)
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        number = step.known.number
        if number not in self.known:
            self.known[number] = self._begin(recorder, step)
        if not self.known[number]:
            return
        self._write(recorder)
        if full(step.number):
            self._digest(recorder, number, step.number)
            self._write(recorder)

    def _begin(self, recorder: Recorder, step: Step) -> list[Reference]:
        """Record the model of an optimizer that takes its first step."""
        optimizer = step.optimizer()
        groups = optimizer.param_groups if optimizer is not None else ()
        every = [p for group in groups for p in group["params"]]
        meshes = [m for p in every if (m := placements(p)[0]) is not None]
        if not meshes and self.flat:
            return self._begin_flat(recorder, step, every)
        if not meshes or len(every) > MESH_PARAMETERS:
            return []
        mesh = max(map(root_mesh, meshes), key=lambda m: int(m.size()))
        names, roots = ModuleOrigins.current.named_roots(every)
        for model in WrappedModels.current.live():
            for name, reference in zip(model.names, model.parameters, strict=True):
                names[id(reference())] = name
        root = roots[0] if roots else None
        if (wrapped := WrappedModels.current.of_wrapper(root)) is not None:
            root = wrapped.inner()
        placed = [_placed(p, mesh) for p in every]
        # Where each rank holds another part of every parameter, nothing can be compared.
        if all("r" not in p and "-" not in p for p in placed):
            return []
        dims = [name or f"dim {n}" for n, name in enumerate(_dims(mesh))]
        apart = {n for p in placed for n, how in enumerate(p) if how == "s"}
        recorder.emit(
            MeshModel(
                at=time.monotonic(),
                optimizer=step.known.number,
                kind=type(root).__name__.removeprefix("FSDP") if root is not None else "",
                site=ModuleOrigins.current.origin_site(root) if root is not None else -1,
                dims=tuple(dims),
                sizes=tuple(mesh.mesh.shape),
                ranks=tuple(mesh.mesh.flatten().tolist()),
                names=tuple(names.get(id(p), f"parameter {n}") for n, p in enumerate(every)),
                shapes=tuple(tuple(shard(p).shape) for p in every),
                placed=tuple(placed),
                split=tuple(dims[n] for n in sorted(apart - _fully_sharded(mesh))),
                parted=Parallelism.current.sends,
                step_site=step.site,
            ),
            vital=True,
        )
        return [Reference(p) for p in every]

    def _begin_flat(self, recorder: Recorder, step: Step, held: list[Any]) -> list[Reference]:
        """The same of `FullyShardedDataParallel`, if the optimizer holds what is in its tensors."""
        alive = [(f, t) for f in self.flat if (t := f.tensor()) is not None]
        within = {id(p) for _, t in alive for p in (t, *(getattr(t, "_params", None) or ()))}
        groups = {(f.replicas, f.shards) for f, _ in alive}
        if len(groups) != 1 or not {id(p) for p in held} <= within:
            return []
        outermost, _ = alive[-1]  # its constructor wraps the others first
        root = outermost.module()
        import torch.distributed as dist

        hybrid = len(outermost.shards) > 1
        paths = {id(m): n for n, m in root.named_modules()} if root is not None else {}
        recorder.emit(
            MeshModel(
                at=time.monotonic(),
                optimizer=step.known.number,
                kind=type(root).__name__ if root is not None else "",
                site=ModuleOrigins.current.origin_site(root) if root is not None else -1,
                dims=("replicate", "shard") if hybrid else ("replicate",),
                sizes=(len(outermost.replicas), len(outermost.shards))[: 1 + hybrid],
                ranks=tuple(outermost.mesh(dist.get_rank())),
                names=tuple(_full_name(paths.get(id(f.module()), ""), f.name) for f, _ in alive),
                shapes=tuple(tuple(t.shape) for _, t in alive),
                placed=("rs" if hybrid else "r",) * len(alive),
                split=(),
                parted=Parallelism.current.sends,
                step_site=step.site,
                flat=True,
            ),
            vital=True,
        )
        return [f.tensor for f, _ in alive]

    def _digest(self, recorder: Recorder, number: int, step: int) -> None:
        every = [p for reference in self.known[number] if (p := reference()) is not None]
        if hands_off() or len(every) < len(self.known[number]):
            return
        held = [shard(p.detach()) for p in every]
        elements = sum(t.numel() for t in held)
        if elements > MESH_ELEMENTS and step >= 10 and not recorder.affordable():
            return
        gradients = [None if p.grad is None else shard(p.grad) for p in every]
        event = MeshDigests(
            at=time.monotonic(),
            optimizer=number,
            step=step,
            gradients="",
            values="",
            samples=tuple(tuple(some_values([t])) for t in held),
        )
        self.waiting.add(event, Waiting(sums(gradients)[0]), Waiting(sums(held)[0]))

    def _write(self, recorder: Recorder, *, wait: bool = False) -> None:
        for event, (gradients, values) in self.waiting.take(wait=wait):
            recorder.emit(replace(event, gradients=pack(gradients), values=pack(values)))

    def _destroying(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        if not (args or kwargs.get("group")):
            self._finish(recorder)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self._finish(recorder)

    def _finish(self, recorder: Recorder) -> None:
        """Digest a last time, and write what is pending."""
        for number, known in self.known.items():
            if known:
                self._digest(recorder, number, -1)
        self._write(recorder, wait=True)
        self.known.clear()


def _full_name(path: str, name: str) -> str:
    return f"{path}.{name}".replace("_fsdp_wrapped_module.", "").lstrip(".")


def _wrapping(recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
    return args[0], args[1] if len(args) > 1 else kwargs.get("module")


def _dims(mesh: Any) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ("",) * mesh.ndim


def _varying(mesh: Any, ranks: list[int]) -> set[int]:
    """The dimensions of a mesh in which ranks have different coordinates."""
    places = [(mesh.mesh == rank).nonzero().flatten().tolist() for rank in ranks]
    by_dim = zip(*filter(None, places), strict=False)
    return {n for n, coordinates in enumerate(by_dim) if len({*coordinates}) > 1}


def _placed(parameter: Any, mesh: Any) -> str:
    """How a parameter lies on the whole mesh, see `MeshModel.placed`."""
    placed = ["-"] * mesh.ndim
    own, places = placements(parameter)
    for n, placement in enumerate(places):
        for dim in _varying(mesh, _line(own, n)):
            placed[dim] = "r" if placement.is_replicate() else "s"
    return "".join(placed)


def _line(mesh: Any, dim: int) -> list[int]:
    """The ranks of a mesh that differ from its first one in one dimension only."""
    first: list[Any] = [0] * mesh.ndim
    first[dim] = slice(None)
    return mesh.mesh[tuple(first)].tolist()


def _fully_sharded(mesh: Any) -> set[int]:
    """The dimensions of a mesh over which `fully_shard` shards some module."""
    found: set[int] = set()
    for module in ModuleOrigins.current.living_modules():
        own = sharding_mesh(module)
        if own is not None:
            found |= _varying(mesh, own.mesh.flatten().tolist())
    return found
