"""DDP308."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import Wrapped, ZeroGradients
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run, some, title_of

SAMPLES = 4


class ZeroGradient(Check):
    """A gradient is exactly zero in every step, and the weights change

    ## What it finds
    Parameters that take part in the loss with a gradient of exactly zero at every step looked at,
    which the optimizer changes all the same: by its weight decay, or by the momentum of gradients
    from before.

    ## How it knows
    Before steps 0, 1, 2 and 4 each rank looks whether a gradient has any value but zero, from the
    second time on only where all were zero before; then before each step up to 128, ever more
    rarely after that, and when the program ends. All looks must agree. At steps that are powers of
    two it sees whether the step changes the parameter. The finding is proven for the steps looked
    at.

    ## Why it hurts
    Nothing is learnt there, and what was there is lost: a pretrained layer that is cut off fades.
    The usual ways are a dead activation, a loss weight of zero, a product with a mask that is
    always zero. Of a bias whose weight has a gradient nothing is lost: the loss does not depend on
    it, as where only the difference of two outputs counts.

    ## How to fix it
    Find what multiplies by zero on the way from the layer to the loss; or freeze the layer. A bias
    that cancels out is left out with `bias=False`.

    ## When it stays quiet
    Embeddings; a gradient that is not zero in one of the steps, as after a warm-up of the loss's
    weight; parameters that the steps leave as they are; fewer than four steps looked at; models of
    more than 2000 parameters; gradients on a GPU, since looking would make it wait.
    """

    code = "DDP308"
    name = "zero-gradient"
    family = "model"
    severity = Severity.NOTE

    def unobserved(self, run: Run) -> str | None:
        if not models.numbers(run):
            return models.NO_DDP
        return None if run.training_ranks() else "no optimizer step seen"

    def examine(self, run: Run) -> Iterable[Finding]:
        keys = {(e.model, e.optimizer) for r in run.ranks.values() for e in r.of(ZeroGradients)}
        every = [_seen(run, model, optimizer) for model, optimizer in sorted(keys)]
        reported: set[tuple[int, int]] = set()
        # One inside another, as of a sharded optimizer, tells of a part of that, on a part of them.
        for seen in sorted(every, key=len, reverse=True):
            for rank, event in list(seen.items())[:1]:
                wrapped = models.wrap_of(rank, event.model)
                if wrapped is None or not (event.weight_decay or event.moved):
                    continue
                worth = _worth_telling(wrapped, event)
                left = [i for i in worth if (event.model, i) not in reported]
                reported.update((event.model, i) for i in left)
                cancelled = [i for i in left if _cancels(wrapped, event, i)]
                for part in ([i for i in left if i not in cancelled], cancelled):
                    if part:
                        yield self._report(
                            run, rank, wrapped, event, part, tuple(r.rank for r in seen)
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
        cause, fix = _why(wrapped, event, left, part)
        return self.finding(
            ranks=ranks,
            subjects=names,
            location=models.made_at(rank, wrapped, part),
            label="its gradient is always zero",
            summary=f"the gradient of {some(names)} of {title} was exactly "
            f"zero at all {event.samples} steps looked at {models.on_ranks(run, ranks)}",
            cause=f"{cause}; "
            + (
                "the momentum of gradients from before still moves it"
                if set(left) <= set(event.moved)
                else f"weight decay {event.weight_decay:g} still shrinks it"
            ),
            fix=f"{fix}; or freeze it before the wrap",
            fix_kind=FixKind.CHECK,
            evidence={
                "steps looked at": event.samples,
                "last of them": event.step,
                "parameters": len(left),
                "weight decay": event.weight_decay,
            },
            at=rank.wall(event.at),
        )


def _seen(run: Run, model: int, optimizer: int) -> dict[Rank, ZeroGradients]:
    """The last record of each rank, after enough steps."""
    last = {
        r: reported[-1] for r in run.ranks.values() if (reported := _events(r, model, optimizer))
    }
    return {r: event for r, event in last.items() if event.samples >= SAMPLES}


def _events(rank: Rank, model: int, optimizer: int) -> list[ZeroGradients]:
    return [e for e in rank.of(ZeroGradients) if (e.model, e.optimizer) == (model, optimizer)]


def _cancels(wrapped: Wrapped, event: ZeroGradients, position: int) -> bool:
    """Whether it is the bias of a module whose weight has a gradient: what comes back to the module
    is not zero, and sums up to nothing."""
    owner, _, word = wrapped.parameters[position].name.rpartition(".")
    weight = f"{owner}.weight".lstrip(".")
    return word == "bias" and weight in models.names_of(wrapped, event.beside)


def _why(
    wrapped: Wrapped, event: ZeroGradients, left: list[int], part: models.Part
) -> tuple[str, str]:
    """Cause and fix, of parameters that share them."""
    names = some(models.names_of(wrapped, left))
    if _cancels(wrapped, event, left[0]):
        weight = f"{part.module}.weight".lstrip(".")
        return (
            f"the gradient of {weight} is not zero, so {part.module or 'the model'} does reach the "
            f"loss: what {names} adds cancels out on the way there, as in the difference of two "
            "outputs, or before a norm or a softmax",
            "leave it out (`bias=False`), the loss does not depend on it",
        )
    alive = {wrapped.parameters[i].name.rpartition(".")[0] for i in event.beside}
    who = names if part.module in alive else part.title
    return (
        f"{who} reaches the loss only through something that is zero",
        "look for a loss weight, a mask or an activation that is zero on its way to the loss",
    )


def _worth_telling(wrapped: Wrapped, event: ZeroGradients) -> list[int]:
    kinds = {m.name: m.kind for m in wrapped.modules}
    owners = {i: wrapped.parameters[i].name.rpartition(".")[0] for i in event.indices}
    return [i for i, owner in owners.items() if "Embedding" not in kinds.get(owner, "")]
