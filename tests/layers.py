"""The packages of the code in the order in which they build on each other.

`MAY_IMPORT` has a row for every package; `test_architecture` holds the code to it, with imports
inside functions and for annotations counted in. `make readme` writes the table in CONTRIBUTING
from it: what a package does is the first line of its docstring.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ddpdoctor"
CHECKS = ROOT / "checks"

READ = ("events", "storage", "run")
REPORTED = (*READ, "report")
WATCHED = (
    "events",
    "storage",
    "probe.recording",
    "probe.source",
    "probe.tensors",
    "probe.collectives",
    "probe.training",
)

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "events": (),
    "storage": ("events",),
    "run": ("events", "storage"),
    "_version": (),
    "analysis.rank_differences": ("events", "run"),
    "report": (*READ, "_version", "analysis.rank_differences"),
    "config": ("report",),
    "analysis": (),
    "analysis.calls": REPORTED,
    "analysis.waiting": (*REPORTED, "analysis.calls"),
    "analysis.control_flow": (*REPORTED, "analysis.calls", "analysis.waiting"),
    "analysis.divergence": (
        *REPORTED,
        "analysis.calls",
        "analysis.waiting",
        "analysis.control_flow",
        "analysis.rank_differences",
    ),
    "analysis.meshes": REPORTED,
    "analysis.models": REPORTED,
    "analysis.replicas": (
        *REPORTED,
        "analysis.calls",
        "analysis.rank_differences",
        "analysis.models",
    ),
    "analysis.manual_sync": (
        *REPORTED,
        "analysis.calls",
        "analysis.rank_differences",
        "analysis.replicas",
        "analysis.models",
        "analysis.data",
    ),
    "analysis.data": (*REPORTED, "analysis.meshes"),
    "analysis.process": REPORTED,
    "checks": ("events", "run", "report", "analysis.*"),
    "probe.recording": ("events", "storage"),
    "probe.source": ("events", "probe.recording"),
    "probe.tensors": ("events", "probe.recording"),
    "probe.collectives": ("events", "storage", "probe.recording", "probe.source"),
    "probe.training": (
        "events",
        "storage",
        "probe.recording",
        "probe.source",
        "probe.tensors",
        "probe.collectives",
    ),
    "probe.watchers": (),
    "probe.watchers.manual_sync": WATCHED,
    "probe.watchers.gradients": (*WATCHED, "probe.watchers.manual_sync"),
    "probe.watchers.losses": (*WATCHED, "probe.watchers.gradients"),
    "probe.watchers.graph": (*WATCHED, "probe.watchers.manual_sync"),
    "probe.watchers.data": WATCHED,
    "probe.watchers.process": (*WATCHED, "nodes"),
    "probe.watchers.numerics": WATCHED,
    "probe.watchers.memory": WATCHED,
    "probe.watchers.timing": WATCHED,
    "probe.bootstrap": (*WATCHED, "probe.watchers.*"),
    "probe": ("probe.recording", "probe.bootstrap", "probe.watchers.process"),
    "shim": ("probe", "__init__"),
    "monitor": (*REPORTED, "config"),
    "render": REPORTED,
    "render.page": (
        *REPORTED,
        "analysis.calls",
        "analysis.waiting",
        "analysis.replicas",
        "render",
    ),
    "exporters": (*REPORTED, "render"),
    "nodes": ("events", "storage", "_version"),
    "launch": (
        *REPORTED,
        "_version",
        "config",
        "monitor",
        "nodes",
        "render",
        "render.page",
        "exporters",
    ),
    "embedded": (
        *REPORTED,
        "_version",
        "config",
        "monitor",
        "launch",
        "render",
        "render.page",
        "probe",
        "probe.recording",
        "exporters",
    ),
    "integrations": ("report", "embedded"),
    "attach": (*REPORTED, "monitor", "render"),
    "leftovers": (*READ, "_version"),
    "cli": (
        *REPORTED,
        "_version",
        "config",
        "monitor",
        "render",
        "render.page",
        "launch",
        "attach",
        "leftovers",
        "exporters",
    ),
    "__init__": ("_version", "embedded", "report"),
    "__main__": ("cli",),
}
"""Package to the packages it may import; `x.*` are all packages below `x`. A module of its own at
the root of `ddpdoctor` counts as a package."""


def sources() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *CHECKS.rglob("*.py")])


def module_of(path: Path) -> str:
    """The dotted name of a file, as it is imported."""
    if path.is_relative_to(CHECKS):
        parts = ["ddpdoctor", "checks", *path.relative_to(CHECKS).with_suffix("").parts]
    else:
        parts = ["ddpdoctor", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sources()}


def package_of(module: str) -> str:
    """The row of `MAY_IMPORT` that a module of ours stands in."""
    parts = module.split(".")[1:]
    if not parts:
        return "__init__"
    if parts[0] == "checks":
        return "checks"
    inside = parts if MODULES[module].name == "__init__.py" else parts[:-1]
    return ".".join(inside) or parts[0]


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports wherever in it, ours as they are called in full."""
    module = module_of(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in MODULES else base


def allowed(package: str, target: str) -> bool:
    """Whether a package may import another one."""
    rows = MAY_IMPORT[package]
    return target == package or any(
        target.startswith(row[:-1]) if row.endswith(".*") else target == row for row in rows
    )


def purpose(package: str) -> str:
    """What a package does: the first sentence of its docstring."""
    place = CHECKS if package == "checks" else PACKAGE.joinpath(*package.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def table() -> str:
    """The layers as a Markdown table; sets that several packages share have a name."""
    rows = ["| package | what it does | may import |", "|---|---|---|"]
    for package, others in MAY_IMPORT.items():
        if package in ("__init__", "__main__", "_version", "analysis", "probe.watchers", "shim"):
            continue
        place = "checks/" if package == "checks" else f"ddpdoctor/{package.replace('.', '/')}"
        place += "" if package in ("checks", "config") else "/"
        inside = package.rpartition(".")[0]
        for whole, word in ((WATCHED, "*floors*"), (REPORTED, "*reported*")):
            if package != "checks" and set(whole) <= set(others) and len(others) >= len(whole):
                others = (word, *(o for o in others if o not in whole))
        shown = [o.removeprefix(f"{inside}.") if inside else o for o in others if o != "_version"]
        rows.append(f"| `{place}` | {purpose(package)} | {', '.join(shown) or 'nothing of ours'} |")
    named = {"floors": WATCHED, "reported": REPORTED}
    notes = (f"*{word}*: {', '.join(whole)}." for word, whole in named.items())
    return "\n".join(rows) + "\n\n" + " ".join(notes)
