"""A request as an engine understands it, whatever API it came by."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from triptych.sim.config import SimConfig
from triptych.sim.errors import EngineError, invalid, malformed
from triptych.sim.media import Item, PartReader

Api = Literal["chat", "completions", "responses", "messages", "embeddings", "transcriptions"]
CHARS_PER_TOKEN = 4
# Looked for all at once: most requests have none of them, and a load test sends many.
RARE = frozenset({"kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority"})
MM_KWARGS = frozenset({"mm_processor_kwargs", "media_io_kwargs"})
LIMITS = frozenset({"min_tokens", "ignore_eos"})


@dataclass(slots=True)
class Prompt:
    """One prompt: its text with a marker per item, its length in tokens, its items with their offsets."""

    text: str
    tokens: int
    items: list[Item] = field(default_factory=list)
    prompt_embeds: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Job:
    """What the engine needs of a request."""

    api: Api
    model: str
    """the name to answer with"""
    weights: str
    """what decides the tokens: the base model's name, or an adapter's"""
    prompts: list[Prompt]
    request_id: str
    role: str = "assistant"
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    echo: bool = False
    token_ids: bool = False
    kv: dict[str, Any] | None = None
    ec: dict[str, Any] | None = None
    smuggled: bool = False
    """hand-over parameters of a wrong type came through vllm_xargs: the engine fails on them"""
    rank: int | None = None
    remembered: list[tuple[str, str]] = field(default_factory=list)
    request: dict[str, Any] = field(default_factory=dict)


def count_tokens(text: str) -> int:
    """Length of a text in tokens, about four characters each."""
    return (len(text) + CHARS_PER_TOKEN - 1) // CHARS_PER_TOKEN


def decode(raw: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises `EngineError` (400)."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # msgspec refuses lone surrogates and NaN, which the server's json module takes.
        try:
            body = json.loads(raw)
        except ValueError as error:
            raise malformed(
                f"{{'type': 'json_invalid', 'loc': 'body', 'msg': 'JSON decode error', 'ctx': {str(error)!r}}}",
                "body",
            ) from None
    if not isinstance(body, dict):
        raise malformed(
            "{'type': 'model_attributes_type', 'loc': 'body', "
            "'msg': 'Input should be a valid dictionary or object to extract fields from'}",
            "body",
        )
    return body


def typed(body: dict[str, Any], key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
    """`body[key]` if it is of a kind, the default if it is absent or null. Raises `EngineError` (400)."""
    value = body.get(key)
    if value is None:
        return default
    if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
        raise malformed(
            f"{{'type': '{kinds[0].__name__}_type', 'loc': 'body.{key}', "
            f"'msg': 'Input should be a valid {_NAMES.get(kinds[0], kinds[0].__name__)}'}}",
            f"body.{key}",
        )
    return value


_NAMES = {dict: "dictionary", int: "integer", str: "string", bool: "boolean"}


def required(body: dict[str, Any], key: str) -> Any:
    """Raises `EngineError` (400) where a field is absent."""
    if key not in body:
        raise malformed(f"{{'type': 'missing', 'loc': 'body.{key}', 'msg': 'Field required'}}", f"body.{key}")
    return body[key]


def reader(body: dict[str, Any], config: SimConfig, known: dict[str, str]) -> PartReader:
    """The reader of this request's media parts, after the checks on what may go with them."""
    kwargs = ""
    for key in MM_KWARGS if not MM_KWARGS.isdisjoint(body) else ():
        value = typed(body, key, (dict,))
        if value:
            if not config.trust_mm_kwargs:
                raise invalid(
                    f"Per-request {key} are disabled by default because they can change multimodal "
                    + ("preprocessing" if key == "mm_processor_kwargs" else "media loading")
                    + " resource usage. Start the server with --trust-request-mm-kwargs only when clients "
                    "are trusted.",
                    key,
                )
            kwargs += msgspec.json.encode(value, order="deterministic").decode()
    return PartReader(config.model, kwargs, config.embeds_allowed, config.enable_prompt_embeds, known)


