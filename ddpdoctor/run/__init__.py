"""A run: what all ranks recorded, joined, read-only, with the questions that checks ask of it."""

from __future__ import annotations

from ..storage.call_ring import Call, Phase, Ring, State
from .load import Recording, load
from .location import Location, shorten
from .merge_records import stopped_in
from .rank import Facts, Rank, title_of
from .rank_sets import (
    equal_ranks,
    fold_ranks,
    groups_text,
    odd_ones,
    ranks_do,
    ranks_text,
    ranks_were,
    unfolded,
)
from .run import Run

__all__ = [
    "Call", "Facts", "Location", "Phase", "Rank", "Recording", "Ring", "Run", "State",
    "equal_ranks", "fold_ranks", "groups_text", "load", "odd_ones", "ranks_do", "ranks_text",
    "ranks_were", "shorten", "stopped_in", "title_of", "unfolded",
]  # fmt: skip
