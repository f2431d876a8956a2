"""Which comparison of a result of an evaluation decides about a line or a loop's end, and whether a
loss is computed from what a call gave, in programs that run."""

import ast
import linecache
import sys
import textwrap
from contextlib import nullcontext

import pytest

from ddpdoctor.probe.source.call_resolver import Scope
from ddpdoctor.probe.source.decisions import deciding, ending
from ddpdoctor.probe.source.passthrough import in_loss

EVALUATE = """
def evaluate():
    total = count = 0
    for x in held_out:
        total += x
        count += 1
    return total / count
"""

KEEPER = """
class Keeper:
    def __init__(self):
        self.best, self.better, self.ready = 9e9, True, True
    def see(self, loss):
        if loss < self.best:
            self.best, self.better = loss, True
    def __call__(self, value):
        score = -value
        self.note(score)
    def note(self, score):
        self.better = score < self.best
        self.ready = True
    def ask(self, loss):
        store.set("loss", loss)
        self.better = min(store.get("loss"), loss) < self.best
    @property
    def improves(self):
        return self.better
keeper = Keeper()
"""

FOUND = {
    "plain": ("loss", "loss = evaluate()\nif loss < best:\n    save()"),
    "inline": ("loss", "loss = 0\nfor x in held_out:\n    loss += x\nif loss < best:\n    save()"),
    "called in the test": ("evaluate()", "if evaluate() < best:\n    save()"),
    "walrus": ("loss", "if (loss := evaluate()) < best:\n    save()"),
    "negated": ("loss", "loss = -evaluate()\nscore = -loss\nif -loss < best:\n    save()"),
    "named": ("loss", "loss = evaluate()\nbetter = loss < best\n"
                      "if rank == 0 and better:\n    save()"),
    "a flag": ("loss", "better = False\nloss = evaluate()\nif loss < best:\n    better = True\n"
                       "if better:\n    save()"),
    "entry": ("metrics['loss']", "metrics = {'loss': evaluate(), 'epoch': 1}\n"
                                 "if metrics['loss'] < best:\n    save()"),
    "made anew in the loop": (
        "evaluate()", "rate = 1\nfor n in range(2):\n    opt = dict(rate=rate)\n"
                      "    if evaluate() < best:\n        rate = 0.5\n    if opt:\n        save()"),
    "history": ("losses[-1]", "losses = []\nlosses.append(evaluate())\n"
                              "if losses[-1] == min(losses):\n    save()"),
    "returns": ("loss", "loss = evaluate()\nif loss >= best:\n    return\nsave()"),
    "a function": ("loss", "def better(x):\n    return x < 1e9\nloss = evaluate()\n"
                           "if better(loss):\n    save()"),
    "passed on": ("loss", "def keep(is_best):\n    if is_best:\n        save()\n"
                          "loss = evaluate()\nkeep(loss < best)"),
    "an object": ("self.loss", "class Trainer:\n    def validate(self):\n"
                  "        self.loss = evaluate()\n    def keep(self):\n"
                  "        if self.loss < best:\n            save()\n"
                  "t = Trainer()\nt.validate()\nt.keep()"),
    "comprehension": ("loss", "loss = sum([x for x in held_out])\nif loss < best:\n    save()"),
    "a metric object, by whatever its methods are called": (
        "acc", "class Metric:\n    def __init__(self):\n        self.seen = []\n"
               "    def calc(self, x):\n        self.seen.append(x)\n"
               "    def result(self):\n        return sum(self.seen)\n"
               "metric = Metric()\ndef validate():\n    for x in held_out:\n"
               "        metric.calc(x)\n    return metric.result()\n"
               "acc = validate()\nif acc < best:\n    save()"),
    "an imported list": (
        "history[-1]", "from keyword import softkwlist as history\nfor x in held_out:\n"
                       "    history.append(x)\nif history[-1] < best:\n    save()"),
    "a metric that is called": (
        "acc", "class Metric:\n    seen = 0\n    def __call__(self, x):\n"
               "        self.seen = self.seen + x\n    def compute(self):\n"
               "        return self.seen\nmetric = Metric()\nfor x in held_out:\n    metric(x)\n"
               "acc = metric.compute()\nif acc < best:\n    save()"),
    "a meter of a function around it": (
        "loss", "def validate():\n    meter = []\n    def rounds():\n"
                "        for x in held_out:\n            meter.append(x)\n"
                "    rounds()\n    return meter[0]\n"
                "loss = validate()\nif loss < best:\n    save()"),
    "a meter that two functions share": (
        "meter[0]", "meter = []\ndef rounds():\n    for x in held_out:\n"
                    "        meter.append(x)\ndef keep():\n    if meter[0] < best:\n"
                    "        save()\nrounds()\nkeep()"),
    "else": ("loss", "loss = evaluate()\nif loss >= best:\n    pass\nelse:\n    save()"),
    "a generator around it": (
        "stats['loss']", "def log_every(x):\n    for item in x:\n        yield item\n"
                         "def means():\n    meters = {'loss': []}\n"
                         "    for x in log_every(held_out):\n        meters['loss'].append(x)\n"
                         "    return {name: sum(m) for name, m in meters.items()}\n"
                         "stats = means()\nif stats['loss'] < best:\n    save()"),
    "a method of what the loop changes": (
        "loss", "class Log:\n    def mean(self):\n        return sum(self.meters['x'])\n"
                "log = Log()\nlog.meters = {'x': []}\nfor x in held_out:\n"
                "    log.meters['x'].append(x)\nloss = log.mean()\nif loss < best:\n    save()"),
    "an object that iterates": (
        "loss", "class Prefetcher:\n    def __iter__(self):\n"
                "        return iter([x for x in held_out])\n"
                "loss = 0\nfor x in Prefetcher():\n    loss += x\nif loss < best:\n    save()"),
    "a flag of an object": (
        "loss", KEEPER + "keeper.see(evaluate())\nif keeper.better:\n    save()"),
    "a flag by way of another": (
        "score", KEEPER + "keeper(evaluate())\nif rank == 0 and keeper.better:\n    save()"),
    "a property": ("loss", KEEPER + "keeper.see(evaluate())\nif keeper.improves:\n    save()"),
}  # fmt: skip

