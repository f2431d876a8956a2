"""faulthandler's dumps."""

from __future__ import annotations

from ddpdoctor.storage.stack_dumps import crash, of_native_thread, threads, worker

DUMP = """\
Thread 0x00007f0a1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 995 in _bootstrap

Current thread 0x00007f0a2 (most recent call first):
  File "/home/u/.venv/lib/python3.11/site-packages/ddpdoctor/probe/calls.py", line 9 in wait
  File "/home/u/.venv/lib/python3.11/site-packages/torch/distributed/c10d.py", line 99 in all_reduce
  File "/home/u/train.py", line 12 in step
  File "/home/u/train.py", line 40 in <module>
"""


def test_the_main_thread_is_last_and_ours_are_left_out() -> None:
    other, main = threads(DUMP)
    assert [f.function for f in main] == ["all_reduce", "step", "<module>"]
    assert [f.user for f in main] == [False, True, True]
    assert not any(f.user for f in other)


def test_what_is_no_dump_has_no_threads() -> None:
    assert threads("Fatal Python error: Aborted\n\nrubbish\n  File nonsense") == []


CRASH = """\
Fatal Python error: Segmentation fault

Thread 0x00007f0a1 (most recent call first):
  File "/home/u/work.py", line 3 in wait

{current}Thread 0x00007f0a2 (most recent call first):
  File "/home/u/train.py", line 12 in step

Extension modules: torch._C (total: 1)
"""


def test_a_crash_is_where_its_thread_was() -> None:
    (frame,) = crash(DUMP + CRASH.replace("{current}Thread", "Current thread"))
    assert (frame.function, frame.line) == ("step", 12)
    other = CRASH.replace("Thread 0x00007f0a1", "Current thread 0x00007f0a1")
    (frame,) = crash(other.replace("{current}", ""))
    assert frame.function == "wait"


def test_a_crash_in_a_thread_without_python_is_told_by_the_main_thread() -> None:
    (frame,) = crash(CRASH.replace("{current}", ""))
    assert frame.function == "step"
    assert crash(DUMP) == ()


def test_which_thread_met_a_fatal_error() -> None:
    assert of_native_thread(CRASH.replace("{current}", ""))
    assert not of_native_thread(CRASH.replace("{current}Thread", "Current thread"))
    assert not of_native_thread(DUMP)


OF_WORKER = """\
Worker 7:
Stack (most recent call first):
  File "/home/u/data.py", line 8 in read
  File "/home/u/.venv/lib/python3.11/site-packages/torch/worker.py", line 9 in fetch
  File "/home/u/.venv/lib/python3.11/site-packages/torch/worker.py", line 3 in _worker_loop
  File "/home/u/train.py", line 40 in <module>
"""


def test_the_stack_of_a_worker_is_not_that_of_the_rank() -> None:
    assert [f.function for f in threads(DUMP + OF_WORKER)[-1]] == ["all_reduce", "step", "<module>"]
    again = DUMP + OF_WORKER + "Rank again:\n" + DUMP.replace("in step", "in later")
    assert [f.function for f in threads(again)[-1]] == ["all_reduce", "later", "<module>"]


def test_the_stack_of_a_worker_begins_where_the_worker_does() -> None:
    assert [f.function for f in worker(OF_WORKER.partition("\n")[2])] == ["read", "fetch"]
    assert worker("") == ()
