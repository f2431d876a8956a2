"""All numbers on which it depends what counts as a divergence of calls, and how it is reported."""

WINDOW = 64
"""Calls around a divergence that are compared: enough for a round of most training loops."""

HISTORY = 256
"""Earlier calls in which a habit is looked for."""

HABIT = 2
"""Earlier rounds that have to be equal before a call counts as skipped: fewer prove no habit."""

ROUNDS = 3
"""Rounds in which ranks have to make the calls in the same two orders, where only the line numbers
show it. Names that one line loops over need one round only."""

LONGEST_ROUND = 16
"""Calls of one round at most where an order is compared: in longer ones a match may be chance."""

NEAR_BY = 16
"""Calls within which the other side may make an additional call, too: then it is not extra."""

NEAR = 4
"""Calls within which ranks may stop because of a divergence; later stops have another cause."""

REACH = 1024
"""Calls within which ranks have to be in the same call again."""

FAULTS = 8
"""Divergences of one group that are reported."""

TIMES = 2000
"""Calls of one group that are examined for the same divergences."""

LOOKS = 64
"""Harmless differences that are passed over in a row."""

RANKS_ASKED = 8
"""Ranks whose earlier calls are read for how usual a call is."""

WAYS_NAMED = 2
"""Statements named in a sentence."""

GROUPS_NAMED = 3
"""Other groups with the same fault named in a sentence."""
