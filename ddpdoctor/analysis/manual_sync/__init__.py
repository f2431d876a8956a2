"""Gradients that the program synchronises itself, without DDP."""
