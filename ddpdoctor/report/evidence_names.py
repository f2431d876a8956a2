"""Names of evidence that checks read of each other's findings, so that both use the same one."""

from __future__ import annotations

MESSAGE = "message"
"""Of `first-failure`: what the exception said, at most 2,000 characters."""

STEPS_TAKEN = "steps_taken"
"""Of `collective-mismatch` and `rank-exited-early`: optimizer steps by rank (as text)."""

FINITE_ON = "finite on"
"""Of `nonfinite-origin`: ranks on which the same gradients were finite."""
