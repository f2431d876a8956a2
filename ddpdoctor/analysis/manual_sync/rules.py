"""The table of `parameter-drift` for copies without a wrapper: for each class of their history, and
each scope that matters (the model, an optimizer, layers, single parameters), what is said of it.

A row that differs from another one in a part only is a `replace` of that.
"""

from __future__ import annotations

from dataclasses import replace

from ...report.findings import Confidence, Severity
from .cases import SHOWN, Rule
from .copies import step_of

ALL_REDUCE = (
    "`for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= dist.get_world_size()`"
)
NOT_SYNCED = "applies gradients that are not synchronised"
MEANT = "; they are whole layers, so this may be intended (heads of their own)"

# Some parameters: never synchronised. Their layer is torn apart, or others differ as a result.

NEVER_SYNCED = Rule(
    name="never-synced",
    when="manual synchronisation leaves out the gradients of some parameters",
    spots=("exchange", "step"),
    label="does not include their gradients",
    summary="{c.they_differ} from step {c.begin} on: the program's own all-reduce does not include "
    "{c.few:its gradient|their gradients}",
    cause="the gradients of {c.rest} {c.of_them} are synchronised in every step, those of {c.few} "
    "never: each rank applies its own",
    fix="all-reduce the gradient of every parameter in the same way as those of the others: `for p "
    "in model.parameters(): dist.all_reduce(p.grad)`, divided by the world size if theirs are",
    evidence=lambda c: {
        "gradients_synchronised": c.rest,
        "gradients_not_synchronised": c.few,
        "parameters_that_differ_now": sum(not h.equal[-1] for h in c.copies.parameters),
        "steps_compared": c.compared,
    },
)
IN_ONE_LAYER = (
    "; that of {c.example[0]} is synchronised, that of {c.example[1]} in the same layer is not"
)
OTHERS_TOO = (
    "; the others differ as a result: a value computed from all gradients (a norm to clip by) or "
    "parameters differs between ranks"
)
OTHERS_CLIPPED = (
    "; the others differ as a result: clipping scales all gradients by their total norm, which "
    "differs between ranks with the gradients that are not synchronised"
)
NEVER_SYNCED_CLIPPED = replace(
    NEVER_SYNCED,
    related=(*NEVER_SYNCED.related, ("scales all gradients by a norm that differs", "clip")),
)
NEVER_SYNCED_REST = replace(
    NEVER_SYNCED,
    confidence=Confidence.SUSPECTED,
    cause=NEVER_SYNCED.cause + "; before the first step a collective carried all parameters, "
    "including these, and they are a part of {c.example[0]}: the ranks are to train one model",
)
NEVER_SYNCED_LAYERS = replace(
    NEVER_SYNCED,
    severity=Severity.NOTE,
    cause=NEVER_SYNCED.cause + MEANT,
    fix="if the ranks are to train one model, all-reduce the gradients of these layers, too",
)

# Some parameters: no longer synchronised.

PART_STOPPED = Rule(
    name="sync-stopped",
    when="manual synchronisation of gradients stops at some step",
    spots=("exchange", "step"),
    label="no longer includes their gradients from step {c.since} on",
    summary="{c.they_differ} from step {c.begin} on: the program's own all-reduce no longer "
    "includes {c.few:its gradient|their gradients} since step {c.since}",
    cause="until then the gradients of all {c.count} parameters were synchronised in every step "
    "and kept the ranks equal; those of {c.few} no longer are, and each rank applies its own",
    fix="all-reduce the gradient of every parameter that is trained; for one that is no longer to "
    "be trained, set `requires_grad_(False)` and `p.grad = None` on all ranks",
    evidence=lambda c: {
        "gradients_not_synchronised_since_step": c.since,
        "gradients_not_synchronised": c.few,
        "gradients_synchronised": c.rest,
    },
)
LAYERS_STOPPED = replace(
    PART_STOPPED,
    severity=Severity.WARNING,
    confidence=Confidence.SUSPECTED,
    cause=PART_STOPPED.cause + MEANT,
)

