"""The sdist and the wheel are complete, and run where there is only what they declare."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import layers
import pytest
from recordings import site, steps, write_folder
from sampling import ROOT, SAMPLES, inherited

packaging = pytest.importorskip("packaging.requirements")
pytest.importorskip("build", reason="pip install -e '.[dev]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SHIPPED = ("ddpdoctor", "checks", "pyproject.toml", "README.md", "LICENSE")
TORCH = "torch"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist and the wheel made from it. Built of a copy: setuptools writes into
    the sources."""
    place = tmp_path_factory.mktemp("packaging")
    source, out = place / "source", place / "dist"
    source.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    words = ["-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(
        [sys.executable, *words], cwd=place, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def wheel_of(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def expected() -> set[str]:
    """The files that an installation has."""
    found = {f"{name.replace('.', '/')}" for name in layers.MODULES}
    files = set()
    for name, path in layers.MODULES.items():
        inside = name.replace(".", "/")
        files.add(f"{inside}/__init__.py" if path.name == "__init__.py" else f"{inside}.py")
    assert len(files) == len(found)
    templates = (ROOT / "ddpdoctor" / "render" / "page" / "templates").iterdir()
    files |= {f"ddpdoctor/render/page/templates/{p.name}" for p in templates}
    return files | {"ddpdoctor/py.typed"}


def test_the_wheel_is_complete(built: Path) -> None:
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        names = {n for n in wheel.namelist() if ".dist-info/" not in n}
        (about,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        said = wheel.read(about).decode()
        (commands,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
        assert "ddpdoctor = ddpdoctor.__main__:main" in wheel.read(commands).decode()
    assert names == expected()
    assert "License-Expression: Apache-2.0" in said and "Requires-Python: >=3.10" in said


def test_the_sdist_is_complete(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {n.partition("/")[2] for n in file.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "checks/__init__.py"} <= names
    assert not any(n.startswith(("tests/whole", "samples", ".venv", "build")) for n in names)


def needed(without: Iterable[str] = ()) -> Iterator[metadata.Distribution]:
    """What pip would install: the declared dependencies, theirs, and so on."""
    seen: set[str] = set()
    asked = [packaging.Requirement(r) for r in declared()]
    while asked:
        requirement = asked.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in seen or name in without:
            continue
        seen.add(name)
        found = metadata.distribution(requirement.name)
        assert requirement.specifier.contains(found.version.partition("+")[0], prereleases=True)
        yield found
        for text in found.requires or ():
            other = packaging.Requirement(text)
            extras = [{"extra": e} for e in requirement.extras] or [{"extra": ""}]
            if other.marker is None or any(other.marker.evaluate(e) for e in extras):
                try:
                    metadata.distribution(other.name)
                except metadata.PackageNotFoundError:
                    continue  # torch names libraries of CUDA; a build for CPUs runs without them
                asked.append(other)


def declared() -> list[str]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        text for text in project["dependencies"]
        if (marker := packaging.Requirement(text).marker) is None or marker.evaluate()
    ]  # fmt: skip


def environment(place: Path, built: Path, without: Iterable[str] = ()) -> Path:
    """The `bin` of a fresh environment with the wheel and its dependencies, which are links to
    those at hand: pip would fetch a gigabyte."""
    venv.create(place / "venv", with_pip=False, symlinks=True)
    python = place / "venv" / "bin" / "python"
    words = ["--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", *words, str(wheel_of(built))], check=True, timeout=120
    )
    links = place / "links"
    links.mkdir()
    for found in needed(without):
        tops = {Path(f).parts[0] for f in found.files or () if ".." not in Path(f).parts}
        for top in tops - {"__pycache__"}:
            target = Path(str(found.locate_file(top)))
            if target.exists() and not (links / top).exists():
                (links / top).symlink_to(target)
    (libraries,) = (place / "venv" / "lib").glob("python*/site-packages")
    (libraries / "links.pth").write_text(f"{links}\n")
    return place / "venv" / "bin"


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in inherited().items() if not k.startswith("PYTHON")}
    path = f"{Path(words[0]).parent}{os.pathsep}{clean['PATH']}"
    return subprocess.run(
        words, cwd=folder, env={**clean, "PATH": path}, capture_output=True, text=True, timeout=300
    )


def test_the_demo_runs_with_what_is_declared(built: Path, tmp_path: Path) -> None:
    commands = environment(tmp_path, built)
    script = shutil.copy(SAMPLES / "model" / "unused_parameter.py", tmp_path)
    where = call(tmp_path, str(commands / "python"), "-c", "import ddpdoctor; print(ddpdoctor)")
    assert str(tmp_path / "venv") in where.stdout
    done = call(
        tmp_path, str(commands / "ddpdoctor"), "run", "--nproc-per-node", "2", "--out", "run",
        str(script),
    )  # fmt: skip
    assert "error[DDP301]" in done.stderr, done.stderr[-3000:]


def test_reading_needs_no_torch(built: Path, tmp_path: Path) -> None:
    """As `pipx` or `uvx` would have it on a laptop."""
    commands = environment(tmp_path, built, without=[TORCH])
    ddpdoctor = str(commands / "ddpdoctor")
    events = [site(1, "train.py", 88, "optimizer.step()"), *steps(10, site=1)]
    run = str(write_folder(tmp_path / "run", {0: events, 1: events}).path)
    assert (
        "No module named 'torch'"
        in call(tmp_path, str(commands / "python"), "-c", "import torch").stderr
    )
    for words in (
        ("report", run), ("report", run, "--rank", "1"), ("compare", run, run), ("watch", run),
        ("explain",), ("explain", "unsynced-step"), ("--version",),
        *(("report", run, "--format", name) for name in ("json", "sarif", "junit", "html")),
    ):  # fmt: skip
        done = call(tmp_path, ddpdoctor, *words)
        assert done.returncode == 0 and done.stdout, (words, done.stderr[-1000:])
    nobody = call(tmp_path, ddpdoctor, "attach", "4194304")
    assert nobody.returncode == 2 and "there is no process 4194304" in nobody.stderr
    loads = "import ddpdoctor, sys; ddpdoctor.load(sys.argv[1])"
    done = call(tmp_path, str(commands / "python"), "-c", loads, run)
    assert done.returncode == 0, done.stderr[-1000:]
