"""Digests find one flipped bit whatever the tensor looks like; sketches tell distances."""

from types import SimpleNamespace

import pytest
import torch

from ddpdoctor.events.codec import decode, encode
from ddpdoctor.events.drift import ZERO, Sketch, chosen, full
from ddpdoctor.probe.tensors.digests import (
    ABSENT,
    Sketcher,
    Unsuited,
    check_suited,
    digests,
    scattered,
    writes_a_block,
)
from ddpdoctor.probe.watchers.gradients import replica_digests
from ddpdoctor.probe.watchers.gradients.manual_edits import ManualEdits
from ddpdoctor.probe.watchers.gradients.replica_digests import ReplicaDigests

SHAPES = [(), (1,), (3,), (10,), (4, 3), (64, 64), (5000,), (5001,), (2, 3, 5, 7)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def _flip(tensor, position):
    """Change the lowest bit of one element."""
    width = tensor.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    flat = tensor.reshape(-1)
    flat.view(kind)[position] ^= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_bit_is_seen_anywhere(shape, dtype):
    tensor = torch.randn(shape).to(dtype)
    (before,) = digests([tensor])
    assert before != ABSENT
    for position in {0, tensor.numel() // 2, tensor.numel() - 1}:
        changed = tensor.clone()
        _flip(changed, position)
        assert digests([changed]) != [before], position
    assert digests([tensor.clone()]) == [before]


@pytest.mark.parametrize("view", [
    lambda t: t.to(memory_format=torch.channels_last),
    lambda t: t[:, ::2],
    lambda t: t.reshape(-1)[1:],
    lambda t: t.transpose(0, 1),
])  # fmt: skip
def test_views_and_layouts(view):
    source = torch.randn(4, 6, 4, 6)
    viewed = view(source)
    (before,) = digests([viewed])
    assert digests([view(source.clone())]) == [before]
    with torch.no_grad():
        flat = viewed.as_strided(viewed.shape, viewed.stride(), viewed.storage_offset())
        flat[(-1,) * flat.dim()] = torch.nextafter(
            flat[(-1,) * flat.dim()], torch.tensor(float("inf"))
        )
    assert digests([viewed]) != [before]


def test_every_single_bit_of_a_sum_reaches_the_digest():
    for total in (0, 1, -1, 12345678901234567):
        for bit in range(64):
            changed = total + (1 << bit)
            wrapped = (changed + 2**63) % 2**64 - 2**63
            assert scattered(wrapped) != scattered(total), (total, bit)


def test_what_cannot_be_digested_is_absent_and_says_why():
    sparse = torch.eye(3).to_sparse()
    meta = torch.empty(3, device="meta")
    assert digests([None, sparse, meta, torch.empty(0)]) == [ABSENT] * 4
    for tensor in (sparse, meta):
        with pytest.raises(Unsuited):
            check_suited(tensor)


def test_nothing_of_the_run_is_touched():
    parameter = torch.nn.Parameter(torch.randn(8, 8))
    parameter.grad = torch.randn(8, 8)
    state, versions = torch.get_rng_state(), (parameter._version, parameter.grad._version)
    digests([parameter, parameter.grad])
    Sketcher().sketch([parameter])
    assert torch.equal(torch.get_rng_state(), state)
    assert (parameter._version, parameter.grad._version) == versions
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("count", [1000, 200_000])
@pytest.mark.parametrize("noise", [1e-4, 1e-1])
def test_the_sketch_estimates_the_distance(count, noise):
    torch.manual_seed(0)
    a = [torch.randn(count), torch.randn(37, 5)]
    b = [t + noise * torch.randn_like(t) for t in a]
    sketcher = Sketcher()
    (norm, mine), (_, other) = sketcher.sketch(a), sketcher.sketch(b)
    true = sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True)) ** 0.5
    estimate = sum((x - y) ** 2 for x, y in zip(mine, other, strict=True)) ** 0.5
    assert norm == pytest.approx(sum(float(t.square().sum()) for t in a) ** 0.5, rel=1e-3)
    assert 0.6 < estimate / true < 1.5


def test_the_sketch_sees_a_constant_shift_and_a_single_element():
    sketcher = Sketcher()
    a = torch.zeros(300_000)
    for b, true in (
        (a + 0.01, 0.01 * 300_000**0.5),
        (a.clone().index_fill_(0, torch.tensor(7), 3.0), 3.0),
    ):
        estimate = sum(v * v for v in sketcher.sketch([b])[1]) ** 0.5
        assert 0.6 < estimate / true < 1.5


def test_a_larger_stride_chooses_a_part_of_what_a_smaller_one_does():
    for key in range(200):
        assert set(chosen(key, 16, 100)) <= set(chosen(key, 4, 100)) <= set(chosen(key, 1, 100))


def test_every_tensor_is_chosen_before_long():
    seen = set()
    for key in range(64):
        seen.update(chosen(key, 16, 100))
    assert seen == set(range(100))


