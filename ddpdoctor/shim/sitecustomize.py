"""Runs at the start of every Python of a run that the doctor watches; the folder is on PYTHONPATH.

It must cost nothing, break nothing and hide nothing: imports beyond os and sys happen only in the
process of a rank, every failure is swallowed, and the `sitecustomize` that this one shadows is run.
"""

import os
import sys


class _Finder:
    """Calls the probe once torch is imported; finds nothing itself."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                _after_loading(spec)
                return spec
        return None


def _after_loading(spec):
    loader = spec.loader
    run = loader.exec_module

    def exec_module(module):
        run(module)
        try:
            _probe().torch_loaded()
        except Exception:
            _complain()

    try:
        loader.exec_module = exec_module
    except AttributeError:
        pass


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
