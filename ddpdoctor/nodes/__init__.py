"""Nodes without a shared disk: their records reach the first node, and its verdict reaches them."""
