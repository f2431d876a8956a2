"""Process groups and the collectives issued on them."""

from __future__ import annotations

from .base import Event


class InitEntered(Event, frozen=True, tag="init-entered"):
    """`init_process_group` was called.

    Attributes:
        rank, world_size: the arguments, -1 if left to the environment.
        env_rank, env_world_size, env_local_rank: the environment's values at that moment, -1 if
            unset; the script may have changed those of the launcher (see `RankStarted`).
        rendezvous: where the ranks meet: address and port, a URL, or a store of this process.
        store_written: where that is a file with contents, when it was last written, seconds since
            the epoch; else 0.
        changed: relevant environment variables that have changed since the process started.
        set_at: the line of the program that sets such a variable, found in its source.
        past: an `if` before this line, in its function or a caller, whose body returns or exits.
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
    store_written: float = 0.0

    def describe(self) -> str:
        return f"init_process_group({self.backend or 'default'}) entered"


class GroupReady(Event, frozen=True, tag="group-ready"):
    """A process group exists on this rank; the default group has `group` 0.

    Attributes:
        group: number of the group on this rank, in the order this rank created groups.
        name: torch's own name of the group, equal on all its ranks.
        ranks: global ranks of the members.
        member: whether this rank is one of them.
        library: the module of a library that created it, empty for the user's own code.
    """

    group: int
    name: str
    backend: str
    ranks: tuple[int, ...]
    member: bool
    site: int
    local_synchronization: bool = False
    description: str = ""
    library: str = ""

    def describe(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        if not self.member:  # torch tells it neither name nor backend
            return f"group without this rank ready: ranks {ranks}"
        kind = "default group" if self.group == 0 else f"group {self.name}"
        return f"{kind} ready: {self.backend}, ranks {ranks}"


class GroupDestroyed(Event, frozen=True, tag="group-destroyed"):
    """`destroy_process_group` succeeded; `name` is empty for all groups.

    `at` is when it was called, since peers lose their connections before it returns.
    """

    name: str = ""
    site: int = -1

    def describe(self) -> str:
        return f"destroyed {self.name or 'all process groups'}"


class ShardedOver(Event, frozen=True, tag="sharded-over"):
    """`fully_shard` got a mesh of several dimensions with all ranks: it shards over one dimension
    and replicates over another, and every rank should read its own data.

    Attributes:
        ranks: all ranks of the mesh; `groups` are this rank's groups, one for each dimension.
    """

    RANKS = ("ranks", "groups")

    ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] = ()
