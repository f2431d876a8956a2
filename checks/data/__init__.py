"""Checks of the family `data`."""
