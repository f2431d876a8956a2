"""How much must be on record before copies without a wrapper are judged."""

ENOUGH = 0.5
"""Share of the parameters' elements that must be communicated to make them equal once."""

LOOKS = 3
"""Looks that show a habit. Two may not: Adam's first update depends on the sign of the gradient
only, so that parameters may be equal once although their gradients differ."""

LOOKS_SINCE_STOPPED = 2
"""Looks since the copies diverge, where the gradients of some parameters are left out from a step
on."""

LOOKS_SINCE_ONCE = 5
"""Looks where only the first step is synchronised: a short run says nothing."""

LOOKS_BESIDE = 4
"""Looks where only what groups have in common tells that they hold copies (model parallelism)."""

NEAR = 1e-3
"""Relative distance up to which two ratios or norms count as equal. The average over ranks whose
gradients differ has a norm farther away."""

LARGE = 0.05
"""A mean counts if it is at least this share of the largest value it is the mean of: smaller ones
are dominated by rounding."""

ROUNDING = 1e-6
"""Relative distance of two options that count as equal."""

MODELS_OF_A_LINE = 3
"""So many models of one line are no longer a generator, a critic and the like."""

ACTIVATIONS = 32
"""Numbers exchanged in each step that are more than figures for a log."""
