"""How a rank's calls are folded into records, without torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddpdoctor.events import CallBlock, CallRun, CallSite, Event, Signature, Site, Statement, decode
from ddpdoctor.probe.collectives import call_log, stack_server
from ddpdoctor.probe.recording import patching
from ddpdoctor.probe.recording.recorder import Recorder, set_recorder
from ddpdoctor.probe.recording.threads import Threads
from ddpdoctor.probe.source import statements
from ddpdoctor.storage.call_ring import State, read_ring
from ddpdoctor.storage.run_folder import EventWriter, Lines


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[call_log.CallLog]:
    monkeypatch.setattr(stack_server, "listen", lambda recorder, ring: None)
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    yield call_log.CallLog(Recorder(writer, tmp_path, "rank-0", {}))
    writer.close()


def events(made: call_log.CallLog) -> list[Event]:
    return list(Lines(made.recorder.writer.path).events())


def test_equal_steps_become_one_run(made: call_log.CallLog) -> None:
    for step in range(1, 501):
        made.ring.mark(made.collective(0, "all_reduce", 1), State.DONE)
        made.ring.mark(made.collective(0, "barrier", 2), State.DONE)
        made.step_ended(step, time.monotonic())
    made.flush()
    runs = [e for e in events(made) if isinstance(e, CallRun)]
    blocks = [e for e in events(made) if isinstance(e, CallBlock)]
    assert blocks[0].codes == (0, 1, 1, 2)
    assert sum(r.repeat for r in runs) == 500
    assert len(runs) <= 2


def test_groups_are_counted_apart(made: call_log.CallLog) -> None:
    for group in (0, 1, 0, 0, 1):
        made.collective(group, "barrier", 1)
    ring = read_ring(made.recorder.directory / "rank-0.ring")
    assert ring is not None
    assert [(c.group, c.index) for c in ring.calls] == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1)]


def test_what_was_no_call_gives_its_number_back(made: call_log.CallLog) -> None:
    made.collective(0, "barrier", 1)
    made.void(made.collective(0, "DDP backward", 2))
    made.collective(0, "barrier", 3)
    made.flush()
    ring = read_ring(made.recorder.directory / "rank-0.ring")
    assert ring is not None
    assert [(c.index, c.state) for c in ring.calls][1:] == [(1, State.VOID), (1, State.BEGUN)]
    (block,) = [e for e in events(made) if isinstance(e, CallBlock)]
    assert block.codes == (0, 1, 0, 3)


def test_calls_of_models_are_told_apart(made: call_log.CallLog) -> None:
    for model in (0, 1, 0, -1):
        made.of_model(0, "DDP backward", None, model, time.monotonic())
    made.of_model(0, "DDP backward", None, -1, time.monotonic(), (0, 1))
    made.flush()
    signatures = [e for e in events(made) if isinstance(e, Signature)]
    assert [s.model for s in signatures] == [0, 1, -1, -1]
    assert [s.models for s in signatures] == [(), (), (), (0, 1)]
    (block,) = [e for e in events(made) if isinstance(e, CallBlock)]
    assert block.codes[::2] == (0, 1, 0, 2, 3)


def test_the_records_are_bounded(made: call_log.CallLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_log, "RUNS_KEPT", 50)
    for step in range(1, 400):
        made.collective(0, "barrier", step % 7)
        made.step_ended(step, time.monotonic())
    made.flush()
    assert len([e for e in events(made) if isinstance(e, CallRun)]) == 50


def test_the_statements_around_a_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def main():\n"
        "    for step in range(3):\n"
        "        if rank == 0:\n"
        "            a()\n"
        "        else:\n"
        "\n"
        "            b()\n"
        "        if rank: c()\n"
    )
    inside = [[(e.line, e.text) for e in statements.enclosing(str(path), n)] for n in (4, 7, 8)]
    loop = (2, "for step in range(3):")
    assert inside[0] == [(3, "if rank == 0:"), loop]
    assert inside[1] == [(5, "else:"), loop]
    assert statements.enclosing(str(path), 7)[0].label == "else:  # if rank == 0:"
    assert inside[2] == [(8, "if rank: c()"), loop]


ARMS = """\
def load(path):
    if rank == 0:
        comm.bcast(len(data))
        comm.bcast(data.pin())
    elif rank == 1:
        size = comm.bcast(None)
    else:
        for _ in range(2):
            data = comm.bcast(None)
        log(data)
    if rank == 0:
        comm.bcast(0)
    return data
