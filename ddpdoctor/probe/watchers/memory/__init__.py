"""Memory between steps, and what holds it."""
