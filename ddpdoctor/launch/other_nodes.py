"""What the supervisors of the nodes of a run do for each other: that of the first node judges for
all, the others say what it says."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Sequence

import msgspec

from .._version import __version__
from ..events import NodeSilent
from ..monitor.monitor import Monitor
from ..nodes.desk import ALONE, FOLLOWS, LEADS, Desk, Standing
from ..nodes.last_words import Address, Had, LastWords, ask
from ..nodes.link import HEARTBEAT_S
from ..nodes.messages import MessageError, Orders, Parcel, packed, unpacked
from ..nodes.mirror import Inbox, Outbox
from ..report.findings import Report
from ..run import Run, silence_text, some
from ..storage.run_folder import RunFolder

FRESH_S = 5.0
"""The first node counts as reachable for so long after it was heard of."""

OWN_S = 5.0
"""Where this node has found a reason to stop the run, it waits so long for the first one's."""

HANDED_ON_S = 2.0
"""Where a rank meets the other nodes, the first one waits so long before it stops its ranks: the
others must have read of it before the store ends with them."""

VERDICT_S, RECORDS_S, ASKED_S = 20.0, 10.0, 5.0
"""After the store has ended: how long a node waits for the verdict of the first one; and how long
that one waits for the others' last records, and then for them to take the verdict."""

MEET_S = 10.0
"""Where a rank meets the other nodes, nothing is concluded for so long after it has begun."""

LATE_S = 4.0
"""Where a node was not heard of for so long, nothing is concluded from what its ranks did then."""

SILENT_S = 8.0
"""A node that was not heard of for so long is named, and what its ranks do is unknown."""

WAITS_S = 8.0
"""torchrun waits for the launchers of other nodes, five minutes at most: said after this time."""

MOST_NOTICES = 200
MOST_LACKING = 16


def _slack(standing: Standing) -> float:
    """Nodes of a large run are heard of more rarely: by so many seconds later."""
    return 2 * max(0.0, standing.beat_s - HEARTBEAT_S)


