"""Programs that close the doctor's descriptors, or put files of their own in their place."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.events import TorchLoaded
from ddpdoctor.probe.collectives import stack_server
from ddpdoctor.probe.recording import stack_file
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.storage.run_folder import EventWriter, Lines
from ddpdoctor.storage.safe_fd import HeldFile, mapped

Take = Callable[[int], None]


@pytest.fixture(params=["closed", "reused", "replaced"])
def take(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Take]:
    """Takes a descriptor away; what the program has there then must stay as it is."""
    users = tmp_path / "users"
    users.write_bytes(b"hello")
    own = os.open(users, os.O_RDWR | os.O_APPEND)
    taken = []

    def take(fd: int) -> None:
        if request.param == "replaced":
            os.dup2(own, fd)
        else:
            os.close(fd)
        if request.param == "reused":
            os.dup2(own, fd)
        if request.param != "closed":
            taken.append(fd)

    yield take
    for fd in {*taken, own}:
        assert os.path.samestat(os.fstat(fd), users.stat())
        os.close(fd)
    assert users.read_bytes() == b"hello"


def event(number: int) -> TorchLoaded:
    return TorchLoaded(at=float(number), torch="2", cuda="", nccl="", threads=1, interop_threads=1)


def test_records_go_on(tmp_path: Path, take: Take) -> None:
    path = tmp_path / "rank-0.jsonl"
    writer = EventWriter(path, tmp_path / "rank-0.log")
    for number in range(3):
        assert writer.write(event(number))
        if number < 2:
            assert writer._log is not None
            for file in (writer._file, writer._log):
                take(file._held.fd)
    assert [e.at for e in Lines(path).events()] == [0, 1, 2]
    assert len((tmp_path / "rank-0.log").read_text().splitlines()) == 3
    writer.close()


def test_closing_leaves_what_is_another_s(tmp_path: Path, take: Take) -> None:
    file = HeldFile(tmp_path / "file")
    take(file._held.fd)
    file.close()
    file.close()


def test_a_file_in_its_place_is_not_written_to(tmp_path: Path, take: Take) -> None:
    path = tmp_path / "file"
    file = HeldFile(path)
    take(file._held.fd)
    path.rename(tmp_path / "moved")
    path.write_text("another's")
    with pytest.raises(OSError):
        file.write(b"ours")
    assert path.read_text() == "another's"


def test_low_numbers_stay_free(tmp_path: Path) -> None:
    first = os.open(os.devnull, os.O_RDONLY)
    os.close(first)
    file = HeldFile(tmp_path / "file")
    mapped(tmp_path / "map", 100)
    again = os.open(os.devnull, os.O_RDONLY)
    os.close(again)
    file.close()
    assert first == again


def test_stacks_go_to_their_file_alone(tmp_path: Path, take: Take) -> None:
    path = tmp_path / "rank-0.stacks.txt"
    recorder = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    sizes = [0]

    def asked() -> bool:
        os.kill(os.getpid(), stack_file.STACK_SIGNAL)
        sizes.append(path.stat().st_size)
        return sizes[-1] > sizes[-2]

    stack_file.watch(recorder)
    try:
        for _ in range(2):
            assert asked()
            take(stack_file._stacks.number)
            recorder.emit(event(0))
        assert asked()
        # A child answers the monitor, as the workers of a loader do, and writes nothing by itself.
        child = os.fork()
        if not child:
            os._exit(asked())
        assert os.waitpid(child, 0)[1] == 1 << 8
        size = path.stat().st_size
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        assert path.stat().st_size == size
    finally:
        stack_file.drop()
    sizes.append(path.stat().st_size)
    assert not asked()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_questions_are_heard_again(take: Take) -> None:
    address = f"\0ddpdoctor-test-{os.getpid()}-{time.monotonic_ns():x}"
    questions = stack_server._QuestionSocket(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        mouth.sendto(b"?", address)
        assert questions.receive()
        take(questions._held.fd)
        assert not questions.receive()
        questions = stack_server._QuestionSocket(address)
        mouth.sendto(b"?", address)
        assert questions.receive()


def user_lines_of(frame: FrameType) -> list[tuple[CodeType, int]]:
    found = [(f, n) for f, n in traceback.walk_stack(frame) if f.f_code.co_filename == __file__]
    return [(f.f_code, n) for f, n in found]


def test_the_lines_of_the_training_thread_are_told() -> None:
    told: list[Any] = []
    recorder: Any = SimpleNamespace(
        emit=told.append,
        sites=SimpleNamespace(user_lines=lambda frame, most: user_lines_of(frame)),
    )
    ring: Any = SimpleNamespace(thread=threading.get_ident(), step=7, phase_now=2)
    other = threading.Thread(target=stack_server._emit_where, args=(recorder, ring))
    other.start()
    other.join()
    ring.thread = 0
    stack_server._emit_where(recorder, ring)  # that thread has ended
    ((frame,),) = (event.frames for event in told)
    assert (told[0].step, told[0].phase) == (7, 2)
    assert (frame.file, frame.user) == (__file__, True)
    assert frame.text and frame.text == frame.text.rstrip()
