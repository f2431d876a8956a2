"""How much the parts that observe training look at, and how much they record."""

# autograd_grad

GRAD_CALLS_KEPT = 64
"""The latest calls that are remembered: older graphs are freed by then."""

# ddp_collectives

NODES_FOLLOWED = 4000
"""Nodes of the graph that are looked at to see which of several models a backward is about."""

# finite_gradients

FIRST_PARAMETERS = 4
MOST_LOOKED_AT, LARGEST = 32, 1 << 20
"""How many parameters are sampled, and how many elements each may have: the gradients are read in
the backward."""

# light_steps

EXAMINED = 9
"""Examined steps in a row, from one whose successor is a multiple of eight on: so that windows of
eight steps, and what is looked at in every eighth, fall among them."""

SHORTEST, LONGEST_LIGHT_S = 16, 10.0
"""A period of examined and light steps: the fewest steps, a power of two as `LONGEST_LIGHT` is, and
about how many seconds at most: drift shows at the earliest in the next examined step."""

# lifecycle

PULSES_FIRST = 16
"""The first steps each have a pulse, so that short runs are seen too."""
PULSE_S, PULSES_PER_PACE, SLOWEST_S = 0.04, 32, 0.64
"""Seconds between later pulses, doubled after every 32 of them up to the slowest: what is done in a
pulse then costs a bounded share of the time."""

# optimizers

STEPS_IN_FULL = 2000
JOINED_S, JOINED_LATER_S = 0.25, 1.0
"""After the first steps of an optimizer (`recording.limits.FIRST_STEPS`), the steps of `JOINED_S`
seconds share one record, and after `STEPS_IN_FULL` those of a second: fast loops would fill the
record. The ring has the number of the last step in any case."""

# steady_state

FAST_PATH_AFTER = 64
"""The first steps of an optimizer never take the fast path: what changes early (warm-up, freezing)
is seen in full."""

ALIKE, MOST_ALIKE = 2, 64
"""Equal steps in a row before the next one takes the fast path; doubled, up to the most, whenever a
step leaves it: for a program that changes often, leaving costs more than the fast path saves."""

MOST_CALLS = 64
"""Forwards and backwards in a step on the fast path, at most: bounds what is compared and kept."""

# write_counts

WRITES_ASKED = 128
"""Parameters asked per optimizer step, on average: larger models are asked once in some steps."""

WRITES_EMITTED = 300
"""Events per optimizer and model: a program that writes in every step has shown itself by then."""