"""


def test_an_arm_whose_calls_every_other_arm_makes_too(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(ARMS)
    arms = {n: statements.enclosing(str(path), n)[-1] for n in (3, 4, 6, 9, 10, 12)}
    assert {n: arm.matched for n, arm in arms.items()} == {
        3: True, 4: False, 6: True, 9: True, 10: False, 12: False
    }  # fmt: skip


ROUNDS = """\
def main():
    for i in range(80):
        try:
            x = batch(i)
        except KeyError: raise
        except ValueError as e:
            print("skip", e)
            continue
        if not len(x):
            continue
        for part in x:
            if part: break
        try:
            step(x)
        except RuntimeError:
            x = None
    return x
"""


FED = """import torch.distributed as dist
def validate(model, metric, loader):
    if rank == 0:
        model.eval()
        with no_grad():
            for x, y in loader:
                metric.update(model(x), y)
            value = metric.compute()
        print(value)
        dist.barrier()
        loss = mean(losses)
        dist.all_reduce(loss)
"""


def test_what_a_branch_gives_to_a_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FED)
    heads = {
        n: statements.enclosing(str(path), n) for n in (8, 10, 12)
    }  # `compute`, `barrier`, `all_reduce`
    fed = {n: [h.fed for h in found if h.kind == "if"] for n, found in heads.items()}
    assert fed == {8: [("metric",)], 10: [()], 12: [("loss",)]}


def test_how_a_round_of_a_loop_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(ROUNDS)
    tried, *_, loop = statements.enclosing(str(path), 14)
    assert [(w.line, w.text) for w in tried.ways] == [(15, "except RuntimeError:")]
    assert [(w.line, w.text, w.first, w.last) for w in loop.ways] == [
        (6, "except ValueError as e:", 4, 16),
        (9, "if not len(x):", 11, 16),
        (15, "except RuntimeError:", 14, 14),
    ]
    assert not loop.exits
    path = tmp_path / "broken.py"
    path.write_text(ROUNDS.replace("x = None", "break"))
    broken = statements.enclosing(str(path), 14)[-1]
    assert [(w.line, w.text) for w in broken.exits] == [(15, "except RuntimeError:")]
    path = tmp_path / "ended.py"
    path.write_text(ROUNDS.replace("x = None", "pass").replace("if part: break", "if part: return"))
    assert [(w.line, w.text) for w in statements.enclosing(str(path), 14)[-1].exits] == [
        (12, "if part: return")
    ]
    path = tmp_path / "exited.py"
    path.write_text(ROUNDS.replace("x = None", "sys.exit(0)"))
    assert not statements.enclosing(str(path), 14)[-1].exits


FLAGS = """\
def main():
    while not self.done:
        stop = False
        for x in batches:
            reduce(x)
            if x.bad:
                log(x)
                stop = True
                self.done = True
            elif other: stop = False
            if stop:
                break
        found = len(x)
        late = now() > 3
        if late or found: break
        if late: break
        if found: break
"""


def test_the_statement_that_sets_the_flag_of_a_jump_decides(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FLAGS)
    inner, outer = (s for s in statements.enclosing(str(path), 5) if s.is_loop)
    assert [(w.line, w.set_line, w.set_by) for w in inner.exits] == [(11, 6, "if x.bad:")]
    assert [(w.line, w.set_line, w.set_by) for w in outer.exits] == [
        (15, 0, ""),
        (16, 14, "late = now() > 3"),
        (17, 0, ""),
        (2, 6, "if x.bad:"),
    ]


STOPPING = """
class Trainer:
    def __init__(self):
        self.should_stop = False
    def after(self, number):
        if rank == 0 and number == 12:
            self.should_stop = True
        self.slow = number > 3
    def request(self):
        self.asked = True
    def fit(self):
        for x in batches:
            reduce(x)
            if self.should_stop:
                break
            if self.slow:
                break
            if self.asked:
                break
            if not self.should_stop:
                break
"""


def test_a_flag_that_another_function_sets(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(STOPPING)
    (loop,) = (s for s in statements.enclosing(str(path), 13) if s.is_loop)
    assert [(w.line, w.set_line, w.set_by, w.set_in) for w in loop.exits] == [
        (14, 6, "if rank == 0 and number == 12:", "after"),
        (16, 8, "self.slow = number > 3", "after"),
        (18, 0, "", ""),
        (20, 0, "", ""),
    ]


DECIDING = """
def fit():
    for epoch in range(9):
        reduce(epoch)
        if rank == 0:
            print(epoch)
            if stopper.step(epoch):
                task.stop = True
        if task.stop:
            break
