"""Which line of the user's code is executing."""

from ddpdoctor.events import Site
from ddpdoctor.probe.sites import Sites

PROGRAM = """
def first(look):
    return look()

def second(look):
    a = look()
    b = look()
    return a, b
"""


def program(name="/home/user/train.py"):
    scope = {}
    exec(compile(PROGRAM, name, "exec"), scope)
    return scope


def test_a_line_has_one_number_and_lines_are_told_apart():
    told = []
    sites = Sites(told.append)
    scope = program()
    (one,) = {scope["first"](sites.here) for _ in range(3)}
    two, three = scope["second"](sites.here)
    assert len({one, two, three}) == 3
    assert [(s.id, s.line, s.function) for s in told if isinstance(s, Site)] == [
        (one, 3, "first"), (two, 6, "second"), (three, 7, "second"),
    ]  # fmt: skip


def test_code_that_is_made_again_and_again_is_not_taken_for_other_code():
    sites = Sites(lambda event: None)
    found = [program(f"/home/user/cell{n}.py")["first"](sites.here) for n in range(200)]
    assert len(set(found)) == 200
    again = [program(f"/home/user/cell{n}.py")["first"](sites.here) for n in range(200)]
    assert again == found
