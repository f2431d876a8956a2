"""Replicated tensors: digests to compare between ranks, and possible causes of drift."""

from __future__ import annotations

from .base import Event
from .calls import Place

ABSENT, ZERO = 0, 1
"""The digests of no tensor, and of one that holds zeros only."""

UNHELD = -1
"""Stands for the optimizer of a model that is trained although no optimizer holds it."""

AGAIN = 8
"""Evaluations that are digested without training in between, the first one included."""

EARLY = (0, 1, 2, 4, 9)
"""Steps at which every tensor is digested; later ones follow the series 1, 2, 5, less one."""


UNEVEN_STEPS = "its ranks take different numbers of steps (`Join`)"
"""Why copies under torch's `Join` are not compared, as `Replica.left_out`."""


class Replica(Event, frozen=True, tag="replica"):
    """An optimizer steps parameters that the ranks of a group hold in equal copies.

    Attributes:
        model, optimizer: numbers as in `Wrapped` and `OptimizerSeen`, or `UNHELD`.
        ranks: global ranks of the model's process group.
        parameters: positions in `Wrapped.parameters`, packed; the rows of `Digests` follow them.
        broadcast: DDP broadcasts rank 0's buffers before each forward.
        hook: name of DDP's communication hook, empty for none; `averages` is False if the hook is
            not known to average gradients.
        left_out: why this replica is not to be compared (`local SGD`, ...), empty if it is.
    """

    model: int
    optimizer: int
    ranks: tuple[int, ...]
    parameters: str
    broadcast: bool = True
    hook: str = ""
    averages: bool = True
    left_out: str = ""


class Digests(Event, frozen=True, tag="digests"):
    """Digests of tensors at some steps: numbers that are equal where tensors are equal bit by bit.

    Attributes:
        kind: `parameters`, `gradients` (averaged by the last backward), `local` (not averaged),
            `buffers`, or `state:<key>` of the optimizer.
        point: `step` (before an optimizer step), `kept` (buffers that DDP does not broadcast, at
            the next forward with gradients after a step), `eval` (after the first forward without
            gradients), `again` (a later evaluation without training in between), `part` (buffers of
            a part of the model that is evaluated by itself) or `end`.
        keys: per row, the number of the moment: the optimizer's step (for `UNHELD` the synchronised
            backward); for `eval`, `kept` and `end` the forwards with gradients before it; for
            `again` and `part` these times `AGAIN`, plus the number of the evaluation.
        strides: per row, which tensors (see `chosen`).
        counts: per row, how many numbers of `values` (packed) belong to it; the number 0 stands for
            a missing tensor.
        backwards: per row, synchronised backwards of the model so far; where ranks differ, they
            have not taken the same steps.
        step: optimizer steps of this process at the last row.
        site: the line of the forward, for `eval`.
    """

    model: int
    optimizer: int
    kind: str
    keys: tuple[int, ...]
    strides: tuple[int, ...]
    counts: tuple[int, ...]
    values: str
    backwards: tuple[int, ...] = ()
    point: str = "step"
    step: int = -1
    site: int = -1


class BufferUpdates(Event, frozen=True, tag="buffer-updates"):
    """Sketches of buffers of a wrapped model, just before DDP overwrites them with those of the
    first rank of its group. Only of modules that are none of torch's, and whose `forward` uses one
    of their buffers for what it returns.

    Attributes:
        forward: forwards of the model with gradients before it.
        sketches: for each buffer a few sums over random halves of its elements; all ranks use the
            same halves.
        read_sites, write_sites: for each the line of its class that uses it, and the first one that
            writes to it; -1 if none was found.
    """

    model: int
    forward: int
    names: tuple[str, ...]
    sketches: tuple[tuple[float, ...], ...]
    read_sites: tuple[int, ...]
    write_sites: tuple[int, ...]


class LateBuffers(Event, frozen=True, tag="late-buffers"):
    """Persistent floating-point buffers that a wrapped model got after the wrap, digested before an
    optimizer step.

    Attributes:
        names, shapes: of each buffer; `values` a digest of each, packed.
    """

    model: int
    optimizer: int
    step: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    values: str


class OuterModule(Event, frozen=True, tag="outer-module"):
    """A module that no wrapper holds was called in a training step, or evaluated after one: a
    target or teacher network, moving averages of the weights, a loss with buffers, a normaliser.

    Attributes:
        number: of the module on this rank, in the order of the records.
        kind: class name.
        site: the line that made or copied it, -1 if unknown; `call_site` the line that calls it.
        owners: for each of these the line that made the part which holds it, -1 if unknown.
        copied: it was made by `copy.deepcopy` or the like; `made_at` when.
        names, shapes: of its floating-point parameters, `parameters` in number, and then of its
            persistent floating-point buffers.
        trained: an optimizer holds parameters of it, so that only its buffers are listed.
        evaluated: it was called after `eval()`, not in a training step.
        learning: gradients flow through it, so that it shapes the loss.
        feeds: what it returned was given to the forward of a wrapped model.
        like: number of the wrapped model that has a part of the same class with the same
            parameters, and the name of that part; None for none.
    """

    number: int
    kind: str
    site: int
    call_site: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parameters: int
    step: int
    copied: bool = False
    made_at: float = 0.0
    owners: tuple[int, ...] = ()
    trained: bool = False
    evaluated: bool = False
    learning: bool = False
    feeds: bool = False
    like: tuple[int, str] | None = None