# All parameters of one optimizer: never synchronised.

OTHER_OPTIMIZER = Rule(
    name="never-synced-optimizer",
    when="manual synchronisation leaves out all parameters of one optimizer",
    severity=Severity.WARNING,
    spots=("step", "exchange"),
    label=NOT_SYNCED,
    related=(("does not include their gradients", "exchange"), ("created here", "made")),
    summary="{c.they_differ} from step {c.begin} on: the program's own all-reduce includes no "
    "parameters of this optimizer",
    cause="the gradients of {c.rest} {c.rest:parameter|parameters} of {c.kind} in another "
    "optimizer are synchronised in every step, those of the {c.count} in this one never: each "
    "rank applies its own",
    fix=f"all-reduce the gradients of both optimizers: {ALL_REDUCE}",
    evidence=lambda c: {
        "gradients_synchronised": c.rest,
        "gradients_not_synchronised": c.count,
        "parameters_that_differ_now": c.few,
        "steps_compared": c.looked,
    },
)
OTHER_OPTIMIZER_TORN = replace(
    OTHER_OPTIMIZER,
    severity=Severity.ERROR,
    cause=OTHER_OPTIMIZER.cause + "; {c.example[0]} has parameters in both",
)
OTHER_OPTIMIZER_PART = replace(
    OTHER_OPTIMIZER,
    severity=Severity.NOTE,
    cause=OTHER_OPTIMIZER.cause + "; they are a part of the model, so this may be intended (heads "
    "of their own)",
)

# Gradients are passed to collectives, and are not applied equally for all that.

MISMATCHED = Rule(
    name="mismatched-gradients",
    when="the ranks pass gradients of different parameters to one collective",
    spots=("exchange", "step"),
    label="pairs gradients of different parameters",
    summary="{c.they_differ}: at step {c.begin} the ranks all-reduce gradients of different "
    "parameters with each other",
    cause="{c.example[0]} got no gradient on {c.example[1]}, which therefore passes "
    "the gradients of other parameters to the collectives than the other ranks. Collectives pair "
    "tensors, and the elements of flat ones, by their order, so that gradients of different "
    "parameters are summed",
    fix="give every parameter a gradient before they are collected for the all-reduce: `for p in "
    "model.parameters(): if p.grad is None: p.grad = torch.zeros_like(p)`",
    evidence=lambda c: {
        "without_a_gradient": c.rows,
        "steps_compared": [s for s in map(step_of, c.copies.looks) if s >= c.begin][:SHOWN],
    },
)
APPLIED_ON_SOME = replace(
    MISMATCHED,
    name="applied-on-some-ranks",
    when="reduced gradients are applied only on the ranks that had one of their own",
    spots=("step", "exchange"),
    label="skips parameters without a gradient",
    related=(("all-reduced here", "exchange"), ("created here", "made")),
    summary="{c.they_differ}: at step {c.begin} only some ranks apply the reduced "
    "{c.few:gradient|gradients}",
    cause="{c.example[0]} got no gradient on {c.example[1]}, which passes something "
    "else (zeros, say) in its place. What comes back is not applied there: the optimizer skips "
    "parameters whose `.grad` is None",
)


AVERAGES_LOST = Rule(
    name="averages-lost",
    when="parameters are passed to collectives again and again, and are never equal afterwards",
    severity=Severity.WARNING,
    confidence=Confidence.SUSPECTED,
    spots=("step", "made"),
    label="trains on from parameters that differ",
    summary="the ranks pass the parameters of {c.kind} to collectives again and again, but these "
    "are neither changed by them nor equal afterwards",
    cause="what the collectives return, an average, say, does not come back into {c.kind}: it is "
    "written to a copy, or to nothing, as an iterator was used up (`model.parameters()` can be "
    "gone through once)",
    fix="copy the result back on every rank: `p.data.copy_(...)` for every parameter of a list "
    "(`list(model.parameters())`); if the average is only to be looked at, and each rank is to "
    "train a model of its own, nothing",
    evidence=lambda c: {
        "steps_compared_after_a_collective": [
            step_of(k) for k in c.copies.looks if all(s.just for s in k.values())
        ][:SHOWN],
    },
)


