"""How much the watchers of manual synchronisation look at, and how often."""

# averaged_gradients

AVERAGE_LOOKS = 4
"""Steps of an optimizer that are recorded. Lines are traced from the second one on: the first step
often differs (warm-up, lazy initialisation)."""

AVERAGED_TENSORS = 6
"""Gradients, or parameters, sampled per optimizer."""

PARAMETER_LOOKS = 64
"""Windows between steps in which parameters are looked at, until `AVERAGE_LOOKS` of them changed
the parameters."""

AVERAGED_NODES = 6
"""Autograd nodes from the loss on that are searched for a division: it is one of the last things
a training loop does to its loss."""

LOSS_NODES = 100
"""Autograd nodes of a loss, of all its terms, in which their means are searched."""

# exchanges

EXCHANGES_KEPT = 20_000
"""Exchanges remembered per list: a loop without any step must not fill the memory."""

SITES_KNOWN = 3
"""Steps in which the line of an exchange is looked up: walking the stack is too slow for all."""

# pending_works

WORK_STEPS = 32
"""Only the first steps are looked at: works (and their tensors) are kept alive until the step ends,
which could cost memory in the long run."""

WORKS_AT_MOST = 4096
"""Works kept at a time."""

# unused_allreduce

COPIES_FIRST = 8

COPIES_LAST = 64
"""Calls are looked at before each of the first `COPIES_FIRST` steps, then before steps that are
powers of two up to `COPIES_LAST`: reading every tensor costs as much as the call itself on small
models."""

# unwrapped

LOOK_AGAIN = 32
"""Steps after which an optimizer whose parameters are all wrapped is looked at again: parameters
may be added to it at any time, but few programs do that."""

UNWRAPPED_EMITTED = 5000
"""Parameters of one optimizer that are listed: bounds the size of the record."""

SMALL_MODEL = 64

UNWRAPPED_FIRST = 64
"""Optimizers of at most `SMALL_MODEL` parameters are digested at every step of the first
`UNWRAPPED_FIRST` and then 16 times per doubling of the steps; others at powers of two only."""

ABSENCES_EMITTED = 256
"""Changes of which parameters have no gradient that are recorded, of one optimizer."""

CHANGES_AT_MOST = 64
"""Extra digests because the exchange stopped or resumed, or came between steps: a program that
exchanges in every other step must not cause one each time."""

# mesh_models

MESH_PARAMETERS = 2000
"""Parameters of an optimizer up to which models of DTensors are compared."""
MESH_ELEMENTS = 1 << 22
"""Elements that a rank holds beyond which they are digested later only as the budget allows."""

# messages

MESSAGE_SIZES = 128
"""Sizes of messages recorded, of all peers together."""

# flat_gradients

FLAT_SIZES = 64
"""Sizes of flat tensors that are looked at: they vary where gradients are missing at times."""

FLAT_LOOKS = 16
"""Times that tensors of one size are looked at until it is known how they hold gradients."""

FLAT_NAMES = 100
"""Parameters that are named."""

FIGURES = 32
"""So many numbers between the all_to_all of forward and backward are no figures for a log: they may
combine what the ranks have computed."""

LOCAL_STEPS = 4
"""Before the steps up to this one it is seen which gradients precede the backward's all_to_all."""
