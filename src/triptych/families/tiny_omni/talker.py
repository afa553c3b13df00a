"""The talker: a Qwen2 whose prompt is what the thinker says, and whose answer is a frame of codes for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from triptych.families.tiny_omni.recipe import SPECIALS
from triptych.families.tiny_omni.sound import CODEBOOKS, CODES, MARK, TAIL
from triptych.stage.model import Row

_END: Final = SPECIALS.index("<|im_end|>")


class TinyOmniTalker(Qwen2ForCausalLM):  # type: ignore[misc]
    """A chunk has the thinker's tokens, which become the prompt, and its hidden states `[tokens, width]`, which are
    added to their embeddings. `state`: `conditions` by position; `mark` of the request; `over`, the length of the
    prompt when the thinker had finished; `frames` so far."""

    _ends: list[bool]

    def stage_inputs(
        self, rows: Sequence[Row], input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor:
        embeds: torch.Tensor = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        for row in rows:
            if row.information is not None:
                _hear(row, embeds.shape[1])
            conditions: dict[int, torch.Tensor] = row.state.get("conditions", {})
            for position in range(row.start, row.start + row.length):
                if position in conditions:
                    embeds[row.offset + position - row.start] += conditions[position]
        self._ends = [_is_last(row) for row in rows]
        return embeds

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """As vLLM's, but a request that has said everything ends."""
        logits: torch.Tensor | None = super().compute_logits(hidden_states)
        ends = getattr(self, "_ends", [])
        if logits is not None and any(ends) and len(ends) == logits.shape[0]:
            over = torch.tensor(ends)
            logits[over] = float("-inf")
            logits[over, _END] = 0.0
        return logits

    def stage_outputs(self, rows: Sequence[Row], hidden: torch.Tensor, sampled: Any) -> list[dict[str, Any] | None]:
        return [
            None if ends or not row.samples else {"codes": {"audio": _frame(row, int(tokens[0]))}}
            for row, tokens, ends in zip(rows, sampled, self._ends, strict=True)
        ]


def _hear(row: Row, width: int) -> None:
    """Note a chunk; a request whose chunk is not one of this talker's fails."""
    information = row.information or {}
    hidden = (information.get("hidden_states") or {}).get("output")
    tokens = (information.get("ids") or {}).get("tokens") or []
    if hidden is not None:
        if hidden.ndim != 2 or tuple(hidden.shape) != (len(tokens), width):
            row.fail(f"hidden states {list(hidden.shape)} for {len(tokens)} tokens of width {width}")
            return
        conditions = row.state.setdefault("conditions", {})
        for index in range(len(tokens)):
            conditions[row.prompt_len - len(tokens) + index] = hidden[index].clone()
    mark = (information.get("extra") or {}).get("mark")
    if mark is not None:
        row.state["mark"] = int(mark)
    if bool((information.get("meta") or {}).get("finished")):
        row.state["over"] = row.prompt_len


def _is_last(row: Row) -> bool:
    over = row.state.get("over")
    return over is not None and row.start + row.length >= over + TAIL


def _frame(row: Row, token: int) -> torch.Tensor:
    """The step's codes `[1, CODEBOOKS]`, int64: of the sampled token, of how many there were, and whose they are."""
    number = row.state.setdefault("frames", 0)
    row.state["frames"] = number + 1
    frame = [(token * (book + 1) * 37 + number * (2 * book + 1)) % CODES for book in range(CODEBOOKS)]
    frame[MARK] = row.state.get("mark", 0)
    return torch.tensor([frame], dtype=torch.int64)
