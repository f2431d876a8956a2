"""Digests and versions of tensors."""
