"""PyTorch's own distributed tests, on gloo, as a script: `python gloo_tests.py TEST...`.

What test/distributed does in PyTorch's repository, from the parts that the wheel ships. Every test
starts its own ranks. Prints one line a test: `ok`, `skip` or `FAIL`.
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
from torch.testing._internal.common_distributed import MultiProcessTestCase  # noqa: E402
from torch.testing._internal.distributed.ddp_under_dist_autograd_test import (  # noqa: E402
    DdpComparisonTest,
)
from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (  # noqa: E402
    TensorPipeRpcAgentTestFixture,
)

METHOD = os.environ.get("START_METHOD", "fork")
"""torch's own way, `spawn`, imports torch anew in every rank of every test."""


class Started(MultiProcessTestCase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context(METHOD).Process)


class TestGloo(Started, TestDistBackend, DistributedTest._DistTestBase):
    """As many ranks as WORLD_SIZE says."""


class TestDdpComparison(Started, TensorPipeRpcAgentTestFixture, DdpComparisonTest):
    """Four ranks."""


CLASSES = (TestGloo, TestDdpComparison)


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
    asked = set(sys.argv[1:])
    tests = [
        kind(name)
        for kind in CLASSES
        for name in unittest.defaultTestLoader.getTestCaseNames(kind)
        if asked & {name, "--list"}
    ]
    if asked == {"--list"}:
        print("\n".join(test._testMethodName for test in tests))
    else:
        unittest.TestSuite(tests).run(Lines())


if __name__ == "__main__":
    main()
