"""Processes, files and devices: who claimed which rank, who touched which file."""
