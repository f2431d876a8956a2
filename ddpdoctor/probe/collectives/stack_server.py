"""Answers the monitor while the main thread hangs: writes the stacks of all threads, and what
torch's flight recorder has.

A thread waits in `recv` of an abstract datagram socket: that leaves no file behind, does not delay
the exit, and does not exist in a forked child. It touches torch only when asked.
"""

from __future__ import annotations

import _thread
import json
import os
import socket
import time

from ...storage.call_ring import RingWriter, ask_address
from ...storage.flight_dumps import parse
from ...storage.safe_fd import Held, out_of_the_way
from ..recording import stack_file
from ..recording.recorder import Recorder, current_recorder
from ..recording.torch_compat import flight_recorders


def listen(recorder: Recorder, ring: RingWriter) -> None:
    """Start the thread; if that fails, hangs are diagnosed without the flight recorder."""
    try:
        nonce = int.from_bytes(os.urandom(7), "little")
        address = ask_address(os.getpid(), nonce)
        _thread.start_new_thread(_serve, (_QuestionSocket(address), address, os.getpid()))
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

    def receive(self) -> bool:
        """Wait for a question; False if the descriptor is not our socket any more."""
        if not self._held.ours():
            self._socket.detach()
            return False
        self._socket.recv(16)
        return True


def _serve(questions: _QuestionSocket, address: str, pid: int) -> None:
    while True:
        try:
            if not questions.receive():
                questions = _QuestionSocket(address)
                continue
        except OSError:
            return
        recorder = current_recorder()
        if recorder is None or os.getpid() != pid:
            return
        try:
            stack_file.keep()
            stack_file.dump()
        except Exception as error:
            recorder.trouble("stacks", error, "where threads are in a hang")
        try:
            _emit_flight_log(recorder)
        except Exception as error:
            recorder.trouble("flight-recorder", error, "what DDP communicated in a hang")


def _emit_flight_log(recorder: Recorder) -> None:
    for text in flight_recorders():
        for log in parse(json.loads(text)).logs(time.monotonic()):
            recorder.emit(log)
