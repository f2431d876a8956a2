"""Every private interface of torch that the probe uses: what it is, since when, what is lost.

| interface | seen in | without it |
|---|---|---|
| `ProcessGroup._get_sequence_number_for_group` | 2.4-2.15 | whether a backward communicated |
| `torch.distributed.distributed_c10d._world` | 2.4-2.15 | the order in which ranks touch files |
| `torch._C._cuda_hasPrimaryContext` | 2.4-2.15 | which call left a context on another GPU |
| `ProcessGroup.group_name` | 2.4-2.15 | groups are numbered by order only |
| `distributed_c10d._world.pg_map` | 2.4-2.15 | groups made before the doctor came |
| `DistributedDataParallel._get_ddp_logging_data` | 2.4-2.15 | which parameters made torch raise |
| `torch._C._dynamo.eval_frame.get_eval_frame_callback` | 2.6-2.13 | calls of compiled submodules |
| `torch._C._dynamo.eval_frame.set_code_exec_strategy` | 2.13 | slower start of compiled steps |
| `torch._C._distributed_c10d._dump_fr_trace_json` | 2.8-2.15 | DDP's own collectives in a hang |
| `Optimizer._optimizer_step_pre_hooks` | 2.4-2.15 | gradients edited in a hook before the step |
| `Tensor._backward_hooks` | 2.4-2.15 | which parameters got no gradient, unless torch says it |
| `Variable._execution_engine.queue_callback` | 2.4-2.15 | which rank the others wait for |
| `DistributedDataParallel._comm_hooks` | 2.4-2.15 | whether a hook averages, and drift under it |
| `DistributedDataParallel._sync_buffers` | 2.4-2.15 | the same |
| `_BaseDataLoaderIter._next_index`, `._index_sampler` | 2.4-2.15 | the indices a rank consumed |
| `FSDPModule.__subclasses__()` | 2.6-2.15 | what ranks read under `fully_shard` is not judged |
| `FSDPModule._get_fsdp_state` | 2.6-2.15 | the same, where it also replicates; its optimizer |
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
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def sequence_number(group: Any) -> int:
    """Collectives (and point-to-point calls) issued on a group by this rank; -1 where unknown."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return -1


def fully_shards() -> bool:
    """Whether `fully_shard` was applied to any module: it makes a class for each."""
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    kind = getattr(module, "FSDPModule", None)
    return kind is not None and bool(kind.__subclasses__())


def fully_sharded(module: Any) -> bool:
    """Whether `fully_shard` was applied to a module."""
    return hasattr(module, "_get_fsdp_state")


def sharding_mesh(module: Any) -> Any:
    """The mesh that `fully_shard` was given for a module with parameters, None for others."""
    try:
        return _shard_groups(module)[0].mesh_info.mesh
    except (AttributeError, IndexError):
        return None


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
    """Whether such a parameter has a whole gradient that was not reduced."""
    whole = getattr(shard, "_unsharded_param", None)
    grads = getattr(shard, "unsharded_accumulated_grad", None), getattr(whole, "grad", None)
    return any(grad is not None for grad in grads)


def may_share_inputs(parameter: Any, meshes: list[Any]) -> bool:
    """Whether it is sharded in a way that may need equal inputs on several ranks, as in tensor
    parallelism. `fully_shard` over all ranks, with one of these meshes, does not."""
    if type(parameter).__name__ != "DTensor":
        return False
    import torch.distributed as dist

    mesh = parameter.device_mesh
    alone = mesh in meshes or (mesh.ndim == 1 and fully_shards())
    return not (alone and mesh.size() == dist.get_world_size())


def group_name(group: Any) -> str:
    """torch's own name of a group, the same on all its ranks; none for one made by hand."""
    try:
        return str(group.group_name)
    except (AttributeError, RuntimeError):
        return ""


