"""The numbers by which the checks of the families `performance`, `launch` and `memory` decide, each
with its reason."""

from __future__ import annotations

MIB = 1 << 20

# --- performance: where a late rank was ----------------------------------------------------------

FEWEST_LOOKS = 3
SEEN_THERE = 0.6
"""Share of the looks at a late rank that have a line in common, at least."""

# --- performance: gradient synchronisation -------------------------------------------------------

SYNC_SHARE = 0.25
"""Of the whole step, the optimizer and loading included."""

SYNC_NOTICEABLE_S = 0.020
"""Less per step is not worth a change, whatever its share."""

SMALLEST_SYNC = MIB
"""Fewer gradients are averaged at once: a rank that waits for them waits for another rank."""

SMALL_BUCKET = 4 * MIB
MANY_BUCKETS = 6
"""That many buckets, even the largest of them small, suggest a larger `bucket_cap_mb`."""


# --- performance: waits for data -----------------------------------------------------------------

WARM_UP_STEPS = 3
"""Steps that are left out: workers start in the first ones."""

FEWEST_STEPS_TIMED = 8
LOADING_SHARE = 0.4
"""Of the median step: with less, better loading would save less than a noisy machine costs."""

FEWEST_EPOCHS = 3
"""Epochs that have ended, at least, before their beginnings are compared with the rest."""

MANY_WORKERS = 4
NOTICEABLE_S = 0.010
"""Shorter waits or lags per step are not worth a change, whatever their share."""


# --- performance: sizes of batches ---------------------------------------------------------------

FEWEST_FORWARDS, LATER_FORWARDS = 8, 4
"""Forwards to compare, at least: of the whole run, or from one of them to the last."""

EXCESS = 0.25
"""By how much the largest batch of a step must exceed the mean of the ranks: less costs less than
a fifth of the step."""

LOST_TO_SIZES = 0.1
"""The share of the training time that unequal batches must cost, where no rank leads."""

LEADING = 0.9
"""The share of steps in which one rank must have the largest batch to be named alone."""


# --- performance: slow ranks ---------------------------------------------------------------------

FEWEST_WINDOWS = 4
"""Windows of a few steps each, at least: fewer may be slow by chance."""

LAG_SHARE = 0.2
"""By which share of a step (and `NOTICEABLE_S`) a rank must be slower. Less is within the noise of
a machine, and not worth a change."""

STEADY = 0.8
"""The share of windows, from one on to the end, in which the rank must be slow."""

LASTING = 3
"""The rank must be slow for at least one third (1 / `LASTING`) of the run, else it is a note."""

PASSING, PASSING_LEAST = 8, 6
"""A rank that was slow for a while only must be so without a break for one eighth (1 / `PASSING`)
of the run, and for that many windows."""

AGREED = 0.5
"""The share of its lag for which the other ranks must be seen to wait, which confirms it."""


FEWEST_STRETCHES = 4
"""Long stretches in which a rank keeps the others waiting, at least: fewer may be a checkpoint and
an evaluation."""

MOST_LOST, FEWER_STRETCHES = 0.4, 2
"""Where the others lose that share of the run, fewer stretches will do."""

LOST_S = 1.0
"""What the others wait for them in sum, at least."""

PLANNED_SHARE = 1 / 3
"""The share of the run that an evaluation or a checkpoint on one rank may take before it is more
than a note: these are known to take time."""


# --- launch: threads, and ranks that left --------------------------------------------------------

FAR_OVER = 2.0
"""Threads per core from which on they mostly wait for each other. Twice, since hyper-threads count
as cores and a rank's main thread idles while its compute threads work."""

CROWDED = 1.5
"""Runnable threads per core that confirm an oversubscription which torch's own default number of
threads only suggests: a default pool may exist and be idle."""

FEWEST_THREAD_SAMPLES = 3
"""Of each rank, before the median of its runnable threads is used: one sample may fall into a
moment of loading."""

SHORT_S = 600.0
"""A shorter `timeout=` of `init_process_group` ends the wait by itself soon enough; the run is then
not stopped."""


# --- memory: outputs gathered by DataParallel ----------------------------------------------------

OUTPUT_RATIO = 1.25
OUTPUT_MORE = 128 * MIB
"""What the output device needs beyond the others, at least: less does not limit the batch."""

FEWEST_DP_STEPS = 3
"""Before the devices are compared: the optimizer allocates its state in the first step."""

GATHERED_SHARE = 0.1
"""Of the difference, what is gathered at least; else something other than outputs fills the device,
as where `forward` returns the loss and only a few bytes are gathered."""


# --- memory: growth ------------------------------------------------------------------------------

PARTS = 6
"""Stretches whose medians must rise one after the other: noise does so once in 720 orders."""

FEWEST_GROWTH_SAMPLES = 12
"""Two in each stretch."""

WARM_UP_SHARE = 0.2
"""The share of the run that is left out: pools, caches and optimizer state are allocated then."""

FEWEST_GROWTH_STEPS = 30
UNKNOWN_STEPS, UNKNOWN_GROWTH, HOST_SHARE = 500, 64 * MIB, 0.04
"""In how many steps and by how much host memory must grow where no holder is found: it rises by
itself for a while (the allocator's pools, kernels for each new shape)."""

DEVICE_GROWTH, DEVICE_SHARE = 8 * MIB, 0.01
KNOWN_GROWTH = 1 * MIB
"""Enough where the container that holds the memory is known."""

LEVEL = 0.2
"""Growth begins with the first stretch that rises by this share of the steepest rise per step."""

SLOWER = 0.6
"""A container whose last gain per step is below this share of its highest gain levels off, as a
cache does."""


FEWEST_COPIES, COPIED = 2, 128 * MIB
"""How many workers of a rank must copy shared pages, and how much each. Of one worker alone the
pages may be those that its rank has overwritten: several share these. Less is what reading Python's
own modules copies."""

MANY_ROWS = 10_000
"""Entries of a list, from which on it is named as what the workers read."""

FEWEST_WORKER_SAMPLES = 2
"""Of a worker's memory, before it is judged."""


# --- memory: ranks compared ----------------------------------------------------------------------

HOST_RATIO, HOST_MORE = 1.5, 128 * MIB
"""Times the median rank, and bytes above it. The host's ratio is larger: rank 0 often logs, saves
and holds a checkpoint there."""

DEVICE_RATIO, DEVICE_MORE = 1.25, 512 * MIB
"""Likewise for the device, where the ranks of a data-parallel run should need the same memory."""

FEWEST_MEMORY_SAMPLES = 5

# --- memory: contexts on other GPUs --------------------------------------------------------------

FEWEST_GPU_SAMPLES = 2
"""Of NVML on the other GPU: one may be of a process whose number was used before."""
