"""Checks of the family `model`."""
