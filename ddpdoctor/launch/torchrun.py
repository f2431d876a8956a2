"""torchrun's command line, read without importing torch: what is an option, where the script is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from .devices import visible_devices

FLAGS = ("standalone", "module", "no-python", "run-path", "virtual-local-rank")
"""Options without a value. Every other one takes one, also those that newer versions add."""

VALUED = (
    "duplicate-stderr-filters",
    "duplicate-stdout-filters",
    "event-log-handler",
    "local-addr",
    "local-ranks-filter",
    "log-dir",
    "logs-specs",
    "master-addr",
    "master-port",
    "max-restarts",
    "monitor-interval",
    "nnodes",
    "node-rank",
    "nproc-per-node",
    "numa-binding",
    "rdzv-backend",
    "rdzv-conf",
    "rdzv-endpoint",
    "rdzv-id",
    "redirects",
    "role",
    "shutdown-timeout",
    "signals-to-handle",
    "start-method",
    "tee",
)

SHORT = {"m": "module", "h": "help", "r": "redirects", "t": "tee"}

_PROCESSES_WITHOUT_GPU = 2


@dataclass(frozen=True)
class TorchrunArgs:
    """torchrun's arguments, taken apart.

    Attributes:
        options: by long name with dashes; flags have the value `""`.
        script: the script or module, None where there is none.
    """

    options: dict[str, str] = field(default_factory=dict)
    script: str | None = None
    script_args: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """A name for the run."""
        if self.script is None:
            return "run"
        if "module" in self.options:
            return self.script.rsplit(".", 1)[-1]
        return PurePath(self.script).stem or "run"


def parse(args: Sequence[str]) -> TorchrunArgs:
    """Take torchrun's arguments apart as its own parser would."""
    options: dict[str, str] = {}
    i = 0
    while i < len(args):
        word = args[i]
        i += 1
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            i -= 1
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _full_name(name.replace("_", "-"))
        else:
            name, equals, value = SHORT.get(word[1], word[1]), word[2:], word[2:].lstrip("=")
        if name in (*FLAGS, "help"):
            options[name] = ""
        elif equals:
            options[name] = value
        else:
            options[name] = args[i] if i < len(args) else ""
            i += 1
    rest = tuple(args[i:])
    return TorchrunArgs(options, rest[0] if rest else None, rest[1:])


def with_defaults(args: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The arguments for torchrun, one process per visible GPU where the user did not say."""
    given = set(parse(args).options) | {
        name[4:].lower().replace("_", "-") for name in environ if name.startswith("PET_")
    }
    if given & {"nnodes", "nproc-per-node", "standalone"} or any(
        name.startswith("rdzv-") for name in given
    ):
        return list(args)
    processes = visible_devices() or _PROCESSES_WITHOUT_GPU
    # --standalone would make torchrun ignore an address that the user did give.
    alone = [] if given & {"master-addr", "master-port", "node-rank"} else ["--standalone"]
    return [*alone, f"--nproc-per-node={processes}", *args]


def node_rank(args: TorchrunArgs, environ: Mapping[str, str]) -> int:
    """This node's number, 0 where only the rendezvous will tell."""
    for said in (
        args.options.get("node-rank"),
        environ.get("PET_NODE_RANK"),
        environ.get("GROUP_RANK"),
    ):
        if said and said.isdecimal():
            return int(said)
    return 0


def said(args: TorchrunArgs, environ: Mapping[str, str], name: str) -> str | None:
    """An option's value, or that of the variable that torchrun reads in its place."""
    variable = f"PET_{name.upper().replace('-', '_')}"
    return args.options.get(name) or environ.get(variable) or None


def nodes(args: TorchrunArgs, environ: Mapping[str, str]) -> int:
    """How many nodes take part, at most."""
    most = (said(args, environ, "nnodes") or "1").rpartition(":")[2]
    return int(most) if most.isdecimal() and "standalone" not in args.options else 1


def shared_id(args: TorchrunArgs, environ: Mapping[str, str]) -> str | None:
    """What the nodes of one run have in common and other runs have not; None for one node."""
    if nodes(args, environ) < 2:
        return None
    rdzv = said(args, environ, "rdzv-id")
    if rdzv and rdzv != "none":
        return rdzv
    address = said(args, environ, "master-addr")
    endpoint = said(args, environ, "rdzv-endpoint")
    port = said(args, environ, "master-port") or "29500"
    return endpoint or (f"{address}:{port}" if address else None)


def _full_name(name: str) -> str:
    """argparse accepts any unambiguous beginning of an option."""
    known = (*FLAGS, *VALUED)
    if name in known:
        return name
    fits = [k for k in known if k.startswith(name)]
    return fits[0] if len(fits) == 1 else name
