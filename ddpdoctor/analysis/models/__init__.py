"""Wrapped models, their parameters, and which of them a backward used."""
