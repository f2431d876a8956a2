"""Meets the other nodes of the run, from inside torchrun: in the store of each rendezvous.

It uses private parts of `torch.distributed.elastic.agent.server.api` (as in torch 2.13):
`SimpleElasticAgent._rendezvous`, and what that leaves in the `WorkerGroup`. Without them each node
judges for itself.
"""

from __future__ import annotations

import functools
import platform
import secrets
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
                self._link.end(None)
                self._link = None
            result = original(agent, group, *args, **kwargs)
            try:
                self._met(agent, group)
            except Exception as error:  # whatever torch has changed
                self._alone(repr(error)[:200])
            return result

        SimpleElasticAgent._rendezvous = rendezvous  # type: ignore[method-assign]

    def end(self, status: int) -> None:
        """torchrun has ended: exchange what is left, within some seconds."""
        if self._link is not None:
            self._link.end(status)

    def _met(self, agent: Any, group: Any) -> None:
        if group.group_world_size < 2:
            return
        self._link = Link(
            group.store,
            self._folder,
            node=group.group_rank,
            nodes=group.group_world_size,
            attempt=group.spec.max_restarts - agent._remaining_restarts,
            origin=self._origin,
            host=platform.node(),
            version=__version__,
        )
        self._link.start()

    def _alone(self, why: str) -> None:
        Desk(self._folder).write_standing(Standing(nodes=2, why=why))
