"""A chunk on a stage that is not autoregressive: it is the request's next input, whole."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.metrics.stats import PrefillStats

from triptych.transfer.adapter.publish import section


def apply_chunk(request: Any, payload: dict[str, Any], *, finished: bool, segment_finished: bool) -> bool:
    """Make the chunk the request's prompt and additional information. False where there is nothing to compute yet.

    `codes.audio` of two or more dimensions stays a tensor behind a prompt of one placeholder; of one dimension, or a
    list, it is the prompt. What else the chunk has is merged into the information that the request has.

    Raises:
        ValueError: the codes are not what a codec stage can take. The request is as it was.
    """
    audio = section(payload, "codes").get("audio")
    tokens, kept = _tokens(audio)
    replaces = section(payload, "meta").get("replace_runtime_additional_information") is True
    request.additional_information = _merge(
        {} if replaces else request.additional_information, payload, without_audio=not kept
    )
    if replaces:
        # A request that is scheduled as a new one carries this record.
        request.model_intermediate_buffer = request.additional_information
    request.num_computed_tokens = 0
    if not tokens and not finished and not segment_finished:
        return False
    if not tokens and segment_finished:
        tokens = [0]
    _set_prompt(request, tokens)
    if request.prefill_stats is None:
        request.prefill_stats = PrefillStats()
    return True


def _tokens(audio: Any) -> tuple[list[int], bool]:
    """The prompt that codes make, and whether they stay codes."""
    if audio is None:
        return [], False
    if isinstance(audio, torch.Tensor):
        if audio.ndim >= 2:
            return ([0] if audio.numel() else []), True
        if audio.is_floating_point() or audio.is_complex():
            raise ValueError(f"codes.audio must be token ids, not {audio.dtype}")
        return [int(token) for token in audio.reshape(-1).tolist()], False
    if isinstance(audio, list | tuple):
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in audio):
            raise ValueError("codes.audio must be a tensor or a list of token ids")
        return list(audio), False
    raise ValueError(f"codes.audio must be a tensor or a list of token ids, not {type(audio).__name__}")


def _merge(old: Any, payload: dict[str, Any], *, without_audio: bool) -> dict[str, Any]:
    record: dict[str, Any] = dict(old) if isinstance(old, dict) else {}
    for name, value in payload.items():
        if not isinstance(value, dict):
            record[name] = value
            continue
        before = record.get(name)
        part = dict(before) if isinstance(before, dict) else {}
        for key, item in value.items():
            if (name == "meta" and key == "finished") or (name == "codes" and key == "audio" and without_audio):
                continue
            part[key] = item
        if part or name in record or name not in ("codes", "meta"):
            record[name] = part
    return record


def _set_prompt(request: Any, tokens: list[int]) -> None:
    request.prompt_token_ids = tokens
    request.num_prompt_tokens = len(tokens)
    every = getattr(request, "_all_token_ids", None)
    if not isinstance(every, list):
        return
    every[:] = tokens
    request._output_token_ids.clear()
    request.block_hashes.clear()
    request.update_block_hashes()
