"""Every private interface of torch that the probe uses, and what is lost without it.

| interface | seen in | without it |
|---|---|---|
| `ProcessGroup._get_sequence_number_for_group` | 2.4-2.15 | whether a backward communicated |
| `torch.distributed.distributed_c10d._world` | 2.4-2.15 | the order in which ranks touch files |
| `torch._C._cuda_hasPrimaryContext` | 2.4-2.15 | which call left a context on another GPU |
| `ProcessGroup.group_name` | 2.4-2.15 | groups are numbered by order only |
| `distributed_c10d._world.pg_map` | 2.4-2.15 | groups made before the doctor came |
| `DistributedDataParallel._get_ddp_logging_data` | 2.4-2.15 | which parameters made torch raise |
| `torch._C._dynamo.eval_frame.get_eval_frame_callback` | 2.6-2.13 | calls of compiled submodules |
| `torch._dynamo.eval_frame.cached_backends` | 2.13 | compiled twice: modules outside of wrappers |
| `torch._C._dynamo.eval_frame.set_code_exec_strategy` | 2.13 | slower start of compiled steps |
| `torch._C._distributed_c10d._dump_fr_trace_json` | 2.8-2.15 | DDP's own collectives in a hang |
| `torch._C._distributed_c10d._dump_nccl_trace_json` | 2.5-2.15 | the same on NCCL |
| `Optimizer._optimizer_step_pre_hooks` | 2.4-2.15 | gradients edited in a hook before the step |
| `Tensor._backward_hooks` | 2.4-2.15 | which parameters got no gradient, unless torch says it |
| `Variable._execution_engine.queue_callback` | 2.4-2.15 | which rank the others wait for |
| `DistributedDataParallel._comm_hooks` | 2.4-2.15 | whether a hook averages, and drift under it |
| `DistributedDataParallel._sync_buffers` | 2.4-2.15 | whether buffers are averaged by a hook |
| `_BaseDataLoaderIter._next_index`, `._index_sampler` | 2.4-2.15 | the indices a rank consumed |
| `LRScheduler._step_count`, `SequentialLR._schedulers`, `._milestones` | 2.13 | planned lengths |
| `FSDPModule.__subclasses__()` | 2.6-2.15 | what ranks read under `fully_shard` is not judged |
| `FSDPModule._get_fsdp_state` | 2.6-2.15 | what ranks read under HSDP; FSDP's optimizer |
| `FSDPState._root_pre_forward`, `._state_ctx` | 2.6-2.15 | what models of `fully_shard` are given |
| `FSDPParam.unsharded_accumulated_grad` | 2.6-2.13 | `fully_shard` that never reduces gradients |
| `torch.jit._builtins._find_builtin`, `._get_builtin_table` | 2.13 | scripts that save fail |
| `torch.utils.weakref` | 2.13 | tensors that the probe knows cannot be swapped |
| `SavedTensor.unpack_hook` | 2.13 | what made the first NaN; losses divided by the world size |
| `Node._sequence_nr`, `torch.autograd._get_sequence_nr` | 2.13 | NaN in a derivative: of what |
| `torch._C._len_torch_dispatch_stack`, `._pop...`, `._push...` | 2.13 | modes see the doctor |
"""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


_several: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""By group, whether it has several backends (`cpu:gloo,cuda:nccl`)."""


def sequence_number(group: Any) -> int:
    """Count of collectives and point-to-point calls issued on a group so far; -1 if unknown. torch
    counts by backend, and answers for that of the accelerator: those of a group are added up."""
    try:
        if several_backends(group):
            return sum(int(b._get_sequence_number_for_group()) for b in _backends(group))
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError, TypeError):
        return -1


def several_backends(group: Any) -> bool:
    """Whether a group has backends that count by themselves; cached."""
    several = _several.get(group)
    if several is None:
        several = _several[group] = len(_backends(group)) > 1
    return several


def sequence_of_backend(wrapper: Any) -> int:
    """`sequence_number` of a DDP object's group that has one backend; -1 if unknown."""
    try:
        number: int = wrapper.process_group._get_sequence_number_for_group()
    except (AttributeError, RuntimeError, TypeError):
        return -1
    return number


def _backends(group: Any) -> list[Any]:
    """The backends of a group, each once."""
    found: dict[int, Any] = {}
    for device in getattr(group, "_device_types", ()):
        try:
            backend = group._get_backend(device)
        except (AttributeError, RuntimeError):  # none for this device after all
            continue
        found[id(backend)] = backend
    return list(found.values())


