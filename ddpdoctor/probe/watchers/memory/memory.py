"""How much memory does this rank use between steps, and what holds it if it only grows?

Sampled in pulses after steps. If memory, or the number of living losses, grows, containers of
tensors are counted twice and compared.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

from ....events import MemoryHeld, MemorySample
from ...recording import devices, hooks, names_in_frames
from ...recording.hooks import Subscriptions
from ...recording.limits import DEEPEST_NAME
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...recording.weak_references import Reference
from ...training import lifecycle
from ...training.forwards import Forwards
from ...training.records import Backward, Forward, Step
from . import memory_holders

SHORTEST_S = 0.04
SAMPLES_PER_PACE = 50
"""Samples after which the interval (`SHORTEST_S` at first) doubles, up to `LONGEST_S`."""

LONGEST_S = 5.0

SUSPICIOUS_GROWTH = 8 << 20
"""Bytes of growth from which containers are counted: less may be an allocator's warm-up."""
COUNTED = 4
"""One output and one loss in so many is referenced weakly, to count those that stay alive."""

SUSPICIOUS_LOSSES = 48 // COUNTED
"""Such references alive at a time that suggest a leak: no loop needs 48 losses at once."""

FORWARDS_WITHOUT_STEP = 3
"""Forwards in a row after which a missing step means evaluation, not gradient accumulation."""

FORWARDS_OF_A_STEP = 64
"""Forwards per step between two censuses from which growth is measured per forward."""

