"""Watchers are called in order, rest while there is nothing to wait for, and never hurt others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.probe.recording.hooks import Hook, Subscriptions
from ddpdoctor.probe.recording.limits import TROUBLE_LIMIT
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.training import lifecycle
from ddpdoctor.storage.run_folder import EventWriter


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})


class Heard(list[str]):
    """Names of the callbacks that were called."""

    def callback(self, name: str, also: Any = None) -> Any:
        def call(recorder: Recorder, moment: str) -> None:
            self.append(name)
            if also is not None:
                also()

        return call


def test_in_the_order_of_subscription_whoever_woke_last(recorder: Recorder) -> None:
    heard, moment = Heard(), Hook[str]("test")
    first = moment.subscribe(heard.callback("first"), enabled=False)
    moment.subscribe(heard.callback("second"))
    moment.fire(recorder, "")
    first.enable()
    moment.fire(recorder, "")
    first.disable()
    moment.fire(recorder, "")
    assert heard == ["second", "first", "second", "second"]


def test_who_wakes_while_it_happens_is_called_the_next_time(recorder: Recorder) -> None:
    heard, moment, sleeping = Heard(), Hook[str]("test"), Subscriptions()
    moment.subscribe(heard.callback("waker", also=sleeping.enable))
    sleeping[:] = [moment.subscribe(heard.callback(n), enabled=False) for n in ("one", "other")]
    moment.fire(recorder, "")
    assert heard == ["waker"]
    moment.fire(recorder, "")
    assert heard[1:] == ["waker", "one", "other"]
    sleeping.disable()
    assert not any(one.enabled for one in sleeping)


def test_who_fails_again_and_again_is_given_up_and_the_others_go_on(recorder: Recorder) -> None:
    heard, moment = Heard(), Hook[str]("test")
    failing = moment.subscribe(heard.callback("failing", also=lambda: 1 // 0))
    moment.subscribe(heard.callback("other"))
    for _ in range(2 * TROUBLE_LIMIT):
        moment.fire(recorder, "")
        failing.enable()
    assert heard.count("failing") == TROUBLE_LIMIT
    assert heard.count("other") == 2 * TROUBLE_LIMIT


def test_close_looks_are_announced_by_the_forward_before() -> None:
    seen = [n for n in range(1000) if lifecycle.looked_at(n)]
    assert seen[:129] == [*range(128), 128]
    assert all(n % 16 in (0, 15) for n in seen[128:])
    assert len(seen) < 250
