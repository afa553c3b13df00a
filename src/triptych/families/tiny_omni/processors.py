"""From stage to stage of the tiny speaking model: the worked example of stage input processors.

A processor is called for each step of a request, on the sending stage, with what the stage's model said
(`multimodal_output`), the tokens that were sampled, and whether the request ends. It returns a chunk, or None where
there is nothing to send yet. What it keeps between calls is in `transfer_manager.request_payload`, by the stream's id,
where it goes with the stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from triptych.families.tiny_omni.sound import CODEBOOKS, CODES
from triptych.processors.fields import codes, mapping, option
from triptych.transfer.payload import Codes, HiddenStates, Ids, Meta, StagePayload

_INITIAL: Final = 4
_STEADY: Final = 25
_LEFT: Final = 1


def mark_of(stream: str) -> int:
    """The code by which frames of this stream are told from those of others."""
    return zlib.crc32(stream.encode()) % CODES


def thinker_to_talker(
    transfer_manager: Any,
    multimodal_output: Any,
    request: Any,
    is_finished: bool = False,
    new_token_ids: list[int] | None = None,
) -> StagePayload | None:
    """The step's tokens, and for each the hidden state that it was sampled from: `[tokens, width]`."""
    hidden = mapping(multimodal_output).get("hidden")
    if not new_token_ids:
        return None
    if not isinstance(hidden, torch.Tensor) or hidden.shape[0] != len(new_token_ids):
        raise ValueError(
            "the thinker's hidden states are missing: its stage needs `take: hidden` and a worker of triptych.stage"
        )
    return StagePayload(
        ids=Ids(tokens=list(new_token_ids)),
        hidden_states=HiddenStates(output=hidden),
        extra={"mark": mark_of(request.external_req_id)},
    )


@dataclass(slots=True)
class _Frames:
    waiting: list[torch.Tensor] = field(default_factory=list)  # frames not sent yet, [n, CODEBOOKS] each
    left: torch.Tensor | None = None  # the last frame sent
    begun: bool = False


def talker_to_codec(
    transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False
) -> StagePayload | None:
    """`codes.audio`, int64 `[left context + frames, CODEBOOKS]`, once there are enough frames, or all where the request
    ends. Options: `initial_codec_chunk_frames` (4), `codec_chunk_frames` (25); `record`, a directory to write each
    stream's codes to."""
    kept: dict[str, Any] = transfer_manager.request_payload
    stream = request.external_req_id
    state = kept.get(stream)
    if not isinstance(state, _Frames):
        state = kept[stream] = _Frames()
    new = codes(multimodal_output, width=CODEBOOKS, exact=True)
    if new is not None:
        state.waiting.append(new.to(torch.int64))
        _record(transfer_manager, stream, new)
    steady = option(transfer_manager, "codec_chunk_frames", _STEADY)
    wanted = steady if state.begun else option(transfer_manager, "initial_codec_chunk_frames", min(_INITIAL, steady))
    if not state.waiting or (len(state.waiting) < wanted and not is_finished):
        return None
    frames = torch.cat(state.waiting)
    audio = frames if state.left is None else torch.cat([state.left, frames])
    left = 0 if state.left is None else _LEFT
    state.waiting, state.left, state.begun = [], frames[-_LEFT:], True
    return StagePayload(codes=Codes(audio=audio), meta=Meta(left_context_size=left))


def codec_to_sound(
    transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False
) -> StagePayload | None:
    """The chunk's samples for the gateway: `extra.sound`, int16 `[samples]`, and `extra.sample_rate`."""
    said = mapping(multimodal_output)
    if "sound" not in said:
        return None
    return StagePayload(extra={"sound": said["sound"], "sample_rate": said["sample_rate"]})


def _record(transfer_manager: Any, stream: str, frames: torch.Tensor) -> None:
    """Append frames to the stream's file, as int16 row by row, where the stage is told to."""
    config = mapping(transfer_manager.connector.config)
    directory = _text(config, "record") or _text(mapping(config.get("extra")), "record")
    if directory:
        name = stream.encode().hex()[-200:]
        with Path(directory, f"{name}.codes").open("ab") as file:
            file.write(frames.to(torch.int16).contiguous().numpy().tobytes())


def _text(config: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name)
    return value if isinstance(value, str) and value else None
