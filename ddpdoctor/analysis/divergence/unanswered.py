"""Collectives that some ranks do not answer: in `Join`, those that are done; in a loop over names,
those that lack a name; of several wrapped models, those that leave one out. And calls that are
answered with other arguments."""

from __future__ import annotations

import re
from typing import ClassVar

from ...events import ForwardInput, SyncPattern, Wrapped
from ...report.findings import Related
from ...run import Location, Rank, ranks_do, ranks_text, title_of
from ...run.phrases import listed
from ..calls.call_logs import BACKWARD, CallLogs, CallRecord
from ..control_flow.branches import head_of, where
from ..control_flow.jumps import loops_around
from .align import CallDivergence
from .attribution import WHO, Attribution
from .explanation import SAME_ORDER, CallExplanation, sides_text
from .suspects import Suspect
from .thresholds import HISTORY


class Unanswered(CallExplanation):
    rule = "not-answered-in-join"
    text = "the program calls a collective in `Join`, which ranks without inputs do not answer"

    def explain(self, suspect: Suspect) -> Attribution | None:
        calls = suspect.divergence.calls
        done = [r for r, m in calls.items() if m.site and m.site.shadows and m.site.internal]
        own = tuple(r for r, m in calls.items() if m.site and m.site.internal is False)
        if not done or not own:
            return None
        blamed = Suspect(suspect.divergence, calls[own[0]], own)
        op = calls[own[0]].signature.op
        return self.blame(
            blamed,
            label=f"not answered by {ranks_text(done)}",
            summary=f"{op} of {ranks_text(own)} in `Join` is matched with another call of "
            f"{ranks_text(done)}: {sides_text(blamed)}",
            cause=f"{ranks_do(done, 'run')} out of inputs first; there `Join` answers the "
            "collectives of DDP and of sharded optimizers only",
            fix=f"call {op} after the `with Join(...)` block, or give it a `Joinable` whose "
            "`JoinHook` makes the same call; or end all ranks together with "
            "`Join([...], throw_on_early_termination=True)`",
        )


class LackingName(CallExplanation):
    rule = "lacking-name"
    text = "a loop over names (keys of a dictionary) makes no call for one of them on some ranks"

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence, made = suspect.divergence, suspect.divergence.added
        if made is None or not divergence.lacking:
            return None
        few = divergence.side if len(divergence.side) < len(divergence.rest) else divergence.rest
        blamed = Suspect(divergence, made, few)
        names = [key.partition(" = ")[2].strip("'") for key in divergence.lacking]
        what, op = listed([f"`{name}`" for name in names]), made.signature.op
        own = ranks_text(divergence.rest)
        sets, related = _setter(made, names[0])
        summary = f"{ranks_do(divergence.rest, 'make')} no {op} for {what}: {sides_text(blamed)}"
        if made.site is not None and made.site.through and related:
            return self.blame(
                blamed,
                location=related[0].location,
                label=f"gives {what} to be reduced, but not on {own}",
                summary=summary,
                cause="the framework reduces what it is given name by name, and keeps each result "
                f"under its name; {own} never gave it {what}",
                fix=f"give the same names on every rank: {what} with a value and a weight of 0 "
                "where there is nothing to tell; or sum values and counts in tensors of one shape",
                related=related[1:],
            )
        return self.blame(
            blamed,
            label=f"no call for {what} on {own}",
            summary=summary,
            cause=f"this loop over names makes no call for {what} on {own}{sets}",
            fix=f"loop over the same names on every rank: give {what} a value on all of them (0 "
            "where there is nothing to tell), or `all_gather_object` the names first and loop over "
            "all of them in one order",
            related=related,
        )


class KeyOrder(CallExplanation):
    rule = "key-order"
    text = "ranks come to the same names (keys, a set, parameters) in a different order"

    def explain(self, suspect: Suspect) -> Attribution | None:
        made = suspect.call
        if not made.key or suspect.divergence.extra:
            return None
        place = made.site.set_at if made.site and made.site.through else None
        logs = made.rank.location(place.site) if place else None
        if logs is not None:
            return self.blame(
                suspect,
                location=logs,
                label="logs the same names in a different order",
                cause="the framework reduces what is logged name by name, in the order in which "
                "the names were logged first; these orders differ between ranks",
                fix="log the same names in the same order on every rank: sort them first",
            )
        return self.blame(
            suspect,
            cause="the ranks loop over the same names in a different order (a `set` is ordered "
            "differently in every process)",
            fix="call the collectives in the same order on every rank: sort the keys looped over, "
            "or loop over a list (`list(model.parameters())`) instead of a `set`",
        )