NONE = {
    "through a file": "import json, io\nfile = io.StringIO()\nseen = []\n"
                      "for x in held_out:\n    seen.append(x)\njson.dump(seen, file)\n"
                      "loss = sum(json.loads(file.getvalue()))\nif loss < best:\n    save()",
    "always": "loss = evaluate()\nsave()",
    "another number": "loss = evaluate()\nother = 3\nif other < best:\n    save()",
    "the training loss": "mean = 0\nfor x in train:\n    mean += x\nloss = evaluate()\n"
                         "if mean < best:\n    save()",
    "another entry": "metrics = {'loss': evaluate(), 'epoch': 1}\n"
                     "if metrics['epoch'] < best:\n    save()",
    "by the epoch": "for epoch in range(3):\n    loss = evaluate()\n"
                    "    if epoch > 1:\n        save()",
    "how many": "losses = [evaluate()]\nif len(losses) > 0:\n    save()",
    "finite": "loss = evaluate()\nif math.isfinite(loss):\n    save()",
    "put together in a store": "def merge(x):\n    store.set('a', x)\n    return store.get('b')\n"
                               "loss = evaluate()\nloss = merge(loss)\n"
                               "if loss < best:\n    save()",
    "put together in files": "def merge(x):\n    return len(open(file).read()) + x\n"
                             "loss = merge(evaluate())\nif loss < best:\n    save()",
    "put together somehow": "loss = evaluate()\nloss = ways[0](loss)\n"
                            "if loss < best:\n    save()",
    "a meter of the same name": "meter = [3]\ndef rounds():\n    meter = []\n"
                                "    for x in held_out:\n        meter.append(x)\n"
                                "rounds()\nif meter[0] < best:\n    save()",
    "two values at once": "loss, other = evaluate(), 3\nif other < best:\n    save()",
    "another branch": "loss = evaluate()\nif loss < -1:\n    pass\nsave()",
    "a generator that trains": "def log_every(x):\n    for item in x:\n        yield item\n"
                               "mean = 0\nfor x in log_every(train):\n    mean += x\n"
                               "loss = evaluate()\nif mean < best:\n    save()",
    "a flag of another object": KEEPER + "other = Keeper()\nother.see(3)\n"
                                         "keeper.see(evaluate())\nif other.better:\n    save()",
    "another attribute of what the loop changes": (
        KEEPER + "for x in held_out:\n    keeper.seen = x\nif keeper.best > best:\n    save()"),
    "what was made before it changed": (
        "rate = 1\nopt = dict(rate=rate)\nfor n in range(1):\n    if evaluate() < best:\n"
        "        rate = 0.5\n    if opt:\n        save()"),
    "another flag": KEEPER + "keeper.see(evaluate())\nif keeper.ready:\n    save()",
    "a flag put together in a store": KEEPER + "keeper.ask(evaluate())\nif keeper.better:\n"
                                               "    save()",
}  # fmt: skip


