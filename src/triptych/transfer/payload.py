"""What one stage hands to the next: structs whose fields are all optional, absent from the wire where they are None.

Tensors are whatever the stage's framework has (torch in an engine); this module knows none.
"""

from __future__ import annotations

from typing import Any, Final, TypedDict, TypeVar

import msgspec


class _Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Fields given by keyword, None unless given."""


_Known = TypeVar("_Known", bound=_Record)


class Codes(_Record, kw_only=True):
    """Codec tokens: `audio` of this chunk (a flat list, or `[frames, codebooks]`), `ref` the reference voice."""

    audio: Any = None
    ref: Any = None


class Ids(_Record, kw_only=True):
    """Token ids: `prompt` of the stage before, `all` that it has, `tts` text to be spoken, `tokens` which the next
    stage's prompt grows by, `streaming_prompt_previous_codes` what a recomputed prompt must be fed again."""

    prompt: Any = None
    all: Any = None
    tts: Any = None
    tokens: list[int] | None = None
    streaming_prompt_previous_codes: Any = None


class HiddenStates(_Record, kw_only=True):
    """Hidden states `[tokens, width]`: `output` of the last layer, `tts` of the text to be spoken."""

    output: Any = None
    tts: Any = None


class Meta(_Record, kw_only=True):
    """What the adapters and the schedulers go by.

    `finished` (bool or a bool tensor of one element): the last chunk of the request; `is_segment_finished`: of the
    segment. `next_stage_prompt_len`: by how many tokens the next stage's prompt grows; `next_stage_generation_tokens`:
    how many more it must have room for; `replace_streaming_prompt`: it starts anew instead. The rest is a model's own.
    """

    finished: Any = None
    is_segment_finished: Any = None
    request_finished: Any = None
    codec_streaming: bool | None = None
    left_context_size: int | None = None
    next_stage_prompt_len: int | None = None
    next_stage_generation_tokens: int | None = None
    replace_streaming_prompt: bool | None = None
    replace_runtime_additional_information: bool | None = None
    streaming_prompt_recompute: bool | None = None
    streaming_condition_seq: int | None = None
    cache_epoch: int | None = None
    chunk_seq: int | None = None
    last_chunk: bool | None = None
    code_flat_numel: int | None = None


class StagePayload(_Record, kw_only=True):
    """One chunk. `extra` is for what a processor and its model agree on beyond these fields."""

    codes: Codes | None = None
    meta: Meta | None = None
    ids: Ids | None = None
    hidden_states: HiddenStates | None = None
    embed: dict[str, Any] | None = None
    kv_metadata: dict[str, Any] | None = None
    native_duplex: bool | None = None
    extra: dict[str, Any] | None = None


class PayloadDict(TypedDict, total=False):
    """A chunk as its receiver sees it: nested dicts, without what is None."""

    codes: dict[str, Any]
    meta: dict[str, Any]
    ids: dict[str, Any]
    hidden_states: dict[str, Any]
    embed: dict[str, Any]
    kv_metadata: dict[str, Any]
    native_duplex: bool
    extra: dict[str, Any]


_PARTS: Final[dict[str, type[_Record]]] = {"codes": Codes, "meta": Meta, "ids": Ids, "hidden_states": HiddenStates}


def to_dict(payload: StagePayload) -> dict[str, Any]:
    """The nested dicts that the receiver of this payload gets; values are shared, not copied."""
    return _fields(payload)


def to_struct(fields: dict[str, Any]) -> StagePayload:
    """The struct of nested dicts; of structs inside, themselves. Values are shared, not copied.

    Raises:
        ValueError: a field that there is not, named with its path, or a part that is no fields at all.
    """
    return _struct(StagePayload, fields, "a stage payload")


def _struct(kind: type[_Known], fields: dict[str, Any], what: str) -> _Known:
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in kind.__struct_fields__:
            raise ValueError(f"{what} has no field {name!r}: it has {', '.join(kind.__struct_fields__)}")
        part = _PARTS.get(name) if kind is StagePayload else None
        if part is not None and value is not None and not isinstance(value, part):
            if not isinstance(value, dict):
                raise ValueError(f"`{name}` of {what} is a {type(value).__name__}, not a dict of its fields")
            value = _struct(part, value, f"`{name}` of {what}")
        values[name] = value
    return kind(**values)


def _fields(record: _Record) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if value is not None:
            out[name] = _fields(value) if isinstance(value, _Record) else value
    return out
