"""How sensitive the checks of the drift family are. Digests are compared bit by bit: numbers decide
only how a difference is described, and what is no difference or no habit yet."""

from __future__ import annotations

ROUNDING = 1e-6
"""A distance over the norm up to which copies differ by rounding errors only: a few times the
resolution of float32 (1.2e-7)."""

NOISE = 0.2
"""Two measurements of one distance may differ by this share: `Sketch` estimates each to about ten
percent."""

GROWS = 1.5
"""A distance that becomes so many times larger grows; less, but more than `NOISE`: slowly."""

SCHEDULE = 3
"""Consecutive values of an option that two ranks do not have in common by chance."""

LACKS_AT_MOST = 8
"""Consecutive values of an option that a rank may have omitted."""

SAME_FACTOR = 1e-3
"""Relative error of a measured factor, up to which it counts as the number that it is near."""

EXAMINED_STEPS = 20
"""Steps in which gradients are always examined, at the begin and after a reduction by the program:
the probe keeps so many records in reserve for the latter (`EMITTED_ON_DEMAND` of its watcher)."""

EXCHANGED = 0.5
"""Elements communicated per element of the model from which on they may be its parameters or
gradients."""

SEVERAL_STEPS = 2
"""Steps from which on gradients that are synchronised several times, or not cleared, are a habit:
one such step may be an initialisation, or the last one of a run."""

FEW_NUMBERS = 8
"""Numbers that a call may carry and still be losses or counts: activations are more."""

STEPS_WATCHED = 32
"""First steps, in all of which the probe looks for writes to parameters between steps
(`SNAPSHOTS_ALWAYS` of its watcher)."""
