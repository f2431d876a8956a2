"""Beside the ranks: follows their records, finds hangs, stops runs."""
