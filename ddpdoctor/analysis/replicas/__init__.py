"""Copies of a model on several ranks: where they differ, and what made them differ."""
