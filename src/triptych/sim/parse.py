"""From the bodies of vLLM's APIs to a `Job`. Raises `EngineError` where vLLM refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from triptych.sim.config import SimConfig
from triptych.sim.errors import EngineError, invalid, malformed
from triptych.sim.job import Job, Prompt, base, count_tokens, limits, prompt_of, reader, required, typed
from triptych.sim.media import PartReader

HeaderOf = Callable[[bytes], bytes | None]
Known = dict[str, str]
NOT_IN_MESSAGES = frozenset({"mm_processor_kwargs", "media_io_kwargs", "priority", "session_id", "min_tokens", "n"})
MEDIA_IN_RESPONSES = ("input_text", "input_image", "input_file", "output_text", "refusal")


def chat(body: dict[str, Any], config: SimConfig, header: HeaderOf, known: Known) -> Job:
    """`/v1/chat/completions`."""
    job = base(body, "chat", config, header)
    messages = required(body, "messages")
    _stream_options(body, job)
    parts = reader(body, config, known)
    job.prompts = [_conversation(messages, parts, body.get("tools"))]
    job.remembered = parts.remembered
    if body.get("add_generation_prompt") is False:
        job.role = messages[-1]["role"]
    job.logprobs = bool(body.get("logprobs"))
    _choices(body, job)
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    limits(job, config, name, typed(body, name, (int,)))
    return job


def completions(body: dict[str, Any], config: SimConfig, header: HeaderOf, known: Known) -> Job:
    """`/v1/completions`: a string, token ids, or a list of either; prompt embeddings beside them."""
    job = base(body, "completions", config, header)
    _stream_options(body, job)
    prompts = _plain_prompts(body.get("prompt"))
    embeds = body.get("prompt_embeds")
    if embeds:
        if not config.enable_prompt_embeds:
            raise invalid("You must set `--enable-prompt-embeds` to input `prompt_embeds`", "prompt_embeds")
        for embed in embeds if isinstance(embeds, list) else [embeds]:
            prompts.append(Prompt("", max(1, len(str(embed)) // 64), [], [str(embed)]))
    if not prompts:
        raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt", body.get("prompt"))
    job.prompts = prompts
    job.echo = bool(body.get("echo"))
    job.logprobs = body.get("logprobs") is not None
    _choices(body, job)
    limits(job, config, "max_tokens", typed(body, "max_tokens", (int,)), default=16)
    return job


def responses(body: dict[str, Any], config: SimConfig, header: HeaderOf, known: Known) -> Job:
    """`/v1/responses`. Its parts are narrower than chat's: image_embeds and input_audio are refused by type."""
    job = base(body, "responses", config, header)
    given = required(body, "input")
    parts = reader(body, config, known)
    texts = []
    if instructions := typed(body, "instructions", (str,)):
        texts.append(f"system: {instructions}")
    if isinstance(given, str):
        texts.append(f"user: {given}")
    elif isinstance(given, list):
        texts.extend(_response_item(item, parts) for item in given)
    else:
        raise malformed("{'type': 'string_type', 'loc': 'body.input'}", "body.input")
    if body.get("tools"):
        texts.insert(0, _tools(body["tools"]))
    job.prompts = [prompt_of(texts, parts)]
    job.remembered = parts.remembered
    limits(job, config, "max_output_tokens", typed(body, "max_output_tokens", (int,)))
    return job


def messages(body: dict[str, Any], config: SimConfig, header: HeaderOf, known: Known) -> Job:
    """`/v1/messages`. Unknown keys of a block, `uuid` among them, are dropped as vLLM drops them."""
    if not required(body, "model"):
        raise malformed("{'type': 'value_error', 'loc': 'body.model'}", "body.model")
    body = {key: value for key, value in body.items() if key not in NOT_IN_MESSAGES}
    job = base(body, "messages", config, header)
    required(body, "max_tokens")
    conversation = required(body, "messages")
    parts = reader(body, config, known)
    texts = []
    if system := body.get("system"):
        texts.append("system: " + _blocks(system, parts))
    if not isinstance(conversation, list):
        raise malformed("{'type': 'list_type', 'loc': 'body.messages'}", "body.messages")
    for message in conversation:
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise malformed("{'type': 'literal_error', 'loc': 'body.messages.role'}", "body.messages")
        texts.append(f"{message['role']}: {_blocks(message.get('content'), parts)}")
    if body.get("tools"):
        texts.insert(0, _tools(body["tools"]))
    job.prompts = [prompt_of(texts, parts)]
    job.remembered = parts.remembered
    job.include_usage = True
    job.continuous_usage = True
    limits(job, config, "max_tokens", typed(body, "max_tokens", (int,)))
    return job


def embeddings(body: dict[str, Any], config: SimConfig, header: HeaderOf, known: Known) -> Job:
    """`/v1/embeddings`: `input` as in completions, or `messages` as in chat."""
    job = base(body, "embeddings", config, header)
    parts = reader(body, config, known)
    if body.get("messages") is not None:
        job.prompts = [_conversation(body["messages"], parts, None)]
    else:
        job.prompts = _plain_prompts(required(body, "input"))
    if not job.prompts:
        raise invalid("Input must not be empty.", "input")
    job.remembered = parts.remembered
    return job


