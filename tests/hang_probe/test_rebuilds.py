"""In which forward DDP rebuilds its buckets, as seen in torch's own sequence numbers."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from ddpdoctor.probe.training.ddp_collectives import _rebuilds


@pytest.mark.parametrize(
    ("synced", "static_graph", "grad_enabled", "expected"),
    [
        (0, False, True, False),
        (1, False, True, True),
        (1, False, False, False),
        (1, True, True, False),
        (2, True, True, True),
    ],
)
def test_the_forward_in_which_buckets_are_rebuilt(synced, static_graph, grad_enabled, expected):
    model = SimpleNamespace(rebuilds=True, synced_backwards=synced, static_graph=static_graph)
    assert _rebuilds(SimpleNamespace(model=model, grad_enabled=grad_enabled)) is expected