NOT_AWAITED = Rule(
    name="async-not-awaited",
    when="gradients are applied before an asynchronous collective has finished",
    spots=("running", "step"),
    label="still running when the optimizer applies the gradients",
    related=(("applied here", "step"),),
    summary="parameters of {c.kind} differ between ranks from step {c.begin} on: their gradients "
    "are applied before their all-reduce has finished",
    cause="the collective is asynchronous and the program does not wait for it: each rank applies "
    "what has arrived by then, its own gradients, the reduced ones or a mixture",
    fix="wait for every collective before the gradients are used: `for work in works: "
    "work.wait()`, or remove `async_op=True`",
    evidence=lambda c: {
        "steps_that_ended_before_a_collective_did": [
            {"rank": n, "steps": s.running} for n, s in c.copies.looks[-1].items() if s.running
        ],
        "steps_compared": c.looked,
    },
)
UNEQUAL_START = Rule(
    name="unequal-start",
    when="the parameters differ before the first step, and only gradients are sent",
    spots=("made", "step"),
    label="the model with parameters that differ from the start",
    related=(("applied here", "step of a module"),),
    summary="{c.they_differ} before the first step and from then on: only gradients are "
    "synchronised",
    cause="the ranks start from different values (another seed, weights loaded on some ranks only) "
    "and apply the same gradients to them: the initial difference remains",
    fix="broadcast the parameters before the first step: `for p in model.parameters(): "
    "dist.broadcast(p.data, src=0)`",
    evidence=lambda c: {
        "parameters_that_differ": f"{c.few} of {c.count}",
        "gradients": "agree",
        "steps_compared": c.compared,
    },
)

# A custom optimizer applies updates that differ, to gradients that agree.

UPDATES_DIFFER = Rule(
    name="unequal-updates",
    when="the ranks apply different updates, although synchronised gradients agree",
    label="applies updates that differ between ranks",
    summary="{c.they_differ} from step {c.begin} on, although the same gradients are applied",
    cause="{c.few:the parameter was|the parameters were} equal before the first step, and "
    "gradients agree in every step; the ranks apply different updates to {c.few:it|them}, or some "
    "ranks modify {c.few:it|them} afterwards",
    fix="compute the update on every rank from the same values, or on one rank and send it",
    evidence=lambda c: {
        "gradients": "agree",
        "parameters_that_differ": c.few,
        "parameters_that_stay_equal": c.rest,
        "steps_compared": c.compared,
    },
)
UPDATE_ON_SOME = replace(
    UPDATES_DIFFER,
    name="update-on-some-ranks",
    when="a custom optimizer updates parameters on some ranks only",
    cause="{c.few:the parameter was|the parameters were} equal before the first step, and "
    "gradients agree in every step; {c.who} {c.many:applies|apply} no update to {c.few:it|them}, "
    "the other ranks do",
    fix="send {c.few:it|them} to all ranks after the update (`dist.broadcast`, "
    "`dist.all_gather`), or apply the update on every rank",
)
STAY_EQUAL = "; the other {c.rest} {c.rest:parameter|parameters} stay equal"

# The whole model: kept equal, and from some step on no longer.

EQUAL_BEFORE = "the parameters were equal before step {c.window[0]} and differed {c.by_when}: "
SYNC_EVERY_STEP = "all-reduce the gradients before every `optimizer.step()`"
SAME_EDITS = (
    "modify parameters and gradients on every rank with the same values, or broadcast them from "
    "one rank afterwards"
)


