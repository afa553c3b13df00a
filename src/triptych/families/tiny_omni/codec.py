"""The codec: a model without attention and without weights that matter; each chunk of codes is one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.interfaces import IsAttentionFree
from vllm.model_executor.models.interfaces_base import attn_type

from triptych.families.tiny_omni.sound import SAMPLE_RATE, sound
from triptych.stage.model import Row


@attn_type("attention_free")
class TinyOmniCodec(nn.Module, IsAttentionFree):  # type: ignore[misc]
    """A row's chunk has `codes.audio` `[frames, CODEBOOKS]`, the first `meta.left_context_size` of which only come
    before."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.vocab_size = config.vocab_size
        self.scale = nn.Parameter(torch.ones(config.hidden_size), requires_grad=False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.scale.expand(input_ids.shape[0], -1)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        return self.scale.expand(positions.shape[-1], -1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """vLLM samples a token of every model; nobody looks at this stage's."""
        return hidden_states.new_zeros(hidden_states.shape[0], self.vocab_size)

    def stage_outputs(self, rows: Sequence[Row], hidden: torch.Tensor, sampled: Any) -> list[dict[str, Any] | None]:
        return [_spoken(row) for row in rows]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in weights}


def _spoken(row: Row) -> dict[str, Any] | None:
    information = row.information or {}
    codes = (information.get("codes") or {}).get("audio")
    if codes is None:
        return None
    left = (information.get("meta") or {}).get("left_context_size") or 0
    try:
        return {"sound": sound(codes, left), "sample_rate": SAMPLE_RATE}
    except ValueError as error:
        row.fail(str(error))
        return None