def test_full_steps():
    assert [s for s in range(500) if full(s)] == [0, 1, 2, 4, 9, 19, 49, 99, 199, 499]


def test_a_sketch_leaves_out_what_cannot_be_projected() -> None:
    ordinary = torch.ones(3)
    unsuited = [torch.eye(4).to_sparse(), torch.empty(2, device="meta")]
    assert Sketcher().sketch([*unsuited, ordinary]) == Sketcher().sketch([ordinary])


@pytest.mark.parametrize(("stride", "steps"), [(4, 4), (16, 24), (64, 96), (256, 400)])
def test_a_lasting_difference_in_one_tensor_is_met_within_so_many_steps(stride, steps):
    for tensor in range(0, 1000, 37):
        assert any(tensor in chosen(37 + n, stride, 1000) for n in range(steps)), tensor


@pytest.mark.parametrize(("value", "told"), [(1.0, 1), (float("nan"), 0), (float("inf"), 0)])
def test_what_is_not_finite_has_no_sketch(monkeypatch, value, told) -> None:
    emitted: list[Sketch] = []
    monkeypatch.setattr(replica_digests, "_tensors", lambda *_: [torch.tensor([1.0, value])])
    watch = SimpleNamespace(holding=SimpleNamespace(model=SimpleNamespace(number=0), optimizer=0))
    ReplicaDigests.current._sketch(SimpleNamespace(emit=emitted.append), watch, "parameters", 4)
    assert len(emitted) == told
    assert [decode(encode(event)) for event in emitted] == emitted


def test_parameters_are_sketched_once_more_at_the_end(monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(4))
    told = []
    recorder = SimpleNamespace(emit=told.append, every=0, budget_percent=1.0, own_ns=0, step=7)
    model = SimpleNamespace(
        number=0, wrapper=lambda: parameter, forwards=7, synced_backwards=7, inner=lambda: None
    )
    holding = SimpleNamespace(
        model=model, optimizer=0, positions=[0], parameters=lambda at: [parameter]
    )
    monkeypatch.setattr(ReplicaDigests, "current", ReplicaDigests())
    monkeypatch.setattr(ManualEdits.current, "emit_parameters", lambda *args: None)
    monkeypatch.setattr(replica_digests.optimizer_models, "steps_taken", lambda holding: 7)
    ReplicaDigests.current.watches[0, 0] = replica_digests.Watch.__new__(replica_digests.Watch)
    known = {"rows": {}, "writes": replica_digests.write_counts.WriteCounts(), "left_out": "Join"}
    known["sketches"] = []
    vars(ReplicaDigests.current.watches[0, 0]).update(known, holding=holding)
    ReplicaDigests.current._finish(recorder)
    assert [(e.step, e.norm) for e in told if isinstance(e, Sketch)] == [(7, 2.0)]


def test_the_digest_of_zeros():
    assert digests([torch.zeros(3), torch.zeros(64, 64)]) == [ZERO, ZERO]
    assert ZERO not in digests([torch.tensor([0.0, 1e-40]), torch.ones(2)])


@pytest.mark.parametrize(
    ("every", "closely"), [(0, [0, 1, 2, 4, 9]), (1, [0, 1, 2, 4, 9]), (5, [0, 5, 10])]
)
def test_some_of_the_steps_that_were_asked_for_are_looked_at_closely(monkeypatch, every, closely):
    looked = []
    for name in ("_detect_join", "_flush", "_record"):
        monkeypatch.setattr(replica_digests, name, lambda *_, **__: 0)
    monkeypatch.setattr(replica_digests.write_counts, "record_writes", lambda *_: None)
    monkeypatch.setattr(replica_digests, "_kind_of_gradients", lambda _: "gradients")
    monkeypatch.setattr(
        ReplicaDigests.current,
        "_record_full_step",
        lambda recorder, watch, step, kinds: looked.append(step.number),
    )
    recorder = SimpleNamespace(every=every)
    pace = SimpleNamespace(spent=lambda *_: None)
    watch = SimpleNamespace(holding=None, broadcast=True, writes=None, pace=pace)
    for number in range(0, 13, every or 1):
        ReplicaDigests.current._record_due(
            recorder, watch, SimpleNamespace(number=number, closure=False), 1
        )
    assert looked == closely


@pytest.mark.parametrize(
    ("rows", "a_block"),
    [
        ((0, 1), True),
        ((3, 4, 5), True),
        ((5, 0), True),
        ((2,), False),
        ((1, 4), False),
        (range(6), False),
        ((), False),
    ],
)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (3, 6)], ids=str)
def test_blocks_that_are_written(shape, rows, a_block):
    old, new = torch.zeros(shape), torch.zeros(shape)
    for row in rows:
        new.select(shape.index(6), row).fill_(1)
    assert writes_a_block(old, new) is a_block
