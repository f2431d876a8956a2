"""Process groups: records who creates them, when, with which ranks; and numbers them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from ...events import CALLERS, GroupDestroyed, GroupReady, InitEntered
from ..recording.code_locations import own_files
from ..recording.debug_level import DebugLevel
from ..recording.environment import (
    environment_at_start,
    interesting_environment,
    number_in_environment,
)
from ..recording.frames import disguise, unframe
from ..recording.hooks import Hook
from ..recording.patching import replace
from ..recording.recorder import Recorder, write_probe_error
from ..recording.torch_compat import group_name, group_ranks, live_groups
from ..recording.watcher import Activate, Args, Error, Kwargs, Watcher
from ..source.source_text import lines_that_set
from ..source.statements import early_exits_before


class ProcessGroups(Watcher):
    """The groups of this process.

    Attributes:
        numbers: the doctor's number of each group, by torch's name.
        others: global ranks of the other members, by number.
        created: how many groups were created, also those that this rank is not in.
        formed: fires when the default group was created, with it.
    """

    lost = "process groups"
    formed: ClassVar[Hook[Any]] = Hook("formed")

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.others: dict[int, frozenset[int]] = {}
        self.created = 0

    def number_of(self, group: Any) -> int:
        """The doctor's number of a group; 0 for the default group (also for None), -1 if
        unknown."""
        if group is None:
            return 0
        return self.numbers.get(group_name(group), -1)

    def other_members(self, group: int) -> frozenset[int]:
        """Global ranks of the other members of a group, by its number; empty if unknown."""
        return self.others.get(group, frozenset())

    def alone(self, group: int) -> bool:
        """Whether this rank is known to be the only member of a group, by its number."""
        return self.others.get(group) == frozenset()

    def exist(self) -> bool:
        """Whether the default group exists."""
        return self.created > 0

    def install(self) -> None:
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        self.around(self.holders(), "new_group", before=self._new_entered, after=self._new_ready)
        self.around(self.holders(), "split_group", after=self._split_ready)
        self.around(
            (c10d, dist), "destroy_process_group", before=self._destroying, after=self._destroyed
        )

    def holders(self) -> tuple[Any, ...]:
        """The modules that have copies of the functions that create groups; `device_mesh` is
        one."""
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        with contextlib.suppress(ImportError):
            import torch.distributed.device_mesh as device_mesh

            return c10d, dist, device_mesh
        return c10d, dist

    def activate_with(self, activate: Activate) -> None:
        """Have `init_process_group` call `activate(rank, world_size, init_method)` before it can
        block.

        Outside of `around`, whose hooks are not called before this process is a rank.
        """
        import torch.distributed.distributed_c10d as c10d

        self.around(
            self.holders(),
            "init_process_group",
            before=_init_entered,
            after=self._init_ready,
        )
        watched = c10d.init_process_group

        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            try:
                given = _init_arguments(args, kwargs)
                activate(given["rank"], given["world_size"], given["init_method"])
            except Exception as error:  # training goes on, unobserved
                write_probe_error(error)
            try:
                return watched(*args, **kwargs)
            except BaseException as error:
                unframe(error)
                raise

        disguise(init_process_group, watched)
        for holder in self.holders():
            replace(holder, "init_process_group", init_process_group)

    def adopt(self, recorder: Recorder) -> None:
        """Record the groups that were created before torch was wrapped."""
        import torch.distributed as dist

        if self.created or not dist.is_available() or not dist.is_initialized():
            return
        groups = dict(live_groups())
        self._emit_ready(recorder, groups.pop("", dist.group.WORLD))
        for group in groups.values():
            self._emit_ready(recorder, group)

    def _init_ready(self, recorder: Recorder, _: Any, result: Any, error: Error) -> None:
        if error is None:
            import torch.distributed as dist

            self._emit_ready(recorder, dist.group.WORLD)

    def _new_entered(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        return (
            asked_for(args, kwargs),
            bool(kwargs.get("use_local_synchronization", False)),
            str(kwargs.get("group_desc") or ""),
        )

    def _new_ready(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if error is None:
            ranks, local, description = token
            self._emit_ready(recorder, result, ranks, local, description)

    def _split_ready(self, recorder: Recorder, _: Any, result: Any, error: Error) -> None:
        if error is None and result is not None:
            self._emit_ready(recorder, result)

    def _emit_ready(
        self,
        recorder: Recorder,
        group: Any,
        ranks: tuple[int, ...] | None = None,
        local: bool = False,
        description: str = "",
    ) -> None:
        import torch.distributed as dist

        member = isinstance(group, dist.ProcessGroup)
        number, self.created = self.created, self.created + 1
        name = group_name(group) if member else ""
        if member:
            self.numbers[name] = number
            ranks = group_ranks(group)
            self.others[number] = frozenset(ranks) - {dist.get_rank()}
        recorder.emit(
            GroupReady(
                at=time.monotonic(),
                group=number,
                name=name,
                backend=_backend(group) if member else "",
                ranks=ranks or (),
                member=member,
                site=recorder.site(),
                local_synchronization=local,
                description=description,
                library=recorder.sites.library_called(),
            )
        )
        if member and group is dist.group.WORLD:
            self.formed.fire(recorder, group)

    def _destroying(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> tuple[str, float]:
        import torch.distributed as dist

        group = args[0] if args else kwargs.get("group")
        everything = group is None or group is dist.group.WORLD
        return "" if everything else group_name(group), time.monotonic()

    def _destroyed(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if error is None:
            name, began = token
            recorder.emit(GroupDestroyed(at=began, name=name, site=recorder.site()))
            if not name:
                self.numbers.clear()
                self.created = 0


def _init_arguments(args: Args, kwargs: Kwargs) -> dict[str, Any]:
    names = ("backend", "init_method", "timeout", "world_size", "rank", "store")
    given: dict[str, Any] = {
        "backend": None,
        "init_method": None,
        "world_size": -1,
        "rank": -1,
        "timeout": None,
    }
    given.update(zip(names, args, strict=False))
    given.update({k: v for k, v in kwargs.items() if k in names})
    for name in ("world_size", "rank"):
        given[name] = -1 if given[name] is None else int(given[name] or 0)
    return given


def _init_entered(recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
    given = _init_arguments(args, kwargs)
    DebugLevel.current.group_asked_for(recorder, str(given["backend"] or ""))
    timeout, rendezvous = given["timeout"], _rendezvous(given)
    recorder.emit(
        InitEntered(
            at=time.monotonic(),
            backend=str(given["backend"] or ""),
            init_method=str(given["init_method"] or ""),
            rank=given["rank"],
            world_size=given["world_size"],
            env_rank=number_in_environment("RANK"),
            env_world_size=number_in_environment("WORLD_SIZE"),
            env_local_rank=number_in_environment("LOCAL_RANK"),
            timeout_s=timeout.total_seconds() if timeout is not None else -1.0,
            site=recorder.site(),
            rendezvous=rendezvous,
            store_written=_written(rendezvous),
            changed=_changed_environment(),
            set_at={
                name: recorder.sites.place(file, line, "")
                for name, (file, line) in lines_that_set(own_files()).items()
            },
            past=_early_exits(recorder),
        ),
        vital=True,
    )


def _early_exits(recorder: Recorder) -> tuple[int, ...]:
    """The sites of the `if`s before this line at which a process may have returned or exited."""
    found: list[int] = []
    frame = recorder.sites.user_frame(sys._getframe())
    for _ in range(CALLERS):
        if frame is None:
            break
        code = frame.f_code
        for line in early_exits_before(code.co_filename, frame.f_lineno):
            found.append(recorder.sites.place(code.co_filename, line, code.co_name))
        frame = recorder.sites.user_frame(frame.f_back)
    return tuple(found)


def _rendezvous(given: dict[str, Any]) -> str:
    """The rendezvous of a group, as text that is equal for processes that mean the same one."""
    method = str(given["init_method"] or "env://")
    if (store := given.get("store")) is not None:
        return _place_of(store)
    if method.startswith("env://"):
        return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    return method.partition("?")[0]


def _place_of(store: Any) -> str:
    """The file or address behind a store; a text of its own for one that is in memory."""
    while (underlying := getattr(store, "underlying_store", None)) is not None:
        store = underlying
    if path := getattr(store, "path", ""):
        return f"file://{path}"
    if host := getattr(store, "host", ""):
        return f"tcp://{host}:{getattr(store, 'port', 0)}"
    return f"store of process {os.getpid()}"


def _written(place: str) -> float:
    """When the file behind a store was last written, seconds since the epoch; 0 where it is no
    file, or an empty one."""
    if not place.startswith("file://"):
        return 0.0
    try:
        file = os.stat(place.removeprefix("file://"))
    except OSError:
        return 0.0
    return file.st_mtime if file.st_size else 0.0


def _changed_environment() -> dict[str, str]:
    now, before = interesting_environment(os.environ), environment_at_start()
    return {name: value for name, value in now.items() if before.get(name) != value}


def asked_for(args: Args, kwargs: Kwargs) -> tuple[int, ...] | None:
    """The ranks passed to `new_group`; None for all, and for an iterator, which must not be
    consumed."""
    ranks = args[0] if args else kwargs.get("ranks")
    return None if ranks is None or isinstance(ranks, Iterator) else tuple(ranks)


def _backend(group: Any) -> str:
    """The backend of a group. If the program chose none, torch takes one per type of device and
    calls that `undefined`: then the accelerator's, if there is one."""
    import torch.distributed as dist

    name = str(dist.get_backend(group))
    if name != "undefined":
        return name
    pairs = [p.partition(":") for p in str(dist.get_backend_config(group)).split(",")]
    return next((b for device, _, b in pairs if device != "cpu"), pairs[0][2]) or name
