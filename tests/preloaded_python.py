"""A Python that has torch imported already, and becomes by fork what `python ...` would be.

Most of the time of a short run goes into importing torch, once in torchrun and once in every rank.
This process imports it once; `tests/preloaded.py` then has it forked instead of starting new ones.
What is forked must not be told from a new process by the doctor or by a script:

- It imports what a script imports in the same order, through the same finders: modules that are
  there already are hidden until they are asked for, and are then found by a finder of ours, which
  comes after the probe's (`Hidden`).
- No frame of ours is beneath the script's: CPython's own function runs the file, called from C
  in the only thread, which is the main one after a fork (`begin`).
- Parents are right: `ddpdoctor run` becomes torchrun's agent and this the ranks by processes that
  each forked before it did anything else, and that wait for what they are to become (`Waiting`).
- Arguments, environment (also in /proc), current folder, `sys.path`, seeds, files and session are
  those of the order; `sitecustomize` is run anew.

Different are the hash seed, which all processes of a run share, what C libraries read from the
environment as they are loaded (a rank with another OMP_NUM_THREADS than torchrun's is started
anew), how long imports take, and that memory of torch is shared. Torchrun and the doctor's own
process end without taking their modules down.
"""

import sys

AT_START = set(sys.modules)

import _thread  # noqa: E402
import array  # noqa: E402
import ctypes  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import importlib.util  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import multiprocessing.process  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import site  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import threading  # noqa: E402
from collections import deque  # noqa: E402
from importlib.machinery import PathFinder  # noqa: E402
from types import ModuleType  # noqa: E402

PADDING = "PRELOADED_PADDING"
"""A variable that makes room for the environments of what is forked, in what /proc shows."""


def belongs(module):
    """Whether it comes from a file, or is made by one that does."""
    said = vars(module).get("__spec__")
    return said is None or said.has_location


OURS = {n for n, module in sys.modules.items() if n not in AT_START and belongs(module)}
THREADS = "1"
MESSAGE = 1 << 17
C = ctypes.pythonapi
RUN_FILE = C.PyRun_SimpleFileExFlags
RUN_FILE.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)
C.Py_Exit.argtypes = (ctypes.c_int,)
LIBC = ctypes.CDLL(None)
LIBC.fopen.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
LIBC.fopen.restype = ctypes.c_void_p

steps = []
"""What the thread that forks calls next, without arguments; each must be a `partial`."""

returned = []
PATH = sys.path[1:]
MAIN = sys.modules["__main__"]


class Hidden:
    """Modules that are imported without their code being run again, once they are asked for.

    Args:
        groups: names of modules by that of the first of them: those that its import brings along.
    """

    def __init__(self, groups):
        self.groups = groups
        self.modules = {}
        self.attributes = []

    def hide(self):
        for name in [*OURS, *(name for group in self.groups.values() for name in group)]:
            module = sys.modules.pop(name, None)
            if module is not None:
                self.modules[name] = module
        for name, module in self.modules.items():
            parent, _, child = name.rpartition(".")
            if vars(sys.modules.get(parent, self.modules.get(parent, sys))).get(child) is module:
                self.attributes.append((parent, child, name))
        inside = self.groups["torch"]
        for parent, child, name in self.attributes:
            if parent in inside and name not in inside:
                delattr(self.modules[parent], child)
        sys.meta_path.insert(sys.meta_path.index(PathFinder), self)

    def find_spec(self, name, path=None, target=None):
        module = self.modules.get(name)
        said = module and vars(module).get("__spec__")
        if not said:
            return None
        spec = importlib.util.spec_from_file_location(
            name,
            said.origin,
            loader=Shown(self, module, said),
            submodule_search_locations=said.submodule_search_locations,
        )
        spec.cached = said.cached
        return spec

    def show(self, name):
        group = self.groups.get(name) or [n for n in self.modules if n.startswith(f"{name}.")]
        for each in (name, *group):
            module = self.modules.pop(each, None)
            if module is not None:
                sys.modules[each] = module
        for parent, child, each in self.attributes:
            if each in sys.modules and parent in sys.modules:
                setattr(sys.modules[parent], child, sys.modules[each])


