"""A run: what all ranks recorded, joined, read-only, with the questions that checks ask of it."""

from __future__ import annotations

from ..storage.call_ring import Call, Phase, Ring, State
from .load import Recording, load
from .location import Location, read_in, shorten
from .merge_records import stopped_at, stopped_in
from .phrases import (
    counted,
    fold_numbers,
    fold_ranks,
    groups_text,
    listed,
    named,
    plural,
    ranks_do,
    ranks_text,
    ranks_were,
    some,
    told_of,
    unfolded,
    whom,
    with_folded,
)
from .rank import OF_DEVICES, Facts, Rank, title_of
from .rank_sets import equal_ranks, members, odd_ones
from .run import Run
from .silent_nodes import silence_text, silences

__all__ = [
    "OF_DEVICES", "Call", "Facts", "Location", "Phase", "Rank", "Recording", "Ring", "Run", "State",
    "counted", "equal_ranks", "fold_numbers", "fold_ranks", "groups_text", "listed", "load",
    "members", "named", "odd_ones", "plural", "ranks_do", "read_in", "ranks_text", "ranks_were",
    "shorten", "silence_text", "silences", "some", "stopped_at", "stopped_in", "title_of",
    "told_of", "unfolded", "whom", "with_folded",
]  # fmt: skip
