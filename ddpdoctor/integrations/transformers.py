"""A callback of Hugging Face Transformers that examines the training."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ..embedded import steps_of
from ..report.findings import Report


class DoctorCallback(TrainerCallback):  # type: ignore[misc]
    """Examine the training of a `Trainer`, by whatever its processes are started.

        doctor = DoctorCallback(raise_on="error")
        trainer = Trainer(model, TrainingArguments(...), callbacks=[doctor])

    Options as in `ddpdoctor.checkup`; with `raise_on` every rank raises `ddpdoctor.FaultFound`
    after the same optimizer step. Make it before `TrainingArguments`, which creates the process
    group. The report is printed when the ranks have ended.

    Raises:
        ValueError: an option is unknown or has an invalid value.
    """

    def __init__(self, **options: Any) -> None:
        self._steps = steps_of(options)

    @property
    def report(self) -> Report | None:
        """The report; None where there is none (yet)."""
        return self._steps.report

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._steps.begin()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._steps.__enter__()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._steps.__exit__(None, None, None)
