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
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_default_pg",
    "test_all_reduce_sum_async",
    "test_barrier",
    "test_batch_isend_irecv_gloo",
    "test_broadcast",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_gather_checks",
    "test_get_future",
    "test_isend",
    "test_scatter_object_list",
    "test_send_recv",
    "test_static_graph_api_cpu",
]

PER_RUN = 48
LIMIT_S = 60
"""Of one test; torch's own class ends it then."""


def outcomes(names: list[str], folder: Path, *, doctor: bool, ranks: int = 2) -> dict[str, str]:
    """By test: `ok`, `FAIL`, or `skip` with the reason."""
    command = [sys.executable, SCRIPT, *names]
    if doctor:
        wrap = [sys.executable, "-m", "ddpdoctor", "exec", "--quiet", "--on-hang", "report"]
        command = [*wrap, "--debug-level", "off", "--out", str(folder / "run"), "--", *command]
    environment = inherited(TEMP_DIR=str(folder), BACKEND="gloo", WORLD_SIZE=str(ranks))
    environment["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(LIMIT_S)
    folder.mkdir(parents=True, exist_ok=True)
    limit_s = LIMIT_S * (len(names) + 1)
    _, printed = run(command, cwd=folder, environment=environment, limit_s=limit_s)
    told = re.findall(r"^(ok|skip|FAIL) (test_\w+)(.*)", printed, re.M)
    return {name: word + reason for word, name, reason in told}


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
    worse: list[str] = []
    every = names()
    for ranks in (2, 4, 8):  # some ask for more
        left = [n for n in every if ranks == 2 or "world" in found.get(n, "")]
        for first in range(0, len(left), PER_RUN):
            some, place = left[first : first + PER_RUN], tmp_path / f"{ranks}-{first}"
            found |= outcomes(some, place / "with", doctor=True, ranks=ranks)
            suspects = [n for n in some if not found.get(n, "").startswith(("ok", "skip"))]
            alone = outcomes(suspects, place, doctor=False, ranks=ranks) if suspects else {}
            worse += [n for n in suspects if alone.get(n) == "ok"]
    passed, skipped = (sum(w.startswith(word) for w in found.values()) for word in ("ok", "skip"))
    print(f"{passed} of {len(every)} passed, {skipped} skipped, {len(worse)} failed only with us")
    assert passed > 100
    assert worse == []
