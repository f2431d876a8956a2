"""Literal events of ranks that train copies of one small model, for the tests of drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recordings import make_run, site, steps

from ddpdoctor.events import Digests, Event, Replica, Sketch, Submodule, Tensor, Wrapped
from ddpdoctor.events.drift import chosen
from ddpdoctor.events.pack import pack
from ddpdoctor.run import Run

NAMES = ("body.weight", "body.bias", "head.weight", "head.bias")
BUFFERS = ("norm.running_mean", "norm.calls")
WRAP, STEP, LINE, OTHER, BACKWARD = 1, 2, 3, 4, 5
"""Site numbers: the wrap, the optimizer's step, the line to blame, another one, the backward."""

LINES = {
    WRAP: (10, "model = DDP(net)"),
    STEP: (40, "optimizer.step()"),
    LINE: (33, "the_line(to_blame)"),
    OTHER: (35, "another_line()"),
    BACKWARD: (38, "loss.backward()"),
}


def replica(
    ranks: Sequence[int] = (0, 1),
    *,
    model: int = 0,
    optimizer: int = 0,
    broadcast: bool = True,
    left_out: str = "",
    names: Sequence[str] = NAMES,
    norm: str = "BatchNorm1d",
    device: str = "cuda:0",
    by: str = "",
) -> list[Event]:
    """A model that was wrapped and an optimizer that holds it; `norm` holds the buffers."""
    return [
        *(site(n, "train.py", line, text) for n, (line, text) in LINES.items()),
        Wrapped(
            at=0,
            model=model,
            wrapper="DistributedDataParallel",
            kind="Net",
            group=0,
            site=WRAP,
            device=device,
            by=by,
            parameters=tuple(Tensor(name=n, shape=(2,), dtype="float32") for n in names),
            buffers=tuple(
                Tensor(name=n, shape=(2,), dtype="int64" if "calls" in n else "float32")
                for n in BUFFERS
            ),
            modules=(Submodule(name="norm", kind=norm),),
        ),
        Replica(
            at=0,
            model=model,
            optimizer=optimizer,
            ranks=tuple(ranks),
            parameters=pack(range(len(names))),
            broadcast=broadcast,
            left_out=left_out,
        ),
    ]


def digests(
    kind: str,
    rows: Mapping[int, Sequence[int]],
    *,
    stride: int = 1,
    point: str = "step",
    **fields: object,
) -> Digests:
    """`rows`: moment to the digests of all tensors; the stride leaves some out."""
    kept = [[values[i] for i in chosen(key, stride, len(values))] for key, values in rows.items()]
    return Digests(
        at=0,
        kind=kind,
        point=point,
        keys=tuple(rows),
        strides=tuple(stride for _ in rows),
        counts=tuple(len(values) for values in kept),
        values=pack(v for values in kept for v in values),
        **{"model": 0, "optimizer": 0, **fields},  # type: ignore[arg-type]
    )


def equal(kind: str, count: int = 4) -> Digests:
    """The same on every rank that has it."""
    return digests(kind, {n: [10 * n + i + 1 for i in range(4)] for n in range(count)})


def sketch(step: int, *bins: float, kind: str = "parameters") -> Sketch:
    padded = (*bins, *[0.0] * (64 - len(bins)))
    return Sketch(at=0, model=0, optimizer=0, kind=kind, step=step, norm=10.0, bins=padded)


def run_of(ranks: Mapping[int, Sequence[Event]], *, count: int = 4, **replicas: object) -> Run:
    """A run of these ranks, each with the model, its events and `count` optimizer steps."""
    members = tuple(ranks)
    return make_run(
        {
            number: [
                *replica(**{"ranks": members, **replicas}),  # type: ignore[arg-type]
                *events,
                *steps(count, site=STEP),
            ]
            for number, events in ranks.items()
        }
    )
