"""From codes to sound, in integers. Pure.

A frame of codes is `HOP` samples. What a frame sounds like depends on its own codes and on the frame before, as with a
real codec; so a chunk brings that frame along as left context.
"""

from __future__ import annotations

from typing import Final

import torch

SAMPLE_RATE: Final = 24_000
HOP: Final = 240
"""Samples of a frame: 10 ms."""
CODEBOOKS: Final = 8
CODES: Final = 1024
"""Values of a code."""
TAIL: Final = 4
"""Steps of the talker from the thinker's last token to its own end; the last of them gives no frame."""
MARK: Final = CODEBOOKS - 1
"""The codebook that says whose frame it is."""


def sound(codes: torch.Tensor, left_context: int = 0) -> torch.Tensor:
    """The samples of frames of codes `[frames, CODEBOOKS]`: int16 `[(frames - left_context) * HOP]`.

    left_context: how many of the first frames only come before. Before the first frame of all there is silence.

    Raises:
        ValueError: the codes have another shape, or are none.
    """
    if codes.ndim != 2 or codes.shape[1] != CODEBOOKS or codes.is_floating_point():
        raise ValueError(f"codes must be integers [frames, {CODEBOOKS}], not {codes.dtype} {list(codes.shape)}")
    if not 0 <= left_context <= codes.shape[0]:
        raise ValueError(f"left context of {left_context} frames, of {codes.shape[0]} in all")
    if bool(((codes < 0) | (codes >= CODES)).any()):
        raise ValueError(f"codes must be from 0 to {CODES - 1}")
    frames = codes.to(torch.int64)
    before = torch.cat([torch.zeros_like(frames[:1]), frames[:-1]])
    at = torch.arange(HOP, dtype=torch.int64)
    tone = frames[:, :1] * (at + 1) * 7 + before[:, 1:2] * (HOP - at) * 3
    noise = frames[:, 2:3] * at * at + frames[:, 3:].sum(dim=1, keepdim=True) * 11 + before[:, 4:5] * at
    samples = ((tone + noise) % 16384 - 8192).to(torch.int16)
    return samples[left_context:].reshape(-1)