class OtherNodes:
    """Call `look` at every tick.

    Args:
        monitor: of this node.
        report: makes the report of all nodes, given torchrun's status and who stops the run (see
            `Supervisor`), empty for nobody.
    """

    def __init__(
        self, folder: RunFolder, monitor: Monitor, report: Callable[[int, str], Report]
    ) -> None:
        self._folder, self._desk = folder, Desk(folder.path)
        self._monitor, self._report = monitor, report
        self._kept: list[str] = []
        self._said: list[str] = []
        self._stop = self._ended = ""
        self._final = b""
        self._final_at, self._waits = 0.0, ""
        self._told = 0
        self._own: tuple[str, float] | None = None
        self._handed_on = 0.0
        self._settled = False
        self._last_words: LastWords | None = None
        self._asked, self._verdict = False, b""
        self._silent: set[int] = set()

    def look(self, lines: Sequence[str], reason: str | None) -> tuple[list[str], str | None]:
        """What to tell the user, and why to stop the run, from what this node alone would say.

        Returns:
            The lines, and the reason, None for none.
        """
        standing = self._desk.standing()
        if standing is None:
            return list(lines), reason
        if standing.by_rank and standing.role == LEADS and self._last_words is None:
            with contextlib.suppress(OSError):
                self._last_words = LastWords(self)
                self._order()
        if standing.meets and time.monotonic() - standing.began < MEET_S:
            self._kept += lines
            return [], None
        lines, self._kept = [*self._kept, *lines], []
        if standing.status >= 0 and not self._settled:
            self._settled = True
            self._monitor.settle()
            self._desk.settle()
        waited = [time.monotonic() - h.at for h in standing.heard.values() if not h.over]
        late = any(LATE_S < s - _slack(standing) <= SILENT_S for s in waited)
        self._monitor.unheard = standing.role == LEADS and late
        if standing.role == LEADS:
            return self._lead(standing, [*lines, *self._gone(standing)], reason)
        if standing.role == FOLLOWS and time.monotonic() - standing.at < FRESH_S + _slack(standing):
            return self._follow(reason)
        return lines, reason

    def _lead(
        self, standing: Standing, lines: list[str], reason: str | None
    ) -> tuple[list[str], str | None]:
        if not standing.heard:
            return lines, reason
        self._said = [*self._said, *lines][-MOST_NOTICES:]
        self._stop = self._stop or reason or ""
        if standing.complete and not self._final:
            report = self._report(standing.status, "")
            self._final, self._final_at = report.to_json(), time.monotonic()
            worst = next((f.summary for f in report.findings), "no faults found")
            self._waits = f"all ranks have ended: {worst}; torchrun waits for the other launchers"
        if self._waits and time.monotonic() - self._final_at > WAITS_S:
            lines, self._waits = [*lines, self._waits], ""
        if standing.by_rank and self._stop and not self._handed_on:  # the store ends with the ranks
            self._final = self._report(1, "doctor").to_json()
            self._handed_on = time.monotonic() + HANDED_ON_S
        self._order()
        return lines, reason

    def _order(self) -> None:
        address = self._last_words.address if self._last_words else Address()
        orders = Orders(tuple(self._said), self._stop, self._final, address, self._ended)
        if orders != self._desk.orders() and orders != Orders():
            self._desk.write_orders(orders)

    def tell_end(self, reason: str) -> None:
        """The user ends this node: where it is the first one, the others are told."""
        standing = self._desk.standing()
        if standing is not None and standing.role == LEADS:
            self._ended = f"{reason} (node {standing.node})"
            self._order()

    def hand_on(self) -> None:
        """Wait until the other nodes have read why the run is stopped."""
        while time.monotonic() < self._handed_on:
            time.sleep(0.05)

    def unannounced(self) -> bool:
        """Whether other nodes do not know yet where to ask for the verdict of this first one."""
        standing = self._desk.standing()
        leads = standing is not None and standing.by_rank and standing.role == LEADS
        return leads and self._last_words is None

    def gather(self, run: Run) -> None:
        """Wait for the last records of the nodes that ended with the store, or before it.

        Args:
            run: as it is known without them.
        """
        standing = self._desk.standing()
        if self._last_words is None or standing is None:
            return
        others, heard = range(1, standing.nodes), standing.heard
        silent = time.monotonic() - SILENT_S - _slack(standing)
        awaited = {n for n in others if n in heard and not heard[n].over and heard[n].at > silent}
        if run.missing:  # ranks that nothing was heard of may belong to nodes that ended early
            awaited |= {n for n in others if n not in heard}
        deadline = time.monotonic() + RECORDS_S
        while not awaited <= self._last_words.brought and time.monotonic() < deadline:
            time.sleep(0.05)

    def tell(self, report: Report) -> None:
        """Give the final report to the nodes that ask for it."""
        standing = self._desk.standing()
        if self._last_words is None or standing is None:
            return
        over = {n for n, h in standing.heard.items() if h.over or self._handed_on > 0}
        nodes = len(over | self._last_words.brought)
        self._last_words.say(report.to_json(), nodes, ASKED_S)
        self._last_words.close()

    def had(self, node: int) -> Had:
        """What this first node has of another one's records; `keep` adds what that one brings."""
        return Had(self._desk.mark_here(), self._inbox(node).sizes())

    def keep(self, node: int, records: bytes) -> None:
        with contextlib.suppress(MessageError):
            self._inbox(node).take(unpacked(records, Parcel).pieces)

    def _inbox(self, node: int) -> Inbox:
        standing = self._desk.standing()
        if standing is None or not 0 < node < standing.nodes:
            raise ValueError(f"there is no node {node}")
        return Inbox(self._desk.node_folder(node))

    def _gone(self, standing: Standing) -> list[str]:
        """A line for each node that is not heard of any more, and for each that is again."""
        lines = []
        for number, heard in standing.heard.items():
            for_s = time.monotonic() - heard.at
            silent = not heard.over and for_s > SILENT_S + _slack(standing)
            if silent is (number in self._silent):
                continue
            (self._silent.add if silent else self._silent.discard)(number)
            event = NodeSilent(
                at=time.monotonic(),
                node=number,
                host=heard.host,
                ranks=self._ranks_of(number),
                wall=time.time() - for_s,
                over=not silent,
            )
            self._monitor.record(event)
            lines.append(silence_text(event))
        return lines

    def _ranks_of(self, node: int) -> tuple[int, ...]:
        folders = (folder for number, folder in self._folder.other_nodes() if number == node)
        found = {r for f in folders for n in f.attempts() for r, _ in f.rank_files(n)}
        return tuple(sorted(found))

    def _follow(self, reason: str | None) -> tuple[list[str], str | None]:
        orders = self._desk.orders() or Orders()
        lines = list(orders.notices[self._told :])
        self._told = max(self._told, len(orders.notices))
        if orders.ended and not self._ended:
            self._ended = orders.ended
            self._monitor.stopped("terminate", orders.ended)
            lines.append(f"the first node was stopped: {orders.ended}")
        now = time.monotonic()
        if reason and self._own is None:
            self._own = reason, now
        if orders.stop:
            return lines, orders.stop
        alone = self._own is not None and now - self._own[1] > OWN_S
        return lines, self._own[0] if alone and self._own else None

    def verdict(self) -> Report | None:
        """The first node's report on all nodes, where this is another one and has it; with the
        command that was typed on this node, and its folder."""
        standing, orders = self._desk.standing(), self._desk.orders()
        if standing is None or orders is None or standing.role == LEADS:
            return None
        if standing.by_rank and orders.address.port and not self._asked:
            self._asked = True
            address = msgspec.structs.replace(orders.address, host=standing.lead)
            # It is cut off, or the store has no name; or the user does not want to wait for it.
            with contextlib.suppress(OSError, KeyboardInterrupt):
                self._verdict = ask(address, standing.node, self._last_records, VERDICT_S)
        words = orders.report if standing.role == FOLLOWS else b""
        try:
            report = msgspec.json.decode(self._verdict or words, type=Report)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        command = info.command if (info := self._folder.read_info()) else report.run.command
        here = msgspec.structs.replace(report.run, command=command, folder=str(self._folder.path))
        return msgspec.structs.replace(report, run=here)

    def _last_records(self, had: Had) -> bytes:
        """What the first node lacks of this one's records; nothing where both have one folder."""
        if had.mark and self._desk.marked(had.mark):
            return b""
        pieces = tuple(Outbox(self._desk.folder, had.sizes).pieces())
        parcel = Parcel("", __version__, platform.node(), time.time(), pieces, over=True)
        return packed(parcel, __version__)

    def shortfall(self) -> str:
        """Why this node's report is not that of all nodes; empty where it is."""
        standing = self._desk.standing()
        if standing is None or standing.nodes < 2 or self.verdict() is not None:
            return ""
        if standing.role == LEADS:
            missing = [n for n in range(1, standing.nodes) if n not in standing.heard]
            other = {n: h.version for n, h in standing.heard.items() if h.version}
            brought = self._last_words.brought if self._last_words else set()
            late = [
                n for n, h in standing.heard.items() if not (h.over or n in other or n in brought)
            ]
            lacking = [str(n) for n in sorted({*missing, *late})]
            lacking += [f"{n}, which has ddpdoctor {other[n]}" for n in sorted(other)]
            names = some(lacking, MOST_LACKING)
            return f"not all of the other nodes' records arrived (node {names})" if names else ""
        if standing.by_rank and self._asked:
            return (
                "the node of rank 0 could not be asked for its verdict: this is what the ranks of "
                "this node tell"
            )
        if standing.role in (ALONE, FOLLOWS):
            why = f" ({standing.why})" if standing.why else ""
            return (
                f"the first node's verdict did not arrive{why}: "
                "this is what the ranks of this node tell"
            )
        return ""
