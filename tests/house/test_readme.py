"""README and CONTRIBUTING say what the code does."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import events_index
import readme
from readers import loader, run_of


def test_generated_parts_are_fresh() -> None:
    text = readme.README.read_text()
    assert text == readme.updated(text), "type `make readme`"


def test_the_table_of_layers_is_fresh() -> None:
    text = readme.CONTRIBUTING.read_text()
    assert text == readme.contributing(text), "type `make readme`"


def test_the_index_of_events_is_fresh() -> None:
    assert events_index.INDEX.read_text() == events_index.text(), "type `make readme`"


def test_every_event_answers_a_question() -> None:
    asked = {name for names in events_index.QUESTIONS.values() for name in names.split()}
    assert asked == set(events_index.events())
    complete = [name for names in events_index.WHEN.values() for name in names.split()]
    assert sorted(complete) == sorted(events_index.events())


def test_every_check_is_listed() -> None:
    text = readme.README.read_text()
    assert all(f"`{check.name}`" in text for check in readme.registry.all_checks())


def test_the_check_in_contributing_works() -> None:
    """The skeleton that newcomers copy is code, and finds something in a run with a loader."""
    text = readme.CONTRIBUTING.read_text()
    block = next(
        b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "class SomeFault" in b
    )
    space: dict[str, Any] = {}
    exec(textwrap.dedent(block), space)
    check = space["SomeFault"]()
    run = run_of(loader(0, [[0, 1]]), loader(0, [[0, 1]]))
    assert check.unobserved(run) is None
    assert [(f.rule, f.ranks) for f in check.examine(run)] == [("shuffled-twice", (0,)),
                                                              ("shuffled-twice", (1,))]  # fmt: skip
