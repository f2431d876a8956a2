"""Wrapped models, their forwards and backwards."""

from __future__ import annotations

from .base import Event, Part

ALWAYS_EXAMINED = 8
"""The first backwards of a model are examined whole; later ones one in a stride by model size, the
same on every rank."""

PARAMETERS_PER_BACKWARD = 2
SHORTEST_STRIDE, SHORTEST_LATER = 8, 32
FIRST = 128


class Tensor(Part, frozen=True):
    """A parameter or buffer as it stood at the wrap (part of `Wrapped`).

    Attributes:
        site: the user's line that registered it, -1 where a library's module did.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    ignored: bool = False
    site: int = -1

    @property
    def look(self) -> tuple[object, ...]:
        """What is the same on every rank that has this tensor: numbers of lines are not."""
        return self.name, self.shape, self.dtype, self.trainable, self.ignored


class Submodule(Part, frozen=True):
    """A submodule that holds parameters, itself or below (part of `Wrapped`).

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
        frozen_site: the line that froze parameters before the wrap, -1 where there are none or it
            was not found.
        adopted: it was wrapped before the examination began; `site` is where that was, or else the
            line of its next call.
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

    @property
    def here(self) -> str:
        """What there is at `site`."""
        return "examined from here on, wrapped before" if self.adopted else "wrapped here"

    def describe(self) -> str:
        return f"wrapped {self.kind} in {self.wrapper} ({len(self.parameters)} parameters)"


class Named(Event, frozen=True, tag="named"):
    """What a variable, or an attribute of one, is called that held the wrapper of a model at the
    first step of an optimizer, in the innermost frame of the user's that has one."""

    model: int
    name: str


class SentBuffers(Event, frozen=True, tag="sent-buffers"):
    """The buffers that DDP is about to broadcast from rank 0 at the begin of a forward, where they
    are not shaped as at the wrap, or at the last such event. Looked at in some forwards, the same
    on every rank.

    Attributes:
        forward: number of the forward with gradients, per model.
        step: steps of the model's optimizer before it; `total` of all optimizers.
    """

    model: int
    forward: int
    step: int
    total: int
    site: int
    buffers: tuple[Tensor, ...]


