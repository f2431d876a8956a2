"""Gradients and parameters that the program itself exchanges."""