class Shown:
    def __init__(self, hidden, module, said):
        self.hidden, self.module, self.said = hidden, module, said

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        self.hidden.show(self.said.name)
        module.__spec__ = self.said

    def __getattr__(self, name):
        return getattr(self.said.loader, name)


def preloaded():
    """Import what runs import; the modules that each of the imports brought along."""
    groups = {}
    for name in ("torch", "torch._dynamo", "torch.distributed.run"):
        before = set(sys.modules)
        importlib.import_module(name)
        groups[name] = [
            new for new, module in sys.modules.items() if new not in before and belongs(module)
        ]
    return groups


def received(channel):
    """The next order and its files; None at the end."""
    size = array.array("i").itemsize
    message, extra, _, _ = channel.recvmsg(MESSAGE, socket.CMSG_SPACE(3 * size))
    files = array.array("i")
    for _, _, data in extra:
        files.frombytes(data)
    return (json.loads(message), list(files)) if message else None


def serve(channel):
    """Fork what is ordered, one after the other; returns only in the new process."""
    while True:
        try:
            order = received(channel)
        except OSError:
            order = None
        if order is None:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            return become(*order)
        for file in order[1]:
            os.close(file)
        try:
            channel.send(json.dumps(pid).encode())
            end = os.pidfd_open(pid)
            if channel in select.select([channel, end], [], [])[0]:  # nobody is there any more
                os.killpg(pid, signal.SIGTERM)
                os._exit(0)
            os.close(end)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            channel.send(json.dumps(status).encode())
        except OSError:
            os._exit(0)