class ModelOrder(CallExplanation):
    """Proven by the models for which one line makes the calls."""

    rule = "model-order"
    text = "ranks go through several wrapped models in a different order"

    def explain(self, suspect: Suspect) -> Attribution | None:
        calls = suspect.divergence.calls
        if len({(made.signature.op, made.text) for made in calls.values()}) > 1:
            return None
        if any(made.model is None for made in calls.values()):
            return None
        by_model: dict[int, list[int]] = {}
        for rank, made in calls.items():
            by_model.setdefault(made.model or 0, []).append(rank)
        if len(by_model) < 2:
            return None
        op = suspect.call.signature.op.removeprefix("DDP ")
        sides = sorted(by_model.items(), key=lambda item: item[1][0] not in suspect.ranks)
        kinds = {n: calls[ranks[0]].models[n].kind for n, ranks in sides}
        who = " and ".join(
            f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in the {op} of model {n} "
            f"({kinds[n]})"
            for n, ranks in sides
        )
        loops = loops_around(suspect.call.rank, suspect.call.site)
        heads = [head for _, head, _, _ in loops][:1]
        return self.blame(
            suspect,
            label="another model's turn than on the other ranks",
            summary=f"ranks go through their wrapped models in a different order: at call "
            f"{suspect.divergence.index} of {suspect.divergence.key}, {who}",
            cause="every wrapped model makes collectives of its own, which are matched by their "
            "order in the group: the gradients of different models are mixed",
            fix="go through the models in one order on every rank: loop over a fixed list of "
            "them, or over `sorted(...)` names, not over what a rank's own data gives",
            related=tuple(Related("the loop over the models", head) for head in heads),
        )


class ModelLeftOut(CallExplanation):
    """Proven by the models in the backwards of one line: in the same step on other ranks, or in
    earlier steps on this rank."""

    rule = "model-left-out"
    text = "a wrapped model takes part in a step on some ranks only"

    def explain(self, suspect: Suspect) -> Attribution | None:
        calls = suspect.divergence.calls
        if not all(made.signature.op.startswith("DDP ") for made in calls.values()):
            return None
        found = [
            (least, made, model)
            for least in calls.values()
            for made in calls.values()
            for model in _left_out(suspect, least, made)
        ]
        if not found:
            return None
        least, made, model = found[0]
        without = tuple(sorted({one.rank.rank for one, _, other in found if other == model}))
        having = sorted({one.rank.rank for _, one, other in found if other == model})
        wrapped = made.models[model]
        title, line = _title(made.rank, wrapped), _forward(made, wrapped)
        blamed = Suspect(suspect.divergence, least, without)
        here = suspect.divergence.location(least)
        return self.blame(
            blamed,
            location=line,
            label=f"not in the backward of {WHO}",
            summary=f"{ranks_do(without, 'leave')} {title} out of a step in which "
            f"{ranks_do(having, 'run')} it (call {suspect.divergence.index} of "
            f"{suspect.divergence.key})",
            cause=f"this model takes part in the step on {ranks_text(having)}, but not on "
            f"{ranks_text(without)}; every wrapped model makes collectives of its own, which are "
            "matched by their order, so those of different models meet",
            fix="run every wrapped model on every rank in every step: where a rank has no samples "
            "for one, give it a dummy batch and multiply its loss by 0",
            related=(Related(f"the backward of {ranks_text(without)}", here),) if here else (),
            subjects=(wrapped.kind,),
        )


def averaged(known: CallLogs, divergence: CallDivergence) -> tuple[CallRecord, ...]:
    """The backwards that each rank made before it makes one at a divergence, each kind once."""
    found: dict[object, CallRecord] = {}
    for rank, made in divergence.calls.items():
        log = known.logs[divergence.key][rank]
        past = range(max(0, divergence.index - HISTORY), divergence.index)
        for one in map(known.recorded, [log] * len(past), past) if made.models else ():
            if one is not None and one.signature.op == BACKWARD:
                found[rank, one.signature.id, one.text] = one
    return tuple(found.values())


def _setter(made: CallRecord, name: str) -> tuple[str, tuple[Related, ...]]:
    """Where the entry with the name of a call is set: as words, and the lines."""
    place = made.site.set_at if made.site else None
    spot = made.rank.location(place.site) if place else None
    if place is None or spot is None:
        return "", ()
    head = next((h for h in place.inside if h.is_branch or h.kind == "past"), None)
    lines = (Related(f"sets `{name}`", spot),)
    if head is None:
        return f"; {spot} sets `{name}`", lines
    at, under = head_of(spot, head), where(head).strip()
    return f"; {spot} sets `{name}` {under}", (Related("the branch in which it is set", at), *lines)


def _left_out(suspect: Suspect, least: CallRecord, made: CallRecord) -> list[int]:
    """The models that one rank leaves out of a backward, as the call of another shows."""
    if least.signature.op != BACKWARD or not least.models or least.step != made.step:
        return []
    more = [model for model in made.models if model not in least.models]
    if made.signature.op == BACKWARD:
        within = made.text == least.text and least.models.keys() < made.models.keys()
        return more if within else []
    usual = {
        model
        for one in suspect.averaged
        if one.rank.rank == least.rank.rank and one.text == least.text
        for model in one.models
    }
    return [model for model in more if model in usual]


