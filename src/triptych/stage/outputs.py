"""What a stage's model said, on its way from the device to the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from triptych.scheduling.output import Refused
from triptych.stage.model import Output

Copies = list[dict[str, Any] | Refused | None]


def on_host(outputs: Sequence[Output | Refused], *, wait: bool = True) -> Copies:
    """The same outputs with copies of all tensors in the host's memory: the runner uses its buffers again.

    wait: False where the copies are only begun, on the current stream.
    """

    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True, non_blocking=not wait)
        if isinstance(value, Mapping):
            return {key: copy(item) for key, item in value.items()}
        return value

    return [None if output is None else copy(output) for output in outputs]


def attach(output: ModelRunnerOutput, outputs: Copies, *, tokens: bool) -> None:
    """Put what the model said beside what was sampled. tokens: False where the stage samples none.

    Raises:
        ValueError: there is not one output for each request.
    """
    if len(outputs) != len(output.req_ids):
        raise ValueError(f"the stage's model gave {len(outputs)} outputs for {len(output.req_ids)} requests")
    if not tokens:
        output.sampled_token_ids = [[] for _ in output.req_ids]
    output.pooler_output = outputs


class StageAsyncOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """vLLM's output of a step that is still running on the device, with the stage's own."""

    def __init__(self, output: AsyncModelRunnerOutput, outputs: Copies, ready: Callable[[], None]) -> None:
        """`ready` waits until the copies in `outputs` are whole."""
        self._output = output
        self._outputs = outputs
        self._ready = ready

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        self._ready()
        attach(output, self._outputs, tokens=True)
        return output
