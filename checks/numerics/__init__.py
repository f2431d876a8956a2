"""Checks of the family `numerics`."""
