"""PyTorch's own distributed tests, under the probe: what passes without it passes with it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from sampling import ROOT, inherited, run

pytest.importorskip("expecttest", reason="torch's own test helpers need expecttest")

SCRIPT = str(ROOT / "tests" / "torch_own" / "gloo_tests.py")

SHORT = [
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_all_gather_object_default_pg",
    "test_all_reduce_sum",
    "test_barrier",
    "test_broadcast",
    "test_destroy_group",
    "test_isend",
    "test_reduce_scatter_v",
    "test_send_recv",
]

PER_RUN = 48
LIMIT_S = 60
"""Of one test; torch's own class ends it then."""


def outcomes(names: list[str], folder: Path, *, doctor: bool) -> dict[str, str]:
    """`ok`, `skip` or `FAIL` by test."""
    command = [sys.executable, SCRIPT, *names]
    if doctor:
        wrap = [sys.executable, "-m", "ddpdoctor", "exec", "--quiet", "--on-hang", "report"]
        command = [*wrap, "--debug-level", "off", "--out", str(folder / "run"), "--", *command]
    environment = inherited(TEMP_DIR=str(folder), BACKEND="gloo", WORLD_SIZE="2")
    environment["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(LIMIT_S)
    folder.mkdir(parents=True, exist_ok=True)
    _, printed = run(
        command, cwd=folder, environment=environment, limit_s=LIMIT_S * (len(names) + 1)
    )
    return {name: word for word, name in re.findall(r"^(ok|skip|FAIL) (test_\w+)", printed, re.M)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_few_of_torch_s_own_tests_pass_under_the_probe(tmp_path: Path) -> None:
    assert outcomes(SHORT, tmp_path, doctor=True) == dict.fromkeys(SHORT, "ok")
    records = list((tmp_path / "run").glob("rank-*.jsonl"))
    assert len(records) >= 2 * len(SHORT), "the probe never saw these ranks"


def names() -> list[str]:
    _, printed = run([sys.executable, SCRIPT, "--list"], cwd=ROOT)
    return [n for n in printed.split() if n.startswith("test_")]


@pytest.mark.exhaustive
@pytest.mark.timeout(4 * 3600)
def test_all_that_pass_without_the_probe_pass_with_it(tmp_path: Path) -> None:
    found: dict[str, str] = {}
    every = names()
    for first in range(0, len(every), PER_RUN):
        some = every[first : first + PER_RUN]
        found |= outcomes(some, tmp_path / f"with-{first}", doctor=True)
    suspects = [n for n in every if found.get(n) not in ("ok", "skip")]
    alone = outcomes(suspects, tmp_path / "without", doctor=False) if suspects else {}
    worse = [n for n in suspects if alone.get(n) == "ok"]
    passed, skipped = (sum(w == word for w in found.values()) for word in ("ok", "skip"))
    print(f"{passed} passed, {skipped} skipped, {len(suspects)} failed, {len(worse)} only with us")
    assert passed > 50
    assert worse == []
