"""How much the recorder and its helpers look at, how often, and at what cost."""

# code_locations

MOST_FILES = 300
"""Files of the program that are searched for a line: they are read from disk, in the run's time."""

# names_in_frames

MOST_NAMED, DEEPEST_NAME = 64, 3
"""A dictionary with more entries than that is data, and its entries have no names; and how many
steps from a variable a growing object is searched for: three, as in `trainer.meters["loss"].sum`.
"""

MOST_ENTRIES = 16
"""Entries of a list whose objects have names in it: longer ones hold data."""

MOST_MODULES = 256
"""Submodules of a model that are searched, from the top, for those of the program's classes: the
search is a walk over the whole model, within a training step."""

# recorder

TROUBLE_LIMIT = 10
"""Failures after which a hook is switched off: enough that a passing error does not silence it, few
enough that a broken hook costs nothing in a long run."""

COST_EVERY_S = 5.0
COST_FIRST_S = 0.25
"""Seconds between two `ProbeCost`: short at first, since a run may be killed in its first second,
then doubled each time up to `COST_EVERY_S`."""

# sampling

BUDGET_SHARE = 0.4
LEAST_SHARE = 0.1
"""Share of the doctor's budget for digests: up to the first, as far as the rest of the doctor
leaves it; at least the second, even if the rest exceeds the budget, or drift would go unseen."""

FIXED_NS = 25_000
"""Nanoseconds that a sampled step costs in addition to its tensors (measured on CPU)."""

TENSOR_NS = 3_500.0
"""First estimate of the nanoseconds that one digest costs; then it is measured."""

SPARSE_AFTER = 1000
"""Steps after which at most every second one is sampled, and half as many after each doubling: the
record then grows with the logarithm of the run's length."""

FIRST_STEPS = 128
FIRST_NS = 120_000
"""The first steps are all sampled, at about this cost each: in a short run one per cent of the time
buys nothing, and 128 * 0.12 ms is too short to notice."""

PER_DOUBLING = 8
"""Samples, at least, while the number of steps doubles, whatever the budget: a long run may not
hide drift for long."""

CHOSEN_ANEW = 16
"""Steps between two choices of stride and interval, after as many first steps that choose each
time: a power of two, so that the steps that choose are also sampled at every interval up to it."""

WIDEST = 128
"""Tensors of a kind per sampled step, at most, after the first steps: bounds the record of models
with thousands of parameters."""
