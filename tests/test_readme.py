"""README and CONTRIBUTING say what the code does."""

from __future__ import annotations

import events_index
import readme


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


def test_every_check_is_listed() -> None:
    text = readme.README.read_text()
    assert all(f"`{check.name}`" in text for check in readme.registry.all_checks())
