"""What a request for sound asks for, and the request for text that the first stage gets in its place. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from triptych.body.request import HANDLES, RequestBody
from triptych.gateway.errors import ApiError

STREAM = "triptych_stream"
SOURCE = "triptych_source"
VOICE = "triptych_voice"
OURS = frozenset({STREAM, SOURCE, VOICE})
"""Members of `vllm_xargs` that stages trust: a client's own are removed."""

CHAT_FORMATS = ("wav", "mp3", "flac", "opus", "aac", "pcm16")
SPEECH_FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
_LONGEST_VOICE = 64
_LONGEST_INPUT = 65_536


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted. form: a name of `triptych.gateway.sound.formats`; stream: sound as it comes; events: as SSE;
    usage: a client's stream ends with usage."""

    api: Literal["chat", "speech"]
    form: str
    voice: str
    stream: bool
    events: bool = False
    usage: bool = False


def chat_ask(body: RequestBody) -> Ask | None:
    """What a chat request asks for; None where it asks for no sound.

    Raises ApiError 400 for what is wrong, with the field.
    """
    modalities = body.get("modalities")
    if not isinstance(modalities, list) or "audio" not in modalities:
        return None
    audio = body.get("audio")
    if not isinstance(audio, dict):
        raise _wrong("audio", 'is missing: `modalities` with "audio" needs `audio: {voice, format}`')
    form = audio.get("format")
    if form not in CHAT_FORMATS:
        raise _wrong("audio.format", f"must be one of {', '.join(CHAT_FORMATS)}")
    stream = body.stream
    if stream and form != "pcm16":
        raise _wrong("audio.format", "must be pcm16 in a stream")
    if body.get("n") not in (None, 1):
        raise _wrong("n", "must be 1 where sound is asked for")
    if body.truth("use_beam_search"):
        raise _wrong("use_beam_search", "must be false where sound is asked for")
    options = body.get("stream_options")
    usage = stream and isinstance(options, dict) and options.get("include_usage") is True
    return Ask(
        "chat", "pcm" if form == "pcm16" else form, _voice(audio.get("voice"), "audio.voice"), stream, usage=usage
    )


def speech_ask(body: RequestBody) -> Ask:
    """What a speech request asks for. Raises ApiError 400 for what is wrong, with the field."""
    form = body.get("response_format")
    if form is None:
        form = "mp3"
    if form not in SPEECH_FORMATS:
        raise _wrong("response_format", f"must be one of {', '.join(SPEECH_FORMATS)}")
    if body.get("speed") not in (None, 1):
        raise _wrong("speed", "must be 1: the model speaks at its own pace")
    kind = body.get("stream_format")
    if kind not in (None, "audio", "sse"):
        raise _wrong("stream_format", "must be audio or sse")
    if kind == "sse" and form == "wav":
        raise _wrong("response_format", "must be another one than wav in a stream: a WAV file begins with its length")
    return Ask("speech", form, _voice(body.get("voice"), "voice"), form != "wav", events=kind == "sse")


def text_request(ask: Ask, body: RequestBody, stream: str, tokens: int | None) -> bytes:
    """The first stage's request: the client's own without what asks for sound, or a chat of what is to be said.

    stream: the id that all stages know the request by. tokens: how many a speech may be long, None for the engine's
    own limit. Raises ApiError 400.
    """
    if ask.api == "speech":
        return _spoken(ask, body, stream, tokens)
    put = {"vllm_xargs": msgspec.json.encode(_xargs(body, ask, stream))}
    if ask.stream:
        put["stream_options"] = b'{"include_usage":true}'
    return b"".join(body.rewrite(put, ("modalities", "audio")))


def _spoken(ask: Ask, body: RequestBody, stream: str, tokens: int | None) -> bytes:
    words = body.get("input")
    if not isinstance(words, str) or not words:
        raise _wrong("input", "must be the text that is to be spoken")
    if len(words) > _LONGEST_INPUT:
        raise _wrong("input", f"has {len(words)} characters: at most {_LONGEST_INPUT}")
    made: dict[str, Any] = {
        "messages": [{"role": "user", "content": words.encode("utf-8", "replace").decode()}],
        "stream": True,
        "vllm_xargs": _xargs(body, ask, stream),
    }
    if body.model is not None:
        made = {"model": body.model, **made}
    if tokens is not None:
        made["max_tokens"] = tokens
    for name in ("max_tokens", "temperature", "top_p", "seed"):
        if (value := body.get(name)) is not None:
            made[name] = value
    try:
        return msgspec.json.encode(made)
    except (TypeError, ValueError) as error:
        raise _wrong("input", f"cannot be sent on: {error}") from None


def stage_request(model: str | None, stream: str, source: str | None, ask: Ask, most: int) -> bytes:
    """The request of a stage after the first. source: where the stage before sends from; most: tokens."""
    xargs = {STREAM: stream, VOICE: ask.voice}
    if source:
        xargs[SOURCE] = source
    made: dict[str, Any] = {"prompt": [0], "max_tokens": most, "stream": True, "vllm_xargs": xargs}
    return msgspec.json.encode(made if model is None else {"model": model, **made})


def _xargs(body: RequestBody, ask: Ask, stream: str) -> dict[str, Any]:
    given = body.get("vllm_xargs")
    if given is not None and not isinstance(given, dict):
        raise _wrong("vllm_xargs", "must be an object")
    kept = {key: value for key, value in (given or {}).items() if key not in OURS and key not in HANDLES}
    return kept | {STREAM: stream, VOICE: ask.voice}


def _voice(value: Any, field: str) -> str:
    if isinstance(value, dict):
        value = value.get("id")
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > _LONGEST_VOICE or not value.isprintable():
        raise _wrong(field, f"must be a name of at most {_LONGEST_VOICE} characters")
    return value


def _wrong(field: str, what: str) -> ApiError:
    return ApiError(400, f"`{field}` {what}", param=field, reason="sound")
