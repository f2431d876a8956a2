"""Is this command one of several that a scheduler has started as one job step, each of them a rank?

`srun ddpdoctor exec -- python train.py` starts a doctor for each rank. They share a folder; the
first one on each node examines its ranks, and the others become the command.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..storage.run_folder import RunFolder, plain_name


@dataclass(frozen=True)
class Task:
    """One of several commands of a job step.

    Attributes:
        step: what all of them have in common, and no other step has.
        node: number of this node, 0 where the scheduler does not say.
    """

    step: str
    node: int

    def folder(self, out: Path | None, stem: str) -> RunFolder:
        """The folder of the step; the first task that comes makes it.

        Args:
            out: where the user wants it; stem: a name for the command.

        Raises:
            FolderError: another run is there, or it cannot be written.
        """
        path = out or Path("ddpdoctor-runs") / plain_name(f"{self.step}-{stem}")
        there = RunFolder(path).read_info()
        if there is not None and there.id == self.step and there.ended_at is None:
            return RunFolder(path)
        return RunFolder.create(path)

    def is_first(self, folder: RunFolder) -> bool:
        """Whether this is the first task on its node: true for one of them only."""
        mark = folder.path / f".examined-on-{plain_name(platform.node())}-{self.node}"
        try:
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        return True


def this_task(environ: Mapping[str, str]) -> Task | None:
    """The task that this process is, None where it is started alone."""
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PROCID" in environ:
        job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
        node = environ.get("SLURM_NODEID", "")
        return Task(f"slurm-{job}.{step}", int(node) if node.isdecimal() else 0)
    space = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if space and environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return Task(f"mpi-{space}", 0)
    return None
