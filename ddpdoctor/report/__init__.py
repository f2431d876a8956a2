"""Checks, findings, and the report that they make."""
