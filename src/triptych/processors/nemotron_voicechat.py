"""Nemotron VoiceChat: from the talker to the codec.

With every step the talker gives all its rows so far, 31 codes each, those over the prompt too. A row is of the step
after its place, so the first `nvc_logical_prompt_len - 1` rows are the prompt's and no sound.

A codec that keeps its state (`codec_streaming`) must get each row once. Rows are sent when there are at least
`codec_chunk_frames` (an option of the connector); until then they are kept. Example, with 2 and a prompt of 3:

    talker_to_codec(adapter, {"codes": {"audio": rows[:3]}, **meta}, request)  # row 2 is the first sound: kept
    talker_to_codec(adapter, {"codes": {"audio": rows[:4]}, **meta}, request)  # rows 2 and 3
    talker_to_codec(adapter, {"codes": {"audio": rows[:5]}, **meta}, request)  # row 4: kept
    talker_to_codec(adapter, None, request, is_finished=True)  # and the request ends: row 4

A segment's end is none for the codec, which goes on with the next segment: only a request that is not resumable ends
it. A codec that keeps no state gets the whole sound so far with every chunk, and in `meta.left_context_size` how many
of its rows it has had.

Between calls the state is kept in `transfer_manager.request_payload`, by external id, where the adapter clears it with
the rest of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from triptych.processors.fields import codes, flag, is_last, is_set, mapping, number, option, request_information
from triptych.transfer.payload import Codes, Meta, StagePayload

_WIDTH: Final = 31
_PROMPT_LEN: Final = "nvc_logical_prompt_len"
_STREAMING: Final = "codec_streaming"


def _nothing() -> torch.Tensor:
    return torch.empty((0, _WIDTH), dtype=torch.long)


@dataclass(slots=True)
class _State:
    streaming: bool = False
    prompt_len: int | None = None
    seen: int = 0  # rows of sound that have come
    sent: int = 0  # and that have gone
    rows: torch.Tensor = field(default_factory=_nothing)  # [rows, 31]: what a chunk is made of


def talker_to_codec(
    transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False
) -> StagePayload | None:
    """The rows that the codec has not had, once there are enough for a chunk, or all where the request ends.

    `codes.audio` of the result: int64 on the CPU, `[rows, 31]`. Where there are too few rows, a streaming codec gets a
    payload without codes that ends neither the request nor its segment, the other gets none.

    Raises:
        ValueError: `codes.audio` of the output is not an integer tensor `[rows, 31]`, or has fewer rows than before;
            the prompt's length is nowhere, or not a positive integer; an option is not one.
    """
    wanted = option(transfer_manager, "codec_chunk_frames", 13)
    output = mapping(multimodal_output)
    information = request_information(request)
    found = codes(output, width=_WIDTH, exact=True)
    kept = transfer_manager.request_payload
    state = kept.get(request.external_req_id)
    if not isinstance(state, _State):
        state = _State()
    state.streaming = state.streaming or is_set(output, _STREAMING) or is_set(information, _STREAMING)
    if found is not None:
        _take(state, found, _prompt_len(state, output, information))
    kept[request.external_req_id] = state

    last = is_last(request, is_finished)
    if last:
        kept.pop(request.external_req_id, None)
    fresh = state.seen - state.sent
    if fresh and (fresh >= wanted or last):
        return _ship(state, last)
    if state.streaming:
        return StagePayload(meta=_meta(state, last))
    return None


def _prompt_len(state: _State, output: Mapping[str, Any], information: Mapping[str, Any]) -> int:
    """The step's own word first: what the request says is overwritten by the chunks that it receives."""
    for source in (output, information):
        length = number(source, _PROMPT_LEN)
        if length is not None:
            return length
    if state.prompt_len is None:
        raise ValueError(f"{_PROMPT_LEN} is neither in the model's output nor in the request: which rows are sound?")
    return state.prompt_len


def _take(state: _State, found: torch.Tensor, prompt_len: int) -> None:
    """Add what is new in all rows so far to the state: copies, on the CPU."""
    state.prompt_len = prompt_len
    sound = found[prompt_len - 1 :]
    if len(sound) < state.seen:
        raise ValueError(f"codes.audio has {len(sound)} rows of sound after {state.seen} before: rows were lost")
    new = sound[state.seen :].detach().to(device="cpu", dtype=torch.long)
    state.rows = torch.cat([state.rows, new])  # a copy in any case
    state.seen = len(sound)


def _ship(state: _State, last: bool) -> StagePayload:
    payload = StagePayload(codes=Codes(audio=state.rows), meta=_meta(state, last))
    state.sent = state.seen
    if state.streaming:
        state.rows = _nothing()
    return payload


def _meta(state: _State, last: bool) -> Meta:
    if not state.streaming:
        return Meta(left_context_size=state.sent)
    # The codec's life is the processor's to tell, not that of the talker's segments.
    return Meta(codec_streaming=True, left_context_size=0, finished=flag(last), is_segment_finished=flag(False))
