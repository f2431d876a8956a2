"""Inside of torch's `_coalescing_manager` a call returns a placeholder in place of its work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.distributed_c10d import _IllegalWork

from ddpdoctor.probe.collectives import collectives
from ddpdoctor.storage.call_ring import State


class Work:
    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize("work", [_IllegalWork(), Work()], ids=["placeholder", "work"])
def test_a_placeholder_is_no_work(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    """It has all attributes, and none can be called."""
    issued: list[Any] = []
    marks: list[State] = []
    ring = SimpleNamespace(mark=lambda number, state: marks.append(state))
    log = SimpleNamespace(issued=lambda number, works: issued.extend(works), ring=ring)
    monkeypatch.setattr(collectives, "call_log_of", lambda recorder: log)
    recorder = SimpleNamespace(trouble=lambda part, error, lost="": pytest.fail(str(error)))
    monkeypatch.setattr(collectives, "current_recorder", lambda: recorder)
    monkeypatch.setattr(collectives.call_hooks.issued, "fire", lambda *args: None)
    collectives._returned(3, work)
    assert (issued, marks) == (([work], []) if isinstance(work, Work) else ([], [State.DONE]))
