"""A rank's own time, apart from its waiting for others."""
