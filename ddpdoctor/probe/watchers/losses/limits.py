"""How much the watchers of losses look at, and how often."""

# loss_counts

COUNTED_BACKWARDS = 64
"""Backwards before which a count was summed that are looked at."""
COUNTS_KEPT = 16
"""Sums between two backwards that are compared with what the loss is divided by."""
SMALLEST_COUNT = 3.0
"""Smaller divisors may be anything."""

# loss_scaling

NODES_FOLLOWED = 12
"""Autograd nodes from the loss on that are looked at."""

TERM_NODES = 256
"""The same, of a loss that is a sum of many terms."""

BACKWARDS_LOOKED_AT = 6
"""Backwards per line whose loss is looked at; later one in `LOOKED_AT_AGAIN` of all."""

COUNTED_LOOKED_AT = 32
"""The same where some elements of the loss do not count: how many do differs by chance, too."""

LOOKED_AT_AGAIN = 17  # a prime: lines that take turns are all looked at

GRAPHS_AT_MOST = 8
"""Different graphs of a loss per line, by their last nodes; a new one is always looked at."""

FOLLOWED_AT_MOST = 100
"""Forwards under anomaly mode, which records the line of every node and is slow."""

LOSSES_ENOUGH = 32
"""After this many backwards of known lines in a row batch sizes are no longer noted, until there
is a new line."""

BATCHES_AT_MOST = 300
"""Batches recorded: their sizes may differ in every step."""

# multiplied_loss

MULTIPLIED_FOLLOWED = 8
"""Backwards of a line whose loss is multiplied by the world size that are waited for, until the
lines of a forward are known."""

# reduced_in_graph

REDUCED_LOOKED_AT, REDUCED_KEPT = 8, 4
"""Tensors of a graph all-reduced at one line that are looked for in the next backward, and how many
of all lines before one backward."""

# gathered_in_graph

CUT_BACKWARDS = 3
"""Backwards in which a gathered tensor gets no gradient before it is told."""

GATHERED_FRAMES = 12
"""Of the stack, above a call that gathers, in which the function is searched that makes it."""
