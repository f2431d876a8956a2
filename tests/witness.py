"""Runs a script as `python SCRIPT` would and writes down, bit by bit, what it computed.

After every optimizer step the parameters, the optimizer's state and the state of all random streams
go into a digest, and the streams once more at the end. One line of digests per rank.
"""

from __future__ import annotations

import hashlib
import os
import random
import runpy
import sys
from pathlib import Path


class Witness:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digest = hashlib.sha256()
        self.steps = 0

    def streams(self) -> None:
        import torch

        self.digest.update(repr(random.getstate()).encode())
        self.digest.update(torch.get_rng_state().numpy().tobytes())
        if "numpy" in sys.modules:
            import numpy

            self.digest.update(repr(numpy.random.get_state()).encode())

    def stepped(self, optimizer: object, args: object, kwargs: object) -> None:
        import torch

        self.steps += 1
        held = [p for group in optimizer.param_groups for p in group["params"]]  # type: ignore[attr-defined]
        for parameter in held:
            state = optimizer.state.get(parameter, {})  # type: ignore[attr-defined]
            for value in (parameter, *(state[k] for k in sorted(state))):
                if isinstance(value, torch.Tensor):
                    local = value.to_local() if hasattr(value, "to_local") else value
                    self.digest.update(local.detach().double().cpu().numpy().tobytes())
        self.streams()

    def leave(self) -> None:
        rank = os.environ.get("RANK", "0")
        self.streams()
        line = f"{self.steps} {self.digest.hexdigest()}\n"
        (self.folder / f"witness-{rank}.txt").write_text(line)


def main() -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    # Python, numpy and torch seed theirs anew in every process.
    random.seed(1)
    torch.manual_seed(1 + int(os.environ.get("RANK", "0")))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(1)
    witness = Witness(Path(os.environ["WITNESS"]))
    register_optimizer_step_post_hook(witness.stepped)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        witness.leave()


if __name__ == "__main__":
    main()
