"""What synchronised between optimizer steps, and what did not."""

from __future__ import annotations

from .base import Event
from .pack import unpack


class SyncPattern(Event, frozen=True, tag="sync-pattern"):
    """The backwards that made the gradients an optimizer step applies. Recorded when they change.

    Attributes:
        step: of the optimizer; holds until the next record for the same model and optimizer.
        synced, unsynced: synchronised and other backwards into these gradients since they were
            cleared.
        reason: why the last backward was not synchronised, empty if it was: `no_sync` (the forward
            ran with synchronisation off), `forward only` (off at the forward, on again at the
            backward), `second backward` (no forward of its own), `no forward` (none of the wrapper
            since the last step), `inside forward`, `autograd.grad` or `not reduced`.
        site: the line to blame for `reason`; `forward_site` and `backward_site` of the last
            backward.
        once: how many backwards at one line synchronised the same parameters, the most of any line;
            `line` is that line.
        late: the line that switched synchronisation off between the forward and the synchronised
            backward, -1 if none.
        talked: the program passed the gradients to its own collectives before the step; `carried`
            are the numbers of any type that it passed to collectives since that backward began.
        exposed_s: DDP's estimate of the time a backward waits for communication, 0 if unknown;
            `backward_s` is the duration of a synchronised backward.
    """

    model: int
    optimizer: int
    step: int
    synced: int = 0
    unsynced: int = 0
    reason: str = ""
    site: int = -1
    forward_site: int = -1
    backward_site: int = -1
    once: int = 0
    line: int = -1
    late: int = -1
    talked: bool = False
    carried: int = 0
    exposed_s: float = 0.0
    backward_s: float = 0.0


class FlatGradients(Event, frozen=True, tag="flat-gradients"):
    """The program reduces a flat tensor that has as many elements as the gradients that exist,
    while some parameters have none. Recorded once for each size.

    Attributes:
        numel: of the tensor; `whole` that of all parameters.
        missing: the parameters without a gradient, the first ones, empty for those without a name.
    """

    numel: int
    whole: int
    missing: tuple[str, ...]
    step: int
    site: int

    def describe(self) -> str:
        return f"reduces {self.numel} elements of gradients, {len(self.missing)} have none"


class AbsentGradients(Event, frozen=True, tag="absent-gradients"):
    """The unwrapped parameters of an optimizer that have no gradient before a step for which the
    program has reduced most gradients itself. Recorded when they change.

    Attributes:
        positions: in the order of `Unwrapped.parameters` (packed).
        other: elements that were passed to collectives for this step, and are no gradients.
    """

    optimizer: int
    step: int
    positions: str
    other: int

    def describe(self) -> str:
        count = len(unpack(self.positions))
        return f"optimizer {self.optimizer}: {count} parameters without a gradient"


class Carried(Event, frozen=True, tag="carried"):
    """Whether an optimizer step applied gradients that were not cleared since the last step.

    Recorded for the first step for which it is known, and when it changes. If the gradients were
    cleared before every step so far, it is recorded only after several steps in a row without
    (`step` is the first), preceded by the last step with cleared gradients.

    Attributes:
        site: the line of the step; `backward_site` of the first backward onto the old gradients.
        parameters: how many parameters were looked at.
    """

    optimizer: int
    step: int
    carried: bool
    site: int = -1
    backward_site: int = -1
    parameters: int = 0


class LossScaled(Event, frozen=True, tag="loss-scaled"):
    """The loss was divided by the size of the model's group before a backward. Recorded once per
    line of the backward.

    Attributes:
        step: the first step for which this may hold.
        divisor: size of the group.
        site: the user's line that divides; `backward_site` the line of the backward.
        expression: the divisor as written. Empty, with `site` -1, if no line was found by the end
            of the run: the number may equal the group's size by chance.
        of_a_term: only a term of the loss, or some of them, were divided.
    """

    model: int
    step: int
    divisor: float
    site: int
    backward_site: int
    expression: str = ""
    of_a_term: bool = False


class LossMultiplied(Event, frozen=True, tag="loss-multiplied"):
    """A loss that is a mean over samples of this rank only was multiplied by the size of the
    model's group before a synchronised backward. Recorded once per line of the backward.

    Attributes:
        step: the first step for which this may hold.
        size: of the group.
        site: the user's line that multiplies; `backward_site` the line of the backward.
        expression: the factor as written.
    """

    model: int
    step: int
    size: int
    site: int
    backward_site: int
    expression: str


class LossCounted(Event, frozen=True, tag="loss-counted"):
    """The loss was divided by a number that was summed over the ranks of the model's group before,
    and not multiplied by their number. Recorded once per line of the backward.

    Attributes:
        step: the first step for which this may hold.
        count: the number; count_site the line that summed it.
        size: of the group.
        site: the user's line that divides, -1 where that was not found; `backward_site` the line of
            the backward.
    """

    model: int
    step: int
    count: float
    size: int
    site: int
    count_site: int
    backward_site: int


