"""Which of the values that a program writes to a file come from a loop over its data."""

import linecache
import sys
import textwrap

import pytest

from ddpdoctor.probe.source.decisions import written_result

PREDICT = """
def predict(data):
    found, labels = [], []
    for x in data:
        found.append(x)
    return found, labels
def gather(x):
    return ways[0](x)
"""

FOUND = {
    "rows": ("found", "rows, _ = predict(data)\nwith opened() as f:\n"
                      "    for row in rows:\n        f.write(str(row))"),
    "a document": ("found", "rows, _ = predict(data)\nwith opened() as f:\n"
                            "    dump({'rows': rows}, f)"),
    "a file that is not closed": ("found", "rows, _ = predict(data)\nf = opened()\n"
                                           "dump(rows, f)"),
    "a writer": ("found", "rows, _ = predict(data)\nwith opened() as f:\n"
                          "    out = writer(f)\n    out.writerow(rows)"),
    "a table": ("found", "rows, _ = predict(data)\nframe = table(rows)\nframe.to_csv(path)"),
    "by a helper": ("found", "def store(what):\n    with opened() as f:\n        dump(what, f)\n"
                             "rows, _ = predict(data)\nstore(rows)"),
    "a sum": ("total", "total = 0\nfor x in data:\n    total += x\n"
                       "with opened() as f:\n    print(total / 2, file=f)"),
}  # fmt: skip

NONE = {
    "settings": "rows, _ = predict(data)\nwith opened() as f:\n    dump(settings, f)",
    "how many": "rows, _ = predict(data)\nwith opened() as f:\n    dump(len(rows), f)",
    "only opened": "rows, _ = predict(data)\nwith opened():\n    pass",
    "the name of the file": "rows, _ = predict(data)\nwith opened(rows) as f:\n    dump(1, f)",
    "put together somehow": "rows, _ = predict(data)\nrows = ways[0](rows)\n"
                            "with opened() as f:\n    dump(rows, f)",
    "before the loop": "rows = []\nwith opened() as f:\n    dump(rows, f)\npredict(data)",
}  # fmt: skip


class Program:
    def __init__(self, tmp_path, body):
        self.file = str(tmp_path / "program.py")
        text = PREDICT + "def main():\n" + textwrap.indent(body, "    ") + "\nmain()\n"
        with open(self.file, "w") as file:
            file.write(text)
        linecache.checkcache(self.file)
        self.loop = self.opening = None
        names = {
            "data": self, "opened": self.opened, "dump": lambda *given: None, "path": self.file,
            "writer": Writer, "table": lambda rows: Table(self), "settings": 1, "ways": [list],
        }  # fmt: skip
        exec(compile(text, self.file, "exec"), names)

    def stack(self):
        frame, found = sys._getframe(2), []
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                found.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return found

    def __iter__(self):
        self.loop = self.stack()
        return iter([1, 2])

    def opened(self, *_):
        self.opening = self.stack()
        return open(self.file + ".out", "w")

    def written(self):
        assert self.opening, "nothing was opened"
        return written_result(self.opening, self.loop)


class Writer:
    def __init__(self, file):
        self.file = file

    def writerow(self, row):
        pass


class Table:
    def __init__(self, program):
        self.program = program

    def to_csv(self, path):
        self.program.opened(path)


@pytest.mark.parametrize("name", FOUND)
def test_a_result_that_is_written(tmp_path, name):
    variable, body = FOUND[name]
    assert Program(tmp_path, body).written() == variable


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_result(tmp_path, name):
    assert Program(tmp_path, NONE[name]).written() is None