class Store(dict):
    set = dict.__setitem__

    def get(self, key):
        return 0.5


class Program:
    def __init__(self, tmp_path, body):
        self.file = str(tmp_path / "program.py")
        text = EVALUATE + "def main():\n" + textwrap.indent(body, "    ") + "\nmain()\n"
        with open(self.file, "w") as file:
            file.write(text)
        linecache.checkcache(self.file)
        self.loop = self.saved = None
        self.scopes = []
        names = {"held_out": self, "train": [1.0, 2.0], "save": self.save, "best": 1e9, "rank": 0,
                 "math": __import__("math"), "file": __file__, "store": Store(),
                 "ways": [float], "block": nullcontext(), "known": lambda: True}  # fmt: skip
        exec(compile(text, self.file, "exec"), names)

    def stack(self):
        frame, found, self.scopes = sys._getframe(2), [], []
        while frame is not None:
            if frame.f_code.co_filename == self.file and frame.f_code.co_name != "<listcomp>":
                found.append((frame.f_code, frame.f_lineno))
                self.scopes.append(Scope(frame.f_locals, frame.f_globals))
            frame = frame.f_back
        return found

    def __iter__(self):
        self.loop = self.stack()
        return iter([0.5, 0.25])

    def save(self):
        self.saved = self.stack()

    def decided_by(self):
        assert self.saved, "nothing was saved"
        found = deciding(self.saved, self.loop, self.scopes)
        return ast.unparse(found.value) if found is not None else None

    def ended_by(self):
        found = ending(self.loop, self.scopes)
        return ast.unparse(found[0].value) if found is not None else None


@pytest.mark.parametrize("name", FOUND)
def test_a_result_that_decides(tmp_path, name):
    value, body = FOUND[name]
    assert Program(tmp_path, body).decided_by() == value


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_result(tmp_path, name):
    assert Program(tmp_path, NONE[name]).decided_by() is None


ENDS = {
    "plain": ("loss", "if loss < best:\n    break"),
    "returns": ("loss", "if loss < best:\n    return"),
    "patience": ("loss", "if loss < least:\n    least, bad = loss, 0\nelse:\n    bad += 1\n"
                         "    if bad >= 2:\n        break"),
    "the other arm": ("loss", "if loss < least:\n    least = loss\nelse:\n    break"),
    "a function": ("loss", "if better(loss):\n    break"),
    "after the warm-up": ("loss", "if epoch < warm_up:\n    continue\nif loss < best:\n    break"),
    "switched on": ("loss", "if early and (loss < best or epoch == 9):\n    break"),
    "in a block": ("loss", "with block:\n    if loss < best:\n        break"),
    "an object that stops": ("score", "stopper(loss)\nif stopper.early_stop:\n    break"),
    "a property": ("score", "stopper(loss)\nif stopper.done:\n    break"),
}  # fmt: skip

GOES_ON = {
    "nothing": "pass",
    "by the epoch": "if epoch > 5:\n    break",
    "a threshold of another number": "if least < best:\n    break",
    "switched off": "if late and loss < best:\n    break",
    "switched off outside": "if late:\n    if loss < best:\n        break",
    "switched off by a number": "if limit > 0 and loss < best:\n    break",
    "not known to be switched on": "if known() and loss < best:\n    break",
    "still warming up": "if epoch < 5:\n    continue\nif loss < best:\n    break",
    "another loop": "for _ in range(2):\n    if loss < best:\n        break",
    "the next round": "if loss < best:\n    continue",
    "saved": "if loss < best:\n    save()",
    "an object that sees another number": "stopper(least)\nif stopper.early_stop:\n    break",
    "put together in files": "loss = merge(loss)\nif loss < best:\n    break",
}