"""


def test_the_branches_around_the_statement_that_sets_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(DECIDING)
    (loop,) = (s for s in statements.enclosing(str(path), 4) if s.is_loop)
    (way,) = loop.exits
    assert (way.line, way.set_line, way.set_by) == (9, 7, "if stopper.step(epoch):")
    assert way.around == ((5, "if rank == 0:"),)


def test_the_flags_that_a_function_sets(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def after(trainer):\n"
        "    if trainer.is_global_zero:\n"
        "        if asked():\n"
        "            trainer.should_stop = True\n"
        "    trainer.seen = True\n"
        "    if x: trainer.loss = 3\n"
        "    trainer.barrier()\n"
        "other()\n"
    )
    (flag,) = statements.flags_set(str(path), 7)
    assert (flag.line, flag.text) == (4, "trainer.should_stop = True")
    assert flag.tests == ("asked()", "trainer.is_global_zero")
    assert statements.flags_set(str(path), 8) == ()


def test_the_statements_that_leave_before_a_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def main():\n"
        "    if not files:\n"
        "        print('nothing to do')\n"
        "        return 0\n"
        "    if world < 1:\n"
        "        raise ValueError(world)\n"
        "    if show: sys.exit(0)\n"
        "    if quick:\n"
        "        files = files[:1]\n"
        "    init()\n"
    )
    assert statements.early_exits_before(str(path), 10) == (7, 2)
    assert statements.early_exits_before(str(path), 3) == ()
    assert statements.early_exits_before("<stdin>", 10) == ()


def test_a_batch_is_known_by_its_other_sides(made: call_log.CallLog) -> None:
    for sends in ((1,), (1,), ()):
        made.point_to_point(0, "batch_isend_irecv", 1, -1, sends, (3,))
    signed = [e for e in events(made) if isinstance(e, Signature)]
    assert [(e.sends, e.receives) for e in signed] == [((1,), (3,)), ((), (3,))]


PAST = """\
def evaluate(net):
    net.eval()
    if net is None:
        return {
            "a": 1,
        }
    if rank != 0: return
    if verbose:
        print()
    elif quiet:
        return
    for x in loader:
        if len(x) < 2:
            log(x)
            continue
        if x.any():
            return
        else:
            net(x)
        with no_grad():
            reduce(x)
