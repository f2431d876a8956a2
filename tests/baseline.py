"""Keeps what the doctor says today of recorded runs, and compares it with what it says later.

    python tests/baseline.py keep FOLDER       # run every sample, keep the run folders
    python tests/baseline.py write FOLDER      # diagnose what is kept, keep the findings
    python tests/baseline.py compare FOLDER    # diagnose it again, print what changed

Use it around a change of structure: nothing of check, severity, ranks, steps, line, rule and
consequences may change without a reason in the commit. Any folder of runs will do, also those of
other programs.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import sampling

import ddpdoctor

SAID = "findings-before.json"
"""The findings that were kept, beside each run's folder."""

WORDS = ("label", "summary", "cause", "fix")


def keep(folder: Path, jobs: int) -> None:
    """Run every sample, its run folder at `FOLDER/<sample>/run`."""

    def one(sample: sampling.Sample) -> str:
        place = folder / sample.name
        if (place / "run").exists():
            return ""
        place.mkdir(parents=True, exist_ok=True)
        try:
            sampling.run(sampling.command(sample, place / "run"), cwd=place, limit_s=150)
        except AssertionError as error:
            return f"{sample.name}: {str(error).splitlines()[0]}"
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        for trouble in pool.map(one, sampling.collect()):
            if trouble:
                print(trouble)


def findings(run: Path) -> list[dict[str, Any]]:
    """What the doctor says of one run folder, as plain JSON values."""
    report = ddpdoctor.load(run)
    kept = []
    for finding in report.findings:
        place = finding.location
        kept.append(
            {
                "code": finding.code,
                "severity": finding.severity.value,
                "ranks": list(finding.ranks),
                "steps": str(finding.steps),
                "line": f"{Path(place.file).name}:{place.line}" if place else None,
                "rule": finding.rule,
                "consequences": sorted(effect.check for effect in finding.consequences),
                **{word: getattr(finding, word) for word in WORDS},
            }
        )
    return kept


def folders(folder: Path) -> list[Path]:
    return sorted({path.parent for path in folder.rglob("rank-*.jsonl")})


def said(run: Path) -> list[dict[str, Any]] | str:
    try:
        return findings(run)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def write(folder: Path, jobs: int) -> None:
    """Keep the findings of every run folder beside it."""
    runs = folders(folder)
    with ProcessPoolExecutor(jobs) as pool:
        for run, now in zip(runs, pool.map(said, runs), strict=True):
            (run.parent / f"{run.name}.{SAID}").write_text(json.dumps(now, indent=1))
    print(f"{len(runs)} runs kept")


def compare(folder: Path, jobs: int, words: bool) -> int:
    """Print what changed; the number of runs that did. `words` compares what is printed too."""
    runs = [r for r in folders(folder) if (r.parent / f"{r.name}.{SAID}").exists()]
    changed = 0
    with ProcessPoolExecutor(jobs) as pool:
        for run, now in zip(runs, pool.map(said, runs), strict=True):
            before = json.loads((run.parent / f"{run.name}.{SAID}").read_text())
            lost = [_line(f, words) for f in before] if isinstance(before, list) else [before]
            new = [_line(f, words) for f in now] if isinstance(now, list) else [now]
            if sorted(lost) != sorted(new):
                changed += 1
                print(run.relative_to(folder))
                print("".join(f"  - {line}\n" for line in lost if line not in new), end="")
                print("".join(f"  + {line}\n" for line in new if line not in lost), end="")
    print(f"{len(runs)} runs compared, {changed} changed")
    return changed


def _line(finding: dict[str, Any], words: bool) -> str:
    facts = ("code", "severity", "ranks", "steps", "line", "consequences")
    told = " ".join(str(finding.get(k)) for k in facts)  # older folders lack the last one
    return f"{told} {[finding[w] for w in WORDS]}" if words else told


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["keep", "write", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--words", action="store_true", help="compare the sentences too")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.what == "keep":
        keep(folder, options.jobs)
        write(folder, options.jobs)
        return 0
    if options.what == "write":
        write(folder, options.jobs)
        return 0
    return 1 if compare(folder, options.jobs, options.words) else 0


if __name__ == "__main__":
    sys.exit(main())
