"""Checks of the family `drift`."""
