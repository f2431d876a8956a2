"""DDP103: ranks run different software or settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.events import InitEntered, ProgramSeen, TorchLoaded
from ddpdoctor.report.declarations import several_records
from ddpdoctor.report.findings import Check, Finding, Related, Severity
from ddpdoctor.run import Location, Rank, Run, equal_ranks, listed, ranks_do, ranks_text

_MATTERS = re.compile(
    r"NCCL_|GLOO_|OMP_NUM_THREADS|MKL_NUM_THREADS|TORCH_|TORCHDYNAMO_|TORCHINDUCTOR_|CUBLAS_|"
    r"PYTORCH_(CUDA_)?ALLOC_CONF|NVIDIA_TF32_OVERRIDE|CUDA_LAUNCH_BLOCKING|PYTHONHASHSEED"
)
_MAY_DIFFER = re.compile(
    r"RANK|PORT|ADDR|HOST|IFNAME|HCA|NET|TOPO|FILE|DIR|PATH|HOME|CACHE|DEBUG$|DEBUG_|LOG|TRACE|"
    r"_ID$|PID|NAME|DEVICE|UUID|SOCKET|FR_"
)
"""Variables that differ by nature (places, identities) or that only change what is logged."""

Row = Mapping[str, object]
"""One difference: its name under `what`, and each value under the ranks that have it
(`{"what": "torch", "rank 0": "2.13.0", "rank 1": "2.12.1"}`)."""

_MUST_AGREE = ("TORCH_DISTRIBUTED_DEBUG",)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_TOOLS = ("ddpdoctor", "msgspec")


class EnvironmentSkew(Check):
    """Ranks run different software or settings

    ## What it finds
    Ranks with different versions of Python, torch, CUDA, NCCL or other packages, with different
    contents of the script or its modules, or with different settings for communication and
    computation (`NCCL_*`, `TORCH_*`, `OMP_NUM_THREADS`, ...).

    ## How it knows
    Each rank records

    - its Python version and environment variables when it starts
    - the versions of torch, CUDA and NCCL when torch is imported
    - the variables that the script has changed when it calls `init_process_group`
    - before its first optimizer step, versions of all loaded packages and digests of the loaded
      files of the program

    These are compared between all ranks; a variable that only some ranks have is a difference. The
    finding is proven: it compares what was loaded, not what is installed. If the program's source
    shows that it sets the variable itself, the finding names that line. A number of threads that is
    set after torch was imported has no effect and is not compared.

    ## Why it hurts
    Ranks that run different code get out of step: collectives hang, models diverge, results cannot
    be reproduced. Different NCCL settings hang or crash at the first collective.

    ## How to fix it
    Use one image or one shared file system for all nodes, and one environment file for all ranks.

    ## When it stays quiet
    - values that must differ: ranks, addresses, ports, network interfaces, devices, paths, host
      names
    - variables that only control logging
    """

    code = "DDP103"
    name = "environment-skew"
    family = "launch"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        "launch-environment": "ranks were started with different software or settings",
        "set-by-program": "the program sets variables to different values on different ranks",
    }
    requires = (several_records,)

    def examine(self, run: Run) -> Iterable[Finding]:
        ranks = [p for p in run.ranks.values() if p.started]
        if len(ranks) < 2:
            return
        rows: list[Row] = [
            {"what": what, **_fold(values)}
            for what, values in sorted(_facts(ranks).items())
            if len(values) > 1 and len(set(values.values())) > 1
        ]
        names = [str(row["what"]) for row in rows]
        own = {name: spot for name in names if (spot := _set_by_program(ranks, name))}
        if launched := [row for row in rows if row["what"] not in own]:
            yield self._report(ranks, launched)
        if reported := [row for row in rows if row["what"] in own and _in_time(ranks, row)]:
            yield self._report_own(ranks, reported, own)

    def _report(self, ranks: list[Rank], rows: list[Row]) -> Finding:
        minority = _minority(ranks, [str(r["what"]) for r in rows])
        odd = next((r for r in ranks if r.rank in minority), ranks[-1])
        entered = odd.first(InitEntered)
        names = [str(row["what"]) for row in rows]
        return self.finding(
            rule="launch-environment",
            ranks=minority,
            subjects=tuple(names),
            location=odd.location(entered.site) if entered else None,
            label="these ranks join one process group",
            summary=f"{ranks_do(minority, 'run')} with different {_kinds(names)} than the others: "
            + _several(rows),
            cause="the nodes or launch commands are set up differently",
            fix="start every rank from the same image, script and environment",
            evidence={"differences": rows},
            at=odd.wall(odd.started.at) if odd.started else 0.0,
        )

    def _report_own(
        self, ranks: list[Rank], rows: list[Row], own: Mapping[str, Location]
    ) -> Finding:
        """A finding about variables that the program itself sets; `own`: the lines that do."""
        names = [str(row["what"]) for row in rows]
        odd = {
            r.rank
            for r in ranks
            for name in names
            if (e := r.latest(InitEntered)) and name in e.changed
        }
        rest = [r.rank for r in ranks if r.rank not in odd]
        return self.finding(
            rule="set-by-program",
            ranks=tuple(sorted(odd if odd and rest else {r.rank for r in ranks})),
            subjects=tuple(names),
            location=own[names[0]],
            label=f"sets {names[0]}",
            related=tuple(Related(f"sets {name}", own[name]) for name in names[1:4]),
            summary=f"the program sets {listed(names[:3])} to different values on the ranks: "
            + _several(rows),
            cause="the value differs between ranks, or only some ranks reach this line",
            fix="set it to the same value on every rank, or once in the launch environment",
            evidence={"differences": rows},
            at=min((r.wall(e.at) for r in ranks if (e := r.latest(InitEntered))), default=0.0),
        )


def _set_by_program(ranks: list[Rank], name: str) -> Location | None:
    """The line of the program that sets a variable; None if it does not, or if the ranks differed
    in it already when they were started (unless one process spawned them all)."""
    spots = [
        (r, e.set_at[name]) for r in ranks if (e := r.latest(InitEntered)) and name in e.set_at
    ]
    reported = [r.started for r in ranks if r.started]
    equal_at_start = len({s.environment.get(name) for s in reported}) == 1
    if not spots or not (equal_at_start or all(s.spawned for s in reported)):
        return None
    rank, site = spots[0]
    return rank.location(site)


def _in_time(ranks: list[Rank], row: Row) -> bool:
    """Whether a variable that the program sets can still have an effect. torch reads the number of
    threads when it is imported, Python its hash seed when it starts."""
    if row["what"] in _THREADS:
        return len({e.threads for r in ranks if (e := r.first(TorchLoaded))}) > 1
    return row["what"] != "PYTHONHASHSEED"


def _facts(ranks: list[Rank]) -> dict[str, dict[int, str]]:
    """What should be equal on all ranks: name to value by rank. A rank whose value is not known is
    left out."""
    facts: dict[str, dict[int, str]] = {}

    def note(what: str, rank: Rank, value: str) -> None:
        if value:
            facts.setdefault(what, {})[rank.rank] = value

    names = {n for r in ranks for n in _settings(r)}
    for rank in ranks:
        started, torch, program = rank.started, rank.first(TorchLoaded), rank.first(ProgramSeen)
        note("Python", rank, started.python if started else "")
        if torch:
            note("torch", rank, torch.torch)
            note("CUDA", rank, torch.cuda)
            note("NCCL", rank, torch.nccl)
        if program:
            for file, digest in program.files.items():
                note(f"file {file}", rank, digest)
            for name, version in program.versions.items():
                if name not in (*_TOOLS, "torch"):
                    note(f"package {name}", rank, version)
        elif started:
            note("script", rank, started.script_digest)
        settings = _settings(rank)
        for name in names:
            note(name, rank, settings.get(name, "(not set)"))
    return facts


def _settings(rank: Rank) -> dict[str, str]:
    """The variables that should be equal on all ranks, as of `init_process_group`."""
    environment: dict[str, str] = dict(rank.started.environment) if rank.started else {}
    entered = rank.latest(InitEntered)
    environment.update(entered.changed if entered else {})
    return {
        name: value
        for name, value in environment.items()
        if name in _MUST_AGREE
        or (
            _MATTERS.match(name)
            and not _MAY_DIFFER.search(name)
            and "/" not in value
            and not name.startswith("TORCHELASTIC")
        )
    }


def _fold(values: Mapping[int, str]) -> dict[str, str]:
    """Each value under the ranks that have it: `{"ranks 0-1": "2.13.0", "rank 2": "2.12.1"}`."""
    return {ranks_text(ranks): values[ranks[0]] for ranks in equal_ranks(values)}


def _minority(ranks: list[Rank], names: list[str]) -> tuple[int, ...]:
    """The ranks that differ from the majority. Where the sides are equal, rank 0's counts as the
    majority."""
    facts = _facts(ranks)
    odd = {r for name in names for group in equal_ranks(facts[name])[1:] for r in group}
    return tuple(sorted(odd))


def _kinds(names: list[str]) -> str:
    """`files`, `versions and settings`: the kinds of these differences."""
    kinds = {
        "files": any(n.startswith("file ") or n == "script" for n in names),
        "versions": any(n.startswith("package ") or n in ("Python", "torch", "CUDA", "NCCL")
                        for n in names),
        "settings": any(n.isupper() and n not in ("CUDA", "NCCL") for n in names),
    }  # fmt: skip
    return listed([kind for kind, there in kinds.items() if there]) or "software"


def _several(rows: list[Row]) -> str:
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return "; ".join(_short(row) for row in rows[:3]) + more


def _short(row: Row) -> str:
    values = ", ".join(f"{value} on {key}" for key, value in row.items() if key != "what")
    return f"{row['what']} is {values}"