class ReducedInGraph(Event, frozen=True, tag="reduced-in-graph"):
    """A tensor that follows from the model's parameters was summed in place over the ranks of its
    group, and a loss was computed from it, or it is the loss. Recorded once per line of the call,
    at the backward.

    Attributes:
        linear: the loss is linear in it, so that the sum only multiplies all gradients by a number.
        step: optimizer steps of this process before it.
        size: of the group; `shape` of the tensor.
        site: the line of the call; `backward_site` that of the backward.
    """

    model: int
    step: int
    size: int
    shape: tuple[int, ...]
    site: int
    backward_site: int
    linear: bool = False


class ShardedModel(Event, frozen=True, tag="sharded-model"):
    """A backward trains a model whose parameters are sharded, and which averages its gradients.

    Attributes:
        model: a negative number; `kind` its class, `wrapper` what shards it.
        ranks: global ranks over which gradients are averaged.
        site: the line that made it, -1 if unknown.
    """

    model: int
    kind: str
    wrapper: str
    ranks: tuple[int, ...]
    site: int


class GatheredWithoutGradient(Event, frozen=True, tag="gathered-without-gradient"):
    """A tensor that follows from the model's parameters is gathered from the ranks of its group, a
    loss is computed from what was gathered, and no gradient of it reaches the tensor. Recorded
    when that was so in the first backwards, once for a line.

    Attributes:
        step: optimizer steps of this process before it.
        size: of the group; `shape` of this rank's tensor.
        backwards: in which it was so.
        site: the line of the call; `backward_site` that of the backward.
    """

    model: int
    step: int
    size: int
    shape: tuple[int, ...]
    backwards: int
    site: int
    backward_site: int


class GatheredInGraph(Event, frozen=True, tag="gathered-in-graph"):
    """A tensor that follows from the model's parameters was gathered from the ranks of its group,
    a loss was computed from all parts, and the backward gave back exactly this rank's part of the
    gradient. Recorded in the first synchronised backwards, once per line of the call in each.

    Attributes:
        forward: zero-based number of the model's last forward; `step` optimizer steps of this
            process before it.
        size: of the group; `shape` of this rank's part.
        function: the program's `autograd.Function` that gathers; empty where this rank's tensor was
            put into what was gathered.
        norm: of the gradient of all parts; `sketch` its projection, equal on ranks that compute
            the same loss; `dropped` the norm of what is not given back, for the other ranks' parts.
        site: the line of the call; `backward_site` that of the backward, `gives_back` where the
            function returns the gradient, -1 if unknown.
    """

    model: int
    forward: int
    step: int
    size: int
    shape: tuple[int, ...]
    function: str
    norm: float
    sketch: tuple[float, ...]
    site: int
    backward_site: int
    gives_back: int = -1
    dropped: float = 0.0


class GradientReduced(Event, frozen=True, tag="gradient-reduced"):
    """The program itself reduced gradients that DDP averages. Recorded for the first calls of a
    line, then rarely, and for the last.

    Attributes:
        op: the reduction (`SUM`, `AVG`, ...).
        call: zero-based number of the step in which this line did so.
        copied: it reduced copies of the gradients, one by one or in a flat tensor.
    """

    model: int
    op: str
    step: int
    site: int
    call: int = 0
    copied: bool = False


class BatchSeen(Event, frozen=True, tag="batch"):
    """The batch size of a model's input and the reduction of its loss. Recorded when they change.

    Attributes:
        forward: forwards with gradients of this model before it.
        reduction: `sum`, `mean`, or empty if unknown.
        weight: factor applied to the loss after the reduction; 0 if it is unknown for a sum.
        valid: elements of the loss that count, where some do not (targets that are ignored, a mask
            that selects): what a mean divides by. 0 if that is not known, or all count.
        step: optimizer steps of this process before it; -1 if unknown.
    """

    model: int
    forward: int
    size: int
    reduction: str = ""
    weight: float = 1.0
    site: int = -1
    valid: int = 0
    step: int = -1


class LossMeans(Event, frozen=True, tag="loss-means"):
    """How many elements each mean in a loss is taken over, in the order of its terms. Recorded when
    it changes.

    Attributes:
        forward: forwards with gradients of this model before it.
        weights: by what each is multiplied afterwards; 0 where that is unknown.
        step: optimizer steps of this process before it.
        site: the line of the backward.
    """

    model: int
    forward: int
    elements: tuple[int, ...]
    weights: tuple[float, ...]
    step: int
    site: int


