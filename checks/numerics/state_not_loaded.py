"""DDP804."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.events import NamesMissed, Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run, counted


class StateNotLoaded(Check):
    """A state was loaded by names that the model does not have, and `strict=False` hid it

    ## What it finds
    `load_state_dict(state, strict=False)` with a state whose names are those of the model but for
    the prefix of a wrapper (`module.` of DDP, `_orig_mod.` of `torch.compile`): nothing of these
    names is loaded, and torch says nothing. Also one of which no name at all is one of the model
    that is wrapped later, as where the program has left out what does not fit (a warning).

    ## How it knows
    Each rank reads the missing and the unexpected names that `load_state_dict` returns, compares
    them without the prefixes of wrappers, and records where that makes more than half of the
    missing ones equal. What is loaded into the same module later, before another optimizer step, is
    on record, too. The finding is proven.

    ## Why it hurts
    A resumed run begins anew, a pretrained model is a random one, the average of the weights (EMA)
    never follows: the program goes on with weights that it did not mean.

    ## How to fix it
    Take the state of the model and not of its wrapper, `model.module.state_dict()`, load it into
    `model.module`, and leave `strict` on. For a file that exists already, remove the prefix:
    `{name.removeprefix("module."): value for name, value in state.items()}`.

    ## When it stays quiet
    - Some names differ for another reason: a new head, a part of a model.
    - Nothing fits a part of the model, which is loaded by itself.
    - The program looks at what is returned, and loads once more with the right names.
    - With `strict=True`, torch raises.
    """

    code = "DDP804"
    name = "state-not-loaded"
    family = "numerics"
    severity = Severity.ERROR

    def examine(self, run: Run) -> Iterable[Finding]:
        found: dict[object, dict[int, NamesMissed]] = {}
        for number, rank in run.ranks.items():
            for event in _missed(rank):
                place = rank.location(event.site), event.kind
                found.setdefault(place, {}).setdefault(number, event)
        for events in found.values():
            number, event = next(iter(events.items()))
            rank = run.ranks[number]
            if not event.prefix:
                if _is_a_whole_model(rank, event):
                    yield self._nothing_fits(run, events)
                continue
            state, model = ("have", "do not") if event.extra else ("lack", "have it")
            whole = event.missed >= event.of
            yield self.finding(
                severity=Severity.ERROR if whole else Severity.WARNING,
                ranks=tuple(events),
                subjects=(event.kind,),
                location=rank.location(event.site),
                label="loads nothing of these names",
                summary=f"{counted(event.missed, 'name')} of {event.kind} "
                f"{'are' if event.missed > 1 else 'is'} not loaded: the names of the state {state} "
                f"the prefix `{event.prefix}`, those of the model {model}"
                + (", so nothing was loaded" if whole else ""),
                cause="the state is that of a wrapper and the model is none, or the reverse, and "
                "`strict=False` leaves out what does not fit without a word",
                fix="take the state of the model in the wrapper (`model.module.state_dict()`), and "
                "load it with `strict=True`; or rename: "
                + (
                    f"`{{n.replace('{event.prefix}', ''): v for n, v in state.items()}}`"
                    if event.extra
                    else f"`{{'{event.prefix}' + n: v for n, v in state.items()}}`"
                ),
                fix_kind=FixKind.CHECK,
                evidence={"names not loaded": event.missed, "parameters": event.of},
                at=rank.wall(event.at),
            )

    def _nothing_fits(self, run: Run, events: dict[int, NamesMissed]) -> Finding:
        number, event = next(iter(events.items()))
        rank = run.ranks[number]
        state = "the state is empty"
        if event.given:
            state = f"none of the {counted(event.given, 'name')} in the state is one of the model"
        return self.finding(
            severity=Severity.WARNING,
            ranks=tuple(events),
            subjects=(event.kind,),
            location=rank.location(event.site),
            label="loads nothing",
            summary=f"nothing is loaded into {event.kind}: {state}",
            cause="`strict=False` leaves out what does not fit without a word, and so does a "
            "filter of the names before it",
            fix="compare `state.keys()` with `model.state_dict().keys()`: the state of a wrapper "
            "has `module.` before each name (`{n.removeprefix('module.'): v for n, v in "
            "state.items()}`); and raise where nothing is left to load",
            fix_kind=FixKind.CHECK,
            evidence={"names in the state": event.given, "parameters": event.of},
            at=rank.wall(event.at),
        )


def _is_a_whole_model(rank: Rank, event: NamesMissed) -> bool:
    """Whether what was loaded into is wrapped later, as a whole."""
    wrapped = rank.of(Wrapped)
    return any(w.kind == event.kind and len(w.parameters) == event.of for w in wrapped)


def _missed(rank: Rank) -> list[NamesMissed]:
    """The loads after which names were still missing at the next optimizer step."""
    last: dict[tuple[int, int], NamesMissed] = {}
    for event in rank.of(NamesMissed):
        last[event.module, event.step] = event
    return [event for event in last.values() if event.missed]
