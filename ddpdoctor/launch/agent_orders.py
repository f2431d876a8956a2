"""What the supervisor passes to the agent, in an environment variable that the ranks do not get."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

VARIABLE = "DDPDOCTOR_AGENT"


@dataclass(frozen=True)
class Orders:
    """Orders for the agent, which reads and removes them before torchrun starts.

    Attributes:
        environment: variables to add for the ranks.
        node_file: where to record the starts and ends of processes.
        several: the run has several nodes.
        supervisor: the supervisor's pid.
        safe_path: the user's PYTHONSAFEPATH; the supervisor sets it only for the agent.
    """

    environment: dict[str, str]
    node_file: str
    supervisor: int
    several: bool = False
    safe_path: str | None = None

    def to_text(self) -> str:
        # Not msgspec: a path that is not UTF-8 must arrive as it is.
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Orders:
        return cls(**json.loads(text))
