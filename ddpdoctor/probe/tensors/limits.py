"""How much of tensors is read, and what counts as equal."""

# collective_payload

ENOUGH_PASSED = 0.5
"""Share of the elements that must have been exchanged to count as a synchronisation: less than one,
since programs freeze parts or skip parameters without a gradient."""

FLAT = (0.9, 1.1)
"""Size of a flat buffer relative to its contents: some leave out parameters, some pad."""

# digests

VALUES_SAMPLED = 4
"""Values read per tensor, to find the factor that it was multiplied by: one would do, but it may be
zero."""

PIECE, PIECES_AT_MOST = 1 << 20, 64
"""Elements that are summed at a time where they have to be converted, and how many times."""

# flat_layout

HEAD, HEADS_TRIED = 8, 4
"""Values of a gradient that are looked for in a flat tensor, and of how many gradients: the first
ones may be zero."""
SAME_FACTOR = 0.02
"""Relative difference of two factors that may be one, rounded to bfloat16."""

# pending_digests

ROWS_WAITING = 64
ROW_WAITS_S = 1.0
"""Rows per event, and how long a row may wait: what waits is lost if the process is killed."""

# sample_digests

BATCH_PARTS = 3
"""Parts of a batch (input, label, mask, ...) that are digested."""

EPOCH_SAMPLES = 256
"""Samples digested per epoch, about."""

EPOCH_BATCHES = 256
"""The first batches of an epoch, of which samples are digested."""

SAMPLES_PER_BATCH = 32
"""Samples digested per batch of an iterable data set: so few that the batches of every worker are
among the first `EPOCH_SAMPLES`."""

EPOCH_ROWS = 4096
"""Rows digested per epoch, of batches that an iterable data set makes itself."""

ROWS_LOOKED_AT, ROWS_CHOSEN = 16_384, 1024
"""Rows of a stream that are digested per epoch, and how many of them are kept at most."""

WINDOW = 64
WINDOWS = 4
"""A sample is digested by `WINDOWS` pieces of `WINDOW` bytes, evenly spread: a cache line each."""
PADDED = 512
"""Bytes digested of a row of integers: these are tokens, and their padding must be found."""

LABEL_NUMBERS = 16
"""Whole numbers of a sample in one part of a batch up to which they may be labels or ids."""

PIECES = 32
"""Contiguous pieces digested of a tensor that is not contiguous as a whole."""

NESTED_AT_MOST = 3
"""Levels of nested containers in a batch that are searched for tensors."""

STATE_ENTRIES = 4096
"""Entries of a state beyond which it is not digested."""

LEAVES = 4096
"""Parts of a model's inputs that are counted; if there are more, their size counts as unknown."""

# tensor_watch

FEW = 5
"""Gradients that stand for those of a model: a backward that reaches none of a few spread over it
does not reach the model."""

GRAPH_NODES = 10_000
"""Nodes of the graph of a loss that are searched."""
