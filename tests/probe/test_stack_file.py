"""Where the threads of a rank are, as it writes it down: no thread may be read while it runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddpdoctor.probe.recording import stack_file
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.storage.run_folder import EventWriter
from ddpdoctor.storage.stack_dumps import threads

ASKED_OFTEN = """
import os, sys, threading, time
from pathlib import Path
from ddpdoctor.probe.recording import stack_file as stacks
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.storage.run_folder import EventWriter

def run():
    while True:
        exec("def nested(n):\\n    return nested(n - 1) if n else 0\\nnested(20)", {})

folder = Path(sys.argv[1])
stacks.watch(Recorder(EventWriter(folder / "rank-0.jsonl"), folder, "rank-0", {}))
for _ in range(2):
    threading.Thread(target=run, daemon=True).start()
if not os.fork():
    for _ in range(2000):
        os.kill(os.getppid(), stacks.STACK_SIGNAL)
        time.sleep(0.0005)
    os._exit(0)
time.sleep(0.5)
os.wait()
os._exit(7)
"""


def test_a_signal_reads_no_thread_that_runs(tmp_path: Path) -> None:
    """Where it reads all, faulthandler ends such processes with SIGSEGV."""
    folders = [tmp_path / str(n) for n in range(3)]
    asked = []
    for folder in folders:
        folder.mkdir()
        asked.append(subprocess.Popen([sys.executable, "-c", ASKED_OFTEN, str(folder)]))
    assert [process.wait(60) for process in asked] == [7, 7, 7]
    found = threads((folders[0] / "rank-0.stacks.txt").read_text(errors="replace"))
    assert len(found) > 100


def test_a_thread_tells_of_all_others(tmp_path: Path) -> None:
    stack_file.watch(Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {}))
    begun, over = threading.Event(), threading.Event()

    def waits_for_the_end() -> None:
        begun.set()
        over.wait(30)

    waiting = threading.Thread(target=waits_for_the_end)
    telling = threading.Thread(target=stack_file.dump)
    try:
        waiting.start()
        assert begun.wait(30)
        telling.start()
        telling.join(30)
    finally:
        over.set()
        waiting.join(30)
        stack_file.drop()
    *others, main = threads((tmp_path / "rank-0.stacks.txt").read_text())
    functions = [{f.function for f in frames} for frames in others]
    assert "test_a_thread_tells_of_all_others" in {f.function for f in main}
    assert sum("waits_for_the_end" in f for f in functions) == 1
    assert not any("tell" in f for f in functions)


def test_nothing_is_written_where_there_is_no_file() -> None:
    stack_file.drop()
    stack_file.dump()


@pytest.mark.parametrize("head", ["Stack", "Thread 0x00007f0a1", "Current thread 0x00007f0a1 [x]"])
def test_every_kind_of_head_is_read(head: str) -> None:
    dump = f'{head} (most recent call first):\n  File "/home/u/train.py", line 3 in step\n'
    ((frame,),) = threads(dump)
    assert (frame.function, frame.line) == ("step", 3)