def live_groups() -> list[tuple[str, Any]]:
    """(name, group) of the groups that this rank is a member of; the default group has no name."""
    import torch.distributed as dist

    try:
        world = dist.distributed_c10d._world
        default = world.default_pg
        return [("" if g is default else group_name(g), g) for g in list(world.pg_map)]
    except AttributeError:
        return []


def has_context(index: int) -> bool:
    """Whether this process has a context on a GPU; asking makes none."""
    import torch

    try:
        return bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return False


def group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of a group's members."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))


def without_gradient(message: str) -> list[int]:
    """Positions, in DDP's own order, that its error about an unfinished reduction names."""
    found = re.search(r"indices which did not receive grad for rank \d+:([ \d]+)", message)
    return [int(word) for word in found.group(1).split()] if found else []


def ready_indices(ddp: Any) -> list[int] | None:
    """Positions of the parameters whose gradients arrived in the last backward that should have
    synchronised, in DDP's own order; None where it is not on record (yet)."""
    try:
        text = ddp._get_ddp_logging_data().get("prev_iteration_grad_ready_order_indices", "")
    except (AttributeError, RuntimeError):
        return None
    numbers = [int(word) for word in str(text).replace(",", " ").split() if word.isdigit()]
    return numbers or None


class _Compiler:
    """torch.compile's callback, as it was when a traced function was entered: inside of hooks it is
    switched off."""

    now: Any = None

    @staticmethod
    def ask() -> Any:
        return None


compiler_in_use = _Compiler()


def uncompiled(function: Any, *, within: bool = True) -> Any:
    """The function, hidden from torch.compile, with (`within`) all that it calls."""
    import torch

    try:
        compiler_in_use.ask = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore
    except AttributeError:
        compiler_in_use.ask = torch.compiler.is_compiling  # type: ignore[method-assign]
    return torch._disable_dynamo(function, recursive=within)  # type: ignore[attr-defined]


class _Interposed:
    """What of the user's stands between Python and torch just now. By torch's own functions, once
    torch is imported.

    Attributes:
        compiler: torch.compile's callback for frames, None for none.
        functions, dispatches: how many modes of either kind are entered.
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
    """What a call returns that may touch the user's tensors: their modes see nothing of it."""
    if interposed.functions() or interposed.dispatches():
        with without_modes():
            return call(*args)
    return call(*args)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Keep the doctor's own operations from the user's modes: one may count or change them, or have
    tensors made on another device."""
    private = sys.modules["torch"]._C
    entered = [private._pop_torch_dispatch_stack(None) for _ in range(interposed.dispatches())]
    try:
        with private.DisableTorchFunction():
            yield
    finally:
        for mode in reversed(entered):
            private._push_on_torch_dispatch_stack(mode)


def scripted_as(new: Any, old: Any) -> Callable[[], None] | None:
    """Have TorchScript, which knows its operators by the identity of functions, take the new
    function for the old one. Returns how to undo that, None where the old is no operator."""
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
    """Keep torch.compile from compiling the doctor's own functions, which run inside the user's.
    Returns what `resume_compiler` needs."""
    return (sys.modules["torch"]._C._dynamo.eval_frame.set_eval_frame(None),)


def resume_compiler(paused: Any) -> None:
    import torch

    torch._C._dynamo.eval_frame.set_eval_frame(*paused)


def sync_times(ddp: Any) -> dict[str, Any]:
    """What DDP has measured of its own synchronisation, in nanoseconds; empty where unknown."""
    try:
        return dict(ddp._get_ddp_logging_data())
    except (AttributeError, RuntimeError):
        return {}


def skip_frames(*functions: Any) -> bool:
    """Have torch.compile run these functions as they are, and look at what they call; whether it
    can be told so. torch._dynamo must be imported."""
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
    """Whether the user's code that runs now is being compiled or checked by torch.compile."""
    torch = sys.modules["torch"]
    try:
        callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    except AttributeError:
        callback = torch.compiler.is_compiling()
    idle = (None, False)
    return callback not in idle or compiler_in_use.now not in idle


