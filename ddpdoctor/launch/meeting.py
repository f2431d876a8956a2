"""Meets the other nodes of the run, from inside torchrun: in the store of each rendezvous.

It uses private parts of `torch.distributed.elastic.agent.server.api` (as in torch 2.13):
`SimpleElasticAgent._rendezvous`, and what that leaves in the `WorkerGroup`. Without them each node
judges for itself.
"""

from __future__ import annotations

import functools
import platform
import secrets
import signal
from pathlib import Path
from typing import Any

from .._version import __version__
from ..nodes.desk import Desk, Standing
from ..nodes.link import Link


class Meeting:
    """The link to the other nodes; a new one after each rendezvous.

    Args:
        folder: of the run, on this node.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._origin = secrets.token_hex(8)
        self._places: dict[str, int] = {}
        self._link: Link | None = None

    def install(self) -> None:
        """Wrap torchrun's rendezvous."""
        from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

        original = getattr(SimpleElasticAgent, "_rendezvous", None)
        if original is None:
            self._alone("this torchrun meets in an unknown way")
            return

        @functools.wraps(original)
        def rendezvous(agent: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
            if self._link is not None:
                self._link.close(None)
                self._link = None
            result = original(agent, group, *args, **kwargs)
            try:
                self._met(agent, group)
            except Exception as error:  # whatever torch has changed
                self._alone(repr(error)[:200])
            return result

        setattr(SimpleElasticAgent, "_rendezvous", rendezvous)  # noqa: B010  (a method)
        barrier = getattr(SimpleElasticAgent, "_exit_barrier", None)
        if barrier is None:
            return

        @functools.wraps(barrier)
        def exit_barrier(agent: Any, *args: Any, **kwargs: Any) -> Any:
            # It waits up to five minutes for the launchers of the other nodes.
            if self._link is not None:
                succeeded = getattr(agent._worker_group.state, "name", "") == "SUCCEEDED"
                self._link.ranks_ended(0 if succeeded else 1)
            return barrier(agent, *args, **kwargs)

        setattr(SimpleElasticAgent, "_exit_barrier", exit_barrier)  # noqa: B010  (a method)

    def end(self, status: int) -> None:
        """torchrun has ended: exchange what is left, within some seconds. A signal that comes
        meanwhile is late: the ranks have ended."""
        if self._link is None:
            return
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, _late)
        self._link.close(status)

    def _met(self, agent: Any, group: Any) -> None:
        if group.group_world_size < 2:
            return
        self._link = Link(
            group.store,
            self._folder,
            node=group.group_rank,
            nodes=group.group_world_size,
            attempt=group.spec.max_restarts - agent._remaining_restarts,
            places=self._places,
            origin=self._origin,
            host=platform.node(),
            version=__version__,
        )
        self._link.start()

    def _alone(self, why: str) -> None:
        Desk(self._folder).write_standing(Standing(nodes=2, why=why))


def _late(number: int, frame: Any) -> None:
    """A handler that does nothing; unlike SIG_IGN, a child would not inherit it."""
