"""What a stage's model may have beyond what vLLM asks of a model: two methods, each optional.

class Talker(Qwen2ForCausalLM):
    def stage_inputs(self, rows, input_ids, inputs_embeds):
        ...  # add each row's chunk to its embeddings

    def stage_outputs(self, rows, hidden, sampled):
        return [{"codes": {"audio": frame}} ...]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch


@dataclass(slots=True)
class Row:
    """One request in one step.

    Its tokens are at positions `start` to `start + length` of the request, and at `offset` to `offset + length` of the
    step's batch. `prompt_len`: tokens of its prompt by now (a chunk that brings n tokens has the last n of them).
    `samples`: whether a token is sampled for it in this step, or its prompt goes on in the next. `information`: the
    chunk that came since its last step, None for none. `state`: the model's own, empty at first; it lives as long as
    the request, preemption included, after which a request begins again at position 0.
    """

    request_id: str
    start: int
    length: int
    offset: int
    prompt_len: int
    samples: bool
    information: Mapping[str, Any] | None
    state: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def fail(self, reason: str) -> None:
        """What the request brings cannot be used: it ends with this reason, the others of the step go on. (An exception
        is the model's own fault, and ends the engine.)"""
        self.failure = self.failure or reason


Sampled: TypeAlias = Sequence[Sequence[int]] | torch.Tensor
"""The token that each row sampled: a list for each row, empty where there is none; with asynchronous scheduling a
tensor `[rows, 1]` on the device."""
Output: TypeAlias = Mapping[str, Any] | None
"""Tensors (in mappings in each other, if need be) for the stage's input processor; None for nothing."""


@runtime_checkable
class TakesInputs(Protocol):
    """A model that wants to see the chunks of its requests."""

    def stage_inputs(
        self, rows: Sequence[Row], input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The embeddings of the step, `[tokens, width]`, from its tokens `[tokens]`; `inputs_embeds` are those that
        vLLM has made, if it has. None: to go on with what vLLM has."""


@runtime_checkable
class GivesOutputs(Protocol):
    """A model that says more than tokens."""

    def stage_outputs(self, rows: Sequence[Row], hidden: torch.Tensor, sampled: Sampled) -> Sequence[Output]:
        """One output for each row; `hidden` is what the forward pass returned, `[tokens, …]`."""
