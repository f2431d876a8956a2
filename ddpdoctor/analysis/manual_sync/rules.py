"""Some parameters of copies without a wrapper diverge: the row of the table for each class of their
history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from ...report.findings import Confidence, Severity
from ...run import counted, named, plural, ranks_text
from .cases import SHOWN, Case, Rule, Text
from .copies import members_of, step_of

IN_CODE = "`for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= dist.get_world_size()`"
MEANT = "; they are whole layers, so this may be intended (heads of their own)"
"""Ends the cause where whole layers are not synchronised."""


def gradients_of(positions: Sequence[int]) -> str:
    """`its gradient`, or `their gradients` for several parameters."""
    return plural(len(positions), "its gradient", "their gradients")


def _layer(name: str) -> str:
    """The module that owns a parameter."""
    return name.rpartition(".")[0]


def _torn(names: list[str], others: list[str]) -> list[str]:
    """The modules that own parameters of both lists."""
    return sorted(({*map(_layer, names)} & {*map(_layer, others)}) - {""})


def _layers_torn(case: Case) -> list[str]:
    names = case.copies.names
    return _torn([names[i] for i in case.positions], [names[i] for i in case.others])


# Some parameters are never synchronised.


def _along(case: Case) -> bool:
    """Whether parameters that are synchronised differ as well in the end."""
    return any(not case.copies.parameters[i].equal[-1] for i in case.others)


def _rest_of(case: Case) -> str:
    """The part of the model of which these parameters are the rest, as a bucket that is never full
    leaves it: consecutive parameters of one part, others of which are synchronised, where a
    collective of these ranks carried all parameters before the first step. Empty where it is not
    so: layers of one kind are not consecutive, and a head is a part by itself."""
    copies, names, local = case.copies, case.copies.names, case.positions
    spread = (members_of(r, copies.looks[0][n].spread) for n, (r, _) in copies.members.items())
    owners = {names[i].partition(".")[0] for i in local if "." in names[i]}
    consecutive = list(local) == list(range(local[0], local[-1] + 1))
    others = {names[i].partition(".")[0] for i in case.others}
    whole = consecutive and len(owners) == 1 and owners <= others
    return owners.pop() if whole and all(g == copies.members.keys() for g in spread) else ""


def _surely_wrong(case: Case) -> bool:
    return bool(_layers_torn(case)) or _along(case)


def _never_synced_cause(case: Case) -> str:
    names, torn, text = case.copies.names, _layers_torn(case), ""
    if torn:
        left = next(names[i] for i in case.positions if _layer(names[i]) in torn)
        synced = next(names[i] for i in case.others if _layer(names[i]) == _layer(left))
        text = f"; that of {synced} is synchronised, that of {left} in the same layer is not"
    if _along(case):
        text += (
            "; the others differ as a result: a value computed from all gradients (a norm to clip "
            "by) or parameters differs between ranks"
        )
    if not _surely_wrong(case):
        text = MEANT
        if owner := _rest_of(case):
            text = (
                "; before the first step a collective carried all parameters, including these, and "
                f"they are a part of {owner}: the ranks are to train one model"
            )
    return (
        f"the gradients of {len(case.others)} of {len(names)} parameters are synchronised in every "
        f"step, those of {len(case.positions)} never: each rank applies its own{text}"
    )


NEVER_SYNCED = Rule(
    name="never-synced",
    when="manual synchronisation leaves out the gradients of some parameters",
    severity=lambda c: Severity.ERROR if _surely_wrong(c) or _rest_of(c) else Severity.NOTE,
    confidence=lambda c: (
        Confidence.SUSPECTED if not _surely_wrong(c) and _rest_of(c) else Confidence.PROVEN
    ),
    spots=("exchange", "step"),
    label="does not include their gradients",
    summary=lambda c: (
        f"{c.they_differ} from step {c.begin} on: the program's own all-reduce does "
        f"not include {gradients_of(c.positions)}"
    ),
    cause=_never_synced_cause,
    fix=lambda c: (
        f"all-reduce the gradient of every parameter: {IN_CODE}"
        if _surely_wrong(c) or _rest_of(c)
        else "if the ranks are to train one model, all-reduce the gradients of these layers, too"
    ),
    evidence=lambda c: {
        "gradients_synchronised": len(c.others),
        "gradients_not_synchronised": len(c.positions),
        "parameters_that_differ_now": sum(not h.equal[-1] for h in c.copies.parameters),
        "steps_compared": c.compared,
    },
)

PART_STOPPED = Rule(
    name="sync-stopped",
    when="manual synchronisation of gradients stops at some step",
    severity=lambda c: Severity.ERROR if _layers_torn(c) else Severity.WARNING,
    confidence=lambda c: Confidence.PROVEN if _layers_torn(c) else Confidence.SUSPECTED,
    spots=("exchange", "step"),
    label=lambda c: f"no longer includes their gradients from step {c.since} on",
    summary=lambda c: (
        f"{c.they_differ} from step {c.begin} on: the program's own all-reduce no "
        f"longer includes {gradients_of(c.positions)} since step {c.since}"
    ),
    cause=lambda c: (
        f"until then the gradients of all {len(c.copies.names)} parameters were "
        "synchronised in every step and kept the ranks equal; those of "
        f"{len(c.positions)} no longer are, and each rank applies its own"
        + ("" if _layers_torn(c) else MEANT)
    ),
    fix="all-reduce the gradient of every parameter that is trained; for one that is no longer to "
    "be trained, set `requires_grad_(False)` and `p.grad = None` on all ranks",
    evidence=lambda c: {
        "gradients_not_synchronised_since_step": c.since,
        "gradients_not_synchronised": len(c.positions),
        "gradients_synchronised": len(c.others),
    },
)


# All parameters of one optimizer are never synchronised.


def _other_names(case: Case) -> list[str]:
    assert case.beside is not None
    return case.beside.names


def _torn_apart(case: Case) -> list[str]:
    """The modules that have parameters in both optimizers."""
    return _torn(case.copies.names, _other_names(case))


def _meant(case: Case) -> bool:
    """Whether the optimizers may be meant to train differently: one holds a part of the model."""
    names, others = case.copies.names, _other_names(case)
    return not _torn_apart(case) and (_one_part(names, others) or _one_part(others, names))


def _one_part(names: list[str], others: list[str]) -> bool:
    """Whether these are all parameters of one module (or one parameter), which has none of the
    others."""
    paths = [name.split(".") for name in names]
    common = [row[0] for row in takewhile(lambda r: len(set(r)) == 1, zip(*paths, strict=False))]
    return bool(common) and not any(n.split(".")[: len(common)] == common for n in others)


def _other_optimizer_cause(case: Case) -> str:
    remark = ""
    if torn := _torn_apart(case):
        remark = f"; {torn[0]} has parameters in both"
    elif _meant(case):
        remark = "; they are a part of the model, so this may be intended (heads of their own)"
    return (
        f"the gradients of {counted(len(_other_names(case)), 'parameter')} of {case.kind} in "
        "another optimizer are synchronised in every step, those of the "
        f"{len(case.copies.names)} in this one never: each rank applies its own{remark}"
    )


OTHER_OPTIMIZER = Rule(
    name="never-synced-optimizer",
    when="manual synchronisation leaves out all parameters of one optimizer",
    severity=lambda c: (
        Severity.ERROR if _torn_apart(c) else Severity.NOTE if _meant(c) else Severity.WARNING
    ),
    spots=("step", "exchange"),
    related=(("does not include their gradients", "exchange"), ("created here", "made")),
    label="applies gradients that are not synchronised",
    summary=lambda c: (
        f"{c.they_differ} from step {c.begin} on: the program's own all-reduce "
        "includes no parameters of this optimizer"
    ),
    cause=_other_optimizer_cause,
    fix=f"all-reduce the gradients of both optimizers: {IN_CODE}",
    evidence=lambda c: {
        "gradients_synchronised": len(_other_names(c)),
        "gradients_not_synchronised": len(c.copies.names),
        "parameters_that_differ_now": len(c.positions),
        "steps_compared": [step_of(look) for look in c.copies.looks][:SHOWN],
    },
)


# Gradients are passed to collectives, and still not applied equally.


def _lacking(case: Case) -> dict[int, list[int]]:
    """By rank, the parameters of this case whose gradients it did not pass, if there are any."""
    k = case.copies.close.index(case.look)
    rows = [case.copies.parameters[i].passed[k] for i in case.positions]
    each = {
        n: [i for i, row in zip(case.positions, rows, strict=True) if not row[column]]
        for column, n in enumerate(case.copies.members)
    }
    return {n: missing for n, missing in each.items() if missing}


def _mismatched_cause(case: Case) -> str:
    number, missing = next(iter(_lacking(case).items()))
    return (
        f"{named(case.copies.names, missing)} got no gradient on rank {number}, which therefore "
        "passes other tensors to the collectives than the other ranks. Collectives pair tensors by "
        "their order, so that gradients of different parameters are summed"
    )


MISMATCHED = Rule(
    name="mismatched-gradients",
    when="the ranks pass gradients of different parameters to one collective",
    spots=("exchange", "step"),
    label="pairs gradients of different parameters",
    summary=lambda c: (
        f"{c.they_differ}: at step {c.begin} the ranks all-reduce gradients of "
        "different parameters with each other"
    ),
    cause=_mismatched_cause,
    fix="pass a tensor for every parameter: `if p.grad is None: p.grad = torch.zeros_like(p)` "
    "before the all-reduce",
    evidence=lambda c: {
        "without_a_gradient": [
            {"rank": n, "parameters": named(c.copies.names, missing)}
            for n, missing in _lacking(c).items()
        ],
        "steps_compared": [s for s in map(step_of, c.copies.looks) if s >= c.begin][:SHOWN],
    },
)

NOT_AWAITED = Rule(
    name="async-not-awaited",
    when="gradients are applied before an asynchronous collective has finished",
    spots=("running", "step"),
    related=(("applied here", "step"),),
    label="still running when the optimizer applies the gradients",
    summary=lambda c: (
        f"parameters of {c.kind} differ between ranks from step {c.begin} on: their "
        "gradients are applied before their all-reduce has finished"
    ),
    cause="the collective is asynchronous and the program does not wait for it: each rank applies "
    "what has arrived by then, its own gradients, the reduced ones or a mixture",
    fix="wait for every collective before the gradients are used: `for work in works: "
    "work.wait()`, or remove `async_op=True`",
    evidence=lambda c: {
        "steps_that_ended_before_a_collective_did": [
            {"rank": n, "steps": s.running} for n, s in c.copies.looks[-1].items() if s.running
        ],
        "steps_compared": [step_of(look) for look in c.copies.looks][:SHOWN],
    },
)

UNEQUAL_START = Rule(
    name="unequal-start",
    when="the parameters differ before the first step, and only gradients are sent",
    spots=("made", "step"),
    related=(("applied here", "step of a module"),),
    label="differs between ranks from the start",
    summary=lambda c: (
        f"{c.they_differ} before the first step and from then on: only gradients are synchronised"
    ),
    cause="the ranks start from different values (another seed, weights loaded on some ranks only) "
    "and apply the same gradients to them: the initial difference remains",
    fix="broadcast the parameters before the first step: `for p in model.parameters(): "
    "dist.broadcast(p.data, src=0)`",
    evidence=lambda c: {
        "parameters_that_differ": f"{len(c.positions)} of {len(c.copies.names)}",
        "gradients": "agree",
        "steps_compared": c.compared,
    },
)


# A custom optimizer applies updates that differ, to gradients that agree.


def _them(case: Case) -> str:
    return plural(len(case.positions), "it", "them")


def _unequal_updates(name: str, when: str, why: Callable[[Case], str], fix: Text) -> Rule:
    def cause(case: Case) -> str:
        they_were = plural(len(case.positions), "the parameter was", "the parameters were")
        stay = f"; the other {counted(len(case.others), 'parameter')} stay equal"
        return (
            f"{they_were} equal before the first step, and gradients agree in every step; "
            f"{why(case)}{stay if case.others else ''}"
        )

    return Rule(
        name=name,
        when=when,
        label="applies updates that differ between ranks",
        summary=lambda c: (
            f"{c.they_differ} from step {c.begin} on, although the same gradients are applied"
        ),
        cause=cause,
        fix=fix,
        evidence=lambda c: {
            "gradients": "agree",
            "parameters_that_differ": len(c.positions),
            "parameters_that_stay_equal": len(c.others),
            "steps_compared": c.compared,
        },
    )


UPDATE_ON_SOME = _unequal_updates(
    "update-on-some-ranks",
    "a custom optimizer updates parameters on some ranks only",
    lambda c: (
        f"{ranks_text(c.ranks)} {plural(len(c.ranks), 'applies', 'apply')} no update to "
        f"{_them(c)}, the other ranks do"
    ),
    lambda c: (
        f"send {_them(c)} to all ranks after the update (`dist.broadcast`, "
        "`dist.all_gather`), or apply the update on every rank"
    ),
)
UNEQUAL_UPDATES = _unequal_updates(
    "unequal-updates",
    "the ranks apply different updates, although synchronised gradients agree",
    lambda c: (
        f"the ranks apply different updates to {_them(c)}, or some ranks modify {_them(c)} "
        "afterwards"
    ),
    "compute the update on every rank from the same values, or on one rank and send it",
)