SYNC_STOPPED = Rule(
    name="sync-stopped",
    when=PART_STOPPED.when,
    label=NOT_SYNCED,
    related=(
        ("sets {c.options[1]}", "option"),
        ("all-reduced here before", "last exchange"),
        ("created here", "made"),
    ),
    summary="parameters of {c.kind} differ {c.between} {c.from_when}, although the program "
    "synchronises their gradients manually",
    cause=EQUAL_BEFORE + "in {c.earlier} every rank{c.of_the_group} passed all gradients to a "
    "collective; {c.lacking} applies its own",
    fix=SYNC_EVERY_STEP,
    evidence=lambda c: {
        "last_equal_at_step": c.window[0],
        "first_different_at_step": c.begin,
        "steps_in_between_not_synchronised": [
            {"rank": n, "steps": count} for n, count in c.missing.items() if count
        ],
        "gradients": c.gradients,
        "comparisons": len(c.copies.looks),
    },
)
OTHER_GROUP = "; {c.others_go_on} still synchronise theirs"
STEP_NOT_SYNCED = replace(
    SYNC_STOPPED,
    name="step-not-synced",
    when="manual synchronisation of gradients is missing at some step",
    fix=f"{SYNC_EVERY_STEP}, also those of the last, shorter group of micro-batches",
)
UNEQUAL_OPTIONS = replace(
    SYNC_STOPPED,
    name="unequal-options",
    when="the ranks apply synchronised gradients with different optimizer options",
    label="",
    cause=EQUAL_BEFORE + "the ranks take step {c.options[0]} with different options, "
    "{c.options[1]} is {c.options[2]}",
    fix="set `{c.options[1]}` to the same value on every rank before the same step: end inner "
    "loops on all ranks together (all-reduce the condition), step schedulers on all ranks",
)
UNEQUAL_UPDATES = replace(
    SYNC_STOPPED,
    name="unequal-updates",
    when=UPDATES_DIFFER.when,
    label="",
    cause=EQUAL_BEFORE + "the gradients of {c.in_between} are all-reduced and agree, so a rank "
    "modifies its parameters there, or applies a different update",
    fix=SAME_EDITS,
)
EDIT_AFTER_SYNC = replace(
    UNEQUAL_UPDATES,
    name="edit-after-sync",
    when="gradients or parameters are modified after manual synchronisation",
    cause=EQUAL_BEFORE + "all gradients of steps {c.window[0]} to {c.last_before} are all-reduced, "
    "so a rank modifies its parameters there, or its gradients after the all-reduce",
)
GRADIENTS_EDITED = replace(
    EDIT_AFTER_SYNC,
    cause=EQUAL_BEFORE + "the gradients applied in {c.in_between} differ between ranks, although "
    "all-reduced",
)
SKIPPED = replace(
    SYNC_STOPPED,
    name="skipped-step-manual-sync",
    when="some ranks skip a step whose gradients were synchronised manually",
    label="skipped at least once, on some ranks only",
    summary="{c.who} skipped an optimizer step of {c.kind}: step {c.ahead.step} follows "
    "more all-reduces of gradients there than on the other ranks",
    cause="all ranks synchronised the gradients manually, but not all of them applied them: the "
    "parameters differ by the missing updates",
    fix="take the step on every rank; if a step is to be skipped, decide it from values that are "
    "equal on all ranks (all-reduce the condition)",
    evidence=lambda c: {
        "last_equal_at_step": c.window[0],
        "communicated_before_the_step": c.communicated,
        "comparisons": len(c.copies.looks),
    },
)
FEWER_IN_THE_END = replace(
    SKIPPED,
    summary="{c.who} took {c.taken[0]} optimizer steps of {c.kind} for as many all-reduces of "
    "gradients as the other ranks, which took {c.taken[1]}",
    evidence=lambda c: {
        "last_equal_at_step": c.window[0],
        "communicated": c.communicated,
        "comparisons": len(c.copies.looks),
    },
)
RULES = {
    rule.name: rule.when
    for rule in (
        SYNC_STOPPED, STEP_NOT_SYNCED, SKIPPED, UNEQUAL_OPTIONS, UNEQUAL_UPDATES, EDIT_AFTER_SYNC,
        NEVER_SYNCED, MISMATCHED, APPLIED_ON_SOME, AVERAGES_LOST, NOT_AWAITED, UNEQUAL_START,
        OTHER_OPTIMIZER, UPDATE_ON_SOME,
    )
}  # fmt: skip