def transcription(form: dict[str, bytes], config: SimConfig, header: HeaderOf, known: Known) -> tuple[Job, bytes]:
    """`/v1/audio/transcriptions`: the form's fields. Returns the job and the file."""
    if "file" not in form:
        raise malformed("{'type': 'missing', 'loc': 'body.file', 'msg': 'Field required'}", "body.file")
    body: dict[str, Any] = {k: v.decode("utf-8", "replace") for k, v in form.items() if k != "file"}
    body["stream"] = body.get("stream", "").lower() in ("true", "1")
    for key in ("kv_transfer_params", "ec_transfer_params", "priority", "vllm_xargs"):
        body.pop(key, None)
    job = base(body, "transcriptions", config, header)
    job.prompts = [Prompt("transcribe", 4)]
    limits(job, config, "max_completion_tokens", None)
    return job, form["file"]


def _stream_options(body: dict[str, Any], job: Job) -> None:
    options = typed(body, "stream_options", (dict,))
    if not options:
        return
    if not job.stream:
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    job.include_usage = bool(options.get("include_usage"))
    job.continuous_usage = job.include_usage and bool(options.get("continuous_usage_stats"))


def _choices(body: dict[str, Any], job: Job) -> None:
    job.n = typed(body, "n", (int,), 1)
    if job.n < 1:
        raise invalid(f"n must be at least 1, got {job.n}.", "n", job.n)
    job.token_ids = bool(body.get("return_token_ids"))


def _conversation(given: Any, parts: PartReader, tools: Any) -> Prompt:
    if not isinstance(given, list) or not given:
        raise malformed("{'type': 'list_type', 'loc': 'body.messages'}", "body.messages")
    texts = [_tools(tools)] if tools else []
    for message in given:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise malformed("{'type': 'missing', 'loc': 'body.messages.role'}", "body.messages.role")
        content = message.get("content")
        if content is None and message["role"] != "assistant":
            raise malformed("{'type': 'string_type', 'loc': 'body.messages.content'}", "body.messages.content")
        if isinstance(content, str) or content is None:
            text = content or ""
        elif isinstance(content, list):
            text = "\n".join(parts.read(part) for part in content)
        else:
            raise malformed("{'type': 'string_type', 'loc': 'body.messages.content'}", "body.messages.content")
        if calls := message.get("tool_calls"):
            text += _tools(calls)
        texts.append(f"{message['role']}: {text}")
    return prompt_of(texts, parts)


def _plain_prompts(given: Any) -> list[Prompt]:
    if given is None or given in ("", []):
        return []
    if isinstance(given, str):
        return [Prompt(given, count_tokens(given) + 1)]
    if isinstance(given, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in given):
        return [Prompt(msgspec.json.encode(given).decode(), len(given))]
    if isinstance(given, list):
        return [prompt for one in given for prompt in _plain_prompts(one)]
    raise malformed("{'type': 'string_type', 'loc': 'body.prompt'}", "body.prompt")


def _response_item(item: Any, parts: PartReader) -> str:
    if not isinstance(item, dict):
        raise malformed("{'type': 'dict_type', 'loc': 'body.input'}", "body.input")
    if "role" not in item:
        return _tools([item])
    content = item.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") not in MEDIA_IN_RESPONSES:
                raise malformed("{'type': 'literal_error', 'loc': 'body.input.content.type'}", "body.input")
        content = "\n".join(parts.read(part) for part in content)
    if not isinstance(content, str):
        raise malformed("{'type': 'string_type', 'loc': 'body.input.content'}", "body.input")
    return f"{item['role']}: {content}"


def _blocks(content: Any, parts: PartReader) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise malformed("{'type': 'string_type', 'loc': 'body.messages.content'}", "body.messages.content")
    return "\n".join(_block(block, parts) for block in content)


def _block(block: Any, parts: PartReader) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return str(block.get("text") or "")
    if kind == "image":
        source = block.get("source") or {}
        if not isinstance(source, dict):
            raise malformed("{'type': 'dict_type', 'loc': 'body.messages.content.source'}", "body.messages")
        if source.get("type") == "url":
            url = source.get("url", "")
        else:
            url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
        return parts.read({"type": "image_url", "image_url": {"url": url}})
    if kind == "tool_result":
        content = block.get("content")
        return _blocks(content, parts) if content else ""
    if kind in ("tool_use", "tool_reference", "thinking", "redacted_thinking", "tool_addition", "tool_removal"):
        return _tools([block])
    raise malformed(
        "{'type': 'literal_error', 'loc': 'body.messages.content.type', "
        f"'msg': 'Input should be text, image, …', 'input': {kind!r}}}",
        "body.messages.content",
    )


def _tools(tools: Any) -> str:
    return msgspec.json.encode(tools, order="deterministic").decode()


PARSERS: dict[str, Callable[[dict[str, Any], SimConfig, HeaderOf, Known], Job]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/embeddings": embeddings,
}


def parse(path: str, body: dict[str, Any], config: SimConfig, header: HeaderOf, known: Known) -> Job:
    """Raises `EngineError`, 404 for a path that is none of the APIs."""
    parser = PARSERS.get(path)
    if parser is None:
        raise EngineError(404, "Not Found", "Not Found")
    return parser(body, config, header, known)
