"""Weights & Biases: tables of the findings and of the time ledger, offline unless `WANDB_MODE` says
otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import wandb

from ..report.findings import Report
from .figures import FINDING_COLUMNS, counts, finding_rows, per_rank


def export(report: Report, target: str) -> str:
    """Write a run below the folder `target`."""
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", "ddpdoctor"),
        dir=folder,
        mode=mode,
        job_type="ddpdoctor",
        config={
            "command": " ".join(report.run.command),
            "world_size": report.run.world_size,
            "torch": report.run.torch,
            "ddpdoctor": report.tool.version,
        },
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    ) as run:
        ranks = [[name, rank, float(value)] for name, rank, value in per_rank(report)]
        run.log({
            "findings": wandb.Table(list(FINDING_COLUMNS), [list(r) for r in finding_rows(report)]),
            "ranks": wandb.Table(["figure", "rank", "value"], ranks),
        })  # fmt: skip
        run.summary["outcome"] = report.run.outcome
        for name, number in counts(report).items():
            run.summary[f"findings/{name}"] = number
        place = run.dir
    return f"wandb sync {Path(place).parent}" if mode == "offline" else mode
