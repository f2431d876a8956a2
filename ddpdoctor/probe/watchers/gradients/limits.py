"""How much the watchers of gradients look at, how often, and what they count as equal."""

# edits_after_wrap, manual_edits

LOOKED_AT = 6
"""Tensors sampled per model: an edit (or a load, or an initialisation) usually reaches all or many
of them, and each costs a digest."""

NAMED_ALIKE = 4
"""A path that the program writes to is watched if no more parameters than these end so: `weight`
says little."""

FORWARDS_AFTER_WRAP = 4
"""Forwards before the first step at which they are compared; gradient accumulation has more."""

FRAMES_AT_MOST = 50
"""Of the stack, against runaway recursion."""

# edits_before_sync

EARLY_LOOKS = 64
"""Steps looked at whatever it costs, as gradients are read: most programs do in their first steps
all that they ever do."""

EARLY_EDITS_EMITTED = 300

# evaluation

RARELY = 4
"""A part that is called without gradients counts as evaluated if at least this many forwards with
gradients came before. One that is called more often belongs to training: it computes targets, say.
"""

# gradient_sync

PATTERNS_EMITTED = 2000
"""Patterns recorded per model: programs may alternate between many."""

AGAIN_AT = (9, 99, 999)
"""Steps at which an unchanged pattern is recorded again, with the times DDP has measured so far:
the first steps are no measure of speed."""

# gradient_edits

ASKED_AT_MOST = 256
"""Gradients of a model that are asked whether they were written to: bounds the time per step."""

# hyperparameters

GROUPS_AT_MOST = 16

LISTED_BELOW = 8
"""Elements of an option that is a sequence (`betas`); longer ones are buffers, not options."""

EXACT_BELOW = 1 << 53
"""Larger integers become floats: JSON readers may not keep them exact."""

SCALER_CALLS_AT_MOST = 5000

SELDOM = 8
"""Steps between two of a scheduler from which on what it set is read before the next one."""

# manual_edits

SNAPSHOTS_ALWAYS = 64
"""Steps in which snapshots are taken whatever they cost: most programs do in their first steps all
that they ever do."""

BUDGET_SHARE, LEAST_SHARE = 0.15, 0.05
"""Share of the doctor's budget for this module, while the doctor is within its budget and after."""

STEPS_APART, STEPS_OVERDUE, STEPS_OPEN = 100, 400, 16
"""Steps from one look beyond the budget to the next, at a step that is due and at any other; and
for how many steps such a look stays open for each optimizer of the model."""

EDITS_EMITTED = 300

EDITS_ON_DEMAND = 20
"""Edits recorded per model, and those kept in reserve for `look_now`."""

TRACED_AT_MOST = 6
"""Times that lines are traced to find the one that edits: tracing slows Python down several times.
After that they are traced only where the next edit is due, if the last two set a rhythm."""

STATE_SEARCHES = 3
"""Searches of the source of running functions for a line that edits optimizer state, per model."""

# outer_modules

OUTER_LOOKED_AT = (1, 32)
"""Optimizer steps of the process after which the modules that are called are looked at, for two
steps of each optimizer; some modules are used later only."""
OUTER_CALLED, OUTER_MODULES = 4096, 16
"""Modules that are noted meanwhile, and those outside of wrappers that are then compared."""
OUTER_TENSORS, OUTER_ELEMENTS = 4000, 1 << 22
"""Tensors per module; with more elements than that it is digested later only as the budget
allows."""
OUTER_COPIED = 1 << 20
"""Elements of a buffer up to which it is copied for one step, to see what the step writes."""
OUTER_STATES = 20
"""Calls of `state_dict` recorded per module."""
OUTER_EVALUATIONS = 4
"""Copies of the model whose first evaluation is waited for."""
OUTER_EVALUATED = 8
"""Evaluations in which calls of known modules are waited for."""

# replica_digests

STATES_AT_MOST = 64
"""Parameters whose optimizer state is digested at a full step: state drifts with its parameters,
so that a sample is enough."""

ENOUGH_UNCHANGED = 8
"""Steps in which an unknown communication hook must leave the parameters unchanged before it is
taken to exchange gradients."""

SKETCHED_ON_A_DEVICE = 32_000_000
"""Elements up to which tensors on a device are sketched: 160 kernels, in full steps only."""

SKETCHED_AT_MOST = 400_000_000

SKETCHED_AT_EASE = 1_000_000
"""Elements up to which tensors are sketched at all, and whatever the budget (some milliseconds)."""

# schedules

SCHEDULES_AT_MOST, LENGTHS_AT_MOST = 64, 64

LOOPS_SEARCHED = 50
"""Frames of the stack whose loops are looked at, against runaway recursion."""

# second_reduction

CALLS_LOOKED_AT = 6
"""Steps per line in which `manual_edits` measures what the call does to the gradients, beyond the
doctor's budget: without a measured factor the finding proves little."""

REDUCTIONS_EMITTED = 20
"""Steps per line that are recorded one by one; later ones at powers of two."""

# shard_scales

SHARDS_LOOKED_AT = 64
"""Steps of an optimizer that are looked at one by one, later those of `amp.told_at`."""
SPANS_AT_MOST = 64
"""Backwards before a step between which the shards are compared."""
LEAST_VALUES = 3
"""Values of a shard other than zero that must have been multiplied by the same: a row of a matrix
may have a factor of its own."""

# state_loading

LOADS_SEARCHED = 8
"""Loads of weights during training for which the source is searched for what made them."""

LOADS_EMITTED = 1000

EARLY_LOADS = 50
"""Loads recorded, and loads remembered that came before any model was wrapped."""

# step_in_backward

INSIDE_FIRST = 8
"""Backwards recorded one by one; later ones at powers of two."""

# zero_grad

CLEARS_EMITTED = 200

CLEARS_ASKED = 16
"""Backwards between two steps before which a gradient on a device is asked whether it is zero. With
more of them, it is not known whether gradients were cleared."""

CLEARS_ENOUGH = 4
"""A program that stopped clearing is recorded after this many steps in a row with cleared gradients
and as many without. One that mixes them accumulates gradients on purpose, and is dropped."""

READ_UP_TO = 65536
"""Gradients up to this size are read, to notice one that was zeroed through `.data`: that changes
neither identity nor version."""

# zero_gradients

ZERO_PARAMETERS = 2000
"""Larger holdings are not looked at: every gradient is read as a whole."""

ZERO_IN_TURN = 64
"""Gradients that are read before a step that is due, unless its number is a power of two."""

ZERO_SAMPLES = 4
"""Samples that must agree before a gradient counts as always zero (steps 0, 1, 2 and 4)."""

# shard_states

SHARD_STATES = 4
"""Loads of a state that are looked at."""

SHARDS_DIGESTED = 64
"""Parameters of one optimizer whose shards are digested."""

# scaled_clips

CLIPS_EMITTED = 16
"""Calls that clip scaled gradients which are recorded."""
