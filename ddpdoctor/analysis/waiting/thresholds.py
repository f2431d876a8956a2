"""All numbers on which it depends what counts as waiting, and what follows from what."""

STALL_S = 10.0
"""Seconds without progress that count as a stall where no monitor learned it from the run."""

QUIET_S = 1.0
"""Seconds without progress after which a rank counts as waiting: a call may be in flight."""

BUSY = 0.3
"""Share of a core from which on a rank counts as computing."""

CLEAN_UP_S = 5.0
"""Seconds within which a launcher terminates the other ranks."""

SEEN_S = 1.0
"""Seconds within which the end of a process is seen."""

JUST_BEFORE_S = 60.0
"""Seconds after a failed call within which an exception is taken to come from it."""

APART_S = 1.0
"""Seconds by which the clock of a rank that sends a signal and the last sign of life of the one
that is stopped may differ."""

TIMESTAMP_DIGITS = 10
"""Digits in a folder's name from which on it is taken for a date and time: a count has fewer."""

DIFFERING_FOLDERS = 2
"""Folders that may differ in two paths of one file at most: more of them are simply other paths."""

NCCL_TIMEOUT_S, WATCHED = 600.0, 0.9
"""Seconds after which NCCL's watchdog aborts a process by default, and the share of its timeout
that a rank must have stood still for the watchdog to be the one that did."""

LINES_SHOWN = 4
"""Lines shown beside the one pointed at."""
