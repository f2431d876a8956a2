"""A callback of PyTorch Lightning that examines the training."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:  # the older package, with the same classes
    from pytorch_lightning.callbacks import Callback

from ..embedded import steps_of
from ..report.findings import Report


class DoctorCallback(Callback):  # type: ignore[misc]
    """Examine the training of a `Trainer`, by whatever its processes are started.

        trainer = lightning.Trainer(callbacks=[DoctorCallback(raise_on="error")], ...)

    Options as in `ddpdoctor.checkup`; with `raise_on` every rank raises `ddpdoctor.FaultFound`
    after the same batch. Make it before `trainer.fit`. The report is printed when the ranks have
    ended.

    Raises:
        ValueError: an option is unknown or has an invalid value.
    """

    def __init__(self, **options: Any) -> None:
        self._steps = steps_of(options)

    @property
    def report(self) -> Report | None:
        """The report; None where there is none (yet)."""
        return self._steps.report

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._steps.begin()

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._steps.__enter__()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._steps.__exit__(None, None, None)

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        self._steps.left()