AT_END, AT_START = -1, -2
"""Stand for moments among the steps of `OuterDigests`."""


class OuterDigests(Event, frozen=True, tag="outer-digests"):
    """Digests of the tensors of an `OuterModule`, in the order of its names.

    Attributes:
        module: its number.
        optimizer, step: before that step of the optimizer; `AT_END` for the end of the run,
            `AT_START` for the time before the first step of the process.
        values: packed.
        queues: positions of the tensors in which the step before wrote one block of rows or columns
            and left the rest, as what is put into a queue does.
        evaluated: it is about to be called in an evaluation, after `step` steps of the process.
        update: in the first record, the line that writes to its parameters, as far as the source
            tells, and the calls that lead to it, innermost first.
    """

    module: int
    optimizer: int
    step: int
    values: str
    queues: tuple[int, ...] = ()
    evaluated: bool = False
    update: tuple[Place, ...] = ()


class OuterStateTaken(Event, frozen=True, tag="outer-state-taken"):
    """`state_dict` of an `OuterModule`, or of a module around it, was called.

    Attributes:
        step: optimizer steps of this process before it.
    """

    module: int
    step: int
    site: int


class MeshModel(Event, frozen=True, tag="mesh-model"):
    """An optimizer that is about to take its first step holds DTensors, or the tensors of
    `FullyShardedDataParallel`: parameters that are sharded or replicated over a device mesh.

    Attributes:
        kind: class name of the model, empty if unknown; `site` the line that made it.
        dims, sizes: names and sizes of the dimensions of the whole mesh (`dim 0` for one without a
            name); `ranks` its ranks, row by row.
        names, shapes: of the parameters, `shapes` of what this rank holds.
        placed: of each parameter and for each dimension `s` (sharded), `r` (replicated, as its
            placements say) or `-` (its mesh has not this dimension; a plain tensor).
        split: the dimensions over which layers are split between ranks, which then need equal
            inputs (tensor parallelism): sharded, but not by `fully_shard`.
        parted: this rank sends to others, as the stages of a pipeline do.
        step_site: the line of the optimizer's step.
        flat: they are those of `FullyShardedDataParallel`: several parameters in one tensor, which
            has the name of the first.
    """

    optimizer: int
    kind: str
    site: int
    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    placed: tuple[str, ...]
    split: tuple[str, ...]
    parted: bool
    step_site: int
    flat: bool = False

    RANKS = ("ranks",)


class MeshDigests(Event, frozen=True, tag="mesh-digests"):
    """Digests of what this rank holds of the parameters of a `MeshModel`, in the order of its
    names.

    Attributes:
        step: of the optimizer, before which they were taken; -1 for the end of the run.
        gradients, values: packed digests of the gradients and of the parameters.
        samples: of each parameter up to four values; empty where they cannot be read.
    """

    optimizer: int
    step: int
    gradients: str
    values: str
    samples: tuple[tuple[float, ...], ...] = ()


class Sketch(Event, frozen=True, tag="sketch"):
    """A random projection of all tensors of a kind. The distance between the sketches of two ranks
    estimates that of the tensors within some ten percent.

    Attributes:
        step: of the optimizer, about to be taken; at the end of the run the number of its steps.
        norm: Euclidean norm of the tensors on this rank.
        bins: sums over random halves of the elements; all ranks use the same halves.
    """

    model: int
    optimizer: int
    kind: str
    step: int
    norm: float
    bins: tuple[float, ...]


class Loaded(Event, frozen=True, tag="loaded"):
    """`load_state_dict` was called. `what` is `weights` of a model, its `optimizer`, a `scheduler`
    of that optimizer, or a gradient `scaler`.

    Attributes:
        model: number of the wrapper, -1 for none; optimizer: of a model without one, the number of
            an optimizer that trains it, else -1. What all ranks exchange before the first step is
            not recorded of weights that were loaded earlier.
        step: optimizer steps of this process before it.
        assigned: with `assign=True`, which replaces the model's parameters by others.
        update: of weights that another module of the program holds, such as moving averages: the
            line that writes to that one, and the calls that lead to it, innermost first.
        places: `site`, and the calls that lead to it, innermost first.
        made: the line that made the optimizer whose state it is.
        own: of weights that are the module's own tensors (what `state_dict()` gave, not a copy):
            nothing changes.
    """

    what: str
    model: int
    step: int
    site: int
    assigned: bool = False
    update: tuple[Place, ...] = ()
    optimizer: int = -1
    places: tuple[Place, ...] = ()
    made: int = -1
    own: bool = False

    def describe(self) -> str:
        whose = f" of model {self.model}" if self.model >= 0 else ""
        return f"loaded the {self.what}{whose} (step {self.step})"


