"""How much the watchers of the graph look at, how often, and when they have seen enough."""

# buffer_updates

UPDATES_AT = (2, 3, 4, 5, 6, 7, 8, 30, 31, 62, 63, 126, 127)
"""Forwards of a model before which buffers are sketched: the first ones may initialise them."""
UPDATED_BUFFERS, UPDATED_ELEMENTS = 32, 1 << 22
"""Buffers of a model, and their elements, up to which that is done."""

# changes_after_wrap

FEW_PARAMETERS = 50
"""`requires_grad` of all parameters is read before one forward in about `parameters /
FEW_PARAMETERS`, so that its cost per forward does not grow with the model."""

CHANGES_FIRST, CHANGES_FIRST_OF_FEW = 3, 128
"""First forwards before which it is always read; the latter for models of few parameters."""

CHANGES_EVERY = 16
"""Of these, one in so many compares the module's parameters, too."""

CALLS_KEPT = 50

# data_parallel

MEMORY_EVERY_S = 1.0

TENSORS_AT_MOST = 32

# devices_used

DEVICE_LOOKS = 4
"""Steps before which contexts are searched for: stray ones are made during setup."""

# late_buffers

BUFFERS_EMITTED = 500

BUFFERS_FIRST, BUFFERS_OFTEN = 16, 64
"""Forwards whose buffers are looked at: the first `BUFFERS_FIRST`, powers of two, and every
`BUFFERS_OFTEN`-th."""

# optimizer_coverage

RENEWED = 16
"""Times that the first step of a new optimizer starts the growing intervals of a model anew; some
programs make an optimizer per epoch."""

# training_modes

MODE_CALLS_KEPT = 64
"""Calls of `train()` and `eval()` that are kept to find the line that set a mode."""

MODES_EMITTED = 300
"""Records per model; a program may change the mode in every step."""

MODULES_NAMED = 256

# unused_outputs

OUTPUT_FRAMES = 12

OUTPUT_VALUES = 50
"""Variables per frame, and items per container."""

OUTPUT_NODES = 20_000
"""Autograd nodes visited: some milliseconds."""

# unused_parameters

WATCHED_FORWARDS = 3
"""First forwards of a model in which calls of submodules are watched: hooks on every module are
too slow for all forwards."""

WATCHES = 30
"""Forwards watched in all, those after a change of the unused parameters included."""

BRANCHES = 20
"""Unused modules whose deciding `if` is searched for in the source."""

UNUSED_IN_FULL = 50
"""Changes of the set that get a record each; later ones are only counted."""

# wrapper_bypass

MOVED_AT_LEAST = 3
"""Suspected backwards after which parameters had changed without an optimizer, before that counts:
once may be an initialisation."""

BYPASS_LOOKS = 3
"""Searches per model through the source of the running functions."""

ARMED_STEPS = 50

ARMED_AT_MOST = 3
"""Optimizer steps for which a global forward hook waits for the next bypassing forward, and times
per model: it slows down every module."""
