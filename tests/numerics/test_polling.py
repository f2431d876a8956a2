"""Waiting for a file in a loop, as the source says."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from ddpdoctor.probe.source.file_polling import polled_before


def load(path: object) -> bool:
    frame = sys._getframe(1)
    return polled_before(frame)


def await_marker(path: object) -> None:
    for _ in range(3):
        if os.path.exists(str(path)):
            break
        time.sleep(0)


def by_hand(path: Path, marker: Path) -> bool:
    while not marker.exists():
        time.sleep(0)
    return load(path)


def by_a_helper(path: Path, marker: Path) -> bool:
    await_marker(marker)
    return load(
        path,
    )


class Trainer:
    def await_it(self, marker: Path) -> None:
        while not marker.is_file():
            time.sleep(0)

    def resume(self, path: Path, marker: Path) -> bool:
        self.await_it(marker)
        return load(path)


def the_file_itself(path: Path, marker: Path) -> bool:
    while not path.exists():
        time.sleep(0)
    return load(path)


def the_file_itself_by_a_helper(path: Path, marker: Path) -> bool:
    await_marker(path)
    return load(path)


def looks_once(path: Path, marker: Path) -> bool:
    if not marker.exists():
        time.sleep(0)
    return load(path)


HOW = "at once"


def waits_in_another_case(path: Path, marker: Path) -> bool:
    if HOW == "patiently":
        await_marker(marker)
    return load(path)


def only_a_function_of_its_own_waits(path: Path, marker: Path) -> bool:
    def later() -> None:
        while not marker.exists():
            time.sleep(0)

    return load(path) or not callable(later)


def waits_afterwards(path: Path, marker: Path) -> bool:
    found = load(path)
    await_marker(marker)
    return found


def test_the_file_itself_was_waited_for(tmp_path: Path) -> None:
    def read(path: Path) -> bool:
        return polled_before(sys._getframe(1), itself=True)

    def waits(path: Path) -> bool:
        while path.stat().st_mtime < 0:
            time.sleep(0)
        return read(path)

    def looks(path: Path) -> bool:
        return path.exists() and read(path)

    assert waits(tmp_path)
    assert not looks(tmp_path)


@pytest.mark.parametrize(
    ("reader", "polled"),
    [
        (by_hand, True),
        (by_a_helper, True),
        (Trainer().resume, True),
        (the_file_itself, False),
        (the_file_itself_by_a_helper, False),
        (looks_once, False),
        (waits_in_another_case, False),
        (only_a_function_of_its_own_waits, False),
        (waits_afterwards, False),
    ],
)
def test_another_file_was_waited_for(reader: object, polled: bool, tmp_path: Path) -> None:
    marker = tmp_path / "done"
    marker.touch()
    assert reader(marker, marker) is polled  # type: ignore[operator]
