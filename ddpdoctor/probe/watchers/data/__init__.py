"""Loaders, samplers, data sets and what models are given."""
