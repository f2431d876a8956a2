"""The texts of the table of manual synchronisation: each names only what its record has."""

from dataclasses import fields
from string import Formatter

import pytest

from ddpdoctor.analysis.manual_sync import rules, unwrapped_rules
from ddpdoctor.analysis.manual_sync.cases import Rule
from ddpdoctor.analysis.manual_sync.divergence import Divergence
from ddpdoctor.analysis.manual_sync.unwrapped_rules import Alone


def templates(module):
    for name, value in vars(module).items():
        if isinstance(value, Rule):
            texts = [value.label, value.summary, value.cause, value.fix]
            yield from ((name, text) for text in (*texts, *(t for t, _ in value.related)))
        elif isinstance(value, str) and name.isupper():
            yield name, value


@pytest.mark.parametrize(("module", "record"), [(rules, Divergence), (unwrapped_rules, Alone)])
def test_templates_name_what_the_record_has(module, record):
    known = {*dir(record), *(field.name for field in fields(record))}
    for row, text in templates(module):
        for _, name, _, _ in Formatter().parse(text):
            if name is not None:
                owner, attribute = name.partition("[")[0].split(".")[:2]
                assert owner == "c" and attribute in known, f"{row}: {name}"
