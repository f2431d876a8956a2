"""The thread of the launcher's process, or of a rank, that meets the other nodes in the store that
torchrun, or `init_process_group`, has for all of them.

The first node leads: the others send it what they record, and it sends its verdict. A store that
does not answer is tried again; meanwhile each node judges for itself.

Keys, below `ddpdoctor/<attempt>/`:

    token           made up by the first node
    lead            how often the first node has said that it is there
    posted          how many parcels were counted
    parcel/<n>      the n-th one: the node's number, a line break, the parcel
    orders          how often the orders changed; orders/<n>: the orders
    read            how many nodes have read the last orders
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from .desk import ALONE, FOLLOWS, LEADS, SHARES, Desk, Heard, Standing
from .messages import MessageError, Orders, Parcel, packed, unpacked
from .mirror import Inbox, Outbox

PERIOD_S = 0.25
HEARTBEAT_S = 2.0
STORE_S = 5.0
"""The longest that one question to the store may take."""

AGAIN_S = 2.0
"""After a failure of the store, the time until it is asked again."""

SILENT_S = 10.0
"""A node that was not heard of for so long is not waited for at the end."""

CLOCKS_AGREE_S = 2.0
"""Wall clocks that differ by less are believed: the first message is on its way for some time."""

PARCELS_A_SECOND, LOOKS_A_SECOND = 128, 1024
"""What the first node can take, and its store, of all nodes together: more nodes send and look
less often each."""

WAITING = 8
"""Parcels that the first node has not taken yet: a node sends no more then."""

LOST_S, MOST_AWAITED = 5.0, 4096
"""A counted parcel that has not come after this time is looked for as rarely; and so many are."""

LAST_PARCELS_S, VERDICT_S, READ_S, SETTLED_S = 10.0, 15.0, 3.0, 5.0
"""At the end: how long the first node waits for the others' records, the others for its verdict,
the first node for their reading it, and all for their own monitor."""

LAST_OF_RANK_S = 3.0
"""How long a rank that meets the others stays for the last records at its end."""


class Store(Protocol):
    """What is used of `torch.distributed.Store`. `add` and `set` are answered at once."""

    def set(self, key: str, value: Any) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...
    def clone(self) -> Store: ...
    def set_timeout(self, timeout: timedelta) -> None: ...


class Link:
    """One attempt of a run. `start` begins the thread; `ranks_ended` has it exchange what is left,
    for as long as torchrun waits for the other nodes; `close` some seconds longer, and waits.

    Args:
        store: of all nodes, for this attempt; kept, so that one in this process lives as long.
        places: which number the folder of each node has, by `Parcel.origin`; of all attempts.
        origin: see `Parcel`; version: of ddpdoctor.
        by_rank: a rank does this: at its end it hands over the last records, and waits for no
            verdict, which comes after it. lead: the host of its store.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        node: int,
        nodes: int,
        attempt: int,
        places: dict[str, int],
        origin: str,
        host: str,
        version: str,
        by_rank: bool = False,
        lead: str = "",
    ) -> None:
        self._kept = store
        self._store: Store | None = None
        self._prefix = f"ddpdoctor/{attempt}/"
        self._desk, self._places = Desk(folder), places
        self._node, self._origin, self._host, self._version = node, origin, host, version
        self.send_s = max(PERIOD_S, nodes / PARCELS_A_SECOND)
        self.look_s = max(PERIOD_S, nodes / LOOKS_A_SECOND)
        self._standing = Standing(
            node=node,
            nodes=nodes,
            why="they have not been heard of yet",
            beat_s=max(HEARTBEAT_S, 2 * self.send_s),
            by_rank=by_rank,
            lead=lead,
            began=time.monotonic(),
        )
        self._ended = threading.Event()
        self._closed_at = math.inf
        self._status, self._failed = -1, False
        self._written = 0.0
        self._thread = threading.Thread(target=self._run, name="ddpdoctor nodes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ranks_ended(self, status: int) -> None:
        """The ranks of this node have ended, and torchrun will end with that status."""
        self._status = status
        self._ended.set()

    def close(self, status: int | None, *, failed: bool = False) -> None:
        """torchrun ends, with that status; None where another attempt follows.

        Args:
            failed: this rank has failed: the others may notice only once it has ended.
        """
        self._failed = failed
        if self._status < 0:
            self._status = -1 if status is None else status
        self._closed_at = time.monotonic()
        self._ended.set()
        by_rank = self._standing.by_rank
        most_s = SETTLED_S + LAST_PARCELS_S + VERDICT_S + READ_S
        self._thread.join(2 * LAST_OF_RANK_S if by_rank else most_s)

    def _run(self) -> None:
        role = _Lead(self) if self._node == 0 else _Follower(self)
        while True:
            try:
                self._store = self._kept.clone()
                with contextlib.suppress(AttributeError):
                    self._store.set_timeout(timedelta(seconds=STORE_S))
                self._serve(role)
                return
            except Exception as error:  # of the store: its types differ between versions of torch
                why = " ".join(str(error).split())[:200]
                self._tell(role=ALONE, why=why or type(error).__name__)
            if self._ended.wait(AGAIN_S):
                self._tell(status=self._status)
                return

    def _serve(self, role: _Lead | _Follower) -> None:
        role.meet()
        while not self._ended.wait(PERIOD_S):
            role.look()
            if time.monotonic() - self._written >= HEARTBEAT_S / 2:
                self._tell()
        if self._standing.by_rank:
            role.hand_over(failed=self._failed)
            self._tell()
        elif self._status >= 0:
            role.look()
            self._tell(status=self._status)
            deadline = time.monotonic() + SETTLED_S
            self.wait(lambda: self._desk.settled() or time.monotonic() > deadline, SETTLED_S)
            role.finish()

    def wait(
        self, condition: Callable[[], bool], most_s: float, meanwhile: Callable[[], object] = int
    ) -> None:
        """Wait until a condition holds, or torchrun has ended for so long."""
        while time.monotonic() < self._closed_at + most_s:
            meanwhile()
            if condition():
                return
            if time.monotonic() - self._written >= HEARTBEAT_S / 2:
                self._tell()
            time.sleep(0.05)

    def _tell(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self._standing, name, value)
        self._written = time.monotonic()
        self._desk.write_standing(self._standing)

    # The store, with the keys of this attempt.

    def set(self, key: str, value: bytes) -> None:
        assert self._store is not None
        self._store.set(self._prefix + key, value)

    def add(self, key: str, amount: int) -> int:
        assert self._store is not None
        return int(self._store.add(self._prefix + key, amount))

    def get(self, key: str) -> bytes | None:
        """What stands under a key; None for nothing."""
        assert self._store is not None
        if not self._store.check([self._prefix + key]):
            return None
        return bytes(self._store.get(self._prefix + key))

    def take(self, key: str) -> bytes | None:
        """As `get`, and nothing stands there any more."""
        found = self.get(key)
        if found is not None:
            assert self._store is not None
            self._store.delete_key(self._prefix + key)
        return found


class _Lead:
    """The first node: takes the others' records, and hands on what its monitor says."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._token = secrets.token_hex(8)
        self._counted = 0
        self._awaited: dict[int, tuple[float, float]] = {}
        self._newest: dict[int, int] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._told = Orders()
        self._ordered = 0.0
        self._said_at = -math.inf

    def meet(self) -> None:
        link = self._link
        link._desk.mark(self._token)
        link.set("token", self._token.encode())
        link._tell(role=LEADS, why="")

    def look(self) -> None:
        link = self._link
        if time.monotonic() - self._said_at >= HEARTBEAT_S / 2:
            self._said_at = time.monotonic()
            link.add("lead", 1)
        posted, now = link.add("posted", 0), time.monotonic()
        self._awaited.update(dict.fromkeys(range(self._counted + 1, posted + 1), (now, now)))
        self._counted = posted
        # A node counts a parcel before it writes it: it may die in between, or be cut off.
        for number, (since, again) in list(self._awaited.items()):
            if now < again:
                continue
            if (said := link.take(f"parcel/{number}")) is not None:
                del self._awaited[number]
                node, _, data = said.partition(b"\n")
                self._take(number, int(node), data)
            elif now - since > LOST_S:
                self._awaited[number] = since, now + LOST_S
        while len(self._awaited) > MOST_AWAITED:
            del self._awaited[min(self._awaited)]
        changed = link._desk.orders_changed()
        if changed != self._ordered:
            self._ordered = changed
            if orders := link._desk.orders():
                self._post(orders)

    def _take(self, count: int, node: int, data: bytes) -> None:
        try:
            self._accept(count, node, unpacked(data, Parcel))
        except MessageError as error:
            known = self._link._standing.heard.get(node, Heard("", 0.0))
            known.at, known.version = time.monotonic(), error.version or "unknown"
            self._link._standing.heard[node] = known

    def _accept(self, count: int, node: int, parcel: Parcel) -> None:
        places = self._link._places
        if parcel.origin not in places:
            taken = {*places.values()}
            free = (n for n in range(node, node + len(taken) + 1) if n not in taken)
            places[parcel.origin] = next(free)
        number = places[parcel.origin]
        inbox = self._inboxes.get(number)
        if inbox is None:
            inbox = self._inboxes[number] = Inbox(self._link._desk.node_folder(number))
        before = self._link._standing.heard.get(number)
        if before is None:
            ahead = round(parcel.wall - time.time(), 3)
            inbox.set_clock(ahead if abs(ahead) > CLOCKS_AGREE_S else 0.0)
        else:
            ahead = before.ahead_s
        inbox.take(parcel.pieces, late=count < self._newest.get(number, 0))
        self._newest[number] = max(count, self._newest.get(number, 0))
        self._link._standing.heard[number] = Heard(
            parcel.host, time.monotonic(), parcel.over, ahead
        )

    def _post(self, orders: Orders) -> None:
        link = self._link
        number = link.add("orders", 0) + 1  # only the first node adds
        link.set(f"orders/{number}", packed(orders, link._version))
        link.add("orders", 1)
        self._told = orders

    def hand_over(self, *, failed: bool) -> None:
        """Wait for the last records of the others, unless they go on until this rank has ended; and
        until they know where to ask for the verdict: the store may end with this process."""
        standing = self._link._standing
        others = standing.nodes - 1
        if not failed:
            self._link.wait(
                lambda: len(standing.heard) >= others and self._all_over(),
                LAST_OF_RANK_S,
                self.look,
            )
        self._link.wait(lambda: self._link.add("read", 0) >= others, LAST_OF_RANK_S, self.look)

    def finish(self) -> None:
        """Wait for the records of the others, then for our verdict, then for their reading it."""
        self._link.wait(self._all_over, LAST_PARCELS_S, self.look)
        self._link._tell(complete=True)
        others = [h for h in self._link._standing.heard.values() if h.over]
        if not others:
            return
        self._link.wait(self._verdict_posted, VERDICT_S, self.look)
        self._link.wait(lambda: self._link.add("read", 0) >= len(others), READ_S)

    def _all_over(self) -> bool:
        heard = self._link._standing.heard.values()
        now = time.monotonic()
        silent_s = max(SILENT_S, 4 * self._link._standing.beat_s)
        return all(h.over or h.version or now - h.at > silent_s for h in heard)

    def _verdict_posted(self) -> bool:
        return bool(self._told.report)


class _Follower:
    """Any other node: sends its records, and takes the first node's orders."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._outbox = Outbox(link._desk.folder)
        self._posted: deque[int] = deque(maxlen=WAITING)
        self._posted_at = self._looked_at = 0.0
        self._orders = 0
        self._shares = False
        self._begun = False
        self._unsent: bytes | None = None
        self._last = Orders()
        self._lead = 0

    def meet(self) -> None:
        self._begun = False

    def look(self) -> None:
        link = self._link
        if not self._begun:
            token = link.get("token")
            if token is None:
                return
            self._begun, self._shares = True, link._desk.marked(token.decode())
            link._tell(role=SHARES if self._shares else FOLLOWS, why="")
        if self._shares:
            return
        now = time.monotonic()
        if now - self._posted_at >= link.send_s:
            self._post()
        if now - self._looked_at >= link.look_s:
            self._looked_at = now
            self._read_orders()

    def _post(self, *, over: bool = False, beat: bool = True) -> bool:
        """Send what is new, or could not be sent before; whether something was.

        Args:
            over: nothing more will come; beat: say that the node is there, where nothing is new.
        """
        link, now = self._link, time.monotonic()
        full = len(self._posted) == WAITING
        if full and link.get(f"parcel/{self._posted[0]}") is not None:
            return False
        if self._unsent is None:
            pieces = self._outbox.pieces()
            due = beat and now - self._posted_at >= link._standing.beat_s / 2
            if not pieces and not over and not due:
                return False
            parcel = Parcel(
                link._origin, link._version, link._host, time.time(), tuple(pieces), over=over
            )
            self._unsent = packed(parcel, link._version)
        self._posted_at = now
        number = link.add("posted", 1)
        link.set(f"parcel/{number}", b"%d\n" % link._node + self._unsent)
        self._posted.append(number)
        self._unsent = None
        return True

    def _post_over(self) -> bool:
        return self._post(over=True)

    def _read_orders(self) -> None:
        link = self._link
        lead, before = link.add("lead", 0), self._lead
        if lead != before:
            self._lead, link._standing.at = lead, time.monotonic()
        count = link.add("orders", 0)
        if count == self._orders:
            return
        self._orders = count
        data = link.get(f"orders/{count}")
        try:
            orders = unpacked(data, Orders) if data is not None else None
        except MessageError as error:
            link._tell(role=ALONE, why=f"it has ddpdoctor {error.version or 'of another kind'}")
            return
        if orders is not None:
            if orders.address.port and not self._last.address.port:
                link.add("read", 1)
            self._last = orders
            link._desk.write_orders(orders)

    def hand_over(self, *, failed: bool) -> None:
        """Send the rest, with what the other ranks of this node write at their end, unless they go
        on until this one has ended."""
        self._link.wait(lambda: self._begun, LAST_OF_RANK_S, self.look)  # it may begin right now
        if self._shares or not self._begun:
            return
        desk, link = self._link._desk, self._link
        if not failed:
            link.wait(desk.ranks_have_ended, LAST_OF_RANK_S / 2, lambda: self._post(beat=False))
        link.wait(lambda: not self._post(beat=False), LAST_OF_RANK_S)
        if not failed:
            link.wait(self._post_over, LAST_OF_RANK_S)
        link.wait(lambda: self._last.address.port > 0, LAST_OF_RANK_S, self._read_orders)

    def finish(self) -> None:
        """Send the rest, and wait for the verdict."""
        if self._shares or not self._begun:
            return
        self._link.wait(lambda: not self._post(beat=False), LAST_PARCELS_S)
        self._link.wait(self._post_over, LAST_PARCELS_S)
        self._link.wait(self._judged_or_gone, LAST_PARCELS_S + VERDICT_S, self._read_orders)
        self._link.add("read", 1)
        self._link._tell(complete=bool(self._last.report))

    def _judged_or_gone(self) -> bool:
        silent = time.monotonic() - self._link._standing.at
        if silent > max(SILENT_S, 4 * self._link._standing.beat_s):
            self._link._standing.why = f"it has not been heard of for {silent:.0f} s"
            return True
        return bool(self._last.report)
