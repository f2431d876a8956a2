"""Process groups and the collectives issued on them."""

from __future__ import annotations

from .base import Event


class InitEntered(Event, frozen=True, tag="init-entered"):
    """`init_process_group` was called.

    Attributes:
        rank, world_size: the explicit arguments, -1 where they were left to the environment.
        env_rank, env_world_size, env_local_rank: what the environment says now, -1 where unset;
            the script may have changed what the launcher had set (see `RankStarted`).
        rendezvous: where the ranks meet: address and port, a URL, or a store of this process.
        changed: variables that matter and that are not what they were when the process started.
        set_at: the line of the program that sets such a variable, as its text says.
        past: the `if` before this line, in its function and those that called it, under which a
            process returns or exits instead.
    """

    backend: str
    init_method: str
    rank: int
    world_size: int
    env_rank: int
    env_world_size: int
    env_local_rank: int
    timeout_s: float
    site: int
    rendezvous: str = ""
    changed: dict[str, str] = {}
    set_at: dict[str, int] = {}
    past: tuple[int, ...] = ()

    def describe(self) -> str:
        return f"init_process_group({self.backend or 'default'}) entered"


class GroupReady(Event, frozen=True, tag="group-ready"):
    """A process group exists on this rank; the default group has `group` 0.

    Attributes:
        group: number of the group on this rank, in the order this rank created groups.
        name: torch's own name of the group, equal on all its ranks.
        ranks: global ranks of the members.
        member: whether this rank is one of them.
    """

    group: int
    name: str
    backend: str
    ranks: tuple[int, ...]
    member: bool
    site: int
    local_synchronization: bool = False
    description: str = ""

    def describe(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        if not self.member:  # torch tells it neither name nor backend
            return f"group without this rank ready: ranks {ranks}"
        kind = "default group" if self.group == 0 else f"group {self.name}"
        return f"{kind} ready: {self.backend}, ranks {ranks}"


class GroupDestroyed(Event, frozen=True, tag="group-destroyed"):
    """`destroy_process_group` was called, and did it; `name` is empty for "all groups".

    Its peers lose their connections before it returns: `at` is when it was called.
    """

    name: str = ""
    site: int = -1

    def describe(self) -> str:
        return f"destroyed {self.name or 'all process groups'}"