class Waiting:
    """Forks of this process that wait to become what it starts.

    `subprocess.Popen` gives its order to one of them where it would start this very Python.
    """

    def __init__(self):
        self.there = []

    def fork(self, count):
        """Returns in the new ones what they became; False in this one."""
        for _ in range(count):
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                for _, other in self.there:
                    other.close()
                here.close()
                order = received(there)
                if order is None:
                    os._exit(0)
                there.close()
                become(*order)
                return True
            there.close()
            self.there.append((pid, here))
        return False

    def install(self):
        original = subprocess.Popen._execute_child
        parameters = inspect.signature(original)

        @functools.wraps(original)
        def _execute_child(popen, *args, **kwargs):
            said = parameters.bind(popen, *args, **kwargs).arguments
            environ = said["env"] if said["env"] is not None else os.environ
            if not (self.there and self._can(said, environ)):
                return original(popen, *args, **kwargs)
            pipes = [said["p2cread"], said["c2pwrite"], said["errwrite"]]
            order = {
                "words": [os.fsdecode(word) for word in said["args"][1:]],
                "environ": {os.fsdecode(k): os.fsdecode(v) for k, v in environ.items()},
                "cwd": os.getcwd(),
                "session": bool(said["start_new_session"]),
            }
            popen.pid, channel = self.there.pop(0)
            popen._child_created = True
            files = array.array("i", [own if f == -1 else f for own, f in enumerate(pipes)])
            channel.sendmsg(
                [json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
            )
            channel.close()
            popen._close_pipe_fds(
                *(said[n] for n in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
                *(said[n] for n in ("errread", "errwrite")),
            )
            return None

        subprocess.Popen._execute_child = _execute_child

    def _can(self, said, environ):
        words = said["args"]
        agent = "ddpdoctor.launch.agent" in words
        return (
            (agent or environ.get("OMP_NUM_THREADS") == THREADS) and
            not said["shell"] and not said["cwd"] and said["preexec_fn"] is None
            and not isinstance(words, (str, bytes)) and words[0] == sys.executable
            and understood(words[1:]) is not None
        )  # fmt: skip


def understood(words):
    """(module, script, arguments), None for a command line that is left to Python itself."""
    words = list(words)
    if words[:1] == ["-u"]:
        del words[0]
    if words[:1] == ["-m"] and len(words) > 1:
        return words[1], None, words[2:]
    if words and not words[0].startswith("-") and os.path.isfile(words[0]):
        return None, words[0], words[1:]
    return None


def starts(words):
    """How many Pythons a process with these arguments may start."""
    module, _, rest = understood(words)
    if module == "ddpdoctor":
        return 1
    if module not in ("ddpdoctor.launch.agent", "torch.distributed.run"):
        return 0
    said = re.search(r"--nproc-per-node[= ](\d+)", " ".join(rest))
    again = re.search(r"--max-restarts[= ](\d+)", " ".join(rest))
    return int(said[1] if said else 2) * (int(again[1] if again else 0) + 1)


def become(order, files):
    """Be what a new Python with these arguments would be when it begins its script."""
    try:
        _become(order, files)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(70)


def _become(order, files):
    for own, file in enumerate(files):
        os.dup2(file, own)
    os.closerange(3, 4096)
    os.chdir(order["cwd"])
    waiting = Waiting()
    if waiting.fork(starts(order["words"])):
        return
    if order["session"]:
        os.setsid()
    note_environ(order["environ"])
    module, script, rest = understood(order["words"])
    if waiting.there:
        waiting.install()
    if script:
        refresh()
    hidden.hide()
    sys.argv = ["-m" if module else script, *rest]
    sys.orig_argv = [sys.executable, *order["words"]]
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__annotations__ = {}
    main.__builtins__ = sys.modules["builtins"]
    main.__loader__ = MAIN.__loader__.__class__
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    if script:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
        name = os.fsencode(os.path.join(os.getcwd(), script))
        steps.append(functools.partial(RUN_FILE, LIBC.fopen(name, b"rb"), name, 1, None))
    else:
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path.insert(0, os.getcwd())
        steps.append(functools.partial(run_module, module))
    steps.append(functools.partial(leave))


def note_environ(environ):
    """Take this environment on, also in what /proc says this process was started with."""
    os.environ.clear()
    os.environ.update(environ)
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    text = b"\0".join(b"%s=%s" % pair for pair in os.environb.items())
    room = end - begin
    ctypes.memmove(begin, text[: room - 1].ljust(room, b"\0"), room)


def refresh():
    """What a new process would find in its environment, or draw by lot."""
    import torch

    torch.distributed.set_debug_level_from_env()
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    # torch stands still at the end of a program where a thread of gloo lets go of the last work,
    # for which it needs the interpreter, while the main thread waits for that thread. In a new
    # process that has a second of imports behind it this is rare. Here the main thread would come
    # first most times as it is woken: as a batch process it does not.
    os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    # And a work keeps the context of the last backward, which only compiled code asks for.
    for name in ("_stash_obj_in_tls", "_remove_obj_from_tls"):
        if hasattr(torch._C, name):
            setattr(torch._C, name, {}.get)


def run_module(module):
    """Not a rank's program: it ends without taking down all of torch, which it does not need."""
    import atexit
    import runpy

    status = 0
    try:
        runpy._run_module_as_main(module)
    except SystemExit as error:
        status = error.code
        if not isinstance(status, (int, type(None))):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(status or 0)


def leave():
    """As Python ends after its script."""
    if returned[-1] == 0:
        status = 0
    elif getattr(sys, "last_type", None) is KeyboardInterrupt:
        import atexit

        threading._shutdown()
        atexit._run_exitfuncs()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    else:
        status = 1
    steps.append(functools.partial(C.Py_Exit, status))


def begin(channel):
    """Serve in a thread that has no frame beneath what it calls: a list iterator, a map and a
    deque are all that is left of us when a script runs."""
    steps.append(functools.partial(serve, channel))
    calls = map(returned.append, map(functools.partial.__call__, steps))
    _thread.start_new_thread(deque, (calls, 0))
    threading.Event().wait()


if __name__ == "__main__":
    hidden = Hidden(preloaded())
    gc.freeze()
    begin(socket.socket(fileno=int(sys.argv[1])))
