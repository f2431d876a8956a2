"""Where tensors lie that are passed to collectives."""

import torch

from ddpdoctor.probe.tensors.collective_payload import memory_of


def test_views_lie_where_their_base_does() -> None:
    whole = torch.zeros(4, 3)
    assert memory_of(whole[1:]) == memory_of(whole) != memory_of(whole.clone())


def test_what_has_no_memory_of_its_own() -> None:
    rows = torch.nn.Embedding(5, 2, sparse=True)
    rows(torch.tensor([1, 3])).sum().backward()
    sparse = rows.weight.grad
    assert sparse is not None
    assert memory_of(sparse) == memory_of(sparse._values())
    mkldnn = torch.zeros(2, 2).to_mkldnn()
    assert memory_of(mkldnn) == memory_of(mkldnn) != memory_of(torch.zeros(2, 2).to_mkldnn())