def is_made(scheduler: Any) -> bool:
    """Whether the constructor of a learning-rate scheduler, which steps it once, is over."""
    return bool(getattr(scheduler, "_step_count", 1) > 0)


def last_in_sequence(scheduler: Any) -> tuple[Any, int]:
    """The last scheduler of a `SequentialLR`, and after how many steps it begins."""
    return scheduler._schedulers[-1], int(scheduler._milestones[-1])


FULLY_SHARDED = "torch.distributed.fsdp.fully_sharded_data_parallel"


def fully_shards() -> bool:
    """Whether `fully_shard` was applied to any module: it derives a class for each."""
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    kind = getattr(module, "FSDPModule", None)
    return kind is not None and bool(kind.__subclasses__())


def fully_sharded(module: Any) -> bool:
    """Whether `fully_shard` was applied to a module."""
    return hasattr(module, "_get_fsdp_state")


def flattens() -> bool:
    """Whether the program may use `FullyShardedDataParallel`."""
    return FULLY_SHARDED in sys.modules


def flattened(module: Any) -> bool:
    """Whether a module is a `FullyShardedDataParallel`."""
    own = sys.modules.get(FULLY_SHARDED)
    return own is not None and isinstance(module, own.FullyShardedDataParallel)


def averages_over(module: Any) -> tuple[int, ...]:
    """The ranks over which a sharded module averages its gradients; empty where it divides by
    something else, or where that is not known."""
    if flattened(module):
        group = getattr(module, "process_group", None)
        between = getattr(module, "_inter_node_pg", None)
        return group_ranks(group) if group is not None and between is None else ()
    parts = [part for part in module.modules() if fully_sharded(part)]
    groups = [group for part in parts for group in _shard_groups(part) if group is not None]
    if any(getattr(group, "gradient_divide_factor", None) is not None for group in groups):
        return ()
    mesh = next((m for part in parts if (m := sharding_mesh(part)) is not None), None)
    return () if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))


def sharding_mesh(module: Any) -> Any:
    """The mesh over which `fully_shard` shards a module's own parameters; None without any."""
    try:
        return _shard_groups(module)[0].mesh_info.mesh
    except (AttributeError, IndexError):
        return None


def root_mesh(mesh: Any) -> Any:
    """The device mesh that a mesh is a part of; itself where torch does not tell."""
    try:
        return mesh._get_root_mesh()
    except AttributeError:
        return mesh


def placements(parameter: Any) -> tuple[Any, tuple[Any, ...]]:
    """The device mesh of a parameter and its placements on it; (None, ()) for a plain tensor. Also
    of the tensor that DDP keeps in the place of a DTensor."""
    about = parameter if hasattr(parameter, "placements") else getattr(parameter, "_st_info", None)
    mesh = getattr(about, "device_mesh", None) or getattr(about, "mesh", None)
    return mesh, tuple(getattr(about, "placements", ())) if mesh is not None else ()


def shard_forwards() -> Any:
    """torch's class whose `_root_pre_forward(module, args, kwargs)` runs before each forward of a
    module that `fully_shard` was applied to; None where it is not loaded, or torch has another."""
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    kind = getattr(module, "FSDPState", None)
    return kind if hasattr(kind, "_root_pre_forward") else None


def in_sharded_forward(state: Any) -> bool:
    """Whether the forward of another sharded module is running around this one.

    Raises:
        AttributeError: in a torch that keeps this elsewhere.
    """
    return state._state_ctx.iter_forward_root is not None


def _shard_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]


def shards(module: Any) -> list[Any]:
    """torch's records of the parameters that `fully_shard` shards with a module."""
    try:
        return [shard for group in _shard_groups(module) for shard in group.fsdp_params]
    except AttributeError:
        return []


def has_unreduced_gradient(shard: Any) -> bool:
    """Whether a parameter of `fully_shard` has an unsharded gradient that was not reduced.

    Args:
        shard: torch's `FSDPParam`, see `shards`.
    """
    whole = getattr(shard, "_unsharded_param", None)
    grads = getattr(shard, "unsharded_accumulated_grad", None), getattr(whole, "grad", None)
    return any(grad is not None for grad in grads)


