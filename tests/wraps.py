"""Literal records of wrapped models, for the tests of the family `model`."""

from __future__ import annotations

from collections.abc import Sequence

from recordings import site

from ddpdoctor.events import (
    Event,
    GroupReady,
    ModulesSkipped,
    ParameterUse,
    Submodule,
    Tensor,
    UnusedParameters,
    Wrapped,
)
from ddpdoctor.run import Run

LAYERS = ("body", "head", "aux")
"""Each has a weight (position 2n) and a bias (2n + 1), and was made at line 10 + n."""

WRAP, BACKWARD, FORWARD, BRANCH = 50, 51, 52, 53


def sites() -> list[Event]:
    made = [site(n, "net.py", 10 + n, f"self.{layer} = ...") for n, layer in enumerate(LAYERS)]
    return [
        *made,
        site(WRAP, "train.py", 5, "model = DDP(net)"),
        site(BACKWARD, "train.py", 8, "loss.backward()"),
        site(FORWARD, "train.py", 7, "out = model(x)"),
        site(BRANCH, "net.py", 20, "if boxes is not None:"),
    ]


def group(ranks: Sequence[int], number: int = 0, name: str = "0") -> GroupReady:
    return GroupReady(
        at=0, group=number, name=name, backend="gloo", ranks=tuple(ranks), member=True, site=-1
    )


def parameters(
    layers: Sequence[str] = LAYERS, frozen: Sequence[str] = (), ignored: Sequence[str] = ()
) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(
            name=f"{layer}.{part}",
            shape=(4, 4) if part == "weight" else (4,),
            dtype="float32",
            trainable=layer not in frozen,
            ignored=layer in ignored,
        )
        for layer in layers
        for part in ("weight", "bias")
    )


def wrap(
    layers: Sequence[str] = LAYERS,
    *,
    model: int = 0,
    group: int = 0,
    kind: str = "Net",
    listed: tuple[Tensor, ...] | None = None,
    **more: object,
) -> Wrapped:
    modules = [Submodule(name="", kind=kind)]
    modules += [
        Submodule(name=n, kind="Linear", site=LAYERS.index(n) if n in LAYERS else -1)
        for n in layers
    ]
    return Wrapped(
        at=0,
        model=model,
        wrapper="DistributedDataParallel",
        kind=kind,
        group=group,
        site=WRAP,
        parameters=parameters(layers) if listed is None else listed,
        modules=tuple(modules),
        **more,  # type: ignore[arg-type]
    )


def unused(
    indices: Sequence[int], *, backward: int = 1, step: int = 0, **more: object
) -> UnusedParameters:
    values: dict[str, object] = {
        "model": 0, "site": BACKWARD, "forward_site": FORWARD, **more
    }  # fmt: skip
    return UnusedParameters(
        at=0,
        backward=backward,
        step=step,
        indices=tuple(indices),
        **values,  # type: ignore[arg-type]
    )


def use(
    examined: int,
    unused: dict[int, int] | None = None,
    model: int = 0,
    thawed: tuple[int, ...] = (),
) -> ParameterUse:
    return ParameterUse(
        at=0,
        model=model,
        examined=examined,
        backwards=examined,
        unused=unused or {},
        thawed=thawed,
    )


def skipped(names: Sequence[str] = (), backward: int = 1) -> ModulesSkipped:
    return ModulesSkipped(at=0, model=0, backward=backward, names=tuple(names), site=FORWARD)


def rank(
    *events: Event, ranks: Sequence[int] = (0, 1), wrapped: Wrapped | None = None
) -> list[Event]:
    """The events of a rank that wrapped a model."""
    return [*sites(), group(ranks), wrapped or wrap(), *events]


def codes(run: Run, check: object) -> list[str]:
    """`DDP301 error` for each finding."""
    return [f"{f.code} {f.severity.value}" for f in check.examine(run)]  # type: ignore[attr-defined]
