"""A tiny speaking model with random weights: thinker → talker → codec. For tests and for trying things out.

The codec is integer arithmetic, so that sound made chunk by chunk can be compared with sound made in one pass.
"""

from __future__ import annotations

from triptych.families.tiny_omni.recipe import stages
from triptych.models.families import Family

FAMILY = Family(
    name="omni",
    summary="speaks: thinker, talker and codec, for a pipeline of stages",
    architectures={
        "TinyOmniTalker": "triptych.families.tiny_omni.talker:TinyOmniTalker",
        "TinyOmniCodec": "triptych.families.tiny_omni.codec:TinyOmniCodec",
    },
    tiny=stages,
)
