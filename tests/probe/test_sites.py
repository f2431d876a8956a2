"""Which line of the user's code is executing."""

import sys
from pathlib import Path

from torch import nn

from ddpdoctor.events import Site
from ddpdoctor.probe.collectives.call_sites import _module, line_of
from ddpdoctor.probe.recording.code_locations import Sites, classify

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


NESTED = """
def loop(step, times):
    return [step() for _ in range(times)]

def plain(look):
    return look()

def deeper(look):
    def inner():
        return look()
    return inner()
"""


def test_the_caller_of_a_hook_is_found_again_and_not_taken_for_another():
    told = []
    sites = Sites(told.append)
    scope = program()
    exec(compile(NESTED, "/home/user/nested.py", "exec"), scope)

    def hook():
        number = sites.caller("hook")[1]
        return places(number)

    def places(number):
        (place,) = [s for s in told if s.id == number]
        return place.function, place.line

    hook.__code__ = hook.__code__.replace(co_filename="<hook>")  # no code of the user's
    assert scope["loop"](lambda: scope["plain"](hook), 3) == [("plain", 6)] * 3
    assert scope["loop"](lambda: scope["deeper"](hook), 3) == [("inner", 10)] * 3
    assert scope["loop"](lambda: scope["plain"](hook), 1) == [("plain", 6)]
    assert scope["second"](hook) == (("second", 6), ("second", 7))


def test_the_lines_that_led_to_one_nearest_first():
    told = []
    sites = Sites(told.append)
    scope = {**program(), "callers": sites.callers}
    outer = "def outer():\n    return second(callers)[0]\n\ndef main():\n    return outer()\n"
    exec(compile(outer, "/home/user/main.py", "exec"), scope)
    callers = scope["main"]()
    known = {s.id: (s.file, s.line, s.function) for s in told}
    assert [known[n] for n in callers[:2]] == [
        ("/home/user/main.py", 2, "outer"), ("/home/user/main.py", 5, "main"),
    ]  # fmt: skip


def test_what_pip_has_put_into_a_folder_of_the_path_is_a_library(tmp_path, monkeypatch):
    record = tmp_path / "libs" / "net_models-1.0.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("models/__init__.py,sha256=x,1\nsix.py,sha256=y,2\n")
    monkeypatch.setattr("sys.path", [str(tmp_path), str(tmp_path / "libs")])
    files = ("libs/models/resnet.py", "libs/six.py", "libs/mine.py", "models/resnet.py")
    kinds = [classify(str(tmp_path / f)) for f in files]
    assert kinds == ["library", "library", "user", "user"]
    monkeypatch.setattr("sys.path", [str(tmp_path / "libs")])
    assert classify(str(tmp_path / "libs/models/own.py")) == "user", "where the script is"


def test_the_module_of_a_library_that_the_program_called() -> None:
    sites = Sites(lambda event: None)
    inner = {"__name__": "accelerate.accelerator", "called": sites.library_called}
    outer = {"__name__": "transformers.trainer"}
    folder = "/opt/site-packages"
    prepare = "def prepare():\n    return called()\n"
    exec(compile(prepare, f"{folder}/accelerate/accelerator.py", "exec"), inner)
    train = "def train():\n    return prepare()\n"
    outer["prepare"] = inner["prepare"]
    exec(compile(train, f"{folder}/transformers/trainer.py", "exec"), outer)
    main = {"train": outer["train"], "called": sites.library_called}
    code = "def main():\n    return train(), called()\n"
    exec(compile(code, "/home/user/main.py", "exec"), main)
    assert main["main"]() == ("transformers.trainer", "")  # type: ignore[operator]


def test_no_line_of_the_doctor_is_the_users() -> None:
    import ddpdoctor

    folder = Path(ddpdoctor.__file__).parent
    assert {classify(str(folder / name)) for name in ("embedded/in_rank.py", "__init__.py")} == {
        "own"
    }
    assert classify(str(folder.parent / "samples/hang/stall.py")) == "user"


def test_the_arms_of_a_conditional_expression_are_one_line() -> None:
    def seen(step: int = 1) -> int:
        return line_of(sys._getframe(1))

    begin = sys._getframe().f_lineno
    found = [
        seen(step)
        if step == 1
        else seen(step + 1)
        for step in (1, 2)
    ]  # fmt: skip
    assert found == [begin + 2, begin + 2]
    assert [seen(),
            seen()] == [begin + 8, begin + 9]  # fmt: skip


def test_the_module_whose_forward_leads_to_a_line() -> None:
    class Head(nn.Module):
        def forward(self) -> str:
            return Gather.forward(None)

    class Gather:
        @staticmethod
        def forward(ctx: None) -> str:  # as of an autograd function
            return _module([sys._getframe(0), sys._getframe(1)])

    assert Head().forward() == "Head"
    assert Gather.forward(None) == ""
