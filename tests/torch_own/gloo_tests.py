"""PyTorch's own distributed tests on gloo, as a script: `python gloo_tests.py TEST...`.

What test/distributed/test_distributed_spawn.py does in PyTorch's repository, from the parts that
the wheel ships. Every test spawns its own ranks. Prints one line a test: `ok`, `skip` or `FAIL`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from pathlib import Path

PLACE = os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
for name in ("barrier", "test_dir", "init_dir"):
    (Path(PLACE) / name).mkdir(exist_ok=True)

import torch  # noqa: E402
from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)

METHOD = os.environ.get("START_METHOD", "fork")
"""torch's own way, `spawn`, imports torch anew in every rank of every test."""


class TestGloo(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context(METHOD).Process)


class Lines(unittest.TestResult):
    def addSuccess(self, test: unittest.TestCase) -> None:
        print("ok", test._testMethodName, flush=True)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        print("skip", test._testMethodName, reason, flush=True)

    def _failed(self, test: unittest.TestCase, error: object) -> None:
        print("FAIL", test._testMethodName, flush=True)
        print(self._exc_info_to_string(error, test), file=sys.stderr, flush=True)  # type: ignore[attr-defined]

    addFailure = addError = _failed  # type: ignore[assignment]


def main() -> None:
    names = sys.argv[1:]
    if names == ["--list"]:
        print("\n".join(unittest.defaultTestLoader.getTestCaseNames(TestGloo)))
        return
    unittest.TestSuite(TestGloo(name) for name in names).run(Lines())


if __name__ == "__main__":
    main()
