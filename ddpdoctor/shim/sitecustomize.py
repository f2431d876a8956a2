"""Runs at the start of every Python of a run that the doctor watches; the folder is on PYTHONPATH.

It must cost nothing, break nothing and hide nothing: more than os and sys is imported only in the
process of a rank and in one that asks for torch, every failure is swallowed, and the
`sitecustomize` that this one shadows is run.
"""

import os
import sys
from _thread import get_ident


class _Finder:
    """Finds nothing itself: puts the probe's own finder in its place, once torch is asked for, or
    was imported without asking it."""

    def __init__(self):
        self.busy = set()

    def find_spec(self, name, path=None, target=None):
        thread = get_ident()
        if thread in self.busy or (name != "torch" and "torch" not in sys.modules):
            return None
        self.busy.add(thread)
        try:
            finder = _probe().wait_for_torch()
        except Exception:
            finder = None
            _complain()
        finally:
            self.busy.discard(thread)
        # Only now: another thread may have asked meanwhile.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        # Who is asking goes on behind this place in `sys.meta_path`, where the new one is not.
        return finder and finder.find_spec(name, path, target)


def _probe():
    try:
        from ddpdoctor import probe
    except ImportError:
        # Another virtual environment than the launcher's: take the package from there.
        home = os.environ["DDPDOCTOR_HOME"]
        sys.path.append(home)
        try:
            from ddpdoctor import probe
        finally:
            sys.path.remove(home)
    return probe


def _complain():
    """Leave the reason where the report finds it; never on the user's terminal."""
    try:
        import traceback

        path = os.path.join(os.environ["DDPDOCTOR_DIR"], "probe-errors-%d.txt" % os.getpid())
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(os.open(path, flags, 0o600), "a") as file:
            traceback.print_exc(file=file)
    except Exception:
        pass


def _chain():
    """Run the `sitecustomize` that would have run without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    ours = sys.modules.pop("sitecustomize", None)
    paths = sys.path[:]
    sys.path[:] = [p for p in paths if os.path.abspath(p or ".") != here]
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        for index, path in enumerate(paths):
            if os.path.abspath(path or ".") == here:
                sys.path.insert(index, path)
        if "sitecustomize" not in sys.modules and ours is not None:
            sys.modules["sitecustomize"] = ours


try:
    if os.environ.get("DDPDOCTOR_DIR"):
        sys.meta_path.insert(0, _Finder())
        # A rank that a launcher started (or that started Python anew), not a helper of a rank.
        if (
            int(os.environ.get("WORLD_SIZE") or 0) > 0
            and os.environ.get("RANK")
            and os.environ.get("DDPDOCTOR_OWNER") in (None, str(os.getpid()))
        ):
            _probe().rank_started()
except Exception:
    _complain()
_chain()