def may_share_inputs(parameter: Any, meshes: list[Any]) -> bool:
    """Whether a parameter is sharded in a way that may need equal inputs on several ranks, as
    tensor parallelism does.

    Args:
        meshes: those of `fully_shard`, which needs no equal inputs if it shards over all ranks.
    """
    if type(parameter).__name__ != "DTensor":
        return False
    import torch.distributed as dist

    mesh = parameter.device_mesh
    alone = mesh in meshes or (mesh.ndim == 1 and fully_shards())
    return not (alone and mesh.size() == dist.get_world_size())


def group_name(group: Any) -> str:
    """torch's name of a group, equal on all its ranks; empty for one that the program made without
    torch's functions."""
    try:
        return str(group.group_name)
    except (AttributeError, RuntimeError):
        return ""


def named_group(name: str) -> Any:
    """The group of this process with that name of torch's.

    Raises:
        RuntimeError: there is none.
    """
    import torch.distributed.distributed_c10d as c10d

    return c10d._resolve_process_group(name)  # type: ignore


def live_groups() -> list[tuple[str, Any]]:
    """(name, group) of the groups that this rank is a member of; the default group's name is
    empty."""
    import torch.distributed as dist

    try:
        world = dist.distributed_c10d._world
        default = world.default_pg
        return [("" if g is default else group_name(g), g) for g in list(world.pg_map)]
    except AttributeError:
        return []


def has_context(index: int) -> bool:
    """Whether this process has a CUDA context on a GPU; does not create one."""
    import torch

    try:
        return bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return False


