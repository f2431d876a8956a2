"""Wraps every collective and point-to-point function of torch.distributed: each call is in the call
log before it can block."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...events.operations import OPERATIONS
from ...storage.call_ring import State
from ..recording import hooks
from ..recording.frames import disguise, unframe
from ..recording.patching import refused, replace
from ..recording.recorder import Recorder, current_recorder
from ..recording.threads import Inside
from ..recording.torch_compat import is_work
from ..recording.watcher import Args, Kwargs, Watcher, on
from . import call_hooks, coalescing
from .call_log import call_log_of
from .coalescing import coalesced
from .gathered_results import GatheredResults
from .process_groups import ProcessGroups
from .shared_outputs import OutputLists


@dataclass(frozen=True)
class Kind:
    """How to read the arguments of one function.

    Attributes:
        op: its name in records.
        tensor, root: names of its parameters, empty if it has none.
        reduces: it has a parameter `op`.
        sized: ranks must pass equal numbers of elements.
        p2p: point-to-point rather than collective.
        gathered, outputs: names of the parameters that are an object to gather, and the tensor, or
            list of tensors, to write to; empty if there are none.
    """

    op: str
    tensor: str = ""
    reduces: bool = False
    root: str = ""
    sized: bool = True
    p2p: bool = False
    gathered: str = ""
    outputs: str = ""


BATCH = "batch_isend_irecv"

KINDS = {
    "all_reduce": Kind("all_reduce", "tensor", reduces=True),
    "all_reduce_coalesced": Kind("all_reduce_coalesced", reduces=True),
    "broadcast": Kind("broadcast", "tensor", root="src"),
    "reduce": Kind("reduce", "tensor", reduces=True, root="dst"),
    "all_gather": Kind("all_gather", "tensor", outputs="tensor_list"),
    "all_gather_coalesced": Kind("all_gather_coalesced"),
    "all_gather_single": Kind("all_gather_into_tensor", "input_tensor"),
    "all_gather_into_tensor": Kind(
        "all_gather_into_tensor", "input_tensor", outputs="output_tensor"
    ),
    "gather": Kind("gather", "tensor", root="dst", outputs="gather_list"),
    "scatter": Kind("scatter", "tensor", root="src"),
    "reduce_scatter": Kind("reduce_scatter", "output", reduces=True, sized=False),
    "reduce_scatter_single": Kind("reduce_scatter_tensor", "output", reduces=True),
    "reduce_scatter_tensor": Kind("reduce_scatter_tensor", "output", reduces=True),
    "all_to_all": Kind("all_to_all", outputs="output_tensor_list"),
    "all_to_all_single": Kind("all_to_all_single", "output", sized=False),
    "barrier": Kind("barrier"),
    "monitored_barrier": Kind("monitored_barrier"),
    "all_gather_object": Kind("all_gather_object", gathered="obj"),
    "gather_object": Kind("gather_object", root="dst", gathered="obj"),
    "broadcast_object_list": Kind("broadcast_object_list", root="src"),
    "scatter_object_list": Kind("scatter_object_list", root="src"),
    "send": Kind("send", "tensor", root="dst", p2p=True),
    "recv": Kind("recv", "tensor", root="src", p2p=True),
    "isend": Kind("isend", "tensor", root="dst", p2p=True),
    "irecv": Kind("irecv", "tensor", root="src", p2p=True),
    "send_object_list": Kind("send_object_list", root="dst", p2p=True),
    "recv_object_list": Kind("recv_object_list", root="src", p2p=True),
    BATCH: Kind(BATCH, p2p=True),
}


_ABSENT = 1 << 30
"""Position of a parameter that a function does not have: no call has so many arguments."""


class Collectives(Watcher):
    """
    Attributes:
        inside: threads in a collective: object collectives call others, and only the outermost call
            is the program's.
    """

    lost = "collectives, and with them mismatches and hangs"

    def __init__(self) -> None:
        self.inside = Inside()

    def install(self) -> None:
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        GatheredResults.begin()
        OutputLists.begin()
        for name, kind in KINDS.items():
            original = getattr(c10d, name, None)
            if original is None:
                continue
            wrapper = self._watched(original, kind)
            for holder in (c10d, dist):
                if vars(holder).get(name) is original:
                    replace(holder, name, wrapper)
        self._watch_waits(c10d)
        coalescing.watch(self.inside)

    def _watched(self, original: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        read = _reader(original, kind)
        part = f"calls.{kind.op}"

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            recorder = None if self.inside else current_recorder()
            number = failure = None
            if recorder is not None:
                began = time.perf_counter_ns()
                try:
                    if not recorder.disabled(part):
                        number = read(recorder, args, kwargs)
                except Exception as error:
                    failure = error.with_traceback(None)
                recorder.own_ns += time.perf_counter_ns() - began
                self.inside.enter()
            called = time.monotonic()
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if recorder is not None and failure is not None and not refused(error):
                    recorder.trouble(part, failure, self.lost)
                failed(number, error)
                unframe(error)
                raise
            finally:
                if recorder is not None:
                    self.inside.leave()
            if recorder is not None and failure is not None:
                recorder.trouble(part, failure, self.lost)
            if recorder is not None:
                began = time.perf_counter_ns()
                call_hooks.waited.fire(recorder, time.monotonic() - called)
                _returned(number, result)
                recorder.own_ns += time.perf_counter_ns() - began
            return result

        return disguise(wrapper, original)

    def _waited_for(self, work: Any) -> int | None:
        """The number in the ring of the call that a `Work` belongs to; None if unknown, or inside
        of a synchronous collective, which waits itself."""
        recorder = current_recorder()
        if recorder is None or self.inside:
            return None
        try:
            log = call_log_of(recorder)
            return log.number_of(work) if log else None
        except Exception as error:
            recorder.trouble("calls.wait", error, self.lost)
            return None

    def _watch_waits(self, c10d: Any) -> None:
        original = c10d.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            number = self._waited_for(work)
            mark(number, State.WAITING)
            began = time.monotonic()
            try:
                result = original(work, *args, **kwargs)
            except BaseException as error:
                failed(number, error)
                unframe(error)
                raise
            mark(number, State.DONE)
            recorder = current_recorder()
            if number is not None and recorder is not None:
                call_hooks.waited.fire(recorder, time.monotonic() - began)
            return result

        replace(c10d.Work, "wait", disguise(wait, original))

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        if log := recorder.call_log or call_log_of(recorder):
            log.flush()


def _reader(original: Callable[..., Any], kind: Kind) -> Callable[..., int | None]:
    """A function (recorder, args, kwargs) that logs a call and returns its number in the ring, None
    for a call in a group that this rank is not in.

    Positions of parameters are looked up here, once: binding arguments in each call takes longer
    than all the rest.
    """
    parameters = inspect.signature(original).parameters
    positions = {name: i for i, name in enumerate(parameters)}
    default_op = parameters["op"].default if kind.reduces else None

    def place(name: str) -> int:
        return positions.get(name, _ABSENT)

    group_at, tensor_at, op_at = place("group"), place(kind.tensor), place("op")
    root_at, group_root_at = place(kind.root), place("group_" + kind.root)
    object_at, outputs_at = place(kind.gathered), place(kind.outputs)
    gathers = kind.op in OPERATIONS and OPERATIONS[kind.op].gathers

    def read(recorder: Recorder, args: Args, kwargs: Kwargs) -> int | None:
        given = len(args)
        group = args[group_at] if group_at < given else kwargs.get("group")
        messages = _batched(args, kwargs) if kind.op == BATCH else ()
        if messages:
            group = messages[0].group
        number = 0 if group is None else ProcessGroups.current.number_of(group)
        tensor = None
        if kind.tensor:
            tensor = args[tensor_at] if tensor_at < given else kwargs.get(kind.tensor)
        reduce_op = None
        if kind.reduces:
            reduce_op = args[op_at] if op_at < given else kwargs.get("op", default_op)
        passed = tensor if kind.tensor else args[0] if args else None
        root = -1
        if kind.root and number >= 0:
            named = args[root_at] if root_at < given else kwargs.get(kind.root)
            in_group = (
                args[group_root_at] if group_root_at < given else kwargs.get("group_" + kind.root)
            )
            root = _root(group, named, in_group, kind.p2p)
        sends, receives = (_peers(messages, name) for name in ("isend", "irecv"))
        peers = (*sends, *receives) or (root,) * kind.p2p
        sent = tuple((m.op.__name__, int(m.peer), m.tensor) for m in messages)
        if kind.p2p and hasattr(tensor, "numel"):
            sent = ((kind.op, root, tensor),)
        outputs = None
        if kind.outputs:
            outputs = args[outputs_at] if outputs_at < given else kwargs.get(kind.outputs)
        call = call_hooks.Call(
            kind.op, number, kind.p2p, _tensors(passed), reduce_op, peers, sent, _tensors(outputs)
        )
        call_hooks.called.fire(recorder, call)
        log = call_log_of(recorder)
        if number < 0 or log is None or not ProcessGroups.current.exist():
            return None  # not a member, or no group at all: torch raises or warns itself
        site = log.here()
        if kind.gathered:
            GatheredResults.current.record_object(
                recorder, site, args[object_at] if object_at < given else kwargs["obj"]
            )
        elif gathers:
            GatheredResults.current.record_tensor(recorder, site, tensor)
        if kind.outputs:
            OutputLists.current.look(recorder, site, kind.op, outputs)
        if messages:
            return log.point_to_point(number, kind.op, site, -1, sends, receives)
        if kind.p2p:
            return log.point_to_point(number, kind.op, site, root)
        return log.collective(number, kind.op, site, tensor, kind.sized, reduce_op, root)

    return read


def _batched(args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """The `P2POp`s of `batch_isend_irecv`."""
    given = args[0] if args else kwargs.get("p2p_op_list")
    return tuple(given) if isinstance(given, (list, tuple)) else ()


def _peers(messages: tuple[Any, ...], op: str) -> tuple[int, ...]:
    return tuple(int(m.peer) for m in messages if m.op.__name__ == op)


def _tensors(given: Any) -> tuple[Any, ...]:
    if isinstance(given, (list, tuple)):
        return tuple(t for t in given if hasattr(t, "untyped_storage"))
    return (given,) if hasattr(given, "untyped_storage") else ()


def _root(group: Any, rank: Any, group_rank: Any, p2p: bool) -> int:
    """The root, or the other side, as a global rank; torch's default is the first of the group. -1
    for a receive from any rank."""
    if rank is not None:
        return int(rank)
    if group_rank is None:
        if p2p:
            return -1
        group_rank = 0
    if group is None:
        return int(group_rank)
    import torch.distributed as dist

    return int(dist.get_global_rank(group, int(group_rank)))


def mark(number: int | None, state: State) -> None:
    """Set the state of a call in the ring; nothing for None."""
    recorder = current_recorder()
    if number is None or recorder is None:
        return
    try:
        if log := call_log_of(recorder):
            log.ring.mark(number, state)
    except Exception as error:
        recorder.trouble("calls.mark", error, Collectives.lost)


def failed(number: int | None, error: BaseException) -> None:
    """Record that a call raised; nothing for None."""
    mark(number, State.FAILED)
    if number is not None and (recorder := current_recorder()):
        call_hooks.call_failed.fire(recorder, (number, error))


def _returned(number: int | None, result: Any) -> None:
    """A call has returned: a synchronous one is done, an asynchronous one only issued."""
    recorder = current_recorder()
    if number is None or recorder is None:
        return
    try:
        log = call_log_of(recorder)
        if log is None:
            return
        given = () if result is None else result if isinstance(result, list) else (result,)
        works = tuple(w for w in given if is_work(w))
        if works:
            log.issued(number, works)
            call_hooks.issued.fire(recorder, call_hooks.Issued(number, works))
        elif not coalesced(log.ring, number):
            log.ring.mark(number, State.DONE)
    except Exception as error:
        recorder.trouble("calls.returned", error, Collectives.lost)