def base(body: dict[str, Any], api: Api, config: SimConfig, header: Callable[[bytes], bytes | None]) -> Job:
    """A job with everything that all APIs share, no prompts yet. Raises `EngineError`."""
    name = typed(body, "model", (str,)) or config.model
    if name not in config.names:
        served = ", ".join((config.model, *config.aliases))
        raise EngineError(404, "NotFoundError", f"The model `{name}` does not exist. Valid aliases: {served}.", "model")
    given = header(b"x-request-id")
    rank = header(b"x-data-parallel-rank")
    job = Job(
        api=api,
        model=name if name in config.loras else config.model,
        weights=name if name in config.loras else config.model,
        prompts=[],
        request_id=given.decode("latin-1") if given else os.urandom(8).hex(),
        stream=bool(typed(body, "stream", (bool,), False)),
        rank=int(rank) if rank and rank.isdigit() else None,
        request=body,
    )
    if RARE.isdisjoint(body):
        return job
    job.kv = typed(body, "kv_transfer_params", (dict,))
    job.ec = typed(body, "ec_transfer_params", (dict,))
    _xargs(body, job)
    if typed(body, "priority", (int,), 0) and not config.priority_scheduling:
        raise invalid(f"Got priority {body['priority']} but Priority scheduling is not enabled.")
    return job


def _xargs(body: dict[str, Any], job: Job) -> None:
    xargs = typed(body, "vllm_xargs", (dict,))
    if not xargs:
        return
    for key, value in xargs.items():
        scalars = value if isinstance(value, list) else [value]
        if not all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in scalars):
            raise malformed(
                f"{{'type': 'string_type', 'loc': 'body.vllm_xargs.{key}.str', "
                "'msg': 'Input should be a valid string'}",
                f"body.vllm_xargs.{key}.str",
            )
    # The top-level field, where it is set, overwrites the slot.
    if ("kv_transfer_params" in xargs and not job.kv) or ("ec_transfer_params" in xargs and not job.ec):
        job.smuggled = True


def limits(job: Job, config: SimConfig, name: str, value: Any, default: int | None = None) -> None:
    """Check and set the token limits. Raises `EngineError` (400)."""
    room = config.max_model_len - max(prompt.tokens for prompt in job.prompts)
    if room < 1:
        raise invalid(
            f"This model's maximum context length is {config.max_model_len} tokens. However, your request "
            f"has {config.max_model_len - room} input tokens. Please reduce the length of the input messages.",
            "input_tokens",
            config.max_model_len - room,
        )
    limit = default if value is None else value
    if limit is not None and limit < 1 and not job.echo:
        raise invalid(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    if limit is not None and limit > room:
        raise invalid(
            f"'max_tokens' or 'max_completion_tokens' is too large: {limit}. This model's maximum context "
            f"length is {config.max_model_len} tokens and your request has {config.max_model_len - room} "
            f"input tokens.",
            "max_tokens" if name != "max_completion_tokens" else name,
            limit,
        )
    job.max_tokens = room if limit is None else limit
    if LIMITS.isdisjoint(job.request):
        return
    job.min_tokens = typed(job.request, "min_tokens", (int,), 0)
    job.ignore_eos = bool(typed(job.request, "ignore_eos", (bool,), False))
    if job.min_tokens < 0:
        raise invalid(f"min_tokens must be greater than or equal to 0, got {job.min_tokens}.")
    if job.min_tokens > job.max_tokens and not job.echo:
        raise invalid(f"min_tokens must be less than or equal to max_tokens={job.max_tokens}, got {job.min_tokens}.")


def prompt_of(texts: list[str], parts: PartReader) -> Prompt:
    """The prompt of a request: its texts, with the items that were read laid out at their markers."""
    text = "\n".join(texts)
    at = 0
    extra = 0
    for item in parts.items:
        found = text.find(f"<|{item.modality}|>", at)
        at = found + 1 if found >= 0 else at
        item.offset = count_tokens(text[:at]) + extra
        extra += item.rows
    return Prompt(text, count_tokens(text) + extra + 1, parts.items, parts.prompt_embeds)
