"""Statements whose text says that only some ranks enter them."""

from __future__ import annotations

import re

from ddpdoctor.events import Enclosing

ON_RANK = re.compile(
    r"\brank|_rank\b|\br\s*(?:==|!=|%|in\b)|(?:\b|_)RANK|\bis_main|\bmain_process|\bis_master"
    r"|\bmaster\b|\bis_chief|\bis_leader|rank_zero|rank0|global_zero|process_index|\bis_first"
    r"|\bprimary\b",
)
PAST = "past "
_STRING = re.compile(r"""(?P<key>[\w\])]\[|get\(|getenv\()?(?P<quote>["']).*?(?P=quote)""")


def on_rank(inside: tuple[Enclosing, ...]) -> Enclosing | None:
    """The innermost of these statements whose text says that only some ranks enter it."""
    heads = (e for e in inside if e.text.startswith(("if ", "elif ", "while ", PAST)))
    return next((e for e in heads if ON_RANK.search(unquoted(e.text))), None)


def unquoted(text: str) -> str:
    """A statement without the strings that name no key: `mode == "rank0"` says nothing of ranks."""
    return _STRING.sub(lambda found: found[0] if found["key"] else "", text)
