"""Ranks that are meant to train independent models: trials of a search (certain), or members of an
ensemble (possible)."""

from __future__ import annotations

from math import isclose

from ...events import CallSite, FileWritten, Hyperparameters, LoaderSeen, Unwrapped
from ...run import Location, Rank, Run
from ..data import parts
from ..data.loaders import Reader, loaders
from .copies import Copies, form, same, states_of, step_of
from .thresholds import ACTIVATIONS, MODELS_OF_A_LINE, ROUNDING

DIFFERENT_START = "the ranks start with different parameters"

Options = tuple[dict[str, float | bool | str], ...]
Trial = tuple[tuple[object, ...], Options]
"""Shapes of the trained parameters, and the options of the first step."""


def searched(run: Run, copies: Copies) -> bool:
    """Whether the consecutive models of this line differ in shape between ranks, or are trained
    with different options from the first step on, and no sampler divides the data."""
    first, *others = (_trials(rank, event) for rank, event in copies.members.values())
    differ = any(
        not _same(mine, theirs)
        for trials in others
        for mine, theirs in zip(first, trials, strict=False)
    )
    return differ and not _divide_data(run, copies)


def adapted(copies: Copies) -> bool:
    """Whether the line creates one model after the other next to a wrapped one: copies that are
    adapted for a few steps and dropped (test-time training, inner loops)."""
    return _beside_wrapped(copies) and all(
        len(_trials(rank, event)) >= MODELS_OF_A_LINE for rank, event in copies.members.values()
    )


def possible(run: Run, copies: Copies) -> str:
    """In words, what shows that the ranks may be meant to train different models; empty if nothing
    does.

    Every rank saves a file of its own, next to another part of the model, which they synchronise.
    Or each leaves out other samples, as in a cross-validation. Or the ranks start with different
    parameters (which torch's default seed does not give them), which no rank sent, and nothing else
    shows that they are to train one model together. Or the forward of the model itself gathers or
    reduces tensors in each step, as that of a layer whose classes are divided among the ranks."""
    beside = _beside_wrapped(copies) or _synced_beside(copies, equal=False)
    if beside and _save_own_files(copies):
        return "every rank saves a file of its own, next to another part, which they synchronise"
    if any(parts.in_folds(readers) for readers in _feeding(run, copies)):
        return "each rank leaves out other samples, which the others train on (cross-validation?)"
    if _exchanges_itself(copies):
        return "its forward exchanges values between the ranks (a share of one layer on each?)"
    begin = copies.looks[0]
    if step_of(begin) or same(begin) or any(s.averaged for s in begin.values()):
        return ""
    if not _beside_wrapped(copies) and not _divide_data(run, copies):
        return f"{DIFFERENT_START}, and no sampler divides the data"
    if _synced_beside(copies, equal=True):
        return f"{DIFFERENT_START}, but with equal ones in another part, which they synchronise"
    if numbers := _exchanged_in_each_step(copies):
        return (
            f"{DIFFERENT_START}, and exchange {numbers} other numbers in each step (activations?)"
        )
    return ""


def _exchanges_itself(copies: Copies) -> bool:
    """Whether the `forward` of this model, and not of a part of it or of a loss, calls collectives
    on every rank."""
    return all(
        any(e.within == event.kind and not e.internal for e in rank.of(CallSite))
        for rank, event in copies.members.values()
        if event.kind
    ) and any(event.kind for _, event in copies.members.values())


def _exchanged_in_each_step(copies: Copies) -> int:
    """How many numbers besides the gradients the ranks exchange in each step, where these are as
    many in all steps and more than figures for a log; else 0. FSDP exchanges its own."""
    if copies.first[1].sharded:
        return 0
    looks = [look for look in copies.looks if step_of(look)]
    found = {s.elements / s.step for look in looks for s in look.values() if not s.last}
    number = found.pop() if len(found) == 1 else 0
    return int(number) if number >= ACTIVATIONS else 0


def _feeding(run: Run, copies: Copies) -> list[list[Reader]]:
    """What each of these ranks reads through the loaders that feed this model."""
    optimizer = copies.first[1].optimizer
    found = [loader.of(copies.members) for loader in loaders(run) if loader.trains]
    return [f for f in found if len(f) == len(copies.members) and f[0].feeds(optimizer)]


def _save_own_files(copies: Copies) -> bool:
    """Whether a line saves files after the first step, none of which two ranks write."""
    written: dict[Location, dict[int, set[str]]] = {}
    for number, (rank, _) in copies.members.items():
        for save in rank.of(FileWritten):
            line = rank.location(save.site)
            if save.how == "save" and save.step and line is not None:
                written.setdefault(line, {}).setdefault(number, set()).add(save.path)
    return any(
        paths.keys() == copies.members.keys()
        and sum(map(len, paths.values())) == len(set().union(*paths.values()))
        for paths in written.values()
    )


def _synced_beside(copies: Copies, *, equal: bool) -> bool:
    """Whether the same ranks train a model of another optimizer and synchronise its gradients;
    `equal`: and start with equal parameters in it."""
    mine = copies.first[1].optimizer
    others = {e.optimizer for e in copies.first[0].of(Unwrapped)} - {mine}
    for optimizer in others:
        states = [states_of(rank, optimizer) for rank, _ in copies.members.values()]
        begins = {row[0].parameters for row in states if row and not row[0].step}
        synced = all(row and row[-1].exchanged.startswith("gradients") for row in states)
        if synced and (len(begins) == 1 or not equal):
            return True
    return False


def _beside_wrapped(copies: Copies) -> bool:
    return any(event.wrapped for _, event in copies.members.values())


def _divide_data(run: Run, copies: Copies) -> bool:
    """Whether a sampler divides the data over the ranks, unless it feeds other models only."""
    optimizer = copies.first[1].optimizer
    elsewhere = {
        id(reader.seen)
        for loader in loaders(run)
        for reader in loader.of(copies.members)
        if not reader.feeds(optimizer)
    }
    seen = (e for rank, _ in copies.members.values() for e in rank.of(LoaderSeen))
    return any((e.distributed or e.replicas > 1) and id(e) not in elsewhere for e in seen)


def _trials(rank: Rank, event: Unwrapped) -> list[Trial]:
    """The models that the line of this model has created, in the order of their first steps."""
    line = rank.location(event.site)
    options = {e.optimizer: e.groups for e in rank.of(Hyperparameters) if not e.step}
    shapes = {
        e.optimizer: form(e)
        for e in rank.of(Unwrapped)
        if e.optimizer == event.optimizer or (line and rank.location(e.site) == line)
    }
    return [(shape, options.get(number, ())) for number, shape in shapes.items()]


def _same(mine: Trial, theirs: Trial) -> bool:
    pairs = zip(mine[1], theirs[1], strict=False)
    return mine[0] == theirs[0] and all(
        name not in b or _equal(value, b[name]) for a, b in pairs for name, value in a.items()
    )


def _equal(a: float | str, b: float | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return isclose(a, b, rel_tol=ROUNDING)
