"""Checks of the family `launch`."""
