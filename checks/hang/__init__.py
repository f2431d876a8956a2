"""Checks of the family `hang`."""
