"""What is known of one wrapped model: what DDP was given, and where it is between forward, backward
and synchronisation."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from ...events.model import examined
from ..recording.torch_compat import graph
from ..recording.weak_references import Reference
from ..source.call_resolver import Found
from ..tensors.tensor_watch import grad_of, marks, spread


class Model:
    """What the probe knows of one wrapped model. Keeps nothing alive.

    Attributes:
        number: in the order of wrapping, as in `Wrapped.model`.
        wrapper: weak reference to the DDP object, None before it is complete.
        inner: weak reference to the module.
        names, trainable: of the parameters, when wrapped.
        parameters: weak references, in the order of `Wrapped.parameters`.
        expected: positions of the parameters that DDP synchronises.
        ignored: positions of those that DDP was told to ignore.
        buffers: names and shapes of the buffers, when wrapped.
        superseded: a later wrapper has taken the module, and this one is not called any more.
        sample: positions of a few expected parameters, whose gradients show whether a backward
            reached the model; `sampled` are references to them.
        made_at: the line that wraps it.
        group: number of the process group, -1 if unknown.
        forwards: forwards with gradients.
        pending: forwards that wait for their backward; `pending_sync`: DDP is to synchronise then.
        unsynced: forwards under `no_sync`, the last one at `unsynced_site`.
        running: forwards with gradients that have begun and not ended. Their backward may run
            inside of them (Lightning's manual optimisation); `answered_inside`: one has.
        rebuilds: DDP will rebuild its buckets in the order of the first backward, in the next
            forward with gradients.
        armed: a forward has told DDP to synchronise the next backward, and none has done so yet.
        backwards: backwards that reached it; `synced_backwards` should have synchronised.
        unfinished: a backward that should have synchronised left DDP waiting for gradients (of the
            positions `left`, if it was examined); another one over the same forward may bring them.
        looked_at: number of the next forward that is sampled on the fast path.
        last_position: of the parameter whose gradient arrived last in a backward whose gradients
            were counted; -1 if unknown.
        next_examined: number of the next synchronised backward that is examined.
        forwards_now: forwards since the last backward, or up to it; `backwards_now` since the last
            forward.
        forward_step, backward_step: optimizer steps before the last forward and backward;
            `forwards_in_step` forwards had this `forward_step`.
    """

    def __init__(self, number: int, module: Any, parameters: list[Any], expected: list[int]):
        self.number = number
        self.wrapper: weakref.ref[Any] | None = None
        self.superseded = False
        self.inner = weakref.ref(module)
        self.made_at: Found | None = None
        self.group = -1
        self.names: list[str] = []
        self.buffers: dict[str, tuple[int, ...]] = {}
        self.trainable: list[bool] = []
        self.parameters = [Reference(p) for p in parameters]
        self.expected = expected
        self.sample = spread(expected)
        self.sampled = [self.parameters[position] for position in self.sample]
        self.ignored: frozenset[int] = frozenset()
        self.find_unused = False
        self.static_graph = False
        self.bucket_view = False
        self.rebuilds = False
        self.forwards = 0
        self.pending = self.running = 0
        self.answered_inside = False
        self.pending_sync = self.armed = False
        self.unfinished = False
        self.left: tuple[int, ...] = ()
        self.backwards = 0
        self.synced_backwards = 0
        self.forward_site = self.first_node = -1
        self.forwards_now = 0
        self.backwards_now = 0
        self.forwards_in_step = 0
        self.forward_step = -1
        self.backward_step = -1
        self.unsynced = 0
        self.unsynced_site = -1
        self.leading: tuple[int, ...] = ()
        self.next_examined = -1
        self.last_position = -1
        self.looked_at = 0

    def ddp(self) -> Any:
        """The DDP object; None if it is not complete, or gone."""
        return None if self.wrapper is None else self.wrapper()

    def held(self) -> dict[int, Any]:
        """By position the parameters that the wrapper keeps alike, as far as they still exist."""
        every = ((i, ref()) for i, ref in enumerate(self.parameters) if i not in self.ignored)
        return {i: p for i, p in every if p is not None}

    def gradients(self) -> list[tuple[int, int]]:
        """The marks of the sampled gradients."""
        return marks(grad_of(reference()) for reference in self.sampled)

    def began(self, site: int, sync: bool, step: int) -> None:
        """A forward with gradients begins.

        Args:
            sync: DDP is to synchronise the next backward.
            step: optimizer steps so far.
        """
        self.forwards += 1
        self.pending += 1
        self.running += 1
        self.pending_sync = sync
        self.unfinished, self.left = False, ()
        self.armed |= sync
        self.forward_site, self.first_node = site, graph.next_number()
        if self.backwards_now:
            self.forwards_now = self.backwards_now = 0
        self.forwards_now += 1
        if self.forward_step != step:
            self.forward_step, self.forwards_in_step = step, 0
        self.forwards_in_step += 1
        if not sync:
            self.unsynced, self.unsynced_site = self.unsynced + 1, site

    def ended(self, meant: bool, sync: bool) -> None:
        """A forward with gradients ends.

        DDP prepares for a backward only if it is to synchronise at the end of the forward. If a
        program switched that off during the forward, its backward ran inside.

        Args:
            meant: DDP was to synchronise the backward, when the forward began; `sync`: when it
                ended.
        """
        self.running -= 1
        if self.answered_inside and not self.running:
            self.answered_inside = False
            if meant and not sync:
                self.pending, self.pending_sync, self.armed = 0, False, False

    def reached(self, step: int, averaged: bool) -> None:
        """A backward reached the model's parameters.

        Args:
            step: optimizer steps so far.
            averaged: the group communicated during it.
        """
        self.backwards += 1
        self.backwards_now += 1
        self.backward_step = step
        if averaged and not self.running:  # else another one may come in the same forward
            self.armed = False

    def answered(self) -> None:
        """The backward of the pending forwards has ended."""
        self.synced_backwards += self.pending_sync
        if self.running:
            self.pending, self.answered_inside = self.running, True
        else:
            self.pending, self.pending_sync = 0, False

    def waits_for(self, left: tuple[int, ...] | None, averaged: bool) -> None:
        """Decide whether DDP still waits for gradients after a backward that was to synchronise.

        Args:
            left: positions without a gradient; None if unknown.
        """
        expects = not self.find_unused and not self.static_graph
        self.unfinished = bool(left) if expects and left is not None else not averaged
        self.left = left or ()

    def examined(self) -> bool:
        """Whether the gradients of its next synchronised backward are counted."""
        return self.examined_within(1)

    def examined_within(self, backwards: int) -> bool:
        """Whether one of the next so many synchronised backwards is examined."""
        made = self.synced_backwards
        if made > self.next_examined:
            count = len(self.expected)
            self.next_examined = next(n for n in itertools.count(made) if examined(n, count))
        return made + backwards > self.next_examined

    def live_parameters(self) -> list[Any] | None:
        """The parameters; None if the model is gone."""
        alive = [ref() for ref in self.parameters]
        return None if any(p is None for p in alive) else alive


def parameters(model: Model, positions: Sequence[int]) -> list[Any]:
    """The parameters at some positions; None for one that is gone."""
    return [model.parameters[position]() for position in positions]


def gradients(model: Model, positions: Sequence[int]) -> list[Any]:
    """The gradients of the parameters at some positions; None for one that has none."""
    return [grad_of(parameter) for parameter in parameters(model, positions)]
