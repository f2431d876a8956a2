"""DDP103."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ddpdoctor.events import InitEntered, ProgramSeen, TorchLoaded
from ddpdoctor.report.findings import Check, Finding, Related, Severity
from ddpdoctor.run import Location, Rank, Run, ranks_do, ranks_text

_MATTERS = re.compile(
    r"NCCL_|GLOO_|OMP_NUM_THREADS|MKL_NUM_THREADS|TORCH_|TORCHDYNAMO_|TORCHINDUCTOR_|CUBLAS_|"
    r"PYTORCH_(CUDA_)?ALLOC_CONF|NVIDIA_TF32_OVERRIDE|CUDA_LAUNCH_BLOCKING|PYTHONHASHSEED"
)
_MAY_DIFFER = re.compile(
    r"RANK|PORT|ADDR|HOST|IFNAME|HCA|NET|TOPO|FILE|DIR|PATH|HOME|CACHE|DEBUG$|DEBUG_|LOG|TRACE|"
    r"_ID$|PID|NAME|DEVICE|UUID|SOCKET|FR_"
)
"""Places and identities, which differ by nature, and what only changes what is printed."""

Row = Mapping[str, object]
"""What differs (`what`), and its values by the ranks that have them."""

_MUST_AGREE = ("TORCH_DISTRIBUTED_DEBUG",)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_TOOLS = ("ddpdoctor", "msgspec")


class EnvironmentSkew(Check):
    """Ranks run different software or settings

    ## What it finds
    Ranks whose Python, torch, CUDA, NCCL or libraries have other versions, whose script or modules
    have other contents, or whose settings for communication and computing (`NCCL_*`, `TORCH_*`,
    `OMP_NUM_THREADS`, ...) differ.

    ## How it knows
    Each rank records its Python and environment as it starts, torch, CUDA and NCCL when torch is
    imported, the variables that the script changed when it calls `init_process_group`, and before
    its first optimizer step, of all that is loaded, the versions of packages and digests of the
    program's own files. They are compared between all ranks; a variable that only some of them have
    is a difference too. The finding is proven: it is about what was really loaded, not about what
    is installed. Where the program sets a variable itself, which its text shows, its line is named;
    a number of threads that it sets when torch is imported already changes nothing.

    ## Why it hurts
    Ranks that run different code fall out of step: hangs in collectives, models that drift apart,
    results that cannot be repeated. NCCL settings that differ hang or crash at the first
    collective.

    ## How to fix it
    One image or one shared file system for all nodes, one environment file for all ranks.

    ## When it stays quiet
    What must differ: ranks, addresses, ports, network interfaces, devices, paths, host names; and
    what only decides about logging.
    """

    code = "DDP103"
    name = "environment-skew"
    family = "launch"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        return None if len(run.ranks) > 1 else "a single rank left a record"

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
            ranks=minority,
            subjects=tuple(names),
            location=odd.location(entered.site) if entered else None,
            label="these ranks join one group",
            summary=f"{ranks_do(minority, 'run')} with other {_kinds(names)} than the rest: "
            + _several(rows),
            cause="nodes or launch commands that were not set up alike",
            fix="start every rank from the same image, script and environment",
            evidence={"differences": rows},
            at=odd.wall(odd.started.at) if odd.started else 0.0,
        )

    def _report_own(
        self, ranks: list[Rank], rows: list[Row], own: Mapping[str, Location]
    ) -> Finding:
        """Settings that the program makes differ."""
        names = [str(row["what"]) for row in rows]
        odd = {
            r.rank
            for r in ranks
            for name in names
            if (e := r.latest(InitEntered)) and name in e.changed
        }
        rest = [r.rank for r in ranks if r.rank not in odd]
        return self.finding(
            ranks=tuple(sorted(odd if odd and rest else {r.rank for r in ranks})),
            subjects=tuple(names),
            location=own[names[0]],
            label=f"sets {names[0]}",
            related=tuple(Related(f"sets {name}", own[name]) for name in names[1:4]),
            summary=f"the program sets {' and '.join(names[:3])}, not alike on all ranks: "
            + _several(rows),
            cause="the value is not the same on all ranks, or only some of them come to this line",
            fix="set it alike on every rank, or once for all where the run is launched",
            evidence={"differences": rows},
            at=min((r.wall(e.at) for r in ranks if (e := r.latest(InitEntered))), default=0.0),
        )


def _set_by_program(ranks: list[Rank], name: str) -> Location | None:
    """The line of the program that sets a variable in which ranks differ, which as they were
    started did not, or were of one process."""
    spots = [
        (r, e.set_at[name]) for r in ranks if (e := r.latest(InitEntered)) and name in e.set_at
    ]
    reported = [r.started for r in ranks if r.started]
    alike = len({s.environment.get(name) for s in reported}) == 1
    if not spots or not (alike or all(s.spawned for s in reported)):
        return None
    rank, site = spots[0]
    return rank.location(site)


def _in_time(ranks: list[Rank], row: Row) -> bool:
    """Whether a variable that the program sets can have an effect: torch has taken the number of
    its threads by the time it is imported."""
    if row["what"] in _THREADS:
        return len({e.threads for r in ranks if (e := r.first(TorchLoaded))}) > 1
    return row["what"] != "PYTHONHASHSEED"


def _facts(ranks: list[Rank]) -> dict[str, dict[int, str]]:
    """What ought to agree: name to value by rank; a rank that could not tell is left out."""
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
    """The variables that ought to agree, as they stood when the group was made."""
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
    """Values by the ranks that have them."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    return {ranks_text(ranks): value for value, ranks in by_value.items()}


def _minority(ranks: list[Rank], names: list[str]) -> tuple[int, ...]:
    """The ranks that are not with the majority; with rank 0's side where there is none."""
    facts = _facts(ranks)
    odd: set[int] = set()
    for name in names:
        values = facts[name]
        first = values[min(values)]
        counts: dict[str, int] = {}
        for value in values.values():
            counts[value] = counts.get(value, 0) + 1
        usual = max(counts, key=lambda v: (counts[v], v == first))
        odd |= {rank for rank, value in values.items() if value != usual}
    return tuple(sorted(odd))


def _kinds(names: list[str]) -> str:
    kinds = {
        "files": any(n.startswith("file ") or n == "script" for n in names),
        "versions": any(n.startswith("package ") or n in ("Python", "torch", "CUDA", "NCCL")
                        for n in names),
        "settings": any(n.isupper() and n not in ("CUDA", "NCCL") for n in names),
    }  # fmt: skip
    return " and ".join(kind for kind, there in kinds.items() if there) or "software"


def _several(rows: list[Row]) -> str:
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return "; ".join(_short(row) for row in rows[:3]) + more


def _short(row: Row) -> str:
    values = ", ".join(f"{value} on {key}" for key, value in row.items() if key != "what")
    return f"{row['what']} is {values}"