class UnusedParameters(Event, frozen=True, tag="unused-parameters"):
    """After a backward that should have synchronised: which parameters got no local gradient.

    Recorded when the set changes, so an empty `indices` means "all are used again". A later record
    of the same backward takes the place of the one before: another backward over its forward
    brought more.

    Attributes:
        model: number of the wrapper.
        backward: how many synchronising backwards this model has seen, this one included.
        step: steps of the model's optimizer before it; `total` of all optimizers, -1 where that was
            not recorded.
        indices: positions in `Wrapped.parameters`.
        called: names of the submodules (those of `Wrapped.modules`) whose forward ran; None where
            that was not observed. `blind` are those of them that ran under `no_grad` only.
        find_unused: whether DDP was told to look for unused parameters.
        site: the line of the backward; `forward_site` of the forward before it.
        frozen: those of `indices` that no longer require a gradient, although they did at the wrap.
        by_torch: torch's own list told it, at the next forward.
        branches: module to the line of the `if` that skips it, where one was found.
        unspent: those of `indices` that the forward made numbers of which the program still has.
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

    def describe(self) -> str:
        if not self.indices:
            return f"model {self.model}: all that DDP averages has gradients (step {self.step})"
        count = len(self.indices)
        return f"model {self.model}: {count} parameters without gradient (step {self.step})"


class ModulesSkipped(Event, frozen=True, tag="modules-skipped"):
    """Which submodules that own parameters a forward did not call. Recorded when it changes.

    Attributes:
        backward: number of the synchronising backward that this forward leads to.
        site: the line of the forward.
    """

    model: int
    backward: int
    names: tuple[str, ...] = ()
    site: int = -1


class ParameterUse(Event, frozen=True, tag="parameter-use"):
    """How often parameters got no gradient, so far; recorded at powers of two and at the end.

    Attributes:
        examined: synchronising backwards looked at, of `backwards` in all.
        unused: position in `Wrapped.parameters` to the number of those in which it got none.
    """

    model: int
    examined: int
    backwards: int
    unused: dict[int, int] = {}


class SearchCost(Event, frozen=True, tag="search-cost"):
    """What `find_unused_parameters=True` cost so far: the walks of the autograd graph that DDP
    made after its forwards. Recorded at powers of two and at the end."""

    model: int
    searches: int
    seconds: float


class Bypassed(Event, frozen=True, tag="bypassed"):
    """An optimizer is about to apply gradients that a backward brought into a wrapped model
    although no forward of its wrapper led to it, and that nothing synchronised.

    Attributes:
        optimizer: `UNHELD` where no optimizer holds the model, and the program itself applied such
            gradients.
        count: such steps so far; recorded at powers of two.
        forwards: forwards of the wrapper so far.
        site: the line of the backward; `call_site` of the call that went around the wrapper, -1
            where it was not found.
        discarded: the wrapper no longer exists.
    """

    model: int
    optimizer: int
    step: int
    count: int
    forwards: int
    site: int = -1
    call_site: int = -1
    discarded: bool = False

    def describe(self) -> str:
        return f"model {self.model}: stepped with gradients that went around its wrapper"


class ParametersChanged(Event, frozen=True, tag="parameters-changed"):
    """Parameters of a wrapped model are no longer what DDP was given, and a backward has run.

    Attributes:
        kind: `added`, `replaced`, `unfrozen`, `frozen`, `converted` (cast or moved, so that DDP's
            hook is on a node that is used no more), `removed`, or `tied` (the name is now another
            known parameter's).
        trained: how many of them have a gradient now.
        communicated: whether the model's group communicated in that backward.
        site: the line that changed them, -1 where it was not found.
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
    """An optimizer trains parameters that no wrapper was given, in a run of several ranks.

    Attributes:
        kind: class of the module that holds most of them, `site` the line that made it; `root` its
            number among the outermost modules, -1 for none.
        parameters: in the optimizer's order, names as far as they are known.
        wrapped: how many models were wrapped so far.
        step_site: the line of the step.
        name: what the program calls the module there, as in `Named`; or the one parameter of none.
    """

    optimizer: int
    kind: str
    parameters: tuple[Tensor, ...]
    wrapped: int = 0
    root: int = -1
    site: int = -1
    step_site: int = -1
    name: str = ""

    def describe(self) -> str:
        count = len(self.parameters)
        return f"optimizer {self.optimizer} trains {count} parameters that no wrapper was given"


class UnwrappedState(Event, frozen=True, tag="unwrapped-state"):
    """Digests of such parameters and their gradients before a step: equal where the bits are.
    Recorded at steps 0, 1, 2, 4, 8 and so on; more often where gradients are exchanged by hand.

    Attributes:
        exchanged: how they, or about as much as they are, were ever exchanged: `gradients` (on
            the default group, between backward and step), `gradients of a group`, `parameters`,
            `point-to-point`, `all-to-all`, `in backward`, `unseen`; `gathered`: after the last
            step only, in a collective that leaves them as they are; empty where they never were,
            or only before the first step of all.
        complete: between the last backward and this step every gradient was handed to collectives
            on one group, `group`. `completed` are the steps before this one of which that is true,
            `inside` those of which it was done inside the backward, and little else there.
        group: the default one, or else the one of all such steps, -1 for several; where it is a
            part of the world, `partners` are the other ranks that this one did something with that
            replicas do not do (sends, all_to_all, collectives in the backward), -1 for any.
        averaged: steps so far, this one included, before which the parameters themselves were
            handed to collectives.
        shared: steps so far, this one included, of which at least half of the gradients, by their
            elements, were handed to collectives before it.
        late: steps so far whose gradients were handed to collectives only after they were applied.
        spread: the group that all of the parameters, and not copies, were handed to before the
            first step of all, -1 for none; where it is a part of the world, `numbers` are what was
            handed over so far, of any kind, by group.
        elements: floating-point numbers handed to collectives so far, first step not included.
        swaps: `all_to_all` of such numbers so far, outside of backwards and inside.
        wrapped: backwards so far in which DDP averaged the gradients of some wrapped model.
        each: digests one by one, of the gradients and then of the parameters, in the order of
            `Unwrapped.parameters` (packed; 0 for none); with it, `handed` are the positions whose
            gradients were handed over for this step, as told by memory and size (packed), `other`
            the elements of what else was, and `exchange_site` the line of such a call.
        copied: the norm of the copies that were handed over for this step, by that of the gradients
            which are applied, 0 where that is not known; `copied_site` is the line of one.
        running: steps so far that ended while a collective ran that carried gradients which they
            applied, and that nobody had waited for; `running_site` is the line of one.
        within: elements handed to collectives inside the backwards since the step before.
        last: taken when the run was over, after `step` steps; the gradients mean nothing.
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
    last: bool = False
    copied: float = 0.0
    copied_site: int = -1
    within: int = 0


class ReadyTwice(Event, frozen=True, tag="ready-twice"):
    """torch refused a backward: a parameter was marked ready twice.

    Attributes:
        parameter: the one that torch names.
        twice: those whose gradient became ready more than once, as far as that was watched.
        nested: backwards inside that backward (re-entrant checkpointing).
        forwards: forwards of the wrapper that this backward is for; backwards: how many over these
            forwards came before it.
        checkpoint_site: the line that checkpoints a part of the model, -1 where none was found.
        backward: how many synchronising backwards this model has seen, this one included; -1 where
            that was not recorded.
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
    """A model wrapped with `static_graph=True` does not do the same in every step.

    Attributes:
        kind: `changed` (torch says so), `asserted` (torch's own assertion failed), or `silent` (a
            backward that should have synchronised did not communicate; at powers of two).
        silent: such backwards so far.
        unsynced: forwards under `no_sync` so far; `unsynced_site` the line of the last.
        promised: what this backward did not reach, where the first one reached all of it without a
            gradient: torch led that one to every output of the forward, and waits since.
        nested: most backwards inside one of its backwards (re-entrant checkpointing);
            `checkpoint_site` as in `ReadyTwice`.
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
    """Parameters whose gradient was exactly zero at every step looked at so far, and that a step
    changed all the same; told again when they are fewer.

    Attributes:
        indices: positions in `Wrapped.parameters`.
        samples: steps looked at.
        weight_decay: the largest of the optimizer's groups that hold them.
        moved: those of them whose group has none.
        beside: parameters of the same modules that were seen with a gradient that is not zero.
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
    """Whether the next synchronising backward of a model is examined whole, after so many; by the
    number of the parameters that DDP synchronises.

    The place moves from window to window: a branch taken every k-th step must not hide.
    """
    if made < ALWAYS_EXAMINED:
        return True
    shortest = SHORTEST_STRIDE if made < FIRST else SHORTEST_LATER
    stride = max(shortest, parameters // PARAMETERS_PER_BACKWARD)
    window, place = divmod(made, stride)
    return place == window % stride
