"""Wrapped models, their forwards and backwards."""

from __future__ import annotations

from .base import Event, Part

ALWAYS_EXAMINED = 8
"""First backwards of a model that are all examined whole. Later ones are examined at a stride that
grows with the model; all ranks examine the same ones."""

PARAMETERS_PER_BACKWARD = 2
SHORTEST_STRIDE, SHORTEST_LATER = 8, 32
FIRST = 128


class Tensor(Part, frozen=True):
    """A parameter or buffer as it stood at the wrap (part of `Wrapped`).

    Attributes:
        site: the user's line that registered it, -1 where a library's module did.
        kept: it is in the model's `state_dict` (a buffer may be registered not to be).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    ignored: bool = False
    site: int = -1
    kept: bool = True

    @property
    def look(self) -> tuple[object, ...]:
        """The fields that are equal on every rank with this tensor; site numbers are not."""
        return self.name, self.shape, self.dtype, self.trainable, self.ignored


class Submodule(Part, frozen=True):
    """A submodule with parameters of its own or in its children (part of `Wrapped`).

    Attributes:
        name: as in `named_modules()`; empty for the wrapped module itself.
        kind: class name.
        site: the user's line that made it, -1 where unknown.
    """

    name: str
    kind: str
    site: int = -1


class Wrapped(Event, frozen=True, tag="wrapped"):
    """A module was wrapped for distributed training.

    Attributes:
        model: number of the wrapper on this rank, in the order of wrapping.
        wrapper: `DistributedDataParallel`, `DataParallel`, `FSDP` or `fully_shard`.
        group: number of the process group (see `GroupReady`), -1 for DataParallel.
        parameters: in the order of `named_parameters()` of the inner module; `ignored` marks
            those in `_ddp_params_and_buffers_to_ignore`.
        options: constructor flags that matter.
        frozen_site: the line that froze parameters before the wrap, -1 if none are frozen or the
            line was not found.
        by: the module of a framework that the program called and that wrapped the model
            (`lightning.pytorch.trainer`); empty if the program did so itself.
        adopted: it was wrapped before the probe started; `site` is that line, or else the line of
            its next call.
        forward: its class defines `forward`; otherwise only parts of it can be called.
        memory: which memory its parameters share with other processes; empty if they do not.
    """

    model: int
    wrapper: str
    kind: str
    group: int
    site: int
    parameters: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    modules: tuple[Submodule, ...] = ()
    options: dict[str, str | int | float | bool | None] = {}
    device: str = ""
    frozen_site: int = -1
    adopted: bool = False
    forward: bool = True
    by: str = ""
    memory: str = ""

    @property
    def here(self) -> str:
        """What there is at `site`."""
        return "examined from here on, wrapped before" if self.adopted else "wrapped here"

    def describe(self) -> str:
        return f"wrapped {self.kind} in {self.wrapper} ({len(self.parameters)} parameters)"


class Named(Event, frozen=True, tag="named"):
    """The variable or attribute that holds a model's wrapper at the first step of an optimizer, in
    the innermost user frame that has one."""

    model: int
    name: str


class SentBuffers(Event, frozen=True, tag="sent-buffers"):
    """The buffers that DDP is about to broadcast from rank 0 at the begin of a forward.

    Recorded when their shapes differ from those at the wrap or in the last such event. Looked at in
    selected forwards, the same ones on every rank.

    Attributes:
        forward: number of the forward with gradients, per model.
        step: steps of the model's optimizer before it; `total` of all optimizers.
        made: the line that made the module of the first buffer that is new; -1 if unknown.
    """

    model: int
    forward: int
    step: int
    total: int
    site: int
    buffers: tuple[Tensor, ...]
    made: int = -1


class UnusedParameters(Event, frozen=True, tag="unused-parameters"):
    """The parameters that got no local gradient in a backward that should have synchronised.

    Recorded when the set changes; an empty `indices` means that all are used again. A later record
    of the same backward replaces an earlier one: another backward over the same forward reached
    more parameters.

    Attributes:
        model: number of the wrapper.
        backward: number of synchronised backwards of this model, this one included.
        step: steps of the model's optimizer before it; `total` of all optimizers, -1 if not
            recorded.
        indices: positions in `Wrapped.parameters`.
        called: names of the submodules (those of `Wrapped.modules`) whose forward ran; None if not
            observed. `blind` are those of them that ran under `no_grad` only.
        find_unused: `find_unused_parameters` is set.
        site: the line of the backward; `forward_site` of the forward before it.
        frozen: those of `indices` that required a gradient at the wrap and no longer do;
            `frozen_site` is the line that froze them, -1 if it was not found.
        by_torch: read from the error that DDP raises in the next forward.
        branches: by module, the line of the `if` that skips it, if one was found.
        unspent: those of `indices` whose forward results the program still holds: the loss left
            them out.
    """

    model: int
    backward: int
    step: int
    indices: tuple[int, ...]
    called: tuple[str, ...] | None = None
    find_unused: bool = False
    static_graph: bool = False
    site: int = -1
    forward_site: int = -1
    frozen: tuple[int, ...] = ()
    by_torch: bool = False
    branches: dict[str, int] = {}
    total: int = -1
    blind: tuple[str, ...] = ()
    unspent: tuple[int, ...] = ()
    frozen_site: int = -1

    def describe(self) -> str:
        if not self.indices:
            return f"model {self.model}: all that DDP averages has gradients (step {self.step})"
        count = len(self.indices)
        return f"model {self.model}: {count} parameters without gradient (step {self.step})"


class ModulesSkipped(Event, frozen=True, tag="modules-skipped"):
    """The submodules with own parameters that a forward did not call. Recorded when they change.

    Attributes:
        backward: number of the synchronised backward that this forward leads to.
        site: the line of the forward.
        unread: of a wrapper that does not broadcast buffers, submodules with own buffers that the
            forward did not call, and that no `forward` mentions but under an `if`.
    """

    model: int
    backward: int
    names: tuple[str, ...] = ()
    site: int = -1
    unread: tuple[str, ...] = ()


class ParameterUse(Event, frozen=True, tag="parameter-use"):
    """How often parameters got no gradient so far. Recorded at powers of two, when one is seen to
    be thawed, and at the end.

    Attributes:
        examined: synchronised backwards that were examined, of `backwards` in all.
        unused: by position in `Wrapped.parameters`, examined backwards without its gradient.
        thawed: positions of parameters that were frozen in such a backward and require a gradient
            again since.
    """

    model: int
    examined: int
    backwards: int
    unused: dict[int, int] = {}
    thawed: tuple[int, ...] = ()


class Bypassed(Event, frozen=True, tag="bypassed"):
    """An optimizer is about to apply unsynchronised gradients of a wrapped model, because the
    forward did not go through the wrapper.

    Attributes:
        optimizer: `UNHELD` if no optimizer holds the model and the program applied the gradients
            manually.
        count: such steps so far; recorded at powers of two.
        forwards: forwards of the wrapper so far.
        site: the line of the backward; `call_site` of the call that bypassed the wrapper, -1 if it
            was not found.
        discarded: the wrapper no longer exists.
        named_site: the line that gave the model the name by which it is called, taking it out of
            the wrapper; `taken_site` the line that reads the wrapper's attribute for it, in a
            function that it calls, say. -1 if they were not found.
        within: the class of another module, outside of the wrapped one, in whose `forward` only
            parts of the wrapped one ran; empty if the wrapped one ran, or that is not known.
        within_site: the line that calls that module.
        handed: the argument, as written, by which a function passes the model on instead of the
            wrapper, where another one then calls it; `handed_site` the line.
    """

    model: int
    optimizer: int
    step: int
    count: int
    forwards: int
    site: int = -1
    call_site: int = -1
    discarded: bool = False
    named_site: int = -1
    taken_site: int = -1
    within: str = ""
    within_site: int = -1
    handed: str = ""
    handed_site: int = -1

    def describe(self) -> str:
        return f"model {self.model}: stepped with gradients that went around its wrapper"


class ParametersChanged(Event, frozen=True, tag="parameters-changed"):
    """Parameters of a wrapped model are no longer those that DDP got at the wrap. Recorded after a
    backward that shows the effect.

    Attributes:
        kind: `added`, `replaced`, `unfrozen`, `frozen`, `converted` (cast or moved, so that DDP's
            hook is on an unused autograd node), `removed`, or `tied` (the name now refers to
            another known parameter).
        trained: how many of them have a gradient now.
        communicated: the model's group communicated in that backward.
        site: the line that changed them, -1 if it was not found.
    """

    model: int
    kind: str
    names: tuple[str, ...]
    trained: int
    communicated: bool
    step: int
    site: int = -1
    forward_site: int = -1
    find_unused: bool = False

    def describe(self) -> str:
        return f"model {self.model}: {len(self.names)} parameters {self.kind} since the wrap"


class Unwrapped(Event, frozen=True, tag="unwrapped"):
    """An optimizer trains parameters outside of any wrapper, in a run of several ranks.

    Attributes:
        kind: class of the module that holds most of them, `site` the line that made it; `root` its
            number among the outermost modules, -1 for none.
        parameters: in the optimizer's order, with names if known.
        wrapped: number of models wrapped so far.
        step_site: the line of the step.
        name: the program's name for the module at that line, as in `Named`, or for a single
            parameter without a module.
        sharded: the module has other parameters, of which each rank holds a piece (FSDP).
        memory: as of `Wrapped`.
        places: packed, the position of each of these parameters among all that the module has;
            empty if some belong to no module, or to another one.
        unsteady: where that is not ascending, lines of the optimizer's class on which an order
            differs between processes (`hash` of a text, a set).
    """

    optimizer: int
    kind: str
    parameters: tuple[Tensor, ...]
    wrapped: int = 0
    root: int = -1
    site: int = -1
    step_site: int = -1
    name: str = ""
    sharded: bool = False
    memory: str = ""
    places: str = ""
    unsteady: tuple[int, ...] = ()

    def describe(self) -> str:
        count = len(self.parameters)
        return f"optimizer {self.optimizer} trains {count} parameters that no wrapper was given"


class UnwrappedState(Event, frozen=True, tag="unwrapped-state"):
    """Digests of an optimizer's unwrapped parameters and their gradients before a step; equal where
    the tensors are equal bit by bit. Recorded at steps 0, 1, 2, 4, 8 and so on, and more often with
    manual synchronisation.

    Attributes:
        exchanged: how they, or tensors of about their size, were exchanged so far: `gradients` (on
            the default group, between backward and step), `gradients of a group`, `parameters`,
            `point-to-point`, `all-to-all`, `in backward`, `unseen` (by means not recorded);
            `gathered`: after the last step only, in a collective that leaves them unchanged; empty
            if never, or only before the first step.
        complete: every gradient was passed to collectives in one group, `group`, between the last
            backward and this step. `completed` counts earlier such steps; `inside` counts steps
            whose gradients were passed inside the backward, with little else.
        group: the default group, or else the one group of all such steps, -1 for several.
        partners: the other ranks with which this one did what replicas do not do (sends,
            all_to_all, collectives in the backward), -1 for any.
        averaged: steps so far, with this one, before which the parameters themselves were passed to
            collectives.
        shared: steps so far, with this one, before which at least half of the gradients' elements
            were passed to collectives.
        late: steps so far whose gradients were passed to collectives only after they were applied.
        spread: the group in which all parameters, not copies of them, were exchanged before the
            first step, -1 for none. If it is a part of the world, `numbers` are the numbers of any
            type passed to collectives so far, by group.
        elements: floating-point numbers passed to collectives since the first step.
        swaps: `all_to_all` calls with floating-point tensors so far, outside and inside backwards.
        wrapped: backwards so far in which DDP averaged the gradients of some wrapped model.
        each: digests of each gradient and then of each parameter, in the order of
            `Unwrapped.parameters` (packed; 0 for none). With it, `handed` are the positions whose
            gradients were passed to collectives for this step, by memory and size (packed), `other`
            the elements of all else that was, and `exchange_site` the line of such a call.
        unclipped: with `each`, the digests of each gradient before a function of torch clipped
            them after the exchange, at `clip_site` (packed); empty where it left them unchanged.
        copied: norm of the exchanged copies of gradients divided by the norm of the gradients that
            are applied, 0 if unknown; `copied_site` is the line of such a call.
        running: steps so far that ended while an asynchronous collective with their gradients ran
            that nobody had waited for; `running_site` is the line of one.
        within: elements passed to collectives inside the backwards since the last step.
        local: positions whose gradients were complete before the first `all_to_all` of the last
            backward (packed); looked at before steps 1 to 4, beside `all_to_all` only.
        just: all parameters themselves were passed to collectives since the last step.
        last: recorded when the run was over, after `step` steps; the gradients mean nothing.
    """

    RANKS = ("partners",)

    optimizer: int
    step: int
    gradients: int
    parameters: int
    exchanged: str = ""
    complete: bool = False
    completed: int = 0
    group: int = 0
    partners: tuple[int, ...] = ()
    inside: int = 0
    averaged: int = 0
    shared: int = 0
    late: int = 0
    spread: int = -1
    numbers: dict[int, int] = {}
    elements: int = 0
    swaps: tuple[int, ...] = ()
    wrapped: int = 0
    each: str = ""
    handed: str = ""
    other: int = 0
    exchange_site: int = -1
    running: int = 0
    running_site: int = -1
    just: bool = False
    last: bool = False
    copied: float = 0.0
    copied_site: int = -1
    within: int = 0
    local: str = ""
    unclipped: str = ""
    clip_site: int = -1


class ReadyTwice(Event, frozen=True, tag="ready-twice"):
    """DDP raised in a backward because a parameter was marked ready twice.

    Attributes:
        parameter: the one that the error names.
        twice: those whose gradient was seen to become ready more than once.
        nested: backwards inside that backward (re-entrant checkpointing).
        forwards: forwards of the wrapper that this backward is for; `backwards` over these
            forwards came before it.
        checkpoint_site: the line that checkpoints a part of the model, -1 if none was found.
        backward: number of synchronised backwards of this model, this one included; -1 if not
            recorded.
    """

    model: int
    step: int
    parameter: str
    twice: tuple[str, ...] = ()
    nested: int = 0
    forwards: int = 0
    backwards: int = 0
    find_unused: bool = False
    static_graph: bool = False
    site: int = -1
    forward_site: int = -1
    checkpoint_site: int = -1
    backward: int = -1

    def describe(self) -> str:
        return f"model {self.model}: {self.parameter} was marked ready twice (step {self.step})"


class StaticGraphBroken(Event, frozen=True, tag="static-graph-broken"):
    """The graph of a model wrapped with `static_graph=True` is not static.

    Attributes:
        kind: `changed` (DDP's error), `asserted` (an assertion in DDP failed), or `silent` (a
            backward that should have synchronised did not communicate; at powers of two).
        silent: silent backwards so far.
        unsynced: forwards under `no_sync` so far; `unsynced_site` is the line of the last.
        promised: positions that this backward did not reach and the first one reached without a
            gradient: DDP made the first one visit every output of the forward, and waits for them
            since.
        nested: most backwards nested in one (re-entrant checkpointing); `checkpoint_site` as in
            `ReadyTwice`.
    """

    model: int
    kind: str
    step: int
    backward: int
    silent: int = 0
    unsynced: int = 0
    unsynced_site: int = -1
    site: int = -1
    forward_site: int = -1
    promised: tuple[int, ...] = ()
    nested: int = 0
    checkpoint_site: int = -1


class ZeroGradients(Event, frozen=True, tag="zero-gradients"):
    """Parameters that steps change although their gradient was exactly zero in every sampled step.
    Recorded again when there are fewer.

    Attributes:
        indices: positions in `Wrapped.parameters`.
        samples: sampled steps.
        weight_decay: the largest of the parameter groups that hold them.
        moved: those of `indices` whose group has no weight decay.
        beside: parameters of the same modules with a nonzero gradient.
    """

    model: int
    optimizer: int
    step: int
    samples: int
    indices: tuple[int, ...] = ()
    weight_decay: float = 0.0
    moved: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()


def examined(made: int, parameters: int) -> bool:
    """Whether a model's next synchronised backward is examined whole.

    The position in the stride changes from one window to the next, so that a branch taken in every
    k-th step is seen.

    Args:
        made: synchronised backwards so far.
        parameters: number of parameters that DDP synchronises.
    """
    if made < ALWAYS_EXAMINED:
        return True
    shortest = SHORTEST_STRIDE if made < FIRST else SHORTEST_LATER
    stride = max(shortest, parameters // PARAMETERS_PER_BACKWARD)
    window, place = divmod(made, stride)
    return place == window % stride
