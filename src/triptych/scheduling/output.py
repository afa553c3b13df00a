"""What a stage's scheduler tells its worker of a request, beyond what vLLM tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import NewRequestData


@dataclass(frozen=True)
class Refused:
    """In the place of what a stage's model says: it cannot use what the request brings."""

    reason: str


@dataclass
class StageRequestData(NewRequestData):  # type: ignore[misc]
    """A request that is scheduled anew. `additional_information`: its chunk, for the model;
    `model_intermediate_buffer`: what the runner keeps of it from step to step."""

    additional_information: dict[str, Any] | None = None
    model_intermediate_buffer: dict[str, Any] | None = None

    @classmethod
    def from_request(cls, request: Any, *args: Any, **kwargs: Any) -> StageRequestData:
        """vLLM's record of the request, with what its stage has for it. Arguments are those of vLLM's own."""
        return cls.of(NewRequestData.from_request(request, *args, **kwargs), request)

    @classmethod
    def of(cls, data: NewRequestData, request: Any) -> StageRequestData:
        """The same of a record that vLLM has made already."""
        return cls(
            **vars(data),
            additional_information=getattr(request, "additional_information", None),
            model_intermediate_buffer=getattr(request, "model_intermediate_buffer", None),
        )
