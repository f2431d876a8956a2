"""The collectives of every rank, group by group, and how ranks failed in them."""