class ShardStates(Event, frozen=True, tag="shard-states"):
    """Digests of this rank's shards of some parameters of an optimizer, and of their state, before
    the first step after that was loaded.

    Attributes:
        values, states: packed digests, in the order of the names: 0 for no state, 1 for zeros. Of
            several states of a parameter the first.
        site: the line that loads.
    """

    optimizer: int
    step: int
    names: tuple[str, ...]
    values: str
    states: str
    site: int


class SteppedInside(Event, frozen=True, tag="stepped-inside"):
    """Optimizers stepped parameters of a wrapped model inside its backward, before its group had
    communicated in that backward. Recorded before the next backward for the first ones, then at
    powers of two, and at the end of the run.

    Attributes:
        first: number of the first such step of its optimizer, at the line `site`.
        count: such backwards so far, of `backwards` in all; the last is at `backward_site`.
        parameters: digest of all parameters that DDP averages, 0 if it could not be taken.
        carried: numbers of any type that the program itself exchanged since the first.
    """

    model: int
    first: int
    count: int
    backwards: int
    parameters: int = 0
    carried: int = 0
    site: int = -1
    backward_site: int = -1


class KeptBack(Event, frozen=True, tag="kept-back"):
    """An optimizer of `fully_shard` parameters found no gradients, although backwards had computed
    some: FSDP kept them unsharded and unreduced. Recorded once, and once more when a step applies
    gradients after all (`applied`).

    Attributes:
        parameters: number of sharded parameters in the optimizer.
        site: the line of the step.
    """

    optimizer: int
    step: int
    parameters: int
    applied: bool = False
    site: int = -1


class EditedBeforeSync(Event, frozen=True, tag="edited-before-sync"):
    """A step applies gradients that this rank had changed before they were averaged over the ranks,
    with a few values of them to tell.

    Attributes:
        model: -1 for parameters that are in no wrapper.
        times: changes of this kind since the gradients were cleared.
        function: of torch, that made the first of them (`clip_grad_norm_`), called at `site`; empty
            and -1 for a change by the program itself, after the backward at `backward_site`.
        factor: that all values were multiplied by in this change, 0 if there is no such factor.
        by_hand: collectives of the program's own averaged them afterwards, not DDP.
    """

    model: int
    optimizer: int
    step: int
    times: int = 1
    function: str = ""
    factor: float = 0.0
    by_hand: bool = False
    site: int = -1
    backward_site: int = -1


class ShardScales(Event, frozen=True, tag="shard-scales"):
    """What the gradients that this rank holds of DTensors were multiplied by between the last
    backward and the step, told by a few values of some. Recorded when it changes: in the first
    steps, then in those of `amp.told_at`.

    Attributes:
        ranks: over which these parameters are sharded.
        flat: they are those of `FullyShardedDataParallel`, several parameters in one tensor.
        factors: of each that is looked at; 0 where there is no such factor, or too few values.
            Empty where the step could not be looked at.
        rounding: relative error of a value in their type.
        site: the line that scaled them, where it was seen; `more` others.
        backward_site, step_site: the lines of the last backward and of the step.
    """

    optimizer: int
    step: int
    ranks: tuple[int, ...]
    factors: tuple[float, ...]
    rounding: float = 0.0
    site: int = -1
    more: tuple[int, ...] = ()
    backward_site: int = -1
    step_site: int = -1
    flat: bool = False

    RANKS = ("ranks",)


class Averaged(Event, frozen=True, tag="averaged"):
    """A few values of manually synchronised gradients, in the first steps before which the program
    exchanged all of them; or of parameters that it exchanges between steps.

    Attributes:
        kind: `gradients` or `parameters`.
        local: values as the last backward left them on this rank, or before it exchanged them, or
            of parameters before the exchange; `applied` the same values when the next step begins.
        operations: reduce operations of the collectives in between (`SUM`, `AVG`).
        sites: the lines that changed them in between, if traced; `divisors` by site the world size
            as written, empty if the line does not divide by it.
        loss_site, loss_divisor: a line that divides the loss by the world size before that
            backward, and the divisor as written.
        alone: nothing that was communicated since the last step can be in `local`.
        inputs: digest of the inputs of the step's first forward, 0 if not seen; `numbers` how many
            numbers they hold; `drawn` and `batch` as in `ForwardInput`; `site` the line of that
            forward.
        unclipped: as `applied`, before a function of torch clipped them at `clip_site`, where one
            did after the exchange.
        means: the factor of each term of the losses, where every term is a mean over many numbers
            and the factors are known; else empty.
        backward_site: the line of the last backward before the step.
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
    batch: int = 0
    kind: str = "gradients"
    unclipped: tuple[float, ...] = ()
    clip_site: int = -1
    means: tuple[float, ...] = ()
    backward_site: int = -1
