"""The prompt of a request that grows while the stage before still writes. Pure: it changes the request it is given.

A *condition* is what one chunk adds to the prompt. Its tokens are placeholders, since the model takes embeddings in
their place, or real ones where the chunk brings them (`ids.tokens`). Rules: contract, 2.6.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Window(NamedTuple):
    """How much of a talker's past is kept. `previous`: conditions before the newest one (0: all of them, so a full
    context is an error); `on_capacity`: recompute only when the context would overflow, else with every condition."""

    previous: int = 0
    on_capacity: bool = False


def positive(value: object) -> int | None:
    """`value` if it is a positive integer (a bool is none), else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def extend_prompt(
    payload: dict[str, Any],
    request: Any,
    *,
    max_model_len: int | None = None,
    previous_condition_len: int | None = None,
    previous_condition_seq: int | None = None,
    condition_seq: int | None = None,
    recompute_previous_chunks: int = 0,
    recompute_on_capacity: bool = False,
) -> bool:
    """Let the request's prompt grow by the payload's condition, or begin anew. True if it began anew.

    Reads `next_stage_prompt_len`, `next_stage_generation_tokens` and `replace_streaming_prompt` of the payload's
    `meta`; writes there whether and for which condition the prompt was recomputed, and into `ids` which codes the
    model must then be fed again.

    Raises:
        ValueError: the payload's numbers are wrong, or the context cannot hold the condition and its answer.
    """
    ids, meta = _part(payload, "ids"), _part(payload, "meta")
    meta["streaming_prompt_recompute"] = False
    reserve = _reserve(meta)
    length = positive(meta.get("next_stage_prompt_len"))
    limit = max_model_len or None
    if reserve and limit:
        if length is None:
            raise ValueError("next_stage_generation_tokens needs a positive next_stage_prompt_len")
        if length + reserve > limit:
            raise ValueError(
                "fresh streaming prompt plus generation reserve exceeds max_model_len: "
                f"prompt={length}, reserve={reserve}, limit={limit}"
            )
    if meta.get("replace_streaming_prompt") is True and length:
        _begin_anew(request, length)
        return True
    tokens = ids.get("tokens")
    if isinstance(tokens, list) and tokens:
        _append_tokens(request, tokens, limit)
        return False
    if length is None:
        prompt = ids.get("prompt")
        length = len(prompt) if isinstance(prompt, list) else None
    if not length:
        return False
    computed: int = request.num_computed_tokens
    full = bool(reserve and limit and computed + length + reserve > limit)
    if full and not recompute_previous_chunks:
        raise ValueError(
            f"a streaming prompt at its capacity requires window_size=1: computed={computed}, prompt={length}, "
            f"reserve={reserve}, limit={limit}"
        )
    if previous_condition_seq is not None and recompute_previous_chunks and (full or not recompute_on_capacity):
        codes = request._all_token_ids[request.num_prompt_tokens : computed - _placeholders(request)]
        _begin_anew(request, (previous_condition_len or 0) + len(codes) + length)
        ids["streaming_prompt_previous_codes"] = list(codes)
        meta["streaming_prompt_recompute"] = True
        meta["streaming_condition_seq"] = condition_seq
        return True
    _append(request, [0] * length, computed)
    return False


def _part(payload: dict[str, Any], name: str) -> dict[str, Any]:
    part = payload.get(name)
    if not isinstance(part, dict):
        part = payload[name] = {}
    return part


def _reserve(meta: dict[str, Any]) -> int:
    if "next_stage_generation_tokens" not in meta:
        return 0
    reserve = positive(meta["next_stage_generation_tokens"])
    if reserve is None:
        raise ValueError(
            f"next_stage_generation_tokens must be a positive integer, not {meta['next_stage_generation_tokens']!r}"
        )
    return reserve


def _placeholders(request: Any) -> int:
    count = getattr(request, "num_output_placeholders", 0)
    return count if isinstance(count, int) else 0


def _begin_anew(request: Any, length: int) -> None:
    request.prompt_token_ids = [0] * length
    request._all_token_ids[:] = [0] * length
    request._output_token_ids.clear()
    request.num_computed_tokens = 0
    request.num_prompt_tokens = length
    request.update_block_hashes()


def _append(request: Any, tokens: list[int], kept: int) -> None:
    """The prompt is what is kept of prompt and answer, and the new tokens; what was sampled beyond is dropped."""
    # A step that was scheduled ahead counts as computed, but what it samples is not there yet and will be dropped.
    kept = min(kept, len(request._all_token_ids))
    request.num_computed_tokens = min(request.num_computed_tokens, kept)
    answered = request._all_token_ids[request.num_prompt_tokens : kept]
    request._all_token_ids[kept:] = tokens
    request.prompt_token_ids.extend([*answered, *tokens])
    request._output_token_ids.clear()
    request.num_prompt_tokens = len(request.prompt_token_ids)
    request.update_block_hashes()


def _append_tokens(request: Any, tokens: list[int], limit: int | None) -> None:
    if not all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in tokens):
        raise ValueError("ids.tokens must be a list of token ids")
    # All of it stays, computed or not, but for the token that was sampled last and that nothing was made of.
    kept = max(request.num_prompt_tokens, request.num_computed_tokens, len(request._all_token_ids) - 1)
    if limit is not None and kept + len(tokens) >= limit:
        raise ValueError(f"the streamed prompt of {kept + len(tokens)} tokens leaves no room: max_model_len={limit}")
    _append(request, tokens, kept)
