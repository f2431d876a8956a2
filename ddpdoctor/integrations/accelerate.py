"""A tracker of Hugging Face Accelerate that examines the training."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

from ..embedded import steps_of
from ..report.findings import Report


class DoctorTracker(GeneralTracker):  # type: ignore[misc]
    """Examine the training of an `Accelerator`, by whatever its processes are started.

        accelerator = Accelerator(log_with=[DoctorTracker(), "tensorboard"])
        accelerator.init_trackers("project")

    Options as in `ddpdoctor.checkup`, but for `raise_on`: a tracker is not told when a step ends
    on all ranks (decorate the step with `@ddpdoctor.checkup(raise_on=...)` for that). Make it
    before `Accelerator`, which creates the process group. The report is printed when the ranks
    have ended.

    Raises:
        ValueError: an option is unknown or has an invalid value.
    """

    name = "ddpdoctor"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        if "raise_on" in options:
            raise ValueError(
                "DoctorTracker takes no raise_on; decorate the function that takes a step: "
                "@ddpdoctor.checkup(raise_on=...)"
            )
        self._steps = steps_of(options)

    @property
    def tracker(self) -> Report | None:
        """The report; None where there is none (yet)."""
        return self._steps.report

    def start(self) -> None:
        self._steps.begin()
