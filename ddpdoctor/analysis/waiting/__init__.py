"""Where every rank was when the run stood still, and who waits for whom."""