STEPS_BETWEEN = 12
"""Steps from one census to the next: fewer show no growth per step."""
CHAIN_EVERY = 8
"""Samples from one search for summed losses to the next."""
MOST_CENSUSES = 6
"""Censuses of all objects, which take a tenth of a second; later ones count named objects only."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Memory(Watcher):
    """
    Attributes:
        due, pace: time of the next sample and seconds between samples.
        samples: bytes sampled so far, thinned out; `taken` is their number.
        idle: forwards in a row without a step, `last_step` the step before them.
        chain: length of the longest sum of losses found last.
        made: weak references to some outputs and losses.
        census: containers counted last, by id; `census_at` steps and forwards before that, -1
            before the first.
        emitted: a container that holds graphs is on record; nothing more is searched for.
    """

    lost = "memory of this rank, step by step"

    def __init__(self) -> None:
        self.due = 0.0
        self.pace = SHORTEST_S
        self.samples: list[int] = []
        self.taken = 0
        self.idle = 0
        self.last_step = 0
        self.chain = 0
        self.made: list[Any] = []
        self.censuses = 0
        self.census: dict[int, memory_holders.TensorContainer] = {}
        self.census_at = (-1, -1)
        self.emitted = False
        self.gpu: Any = None
        # Subscriptions to the next output and loss after a pulse, on the fast path too.
        self._next_output = Subscriptions()

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        if backward.number % COUNTED == 0 and backward.roots:
            self._count_while_alive(backward.roots[0])

    @on(lifecycle.forward_ends, during="_next_output")
    def _output_made(self, recorder: Recorder, forward: Forward) -> None:
        if getattr(forward.output, "requires_grad", False):
            self._count_while_alive(forward.output)

    @on(lifecycle.backward_begins, during="_next_output")
    def _loss_made(self, recorder: Recorder, backward: Backward) -> None:
        if backward.roots:
            self._count_while_alive(backward.roots[0])
        self._next_output.disable()

    def _count_while_alive(self, tensor: Any) -> None:
        """Keep a weak reference to a tensor that every step makes: only leaked ones accumulate."""
        made = self.made
        if len(made) < 4 * SUSPICIOUS_LOSSES or self._alive() < 2 * SUSPICIOUS_LOSSES:
            made.append(Reference(tensor))

    def _alive(self) -> int:
        """Number of the referenced tensors that are still alive."""
        self.made[:] = [reference for reference in self.made if reference() is not None]
        return len(self.made)

    @on(lifecycle.forward_ends, fast_path=False)
    def _forward_ends(self, recorder: Recorder, forward: Forward) -> None:
        if Forwards.current.count % COUNTED == 0:
            self._output_made(recorder, forward)
        # Programs that step are sampled after steps, when activations are freed.
        if recorder.step != self.last_step:
            self.idle, self.last_step = 0, recorder.step
            return
        now = time.monotonic()
        if now >= self.due:
            self.idle += 1
            if self.idle > FORWARDS_WITHOUT_STEP:
                self._sample(recorder, now)

    @on(lifecycle.pulse)
    def _pulse(self, recorder: Recorder, step: Step) -> None:
        self._next_output.enable()
        now = time.monotonic()
        if now >= self.due:
            self._sample(recorder, now)

    def _sample(self, recorder: Recorder, now: float) -> None:
        self.taken += 1
        if self.taken % SAMPLES_PER_PACE == 0:
            self.pace = min(2 * self.pace, LONGEST_S)
        self.due = now + self.pace
        resident = _resident()
        device, peak, reserved = devices.memory()
        recorder.emit(
            MemorySample(
                at=now,
                step=recorder.step,
                rss_bytes=resident,
                peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                forwards=Forwards.current.count,
                device_bytes=device,
                device_peak_bytes=peak,
                device_reserved_bytes=reserved,
            )
        )
        self.samples.append(device or resident)
        if len(self.samples) > 2 * SAMPLES_PER_PACE:
            del self.samples[::2]
        if self.emitted:
            return
        if self.taken % CHAIN_EVERY == 0:
            self._look_for_chain(recorder)
        if not self.emitted:
            kept = self._alive() >= SUSPICIOUS_LOSSES
            if kept or self._grows():
                self._look_for_holder(recorder, everywhere=kept or recorder.affordable())

    def _grows(self) -> bool:
        """Whether the samples suggest growth: reason enough to search, not to report."""
        seen = self.samples
        if len(seen) < 12:
            return False
        quarter = len(seen) // 4
        parts = [sorted(seen[i * quarter : (i + 1) * quarter])[quarter // 2] for i in range(4)]
        before, lately = parts[2] - parts[1], parts[3] - parts[2]
        # Require growth that lasts: the warm-up of an allocator levels off, and a census is
        # expensive.
        lasting = lately >= before / 2 and before >= lately / 4
        return parts == sorted(parts) and parts[3] - parts[1] >= SUSPICIOUS_GROWTH and lasting

    def _look_for_holder(self, recorder: Recorder, *, everywhere: bool) -> None:
        progress = recorder.step, Forwards.current.count
        since = [now - then for now, then in zip(progress, self.census_at, strict=True)]
        evaluates = since[1] > FORWARDS_OF_A_STEP * since[0]
        last, steps = self.census_at[evaluates], since[evaluates]
        if last >= 0 and steps < max(STEPS_BETWEEN, last // 4):
            return
        if everywhere and self.censuses < MOST_CENSUSES:
            self.censuses += 1
            now = memory_holders.census()
        else:
            now = memory_holders.census(
                memory_holders.named_objects(sys._getframe(1), recorder.sites)
            )
        before, self.census, self.census_at = self.census, now, progress
        grown = {
            key: more
            for key, held in now.items()
            if key in before
            and held.kind == before[key].kind
            and (more := held.length - before[key].length) >= steps // 2
        }
        if grown:
            key = max(grown, key=lambda k: (now[k].graphs, grown[k] * now[k].entry_bytes))
            one = names_in_frames.name_of(key, sys._getframe(1), recorder.sites, DEEPEST_NAME)
            self._emit(recorder, one, now[key], grown[key], steps)

    def _look_for_chain(self, recorder: Recorder) -> None:
        """Search the user's variables for a sum of losses that keeps their graphs: it is a tensor,
        so a census does not find it."""
        one, length = memory_holders.long_chain(sys._getframe(1), recorder.sites)
        if one is not None and length > self.chain > 0:
            grown = length - self.chain
            self._emit(
                recorder, one, memory_holders.TensorContainer(length, True, "graph"), grown, grown
            )
        self.chain = length

    def _emit(
        self,
        recorder: Recorder,
        one: names_in_frames.NamedObject | None,
        held: memory_holders.TensorContainer,
        grown: int,
        steps: int,
    ) -> None:
        sites = recorder.sites
        site = (
            recorder.site() if one is None else sites.place(*memory_holders.adding_line(one, sites))
        )
        self.emitted = held.graphs
        recorder.emit(
            MemoryHeld(
                at=time.monotonic(),
                name=one.name if one is not None else "",
                kind=held.kind,
                length=held.length,
                grown=grown,
                steps=steps,
                step=recorder.step,
                graphs=held.graphs,
                site=site,
                entry_bytes=held.entry_bytes,
            ),
            vital=True,
        )

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        if self.taken:
            self._sample(recorder, time.monotonic())


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
