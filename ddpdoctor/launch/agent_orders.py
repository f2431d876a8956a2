"""What the supervisor tells the agent, in one variable that no rank sees."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

VARIABLE = "DDPDOCTOR_AGENT"


@dataclass(frozen=True)
class Orders:
    """Read and removed by the agent before torchrun starts.

    Attributes:
        environment: to add for the ranks.
        supervisor: its pid.
        safe_path: what PYTHONSAFEPATH was; the supervisor sets it for the agent alone.
    """

    environment: dict[str, str]
    node_file: str
    supervisor: int
    safe_path: str | None = None

    def to_text(self) -> str:
        # Not msgspec: a path that is not UTF-8 must arrive as it is.
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Orders:
        return cls(**json.loads(text))
