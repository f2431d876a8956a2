"""Messages of torch, as it words them, and what is said about them."""

import pytest
import torch
import torch.distributed as dist
from ddpdoctor.checks.hang.first_failure import FirstFailure
from recordings import make_run
from test_first_failure import CLOSED, raised
from torch.utils.data import DataLoader, DistributedSampler

from ddpdoctor.analysis.waiting.error_words import MESSAGES, remedy, translate


class DistributedDataParallel(torch.nn.Module):
    pass


def wrapped_state():
    torch.nn.Linear(2, 2).load_state_dict({"module.weight": torch.ones(2, 2)})


def unwrapped_state():
    wrapper = torch.nn.Module()
    wrapper.module = torch.nn.Linear(2, 2)
    wrapper.load_state_dict({"weight": torch.ones(2, 2)})


def shuffled():
    data = list(range(8))
    DataLoader(data, sampler=DistributedSampler(data, 2, 0), shuffle=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (wrapped_state, "model.module.state_dict()"),
        (unwrapped_state, "model.module.state_dict()"),
        (lambda: DistributedDataParallel().in_features, "`model.module`"),
        (shuffled, "`shuffle=False` in the `DataLoader`"),
    ],
)
def test_what_torch_says_has_a_remedy(call, words):
    with pytest.raises((RuntimeError, AttributeError, ValueError)) as error:
        call()
    assert translate(str(error.value)) and words in remedy(str(error.value))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Global rank 1 is not part of group <ProcessGroup object at 0x7f>", "get_global_rank"),
        ("trying to initialize the default process group twice!", "is_initialized"),
        ("DistributedDataParallel is not needed when a module doesn't have any parameter that "
         "requires a gradient.", "leave the wrapper out"),
        ("Argument ``gather_list`` must NOT be specified on non-destination ranks.", "== dst"),
        ("Tensors must be contiguous", ".contiguous()"),
        ("boom", ""),
    ],
)  # fmt: skip
def test_messages_that_need_a_group(message, words):
    assert words in remedy(message) and bool(translate(message)) is bool(words)
    run = make_run({0: raised(5.0, message=message), 1: raised(6, "RuntimeError", CLOSED)})
    (finding,) = FirstFailure().examine(run)
    assert words in finding.fix


def test_torch_still_words_them_so():
    import inspect

    import torch.distributed.distributed_c10d as c10d

    source = inspect.getsource(c10d) + inspect.getsource(torch.nn.parallel.distributed)
    for text in ("is not part of group", "default process group twice", "any parameter that"):
        assert text in source
    assert dist.is_available() and len({m.pattern for m in MESSAGES}) == len(MESSAGES)
