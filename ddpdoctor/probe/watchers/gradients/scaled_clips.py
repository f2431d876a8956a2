"""Are gradients clipped while they are still multiplied by a loss scale?

`GradScaler.step` divides them by the scale where the program has not called `unscale_` before: what
was clipped until then was limited to a fraction of what was asked for.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from ....events import ClippedScaled
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Error, Kwargs, Watcher
from ...training.backwards import Backwards
from .limits import CLIPS_EMITTED

LIMITS = {"clip_grad_norm_": "max_norm", "clip_grad_value_": "clip_value"}
"""The functions that clip, and the name of the second parameter of each."""


LARGE = 256.0
"""A limit from which on it may be meant for scaled gradients, where the scale is not read."""


class _Clip(NamedTuple):
    """The last call that clips, and how many backwards had ended before it."""

    function: str
    limit: float
    site: int
    backwards: int


class ScaledClips(Watcher):
    """
    Attributes:
        clip: None where gradients were divided by the scale before it, after the same backward.
        unscaled: how many backwards had ended when gradients were divided by a scale last.
        emitted: calls recorded.
    """

    lost = "clipping of gradients that are multiplied by a loss scale"

    def __init__(self) -> None:
        self.clip: _Clip | None = None
        self.unscaled = -1
        self.emitted = 0

    def install(self) -> None:
        import torch.amp
        import torch.nn.utils as utils
        from torch.nn.utils import clip_grad

        for name in LIMITS:
            begins = self._clips(name)
            self.around((clip_grad, utils), name, before=begins)
        self.around(
            torch.amp.GradScaler, "unscale_", before=self._unscales, after=self._unscaled_now
        )

    def _clips(self, name: str) -> Any:
        def before(recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
            count = Backwards.current.count
            if self.emitted >= CLIPS_EMITTED or self.unscaled == count:
                self.clip = None
                return
            given = args[1] if len(args) > 1 else kwargs.get(LIMITS[name])
            limit = 0.0 if not isinstance(given, (int, float)) else float(given)
            self.clip = _Clip(name, limit, recorder.site(), count)

        return before

    def _unscales(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        clip, self.clip = self.clip, None
        if clip is None or clip.backwards != Backwards.current.count or not args[0].is_enabled():
            return None
        held = getattr(args[0], "_scale", None)
        scale = float(held) if held is not None and held.is_cpu else 0.0
        return clip, scale, recorder.site()

    def _unscaled_now(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        self.unscaled = Backwards.current.count
        if token is None or error is not None:
            return
        clip, scale, site = token
        # A limit that is multiplied by the scale is meant for scaled gradients.
        if scale == 1.0 or clip.limit >= (scale or LARGE):
            return
        self.emitted += 1
        recorder.emit(
            ClippedScaled(
                at=time.monotonic(),
                function=clip.function,
                limit=clip.limit,
                scale=scale,
                step=recorder.step,
                site=clip.site,
                unscale_site=site,
            )
        )
