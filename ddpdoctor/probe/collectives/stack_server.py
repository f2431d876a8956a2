"""Answers the monitor. While the main thread hangs: the stacks of all threads, and what torch's
flight recorder has. While other ranks wait for this one: the program's lines that it is at.

A thread waits in `recv` of an abstract datagram socket: that leaves no file behind, does not delay
the exit, and does not exist in a forked child. It touches torch only when asked.
"""

from __future__ import annotations

import _thread
import json
import linecache
import os
import socket
import sys
import time

from ...events import StackFrame, Working
from ...storage.call_ring import ASK_LINES, ask_address
from ...storage.flight_dumps import parse
from ...storage.safe_fd import Held, out_of_the_way
from ..recording import stack_file
from ..recording.code_locations import absolute
from ..recording.recorder import Recorder, current_recorder
from ..recording.torch_compat import flight_recorders
from .timed_ring import TimedRing

LINES_AT_MOST, TEXT_AT_MOST = 12, 200
"""Lines of a stack that are recorded, and characters of each."""


def listen(recorder: Recorder, ring: TimedRing) -> None:
    """Start the thread; if that fails, hangs are diagnosed without the flight recorder."""
    try:
        nonce = int.from_bytes(os.urandom(7), "little")
        address = ask_address(os.getpid(), nonce)
        questions = _QuestionSocket(address)
        _thread.start_new_thread(_serve, (questions, address, os.getpid(), ring))
        ring.answers(nonce)
    except (OSError, RuntimeError, AttributeError) as error:
        recorder.trouble("answers", error, "collectives that DDP issues itself, in a hang")


class _QuestionSocket:
    """The socket. The program may close it, or reuse its number, like any descriptor's."""

    def __init__(self, address: str) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket = socket.socket(fileno=out_of_the_way(made.detach()))
        self._held = Held(self._socket.fileno())
        self._socket.bind(address)

    def receive(self) -> bytes:
        """Wait for a question; empty if the descriptor is not our socket any more."""
        if not self._held.ours():
            self._socket.detach()
            return b""
        return self._socket.recv(16)


def _serve(questions: _QuestionSocket, address: str, pid: int, ring: TimedRing) -> None:
    while True:
        try:
            if not (question := questions.receive()):
                questions = _QuestionSocket(address)
                continue
        except OSError:
            return
        recorder = current_recorder()
        if recorder is None or os.getpid() != pid:
            return
        if question == ASK_LINES:
            try:
                _emit_where(recorder, ring)
            except Exception as error:
                recorder.trouble("lines", error, "where a rank is that others wait for")
            continue
        try:
            stack_file.keep()
            stack_file.dump()
        except Exception as error:
            recorder.trouble("stacks", error, "where threads are in a hang")
        try:
            _emit_flight_log(recorder)
        except Exception as error:
            recorder.trouble("flight-recorder", error, "what DDP communicated in a hang")


def _emit_where(recorder: Recorder, ring: TimedRing) -> None:
    """Record the program's lines that the training thread is at."""
    frame = sys._current_frames().get(ring.thread)
    if frame is None:
        return
    lines = recorder.sites.user_lines(frame, LINES_AT_MOST)
    del frame  # else the program's objects live longer
    recorder.emit(
        Working(
            at=time.monotonic(),
            step=ring.step,
            phase=ring.phase_now,
            frames=tuple(
                StackFrame(
                    file=absolute(code.co_filename),
                    line=line,
                    function=code.co_name,
                    user=True,
                    text=linecache.getline(code.co_filename, line).rstrip()[:TEXT_AT_MOST],
                )
                for code, line in reversed(lines)
            ),
        )
    )


def _emit_flight_log(recorder: Recorder) -> None:
    for text in flight_recorders():
        for log in parse(json.loads(text)).logs(time.monotonic()):
            recorder.emit(log)
