"""Text to text: the next stage's prompt grows by the tokens of this one.

Example: `"stage": {"id": 0, "role": "sender", "processor": "triptych.processors.tokens:forward"}`. A request of both
stages under one `triptych_stream` then starts parked in stage 1, and reads there what stage 0 writes.
"""

from __future__ import annotations

from typing import Any

from triptych.transfer.payload import Ids, StagePayload


def forward(
    transfer_manager: Any,
    multimodal_output: Any,
    request: Any,
    is_finished: bool = False,
    new_token_ids: list[int] | None = None,
) -> StagePayload | None:
    """A chunk with the step's tokens; None where there are none and nothing ends."""
    if not new_token_ids:
        return None
    return StagePayload(ids=Ids(tokens=list(new_token_ids)))
