"""PersonaPlex: from the talker to the codec.

With every step the talker gives one row of codes, one per codebook; the first eight are its own voice. Codebook 0 is of
the frame of that step, codebooks 1 to 7 are of the frame before. So a frame takes two rows:

    frame t = row[t][0], row[t + 1][1:8]

N frames take N + 1 rows, and the last row of a chunk is also the first of the next. The first chunk is of
`initial_codec_chunk_frames` frames (it is heard early), the others of `codec_chunk_frames`; both are options of the
connector. Example, with 1 and 2:

    talker_to_codec(adapter, None, request)  # row 0: nothing to hear yet, meta.finished is False
    talker_to_codec(adapter, None, request)  # row 1: frame 0
    talker_to_codec(adapter, None, request)  # row 2: nothing new
    talker_to_codec(adapter, None, request)  # row 3: frames 1 and 2
    talker_to_codec(adapter, None, request, is_finished=True)  # row 4, and the request ends: frame 3

A frame needs the row after it, so the last row of all gives none. Between calls the rows are kept in
`transfer_manager.request_payload`, by external id, where the adapter clears them with the rest of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch

from triptych.processors.fields import codes, flag, is_last, option
from triptych.transfer.payload import Codes, Meta, StagePayload

_CODEBOOKS: Final = 8


@dataclass(slots=True)
class _State:
    rows: list[torch.Tensor] = field(default_factory=list)  # not sent, or needed for the next frame; [8] each
    begun: bool = False


def talker_to_codec(
    transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False
) -> StagePayload:
    """The frames that are complete, once there are enough for a chunk, or all where the request ends.

    `codes.audio` of the result: int64 on the CPU, flat, codebook by codebook: `[8 * frames]`. Where there are too few
    rows, the result has no codes and says that neither the request nor its segment ends, because the adapter would
    else say so for a flush.

    Raises:
        ValueError: `codes.audio` of the request, or else of the output, is not an integer tensor `[rows, at least 8]`;
            an option is not a positive integer.
    """
    steady = option(transfer_manager, "codec_chunk_frames", 25)
    initial = option(transfer_manager, "initial_codec_chunk_frames", steady)
    row = _row(request, multimodal_output)
    kept = transfer_manager.request_payload
    state = kept.get(request.external_req_id)
    if not isinstance(state, _State):
        state = kept[request.external_req_id] = _State()
    if row is not None:
        state.rows.append(row)

    there = max(0, len(state.rows) - 1)
    if is_last(request, is_finished):
        frames = state.rows
        kept.pop(request.external_req_id, None)
        return StagePayload(codes=Codes(audio=_frames(frames))) if there else StagePayload()
    if there < (steady if state.begun else initial):
        return StagePayload(meta=Meta(finished=flag(False), is_segment_finished=flag(False)))
    frames, state.rows, state.begun = state.rows, state.rows[-1:], True
    return StagePayload(codes=Codes(audio=_frames(frames)))


def _row(request: Any, multimodal_output: Any) -> torch.Tensor | None:
    """The step's row of the talker's own codebooks, a copy: the last one. None while the model is warming up, which it
    shows by a code below 0."""
    found = codes(getattr(request, "additional_information", None), width=_CODEBOOKS, exact=False)
    if found is None:
        found = codes(multimodal_output, width=_CODEBOOKS, exact=False)
    if found is None:
        return None
    row = found[-1, :_CODEBOOKS].detach().to(device="cpu", dtype=torch.long, copy=True)
    return None if bool((row < 0).any()) else row


def _frames(rows: list[torch.Tensor]) -> torch.Tensor:
    """The frames that these rows complete, `[8 * (rows - 1)]`, codebook by codebook."""
    raw = torch.stack(rows)
    return torch.cat([raw[:-1, :1], raw[1:, 1:]], dim=1).t().reshape(-1)