TRAINS = """
class Stopper:
    best, bad, early_stop = -9e9, 0, False
    def __call__(self, value):
        score = -value
        if score < self.best:
            self.bad += 1
            if self.bad >= 3:
                self.early_stop = True
        else:
            self.best, self.bad = score, 0
    @property
    def done(self):
        return self.bad >= 3
def better(x):
    return x < best
def merge(x):
    return float(len(open(file).read())) + x
def train():
    least, bad, warm_up, early, late, limit = 9e9, 0, 1, True, False, 0
    stopper = Stopper()
    for epoch in range(1, 3):
        loss = evaluate()
"""


def way_out(tmp_path, body, loop="for epoch in range(1, 3):"):
    text = TRAINS.replace("for epoch in range(1, 3):", loop)
    return Program(tmp_path, text + textwrap.indent(body, " " * 8) + "\ntrain()").ended_by()


@pytest.mark.parametrize("name", ENDS)
def test_a_result_that_ends_the_loop_around(tmp_path, name):
    value, body = ENDS[name]
    assert way_out(tmp_path, body) == value


@pytest.mark.parametrize("name", GOES_ON)
def test_loops_that_no_result_ends(tmp_path, name):
    assert way_out(tmp_path, GOES_ON[name]) is None


@pytest.mark.parametrize(
    ("test", "value"),
    [("epoch < 9 and not done", "loss"), ("epoch < 9", None), ("not done or late", "loss")],
)
def test_a_condition_of_the_loop_itself(tmp_path, test, value):
    loop = f"epoch, done = 0, False\n    while {test}:"
    body = "epoch += 1\nif loss < least:\n    done = True"
    assert way_out(tmp_path, body, loop) == value


GATHERS = """
def gather(x):
    parts = [None, None]
    all_gather(parts, x)
    return parts
def returned(x):
    return lib(x)
def contrast(q, p):
    return q @ cat(gather(p))
class Loss:
    def __call__(self, q, p):
        every = returned(p)
        return q @ cat(every)
def training_step(q, p):
    loss = contrast(q, p)
    return {"loss": loss, "seen": q}
def looks(q, p):
    seen = gather(p)
    log(seen)
    return q @ p
"""

LOSSES = {
    "in place": (True, "loss = contrast(q, p)\nloss.backward()"),
    "an object": (True, "loss = Loss()(q, p)\nscaler.scale(loss).backward()"),
    "given": (True, "total = 0\ntotal = total + contrast(q, p)\naccelerator.backward(total)"),
    "here": (True, "every = returned(p)\nloss = q @ cat(every)\nloss.backward()"),
    "of a framework": (True, "fit(training_step, q, p)"),
    "to look at": (False, "seen = gather(p)\nloss = q @ p\nlog(seen)\nloss.backward()"),
    "of another loss": (False, "first = q @ p\nsecond = contrast(q, p)\nfirst.backward()"),
    "looked at in a function": (False, "loss = looks(q, p)\nloss.backward()"),
}


class Anything:
    """An object with any method and operator, which calls back when a backward begins."""

    def __init__(self, backward):
        self.begins = backward

    def __getattr__(self, name):
        return self

    def __call__(self, *args):
        return self

    def __matmul__(self, other):
        return self

    __add__ = __radd__ = __matmul__

    def backward(self, *args):
        self.begins()


@pytest.mark.parametrize("name", LOSSES)
def test_whether_a_loss_is_computed_from_what_a_call_gave(tmp_path, name):
    told, body = LOSSES[name]
    file = str(tmp_path / "program.py")
    text = GATHERS + "def main(q, p):\n" + textwrap.indent(body, "    ") + "\nmain(q, p)\n"
    with open(file, "w") as written:
        written.write(text)
    linecache.checkcache(file)
    calls, backwards = [], []

    def stack():
        frame, found = sys._getframe(2), []
        while frame is not None:
            if frame.f_code.co_filename == file:
                found.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return found

    def gathers(*args):
        calls.append(stack())
        return args[-1]

    thing = Anything(lambda: backwards.append(stack()[0]))
    names = {"all_gather": gathers, "lib": gathers, "log": lambda x: None, "cat": lambda x: thing,
             "scaler": thing, "accelerator": thing, "q": thing, "p": thing,
             "fit": lambda step, *args: step(*args)}  # fmt: skip
    exec(compile(text, file, "exec"), names)
    (calling,) = calls
    entered = [code for code, _ in calling if code.co_name == "training_step"]
    assert in_loss(calling, backwards[0] if backwards else None, entered) is told
