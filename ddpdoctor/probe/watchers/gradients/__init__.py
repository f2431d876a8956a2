"""Gradients and parameters between a backward and the next step."""