class NamesMissed(Event, frozen=True, tag="names-missed"):
    """A state was loaded with `strict=False`, and names of it are those of the module but for the
    prefix of a wrapper, or none of them is one of the module. Also recorded for the next loads into
    that module.

    Attributes:
        module: its number, in the order of such loads; `kind` its class.
        missed: names of the module that the state has only with, or without, the `prefix`; `of`
            parameters.
        extra: the state has the prefix; otherwise the module has it. The prefix is empty where no
            name fits, whatever the reason; `given` is how many the state has.
        step: optimizer steps of this process before it.
    """

    module: int
    kind: str
    missed: int
    of: int
    prefix: str
    extra: bool
    step: int
    site: int
    given: int = -1


class StateTaken(Event, frozen=True, tag="state-taken"):
    """`state_dict` of a wrapped model was called, as for a checkpoint; some calls are recorded.

    Attributes:
        forwards: forwards of the model with gradients before it.
    """

    model: int
    step: int
    forwards: int
    site: int
    call: int = 0


class Edited(Event, frozen=True, tag="edited"):
    """Something other than DDP and the optimizer changed tensors of this rank.

    Recorded when that begins, changes or ends, so one record may stand for many steps.

    Attributes:
        kind: `gradients` (between the synchronised backward and the step), `parameters` (between
            two steps, or the wrap and the first step) or `state` (the optimizer's, between two
            steps).
        step: of the optimizer.
        changed: False when such changes have ended.
        ratio: factor between the gradients before and after, if it is the same for all that were
            looked at; else 0.
        site: the user's line that did it, -1 if it was not traced; `more` are further lines.
        functions: functions of torch that wrote to the gradients meanwhile (`clip_grad_norm_`).
        beside: something other than these functions changed them, too.
        undone: `changed` is False, but values were changed and restored.
        counted: gradients that were not sampled were written to, by torch's version counters.
        divisor: the world size as written, if the line divides by it, or by a product with it.
        changers: by function that changed sampled gradients, the site that called it, -1 if
            unknown.
        besides: as `ratio`, for changes by anything other than these functions; 0 if none.
        searched: where `site` is -1, a line that ran between these steps and writes to tensors, as
            the source says; -1 for none.
    """

    model: int
    optimizer: int
    kind: str
    step: int
    changed: bool
    ratio: float = 0.0
    site: int = -1
    functions: tuple[str, ...] = ()
    divisor: str = ""
    more: tuple[int, ...] = ()
    beside: bool = False
    undone: bool = False
    counted: bool = False
    changers: dict[str, int] = {}
    besides: float = 0.0
    searched: int = -1


class Rewritten(Event, frozen=True, tag="rewritten"):
    """Something other than the optimizer wrote to parameters of this rank, by torch's version
    counters, which ignore writes through `.data`.

    Attributes:
        since, step: between the begin of step `since` of the optimizer and that of `step`.
        times: number of these writes.
        parameters: positions in `Wrapped.parameters`, packed.
    """

    model: int
    optimizer: int
    since: int
    step: int
    times: int
    parameters: str


class Clipped(Event, frozen=True, tag="clipped"):
    """`clip_grad_norm_` or `clip_grad_value_` was called; only some calls are recorded.

    Attributes:
        call: zero-based number of the call at this line.
    """

    function: str
    step: int
    call: int
    site: int


class TrainingMode(Event, frozen=True, tag="training-mode"):
    """The modules of a wrapped model that were in evaluation mode in a forward with gradients, of
    those that behave otherwise in it. Recorded for the first such forward and when the modes
    change, after the synchronised backward that followed.

    Attributes:
        backward: synchronised backwards of the model before that one.
        forwards: forwards of the model with gradients before this one.
        step: steps of the model's optimizer before it.
        whole: the wrapped module itself was in evaluation mode.
        evaluating: class by name of the modules in evaluation mode, `count` in all, of `total`
            whose behaviour depends on it.
        unsure: names of those, in either mode, that are not torch's own: their code reads
            `self.training`, for whatever reason.
        site: the line that put the first of the changed modules into its mode, -1 if unknown;
            `forward_site` the line of the forward.
        last: no later change is recorded.
    """

    model: int
    backward: int
    forwards: int
    step: int
    whole: bool
    evaluating: dict[str, str]
    count: int
    total: int
    unsure: tuple[str, ...] = ()
    site: int = -1
    forward_site: int = -1
    last: bool = False

    def describe(self) -> str:
        return (
            f"model {self.model}: {self.count} of {self.total} modules in evaluation mode "
            f"(step {self.step})"
        )


def full(step: int) -> bool:
    """Whether all tensors are digested at a step (if the budget allows)."""
    if step < 10:
        return step in EARLY
    number = step + 1
    while number % 10 == 0:
        number //= 10
    return number in (1, 2, 5)


def chosen(key: int, stride: int, count: int) -> range:
    """The positions of the tensors to digest, one in `stride` of `count`.

    `stride` is a power of two. A smaller stride includes all positions of a larger one, so that
    ranks with different strides still have tensors in common.
    """
    scattered = key * 0x9E3779B1 & 0xFFFFFFFF
    return range(int(f"{scattered:032b}"[::-1], 2) % stride, count, stride)
