"""DDP308."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import StepDone, Wrapped, ZeroGradients
from ddpdoctor.report.declarations import seen
from ddpdoctor.report.findings import Check, Finding, Severity
from ddpdoctor.run import Rank, Run, some, title_of

SAMPLES = 4
"""Examined steps that suffice: fewer may be a warm-up."""


class Explanation(NamedTuple):
    """Why a gradient is always zero, and what to change."""

    rule: str
    cause: str
    fix: str


class ZeroGradient(Check):
    """A gradient is exactly zero in every step, and the weights change

    ## What it finds
    Parameters whose gradient is exactly zero in every examined step, and that the optimizer changes
    nevertheless, by weight decay or by the momentum of earlier gradients.

    ## How it knows
    Before steps 0, 1, 2 and 4, each rank checks whether a gradient has any value other than zero,
    from the second time on only where all were zero before; then before each step up to 128, less
    often after that, and at the end of the program. The gradient must be zero each time. At steps
    that are powers of two it also checks whether the step changes the parameter. The finding is
    proven for the examined steps.

    ## Why it hurts
    The layer does not learn, and loses what it had learned: a pretrained layer decays. Common
    reasons are a dead activation, a loss weight of zero, or a mask that is always zero. A bias
    whose weight has a gradient is harmless: the loss does not depend on it, because only the
    difference of two outputs counts, for example.

    ## How to fix it
    Find what multiplies by zero between the layer and the loss, or freeze the layer. Remove a bias
    that cancels out with `bias=False`.

    ## When it stays quiet
    - Embeddings.
    - The gradient is not zero in one of the steps, as after a warm-up of the loss weight.
    - The steps do not change the parameters.
    - Fewer than four steps were examined.
    - Models of more than 2000 parameters; gradients on a GPU, as reading them would block it.
    """

    code = "DDP308"
    name = "zero-gradient"
    family = "model"
    severity = Severity.NOTE
    rules: ClassVar[Mapping[str, str]] = {
        "zero-factor": "the parameters reach the loss only through a factor of zero",
        "bias-cancels": "a bias cancels out, while the weight of its module has a gradient",
    }
    requires = (models.needs_ddp, seen(StepDone, otherwise="no optimizer step seen"))

    def examine(self, run: Run) -> Iterable[Finding]:
        keys = {(e.model, e.optimizer) for r in run.ranks.values() for e in r.of(ZeroGradients)}
        every = [_seen(run, model, optimizer) for model, optimizer in sorted(keys)]
        reported: set[tuple[int, int]] = set()
        # An optimizer within another one (a sharded one) covers some of its parameters and ranks.
        for events in sorted(every, key=len, reverse=True):
            for rank, event in list(events.items())[:1]:
                wrapped = models.wrap_of(rank, event.model)
                if wrapped is None or not (event.weight_decay or event.moved):
                    continue
                candidates = _without_embeddings(wrapped, event)
                left = [i for i in candidates if (event.model, i) not in reported]
                reported.update((event.model, i) for i in left)
                cancelled = [i for i in left if _cancels(wrapped, event, i)]
                for part in ([i for i in left if i not in cancelled], cancelled):
                    if part:
                        yield self._report(
                            run, rank, wrapped, event, part, tuple(r.rank for r in events)
                        )

    def _report(
        self,
        run: Run,
        rank: Rank,
        wrapped: Wrapped,
        event: ZeroGradients,
        left: list[int],
        ranks: tuple[int, ...],
    ) -> Finding:
        names = models.names_of(wrapped, left)
        part = models.parts_of(wrapped, left)[0]
        title = title_of(rank, wrapped)
        why = _explain(wrapped, event, left, part)
        return self.finding(
            rule=why.rule,
            ranks=ranks,
            subjects=names,
            location=models.made_at(rank, wrapped, part),
            label="its gradient is always zero",
            summary=f"the gradient of {some(names)} of {title} is exactly zero at all "
            f"{event.samples} examined steps {models.on_ranks(run, ranks)}",
            cause=f"{why.cause}; "
            + (
                "the momentum of earlier gradients still changes it"
                if set(left) <= set(event.moved)
                else f"weight decay {event.weight_decay:g} still shrinks it"
            ),
            fix=f"{why.fix}; or freeze it before the wrap",
            evidence={
                "steps examined": event.samples,
                "last of them": event.step,
                "parameters": len(left),
                "weight decay": event.weight_decay,
            },
            at=rank.wall(event.at),
        )


def _seen(run: Run, model: int, optimizer: int) -> dict[Rank, ZeroGradients]:
    """The last record of each rank that has examined enough steps."""
    last = {
        r: reported[-1] for r in run.ranks.values() if (reported := _events(r, model, optimizer))
    }
    return {r: event for r, event in last.items() if event.samples >= SAMPLES}


def _events(rank: Rank, model: int, optimizer: int) -> list[ZeroGradients]:
    return [e for e in rank.of(ZeroGradients) if (e.model, e.optimizer) == (model, optimizer)]


def _cancels(wrapped: Wrapped, event: ZeroGradients, position: int) -> bool:
    """Whether a parameter is the bias of a module whose weight has a gradient: the gradient of the
    module's output is not zero, but sums to zero."""
    owner, _, word = wrapped.parameters[position].name.rpartition(".")
    weight = f"{owner}.weight".lstrip(".")
    return word == "bias" and weight in models.names_of(wrapped, event.beside)


def _explain(
    wrapped: Wrapped, event: ZeroGradients, left: list[int], part: models.Part
) -> Explanation:
    """Why the gradients of these parameters (`left`, by position) are zero; all have one reason."""
    names = some(models.names_of(wrapped, left))
    if _cancels(wrapped, event, left[0]):
        weight = f"{part.module}.weight".lstrip(".")
        return Explanation(
            "bias-cancels",
            f"the gradient of {weight} is not zero, so {part.module or 'the model'} does reach the "
            f"loss, but what {names} adds cancels out on the way, as in the difference of two "
            "outputs, or before a norm or a softmax",
            "remove it (`bias=False`), as the loss does not depend on it",
        )
    alive = {wrapped.parameters[i].name.rpartition(".")[0] for i in event.beside}
    who = names if part.module in alive else part.title
    return Explanation(
        "zero-factor",
        f"{who} reaches the loss only through a factor of zero",
        "look for a loss weight, a mask or an activation that is zero on the way to the loss",
    )


def _without_embeddings(wrapped: Wrapped, event: ZeroGradients) -> list[int]:
    """Positions of the parameters except embeddings, whose unused rows get no gradient."""
    kinds = {m.name: m.kind for m in wrapped.modules}
    owners = {i: wrapped.parameters[i].name.rpartition(".")[0] for i in event.indices}
    return [i for i, owner in owners.items() if "Embedding" not in kinds.get(owner, "")]