def replicated_over(
    wrapper: Any, ranks: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of `FullyShardedDataParallel` with a process group of these ranks: the ranks that hold the
    same part of its parameters as this one, and those that hold the parts of one copy."""
    import torch.distributed as dist

    this = (dist.get_rank(),)
    if wrapper.sharding_strategy.name == "NO_SHARD":
        return ranks, this
    between = getattr(wrapper, "_inter_node_pg", None)
    if between is None or not wrapper.sharding_strategy.name.lstrip("_").startswith("HYBRID"):
        return this, ranks
    return group_ranks(between), ranks


def group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of the members of a group."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))


def without_gradient(message: str) -> list[int]:
    """The parameter indices, in DDP's order, in its error about an unfinished reduction."""
    found = re.search(r"indices which did not receive grad for rank \d+:([ \d]+)", message)
    return [int(word) for word in found.group(1).split()] if found else []


def ready_indices(ddp: Any) -> list[int] | None:
    """Indices, in DDP's order, of the parameters whose gradients were ready in the last backward
    that should have synchronised; None if DDP has not logged them."""
    try:
        text = ddp._get_ddp_logging_data().get("prev_iteration_grad_ready_order_indices", "")
    except (AttributeError, RuntimeError):
        return None
    numbers = [int(word) for word in str(text).replace(",", " ").split() if word.isdigit()]
    return numbers or None


class _Compiler:
    """torch.compile's frame callback as it was when a traced wrapper was entered (`now`); inside of
    hooks it is switched off, so that they must look here.

    Attributes:
        ask: returns the callback that is active.
    """

    now: Any = None

    @staticmethod
    def ask() -> Any:
        return None


compiler_in_use = _Compiler()


def uncompiled(function: Any, *, within: bool = True) -> Any:
    """A function that torch.compile does not trace; nor, with `within`, what it calls."""
    import torch

    try:
        compiler_in_use.ask = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore
    except AttributeError:
        compiler_in_use.ask = torch.compiler.is_compiling  # type: ignore[method-assign]
    return torch._disable_dynamo(function, recursive=within)  # type: ignore[attr-defined]


class _Interposed:
    """What intercepts calls of torch in this thread: torch.compile, and modes of the program.

    The attributes are torch's own functions once torch is imported, as they are called in every
    step.

    Attributes:
        compiler: returns torch.compile's frame callback, None if it is not active.
        functions, dispatches: return how many TorchFunctionModes, TorchDispatchModes are entered.
    """

    def __init__(self) -> None:
        self.compiler: Callable[[], Any] = self._look_up
        self.functions: Callable[[], int] = int
        self.dispatches: Callable[[], int] = int

    def _look_up(self) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        private = torch._C
        dynamo = getattr(private, "_dynamo", None)
        frames = getattr(dynamo, "eval_frame", None)
        self.compiler = getattr(frames, "get_eval_frame_callback", _Compiler.ask)
        self.functions = getattr(private, "_len_torch_function_stack", int)
        self.dispatches = getattr(private, "_len_torch_dispatch_stack", int)
        return self.compiler()


interposed = _Interposed()


def call_without_modes(call: Callable[..., T], *args: Any) -> T:
    """Call a function whose operations on tensors the user's modes must not see."""
    if interposed.functions() or interposed.dispatches():
        with without_modes():
            return call(*args)
    return call(*args)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Leave the user's torch modes: one may count or change operations of the doctor, or create
    their tensors on another device."""
    private = sys.modules["torch"]._C
    entered = [private._pop_torch_dispatch_stack(None) for _ in range(interposed.dispatches())]
    try:
        with private.DisableTorchFunction():
            yield
    finally:
        for mode in reversed(entered):
            private._push_on_torch_dispatch_stack(mode)


def scripted_as(new: Any, old: Any) -> Callable[[], None] | None:
    """Have TorchScript, which finds its operators by id(function), accept a wrapper of one.

    Returns:
        A function that undoes it; None if `old` is not an operator.
    """
    module = sys.modules.get("torch.jit._builtins")
    try:
        if module is None or (operator := module._find_builtin(old)) is None:
            return None
        table = module._get_builtin_table()
    except AttributeError:
        return None
    table[id(new)] = operator
    return lambda: table.pop(id(new), None)


def pause_compiler() -> Any:
    """Keep torch.compile from compiling the doctor's functions, which the user's call. Returns the
    argument for `resume_compiler`."""
    return (sys.modules["torch"]._C._dynamo.eval_frame.set_eval_frame(None),)


def resume_compiler(paused: Any) -> None:
    """Undo `pause_compiler`."""
    import torch

    torch._C._dynamo.eval_frame.set_eval_frame(*paused)


def sync_times(ddp: Any) -> dict[str, Any]:
    """DDP's logging data: its own measurements, in nanoseconds; empty if there are none."""
    try:
        return dict(ddp._get_ddp_logging_data())
    except (AttributeError, RuntimeError):
        return {}


def skip_frames(*functions: Any) -> bool:
    """Have torch.compile run these functions uncompiled but trace what they call; False if this
    torch cannot. torch._dynamo must be imported."""
    import torch

    evaluation = torch._C._dynamo.eval_frame
    try:
        for function in functions:
            if hasattr(evaluation, "skip_code"):
                evaluation.skip_code(function.__code__)
            else:
                action = evaluation._FrameAction
                strategy = evaluation._FrameExecStrategy(action.SKIP, action.DEFAULT)
                evaluation.set_code_exec_strategy(function.__code__, strategy)
    except (AttributeError, TypeError):
        return False
    return True


def compiling() -> bool:
    """Whether torch.compile traces or guards the user's code that runs now."""
    torch = sys.modules["torch"]
    try:
        callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    except AttributeError:
        callback = torch.compiler.is_compiling()
    idle = (None, False)
    return callback not in idle or compiler_in_use.now not in idle


def compiles() -> bool:
    """Whether the program has asked torch.compile for anything: a global hook on modules would make
    it compile that again."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return any(getattr(frames, "cached_backends", {}).values())  # None: of what it skips


def compiled(modules: Iterable[Any]) -> bool:
    """Whether any of the modules is compiled: a hook on it, or a trace function, would make
    torch.compile compile it again."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in modules)


def ignored_by_ddp(module: Any) -> frozenset[str]:
    """Names of the parameters and buffers of a module that DDP was told to ignore."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", None) or ())


def queue_when_computed() -> Callable[[Callable[[], None]], None]:
    """A function that has, inside a backward, a callback called once all gradients are computed,
    and before DDP waits for the other ranks."""
    import torch

    queue: Callable[[Callable[[], None]], None]
    queue = torch.autograd.Variable._execution_engine.queue_callback
    return queue


def flight_recorders() -> Iterator[str]:
    """torch's flight recorders as JSON: that of NCCL and the one of other backends, as far as this
    torch has them. Without stacks: symbolising them would import torch's compiler.

    Ask only where a rank stands still: NCCL's queries events of works that may retire meanwhile.
    """
    import torch._C._distributed_c10d as c

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c, name, None)
        if dump is not None:
            yield dump(includeCollectives=True, onlyActive=False).decode()


def is_work(result: Any) -> bool:
    """Whether a collective has returned a `Work`. Inside of `_coalescing_manager` it returns a
    placeholder, all of whose methods raise."""
    return type(result).__name__ != "_IllegalWork" and hasattr(result, "is_completed")


def own_pre_hooks(optimizer: Any) -> Any:
    """The step pre-hooks registered on this optimizer; None if torch does not keep them there."""
    return getattr(optimizer, "_optimizer_step_pre_hooks", None)


def global_pre_hooks() -> Any:
    """The step pre-hooks registered for all optimizers; empty if torch does not keep them there."""
    return sys.modules["torch.optim.optimizer"].__dict__.get("_global_optimizer_pre_hooks", ())


def pre_hooks_after(optimizer: Any, hook: Any) -> Any:
    """The step pre-hooks registered on this optimizer, if any pre-hook runs after `hook`; None if
    `hook`, a global one, is the last."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if own is None:
        return None
    every = sys.modules["torch.optim.optimizer"].__dict__.get("_global_optimizer_pre_hooks", own)
    return own if own or (len(every) > 1 and next(reversed(every.values())) is not hook) else None


def exposed_seconds(ddp: Any) -> float:
    """DDP's average of the seconds that a backward waits for communication after the last gradient
    was computed; 0 if it has not measured."""
    try:
        data = ddp._get_ddp_logging_data()
        waited = data["avg_backward_comm_time"] - data["avg_backward_compute_comm_overlap_time"]
    except (AttributeError, RuntimeError, KeyError):
        return 0.0
    return max(0.0, waited / 1e9)


def comm_hook(ddp: Any) -> str:
    """Name of DDP's communication hook, empty if it has none."""
    try:
        return str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    except (AttributeError, RuntimeError):
        return ""


def averages(ddp: Any) -> bool:
    """Whether DDP averages gradients: without a communication hook, or with one of torch's that
    does so (also inside a wrapper of torch's such as `fp16_compress_wrapper`)."""
    hooks = getattr(ddp, "_comm_hooks", None) or ()
    return all(_averages(hook) for hook, _ in hooks)


def _averages(hook: Any) -> bool:
    module, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    package, _, last = str(module).rpartition(".")
    if package != "torch.distributed.algorithms.ddp_comm_hooks":
        return False
    if "<locals>" not in name:
        return last in _AVERAGING
    inside = getattr(hook, "__closure__", None) or ()
    hooks = [c.cell_contents for c in inside if callable(c.cell_contents)]
    return len(hooks) == 1 and _averages(hooks[0])


# Modules of torch's communication hooks that average. Others (post-local SGD) do not always.
_AVERAGING = ("default_hooks", "powerSGD_hook", "quantization_hooks", "mixed_precision_hooks")


def joins(ddp: Any) -> bool:
    """Whether a wrapper is inside `Join`: ranks that are done then shadow its collectives."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def anomaly_mode(on: bool) -> bool:
    """Switch autograd's anomaly mode on or off, without its check for NaN: torch then keeps the
    stack of each node's forward. False, and nothing is done, if the user has it on."""
    import torch

    if on and torch.is_anomaly_enabled():
        return False
    torch.set_anomaly_enabled(on, False)
    return True


def made_at(node: Any) -> list[str] | None:
    """The stack of the forward that created a node, outermost first; None if torch kept none."""
    try:
        text = node.metadata.get("traceback_")
    except (AttributeError, RuntimeError):
        return None
    return [str(line) for line in text] if text else None


class _Graph:
    """The autograd graph that the operations of this thread build.

    Attributes:
        next_number: returns the sequence number of the next node, -1 if unknown; torch's own
            function after the first call.
    """

    def __init__(self) -> None:
        self.next_number: Callable[[], int] = self._look_up

    def _look_up(self) -> int:
        ask = getattr(sys.modules["torch"].autograd, "_get_sequence_nr", None)
        self.next_number = ask or (lambda: -1)
        return self.next_number()


graph = _Graph()


def node_number(node: Any) -> int:
    """The sequence number of a node of the graph; they rise in order of creation. -1 if unknown."""
    try:
        return int(node._sequence_nr())
    except AttributeError:
        return -1


def saved(node: Any, name: str) -> Any:
    """A value that a node of the graph saved for backward (`name`: `_saved_self`, say).

    Raises:
        LookupError: it is gone, or has an unpack hook, which would run the user's code:
            checkpointing recomputes what it has saved.
    """
    try:
        raw = getattr(node, f"_raw{name}", None)
        packed = raw if isinstance(raw, (list, tuple)) else (raw,)
        if all(one is None or one.unpack_hook is None for one in packed):
            return getattr(node, name)
    except (AttributeError, RuntimeError) as error:  # an older torch; freed, or changed in place
        raise LookupError(name) from error
    raise LookupError(name)


def shard(tensor: Any) -> Any:
    """This rank's shard of a DTensor (the whole needs a collective); any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)
