"""Replicated tensors: digests to compare between ranks, and what may have set them apart."""

from __future__ import annotations

from .base import Event

UNHELD = -1
"""Stands for the optimizer of a model that is trained although none holds it."""

AGAIN = 8
"""One more than the evaluations without training in between that are looked at, after the first."""

EARLY = (0, 1, 2, 4, 9)
"""Steps at which every tensor is digested; later ones follow the series 1, 2, 5, less one."""


class Replica(Event, frozen=True, tag="replica"):
    """An optimizer steps parameters that the ranks of a group hold in equal copies.

    Attributes:
        model, optimizer: numbers as in `Wrapped` and `OptimizerSeen`, or `UNHELD`.
        ranks: global ranks of the model's process group.
        parameters: positions in `Wrapped.parameters`, packed; what `Digests` count through.
        broadcast: DDP copies rank 0's buffers before each forward.
        hook: name of DDP's communication hook, empty for none; averages: False for one that is
            not known to average gradients.
        left_out: why this replica is not to be compared (`local SGD`, ...), empty where it is.
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
    """What some tensors were, at some steps: one number each, equal where the bits are.

    Attributes:
        kind: `parameters`, `gradients` (averaged by the last backward), `local` (gradients that
            were not), `buffers`, or `state:<key>` of the optimizer.
        point: `step` (before an optimizer step), `kept` (buffers that DDP does not copy: after a
            step, as the next forward with gradients finds them), `eval` (after the first forward
            without gradients), `again` (of an evaluation after that without training in between),
            `part` (buffers of a part of the model that is evaluated by itself) or `end`.
        keys: per row, the number of the moment: the optimizer's step (`UNHELD`: the backward that
            averaged), or for `eval`, `kept` and `end` the forwards with gradients before it; for
            `again` and `part` that times `AGAIN`, and which one it is.
        strides: per row, which tensors (see `chosen`).
        counts: per row, how many numbers follow in `values` (packed); 0 stands for "no tensor".
        backwards: per row, how many backwards of the model had averaged gradients by then: ranks
            that differ have not taken the same steps.
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


class LateBuffers(Event, frozen=True, tag="late-buffers"):
    """Buffers of a wrapped model that it did not have at the wrap, before an optimizer step: those
    with fractions that a checkpoint holds.

    Attributes:
        names, shapes: of each; values: a digest of each, packed.
    """

    model: int
    optimizer: int
    step: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    values: str


class Sketch(Event, frozen=True, tag="sketch"):
    """A projection of all tensors of a kind at once: the distance of two estimates that of the
    tensors themselves, within some ten percent.

    Attributes:
        step: of the optimizer that was to follow: one more than it took, at the end.
        norm: Euclidean norm of the tensors on this rank.
        bins: sums over random halves; ranks use the same ones.
    """

    model: int
    optimizer: int
    kind: str
    step: int
    norm: float
    bins: tuple[float, ...]


class Loaded(Event, frozen=True, tag="loaded"):
    """`load_state_dict` on a wrapped model (`weights`), on its `optimizer`, on a `scheduler` of
    that, or on a gradient `scaler` (`what`).

    Attributes:
        model: number of the wrapper, -1 for none.
        step: optimizer steps of this process before it.
        assigned: with `assign=True`, which puts other parameters in the place of the model's.
    """

    what: str
    model: int
    step: int
    site: int
    assigned: bool = False

    def describe(self) -> str:
        whose = f" of model {self.model}" if self.model >= 0 else ""
        return f"loaded the {self.what}{whose} (step {self.step})"


class StateTaken(Event, frozen=True, tag="state-taken"):
    """`state_dict` of a wrapped model was taken, as for a checkpoint; only some calls are recorded.

    Attributes:
        forwards: of the model with gradients before it.
    """

    model: int
    step: int
    forwards: int
    site: int
    call: int = 0


class Edited(Event, frozen=True, tag="edited"):
    """Between two moments, something other than the optimizer changed tensors of this rank.

    Told when it begins, changes or ends, so one record may stand for many steps.

    Attributes:
        kind: `gradients` (between the averaging backward and the step), `parameters` (between
            a step and the next; at the first step since the wrap) or `state` (the optimizer's,
            between a step and the next).
        step: of the optimizer. `changed` False: not any more.
        ratio: gradients now by gradients before, where that is one number for all that were
            looked at; 0 where it is not.
        site: the user's line that did it, -1 where it was not traced; more: other lines that did.
        functions: what of torch's wrote to the model's gradients meanwhile (`clip_grad_norm_`).
        beside: something else than these functions changed them, too.
        undone: `changed` False, but they were changed and put back.
        counted: gradients whose values were not looked at were written to, as torch counts writes.
        divisor: the world size as written, where the line divides by it.
        changers: of the functions, those that changed what was looked at; the sites that called
            them, -1 where it is not known.
        besides: as `ratio`, of what else than these functions changed them; 0 where nothing did.
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


class Rewritten(Event, frozen=True, tag="rewritten"):
    """Something other than the optimizer wrote to parameters of this rank, as torch counts writes:
    it does not count those through `.data`.

    Attributes:
        since, step: after step `since` of the optimizer had begun, and before `step` did, or would.
        times: how often more than the optimizer does in as many steps.
        parameters: positions in `Wrapped.parameters`, packed.
    """

    model: int
    optimizer: int
    since: int
    step: int
    times: int
    parameters: str


class Averaged(Event, frozen=True, tag="averaged"):
    """Some gradients that no wrapper averages and that the program exchanged, all of them, before
    a step; of the first few such steps.

    Attributes:
        local: as the last backward left them on this rank; applied: the same ones at the step.
        operations: of the collectives between (`SUM`, `AVG`).
        sites: the lines that changed them between, where they were followed; divisors: the world
            size as written, by site, empty where a line does not divide by it.
        loss_site, loss_divisor: the same of a line that divided the loss before that backward.
        alone: nothing was communicated since the step before that could be in `local`.
        inputs: digest of what the first forward of that step was given, 0 where it was not seen;
            `numbers` how many it holds; `drawn` as in `ForwardInput`; `site` its line.
    """

    optimizer: int
    step: int
    local: tuple[float, ...]
    applied: tuple[float, ...]
    operations: tuple[str, ...] = ()
    sites: tuple[int, ...] = ()
    divisors: tuple[str, ...] = ()
    loss_site: int = -1
    loss_divisor: str = ""
    alone: bool = False
    inputs: int = 0
    numbers: int = 0
    drawn: int = -1
    site: int = -1


class Clipped(Event, frozen=True, tag="clipped"):
    """`clip_grad_norm_` or `clip_grad_value_` was called; only some calls are recorded.

    Attributes:
        call: zero-based number of the call at this line.
    """

    function: str
    step: int
    call: int
    site: int


def full(step: int) -> bool:
    """Whether all tensors are digested at a step, where that is affordable."""
    if step < 10:
        return step in EARLY
    number = step + 1
    while number % 10 == 0:
        number //= 10
    return number in (1, 2, 5)


def chosen(key: int, stride: int, count: int) -> range:
    """Which of `count` tensors are digested at a moment when one in `stride` is.

    `stride` is a power of two: what a larger one chooses, a smaller one chooses too, so that ranks
    may look at different shares and still have tensors in common.
    """
    scattered = key * 0x9E3779B1 & 0xFFFFFFFF
    return range(int(f"{scattered:032b}"[::-1], 2) % stride, count, stride)