def _forward(made: CallRecord, wrapped: Wrapped) -> Location | None:
    """The line on which a rank runs a model."""
    if made.signature.op != BACKWARD:
        return made.location
    ran = next((e.site for e in made.rank.of(ForwardInput) if e.model == wrapped.model), -1)
    synced = (e.forward_site for e in made.rank.of(SyncPattern) if e.model == wrapped.model)
    return made.rank.location(ran if ran >= 0 else next(synced, -1))


def _title(rank: Rank, wrapped: Wrapped) -> str:
    """A model as a reader can tell it from others of its class."""
    title = title_of(rank, wrapped)
    alike = [w for w in rank.of(Wrapped) if w.kind == wrapped.kind]
    if title != wrapped.kind or len(alike) == 1:
        return f"`{title}`"
    first = f"{wrapped.parameters[0].name} of shape {list(wrapped.parameters[0].shape)}"
    return f"`{title}` (wrapped as number {alike.index(wrapped) + 1} of {len(alike)}; {first})"


_OTHER_NAMES = "the ranks loop over the same names in a different order, and so they"
_SET = re.compile(r"for .+ in (?:\{|set\(|frozenset\()")


def _over_a_set(made: CallRecord) -> Location | None:
    """The loop around a call that goes through a set, as written in its head."""
    heads = (head for _, head, _, _ in loops_around(made.rank, made.site))
    return next((head for head in heads if _SET.match(head.source.strip())), None)


FROM_THE_ROOT = ("broadcast", "scatter")
"""Collectives in which all ranks receive what one of them sends."""


class Arguments(CallExplanation):
    rule = "arguments"
    text = "one collective is called with different arguments"
    check = "collective-shape-mismatch"
    _names: ClassVar = {
        "numel": "shapes",
        "dtype": "dtypes",
        "device": "devices",
        "reduce_op": "reduce operations",
        "root": "roots",
    }
    _fixes: ClassVar = {
        "numel": "pass tensors of the same shape on every rank: pad them, or exchange the sizes "
        "first",
        "dtype": "cast to one dtype on every rank before the call: `tensor.to(torch.float32)`",
        "device": "put the tensor on the same type of device on every rank",
        "reduce_op": "pass the same `op=` on every rank",
        "root": "pass the same `src`/`dst` on every rank",
    }

    @staticmethod
    def _as_sent(divergence: CallDivergence) -> dict[str, str]:
        """The fixes where all ranks receive what one of them sends."""
        roots = {made.signature.root for made in divergence.calls.values()}
        root = divergence.calls.get(next(iter(roots))) if len(roots) == 1 else None
        if root is None:
            return {}
        sender = ranks_text([root.rank.rank])
        return {
            "dtype": f"receive into a tensor of the dtype that {sender} sends: "
            f"`dtype=torch.{root.signature.dtype}`",
            "numel": f"receive into a tensor of the shape that {sender} sends: let it send the "
            "shape first, or send the object (`broadcast_object_list`)",
        }

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence, op = suspect.divergence, suspect.call.signature.op
        if not divergence.same_call:
            return None
        differs = [name for name in divergence.differs if name in self._names]
        names = listed([self._names[name] for name in differs])
        one = listed([self._names[name].removesuffix("s") for name in differs])
        calls = "; ".join(
            f"{ranks_text(side)}: {made.signature.text}"
            for side, made in divergence.sides(suspect.ranks)
        )
        # Whoever pads the tensors of two names, which the ranks take in turn, adds unlike ones.
        keys = {made.key for made in divergence.calls.values()}
        mixed = len(keys) > 1 and "" not in keys
        unordered = _over_a_set(suspect.call)
        sent = self._as_sent(divergence) if op in FROM_THE_ROOT else {}
        fixes = self._fixes | sent
        who, fix = "the ranks", "; ".join(fixes[name] for name in differs)
        if mixed:
            who, fix = _OTHER_NAMES, SAME_ORDER
        elif unordered is not None:
            who = f"`{unordered.source.strip()}` ({unordered}) goes through a set, which may have "
            who += "another order in each process: the ranks"
            fix = "go through it in an order that is the same on all ranks: `sorted(..., key=str)`"
        return self.blame(
            suspect,
            label=f"a different {one} on {WHO} than on the other ranks"
            if suspect.rest
            else f"different {names} on {WHO}",
            summary=f"{op} is called with different {names}: {calls}",
            cause=f"{who} pass different {names} to the same {op} "
            f"(call {divergence.index} of {divergence.key}); the backend does not check this",
            fix=fix,
            subjects=(op,),
        )
