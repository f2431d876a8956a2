"""Files of a run folder: events, rings of calls, stack dumps."""