"""


def test_a_branch_within_a_statement_that_leaves_the_block(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def load(name):\n"
        "    if rank == 0:\n"
        "        try:\n"
        "            fetch(name)\n"
        "        except OSError as error:\n"
        "            log(error)\n"
        "            return None\n"
        "        except ValueError as error:\n"
        "            raise Unfit from error\n"
        "    for part in parts:\n"
        "        if part is None:\n"
        "            break\n"
        "        if not part:\n"
        "            return None\n"
        "    with lock:\n"
        "        return_code = 0\n"
        "    all_true(name)\n"
    )
    inside = statements.enclosing(str(path), 17)
    assert [(e.kind, e.text, e.line, e.opener, e.test) for e in inside] == [
        ("past", "if not part:", 14, 13, "not part"),
        ("past", "except OSError as error:", 7, 5, ""),
    ]


def test_statements_before_a_line_that_leave_its_block(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PAST)
    inside = statements.enclosing(str(path), 21)
    assert [(e.kind, e.text, e.line, e.opener, e.test) for e in inside] == [
        ("with", "with no_grad():", 20, 0, ""),
        ("past", "if x.any():", 17, 16, "x.any()"),
        ("past", "if len(x) < 2:", 15, 13, "len(x) < 2"),
        ("for", "for x in loader:", 12, 0, ""),
        ("past", "elif quiet:", 11, 10, "quiet"),
        ("past", "if rank != 0: return", 7, 7, "rank != 0"),
        ("past", "if net is None:", 4, 3, "net is None"),
    ]


def test_a_thread_without_lines_of_the_program_is_where_it_was_started(
    made: call_log.CallLog,
) -> None:
    set_recorder(made.recorder)
    try:
        Threads.begin()
        pool = ThreadPoolExecutor(1, "saver")
        sites = [pool.submit(made.here).result() for _ in range(2)]
        pool.shutdown()
    finally:
        patching.restore()
        set_recorder(None)
    (called,) = [e for e in events(made) if isinstance(e, CallSite)]
    (started,) = [e for e in events(made) if isinstance(e, Site) and e.id == called.started]
    assert "pool.submit(made.here)" in started.text
    assert (sites, called.places, called.thread) == ([called.id] * 2, (), "saver_0")


def test_lines_that_hand_on_what_they_were_given(made: call_log.CallLog) -> None:
    pytest.importorskip("torch.distributed")

    def all_reduce(*given: object) -> int:
        return made.here()

    all_reduce.__code__ = all_reduce.__code__.replace(
        co_filename="<torch>"
    )  # no line of the user's

    def reduced(value: object) -> int:
        return all_reduce(value)

    def logged(name: str, value: object) -> int:
        return reduced(value)

    logged("loss", 1.0)
    (called,) = [e for e in events(made) if isinstance(e, CallSite)]
    assert [place.hands_on for place in called.places] == [True, True, False]


def test_the_parts_of_a_record_keep_their_places() -> None:
    """They are written without names: one that goes makes older records unreadable."""
    inside = '[146,"for x in y:",[[1,"if x:",2,3]],true,0,[]]'
    event = decode(f'{{"event":"call-site","id":0,"at":1.5,"places":[[3,[{inside}]]]}}'.encode())
    assert isinstance(event, CallSite)
    assert not event.places[0].hands_on
    (around,) = event.places[0].inside
    assert (around.line, around.broken, around.opener, around.exits) == (146, True, 0, ())


@pytest.mark.parametrize("comment", ["", " # enough", "  # it's enough", "# 'enough"])
def test_what_ends_a_loop_whatever_is_remarked_on_it(tmp_path: Path, comment: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def main():\n"
        "    for i in range(9):\n"
        "        reduce(i, '#')\n"
        f"        if i == 4:{comment}\n"
        f"            break{comment}\n"
    )
    (loop,) = statements.enclosing(str(path), 3)[:1]
    assert [(w.line, w.text) for w in loop.exits] == [(4, "if i == 4:")]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("f('#'): # a", "f('#'):"),
        ("x == '\\'#':", "x == '\\'#':"),
        ("x == '''text of  # several\n''':", "x == '''text of # several ''':"),
    ],
)
def test_what_is_a_comment_and_what_is_a_text(tmp_path: Path, line: str, code: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"if {line}\n    pass\n")
    last = len(path.read_text().splitlines())
    assert statements.enclosing(str(path), last)[0].text == f"if {code}"


LONG = """\
def main():
    match mode:
        case "a":
            a()
        case _ if slow:
            b()
    if (
        rank != 0
        or late
    ):
        return
    for x in loader:
        c(x)
    else:
        d()
    try:
        e()
    except OSError:
        f()
    finally:  # in any case
        g()
    if x:
        pass
    elif h():
        pass
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (4, ("case", 3, 2, "match mode:", "mode")),
        (6, ("case", 5, 2, "match mode:", "mode")),
        (13, ("for", 12, 0, "", "")),
        (15, ("after", 14, 12, "for x in loader:", "")),
        (17, ("try", 16, 0, "", "")),
        (19, ("except", 18, 16, "try:", "")),
        (21, ("finally", 20, 16, "try:", "")),
        (24, ("elif", 24, 22, "if x:", "h()")),
    ],
)
def test_the_kinds_of_statements(
    tmp_path: Path, line: int, expected: tuple[str, int, int, str, str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(LONG)
    inside = statements.enclosing(str(path), line)
    around, *past = inside
    assert (around.kind, around.line, around.opener, around.of, around.test) == expected
    assert [e.text for e in past] == ["if rank != 0 or late:"] * (line > 6)


def test_what_calls_a_function_in_its_condition_is_not_around_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def main():\n    while agree():\n        if agree():\n            pass\n")
    assert statements.enclosing(str(path), 2) == ()
    assert [e.text for e in statements.enclosing(str(path), 3)] == ["while agree():"]


def test_a_file_that_does_not_parse_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def main():\n    if rank == 0:\n        save()\n    if x y:\n        pass\n")
    assert statements.enclosing(str(path), 3) == ()


@pytest.mark.parametrize(
    ("text", "kind", "test", "of", "code"),
    [
        ("past if rank != 0: return", "past", "rank != 0", "", "if rank != 0: return"),
        ("else:  # if x:", "else", "", "if x:", "else:"),
        ("else:  # for x in y:", "after", "", "for x in y:", "else:"),
        ("elif b:  # if a:", "elif", "b", "if a:", "elif b:"),
        ("except OSError as e:", "except", "", "try:", "except OSError as e:"),
        ("if a[1:2]:", "if", "a[1:2]", "", "if a[1:2]:"),
        ("if x", "if", "x", "", "if x"),
        ("async for x in y:", "for", "", "", "async for x in y:"),
    ],
)
def test_statements_of_older_records(text: str, kind: str, test: str, of: str, code: str) -> None:
    head = Statement(line=3, text=text)
    assert (head.kind, head.test, head.of, head.text) == (kind, test, of, code)


def test_the_branches_around_a_statement_that_ends_a_loop(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def train():\n"
        "    while True:\n"
        "        step()\n"
        "        if rank == 0:\n"
        "            for x in xs:\n"
        "                look(x)\n"
        "            if late:\n"
        "                break\n"
        "        else:\n"
        "            if over:\n"
        "                return\n"
    )
    loop = statements.enclosing(str(path), 3)[-1]
    assert [(w.line, w.around) for w in loop.exits if w.line > 2] == [
        (7, ((4, "if rank == 0:"),)),
        (10, ((9, "else:"),)),
    ]
