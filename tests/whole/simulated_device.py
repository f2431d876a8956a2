"""Runs a script on a device of a kind of its own whose memory is the host's.

    python simulated_device.py SCRIPT [ARGUMENT ...]

Tensors on `npu` are plain tensors of torch's key for devices of other vendors (`PrivateUse1`): not
on the CPU, with autograd's threads for devices. Kernels of the CPU work on their bytes. `hccl`, the
backend for process groups, is that of `late_backend.py`: calls return before their values are
there, events answer once the calls before them have ended, and reading a value waits for all.
`samples/_on_device.py --device npu:0 SAMPLE` moves a sample there.
"""

from __future__ import annotations

import contextlib
import ctypes
import runpy
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import late_backend
import torch
import torch.distributed as dist
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "npu"
HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
KEPT: list[Any] = []
"""Libraries of kernels; what they register goes when they go."""

VIEWS = {"as_strided", "view", "_reshape_alias", "unfold", "set_", "resize_", "alias",
         "view_as_real", "view_as_complex"}  # fmt: skip
"""Operations that read no values: the CPU's kernels do them on any tensor."""

aten: Any = torch.ops.aten


def storage(size_bytes: int) -> Any:
    """Memory of the device."""
    memory = torch.empty(max(size_bytes, 1), dtype=torch.uint8, device="cpu")
    device = torch.device(NAME, 0)
    made = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), device, size_bytes)
    weakref.finalize(made, id, memory)  # which keeps it
    return made


