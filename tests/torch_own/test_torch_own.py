"""PyTorch's own distributed tests, under the probe: what passes without it passes with it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from sampling import ROOT, inherited, run

pytest.importorskip("expecttest", reason="torch's own test helpers need expecttest")

SCRIPT = str(ROOT / "tests" / "torch_own" / "gloo_tests.py")

SHORT = ["test_all_reduce_sum", "test_DistributedDataParallelCPU"]

WITHOUT_GPU = (
    "all_gather|all_reduce|all_to_all|barrier|batch_isend|broadcast|gather|scatter|reduce|send|recv"
    "|ddp_|DistributedDataParallelCPU|static_graph|model_averager|localSGD|subgroups|group"
    "|no_sync|unused|graph|sampler|verify_model|get_"
)
PER_RUN = 8


def outcomes(names: list[str], folder: Path, *, doctor: bool) -> dict[str, str]:
    """`ok`, `skip` or `FAIL` by test."""
    command = [sys.executable, SCRIPT, *names]
    if doctor:
        wrap = [sys.executable, "-m", "ddpdoctor", "exec", "--quiet", "--on-hang", "report"]
        command = [*wrap, "--debug-level", "off", "--out", str(folder / "run"), "--", *command]
    environment = inherited(TEMP_DIR=str(folder), BACKEND="gloo", WORLD_SIZE="2")
    folder.mkdir(parents=True, exist_ok=True)
    _, printed = run(command, cwd=folder, environment=environment, limit_s=110 * len(names))
    return {name: word for word, name in re.findall(r"^(ok|skip|FAIL) (test_\w+)", printed, re.M)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_few_of_torch_s_own_tests_pass_under_the_probe(tmp_path: Path) -> None:
    assert outcomes(SHORT, tmp_path, doctor=True) == dict.fromkeys(SHORT, "ok")
    records = list((tmp_path / "run").glob("rank-*.jsonl"))
    assert len(records) >= 2 * len(SHORT), "the probe never saw these ranks"


def names() -> list[str]:
    _, printed = run([sys.executable, SCRIPT, "--list"], cwd=ROOT)
    listed = [n for n in printed.split() if n.startswith("test_")]
    return [n for n in listed if re.search(WITHOUT_GPU, n) and not re.search("cuda|nccl", n)]


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
