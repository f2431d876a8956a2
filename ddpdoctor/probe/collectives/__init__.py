"""Process groups and calls of collectives."""