def blank(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the device, not initialised."""
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if all(shape) else -1
    tensor = torch._C._acc.create_empty_tensor([0], dtype)
    return put(tensor, storage((last + 1) * dtype.itemsize), shape, stride)


def copied(clone: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`UntypedStorage.clone`, which asks for an allocator of the device's."""

    def clone_there(held: Any) -> Any:
        if held.device.type != NAME:
            return clone(held)
        copy = storage(held.nbytes())
        ctypes.memmove(copy.data_ptr(), held.data_ptr(), held.nbytes())
        return copy

    return clone_there


def put(tensor: Any, memory: Any, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Have a tensor on the device lie in some memory of it."""
    shaped: torch.Tensor = aten.set_.source_Storage_storage_offset.redispatch(
        HOST, tensor, memory, 0, list(shape), list(stride)
    )
    return shaped


def is_there(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the host."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    held, host = tensor.untyped_storage(), torch.device("cpu")
    same = torch._C._construct_storage_from_data_pointer(held.data_ptr(), host, held.nbytes())
    bare = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return bare.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor of the host."""
    copy = blank(tensor.shape, tensor.stride(), tensor.dtype)
    on_host(copy).copy_(tensor)
    return copy


def kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation, on the CPU."""
    if op._schema.name.partition("::")[2] in VIEWS:
        return op.redispatch(HOST, *args, **kwargs)
    lowered: dict[int, tuple[Any, Any, Any]] = {}

    def lower(value: Any) -> Any:
        if is_there(value):
            host = on_host(value)
            lowered[id(host)] = host, value, host.shape
            return host
        away = isinstance(value, torch.device) and value.type == NAME
        return torch.device("cpu") if away else value

    def lift(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return lowered[id(value)][1] if id(value) in lowered else on_device(value)

    args, kwargs = tree_map(lower, (args, kwargs))
    result = op(*args, **kwargs)
    for host, tensor, shape in lowered.values():
        if host.shape != shape:  # an output that was made to fit
            put(tensor, on_device(host).untyped_storage(), host.shape, host.stride())
    return tree_map(lift, result)


def empty(size: Sequence[int], **options: Any) -> torch.Tensor:
    order = options.get("memory_format") or torch.contiguous_format
    shaped = torch.empty(size, dtype=options.get("dtype"), device="meta", memory_format=order)
    return blank(shaped.shape, shaped.stride(), shaped.dtype)


def unpinned(op: Any) -> Callable[..., Any]:
    """An operation that makes tensors without pinning them: all memory of the host can be reached,
    and to pin it torch asks for an allocator in C++."""

    def make(keys: Any, *args: Any, **options: Any) -> Any:
        kind = torch.device(options.get("device") or "cpu").type
        key = {"cpu": "CPU", NAME: "PrivateUse1", "meta": "Meta"}[kind]
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        return op.redispatch(keys, *args, **{**options, "pin_memory": False})

    return make


def empty_strided(size: Sequence[int], stride: Sequence[int], **options: Any) -> torch.Tensor:
    return blank(size, stride, options.get("dtype") or torch.get_default_dtype())


def copy(source: Any, target: Any, non_blocking: bool = False) -> Any:
    if not is_there(target) and not non_blocking:
        late_backend.wait_for_all()
    there = on_host(target) if is_there(target) else target
    there.copy_(on_host(source) if is_there(source) else source)
    return target


def item(tensor: torch.Tensor) -> Any:
    late_backend.wait_for_all()
    return aten._local_scalar_dense(on_host(tensor))


def convolution(source: Any, weight: Any, bias: Any, *shape: Any) -> Any:
    return kernel(aten.convolution.default, source, weight, bias, *shape)


def convolution_backward(grad: Any, source: Any, weight: Any, *rest: Any) -> Any:
    *shape, wanted = rest
    op, biases = aten.convolution_backward.default, [grad.shape[1]]
    return kernel(op, grad, source, weight, biases, *shape, wanted)


KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "_copy_from": copy,
    "_copy_from_and_resize": copy,
    "_local_scalar_dense": item,
    "convolution_overrideable": convolution,
    "convolution_backward_overrideable": convolution_backward,
}


class Event:
    """Passed once the calls that were issued before it have ended."""

    def __init__(self, **options: Any) -> None:
        self.before: list[Any] = []

    def record(self, stream: Any = None) -> None:
        self.before = list(late_backend.ISSUED)

    def query(self) -> bool:
        return all(work.arrived.is_set() for work in self.before)

    def synchronize(self) -> None:
        for work in self.before:
            work.arrived.wait()


class Stream:
    """There is one: kernels are over when they return."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class Module(backend_registration._DummyBackendModule):
    """What stands at `torch.npu`."""

    Event, Stream = Event, Stream
    stream = contextlib.nullcontext

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        late_backend.wait_for_all()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


class OnHost:
    """A process group for the host that is given tensors of the device."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        def on_bytes(*args: Any) -> Any:
            return method(*tree_map(lambda v: on_host(v) if is_there(v) else v, args))

        return on_bytes


def create(asked: Any, options: Any) -> Any:
    return late_backend.LateGroup(OnHost(late_backend.over_gloo(asked)), asked)


def made_there(make: Callable[..., Any]) -> Callable[..., Any]:
    """Makes parameters on the device: torch does not let `.data` move them to one of this key."""

    @late_backend.as_torch
    def there(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if type(data) in (torch.Tensor, torch.nn.Parameter) and data.is_cpu:
            data = data.detach().to(NAME)
        return make(cls, data, *args, **kwargs)

    return there


def install() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    anything, named = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    anything.fallback(kernel, "PrivateUse1")
    anything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one already
        for op in (aten.empty.memory_format, aten.empty_strided.default):
            name = op._schema.name + "." * bool(op._schema.overload_name) + op._schema.overload_name
            named.impl(name, unpinned(op), "BackendSelect", with_keyset=True)
    for function in (kernel, *KERNELS.values()):
        late_backend.as_torch(function)
    for name, made in KERNELS.items():
        named.impl(name, made, "PrivateUse1")
    named.impl("is_pinned", lambda tensor, device=None: True, "CPU")
    KEPT.extend((anything, named))
    dist.Backend.register_backend("hccl", create, extended_api=True, devices=[NAME])
    torch.UntypedStorage.clone = copied(torch.UntypedStorage.clone)  # type: ignore[method-assign]
    parameter = torch.nn.Parameter
    parameter.__new__ = made_there(parameter.__new__)  # type: ignore[method-assign]
    load = torch.load

    @late_backend.as_torch
    def load_on_host(*args: Any, map_location: Any = "cpu", **options: Any) -> Any:
        return load(*args, map_location=map_location, **options)

    torch.load = load_on_host
    wrapper = torch.nn.parallel.DistributedDataParallel
    wrapper.__init__ = late_backend.blocks(wrapper.__init__)  # type: ignore[method-assign]


def main() -> None:
    install()
    script, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
