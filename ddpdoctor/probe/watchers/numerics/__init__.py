"""NaN and infinity, and where they arose."""
