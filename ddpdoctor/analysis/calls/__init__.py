"""The collectives of every rank, group by group."""
