"""The numbers by which the checks of the family `data` decide, each with its reason."""

from __future__ import annotations

# --- digests of samples --------------------------------------------------------------------------

SURE = 1e-3
"""A probability of agreeing by chance below which agreement counts as proof."""

SAME = 0.6
"""Share of equal digests that makes two ranks' samples the same. Not 1: where batches are padded,
the longest text of a batch has another digest than where it is padded itself."""

AUGMENTED, FEWEST_AUGMENTED = 0.2, 3
"""As `SAME`, where all samples are distinct: augmentation changes some, but those that agree are
the same samples beyond doubt. And how many of them it takes."""

DISTINCT = 0.75
"""Share of distinct digests from which on samples can be told from each other."""

FEWEST_COMPARED = 4
"""Digests in a column that suffice to compare two epochs, or two streams."""

NO_ACCIDENT = 8
"""Distinct samples or batches that two ranks cannot have in common, or at equal positions, by
accident."""

FEWEST_LABELS = 16
"""Samples with an index that both ranks read, so that their labels can be compared."""

FEWEST_KEPT = 8
"""Times that a sample has its label again in another epoch, for labels not to depend on the epoch
or on the batch; times that a label occurs again, for a mapping between two ranks to be none by
chance."""

LABELS_DIFFER = 0.25
"""Share of these samples whose label differs: where classes are numbered otherwise, some may have
their number by chance."""

RENUMBERED = 0.9
"""Share of the labels that occur again with which two ranks keep to one mapping. Not 1: two texts
may have the same hash on one rank only."""

# --- indices -------------------------------------------------------------------------------------

REPEATS, FEWEST_REPEATS = 24, 11
"""Expected number of indices that come twice on one rank, if ranks draw at random. From `REPEATS`
on, a quarter of it or less is not random; from `FEWEST_REPEATS` on, none at all is not."""

FEWEST_SHARED = 3
"""Indices that several ranks read among their first ones: padding shares fewer."""

FEWEST_TO_ORDER = 8
"""Indices that suffice to tell one order from another."""

FEWEST_REPEATED = 4
"""Samples in an epoch whose order can hardly repeat by chance."""

FEWEST_ASCENDING = 16
"""Samples per epoch below which ascending indices say nothing: a toy set, or a small evaluation."""

OVERFITTED_BATCHES = 2
"""Batches in an epoch up to which a custom sampler may repeat them on purpose (overfitting a few
batches as a test)."""

SMALL_TAIL = 0.1
"""Share of the data that shuffled training may drop in an epoch: later epochs drop others."""

# --- what each rank selects ----------------------------------------------------------------------

MATERIAL = 0.3
"""Share of a rank's or worker's samples that another one has to have too. Below that, samples of
one dataset may be common to shards on purpose, or equal by chance."""

NEARLY_ALL = 0.9
"""Share of two selections that must be equal where neither continues the other. Below that, shards
may have common samples on purpose."""

FEWEST_ALIKE = 3
"""Parts of the entries, of 16, that are the same on all ranks where these hold one dataset of which
each made some entries by itself."""

MOVED = 0.2
"""Share of the compared samples that two ranks must have at different indices for each to have
selected its own from the same data."""

# --- streams -------------------------------------------------------------------------------------

OWN_SHUFFLES = 3
"""Whole epochs of a stream from which it is told that ranks shuffle it differently: that no sample
comes twice in a share is no chance in so many."""

WHOLE = 0.8
"""Share of two passes over a stream that must agree. Not 1: each may drop its last batches."""

ONCE, MANY = 0.95, 32
"""Rows in a pass over a stream, and the share of them that must occur once, for it to be one pass
over the data and neither random draws nor padding."""

# --- inputs of models ----------------------------------------------------------------------------

FEWEST, LATER = 3, 4
"""Compared forwards with equal inputs that suffice: where all are equal, and where they are equal
from one of them to the last."""

RICH = 4
"""Numbers per sample from which on an input is data, and no time, class or weight that ranks may
have in common."""

DRAWN_SHARE = 6
"""Inputs count as random toy data where one forward in this many follows a draw of as many random
numbers: not every forward does, as a GAN draws once for two."""

TOY_DRAWS = 300
"""The most draws that a generator's state can tell; beyond it counts as enough."""

FEW = 8
"""The most numbers in one call that are taken for a report on the training (a loss, counts), not
for samples, activations or gradients."""