def when_computed(callback: Callable[[], None]) -> None:
    """Inside a backward: have `callback` called once all gradients are computed, and before DDP
    waits for the other ranks."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(callback)


def flight_recorder() -> str | None:
    """The recent collectives as JSON, without stacks (taking those would import a compiler)."""
    import torch._C._distributed_c10d as c

    try:
        return c._dump_fr_trace_json(  # type: ignore[attr-defined]
            includeCollectives=True, onlyActive=False
        ).decode()
    except AttributeError:
        return None


def own_pre_hooks(optimizer: Any) -> Any:
    """The optimizer's own hooks before a step, None where torch keeps none."""
    return getattr(optimizer, "_optimizer_step_pre_hooks", None)


def pre_hooks_after(optimizer: Any, hook: Any) -> Any:
    """The optimizer's own hooks before a step, where any hook runs after this one, which is for all
    optimizers; None where it is the last."""
    own = own_pre_hooks(optimizer)
    if own is None:
        return None
    every = sys.modules["torch.optim.optimizer"].__dict__.get("_global_optimizer_pre_hooks", own)
    return own if own or (len(every) > 1 and next(reversed(every.values())) is not hook) else None


def exposed_seconds(ddp: Any) -> float:
    """DDP's own average of how long a backward waits for communication after the last gradient
    was computed; 0 where it has not measured."""
    try:
        data = ddp._get_ddp_logging_data()
        waited = data["avg_backward_comm_time"] - data["avg_backward_compute_comm_overlap_time"]
    except (AttributeError, RuntimeError, KeyError):
        return 0.0
    return max(0.0, waited / 1e9)


def comm_hook(ddp: Any) -> str:
    """Name of DDP's communication hook, empty for none."""
    try:
        return str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    except (AttributeError, RuntimeError):
        return ""


def averages(ddp: Any) -> bool:
    """Whether DDP's communication hook, if it has one, is known to average gradients: torch's own
    do, and those of its wrappers that are around one."""
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


_AVERAGING = ("default_hooks", "powerSGD_hook", "quantization_hooks", "mixed_precision_hooks")


def joins(ddp: Any) -> bool:
    """Under `Join` the ranks that are done answer for the model in their own way."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def anomaly_mode(on: bool) -> bool:
    """Have torch keep, or no longer keep, the lines that make nodes of the graph. No check for
    NaN. False where the user has the mode on: then it is left alone."""
    import torch

    if on and torch.is_anomaly_enabled():
        return False
    torch.set_anomaly_enabled(on, False)
    return True


def made_at(node: Any) -> list[str] | None:
    """The stack, outermost first, of the line that made a node; None where torch kept none."""
    try:
        text = node.metadata.get("traceback_")
    except (AttributeError, RuntimeError):
        return None
    return [str(line) for line in text] if text else None


class _Graph:
    """What torch builds of the operations of this thread.

    Attributes:
        next_number: of the next node, -1 where unknown. By torch's own function, once it was asked.
    """

    def __init__(self) -> None:
        self.next_number: Callable[[], int] = self._look_up

    def _look_up(self) -> int:
        ask = getattr(sys.modules["torch"].autograd, "_get_sequence_nr", None)
        self.next_number = ask or (lambda: -1)
        return self.next_number()


graph = _Graph()


def node_number(node: Any) -> int:
    """Of a node of the graph; -1 where unknown."""
    try:
        return int(node._sequence_nr())
    except AttributeError:
        return -1


def saved(node: Any, name: str) -> Any:
    """What a node of the graph has saved.

    Raises:
        LookupError: it cannot be had, or only by running the user's code: what checkpointing has
            saved is computed anew when it is unpacked.
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
    """This rank's part of a distributed tensor, any other as it is. To ask the whole would be a
    collective."""
    return getattr(tensor, "_local_tensor", tensor)
