"""What vLLM's own protocol classes and parsers make of request bodies. Run as a script, in a process of its own.

Standard input: a JSON list of [api, body as Latin-1 text]. Output: per body null where the engine refuses it, else
its media parts as [type, content, uuid], its client-given handles and xargs.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def view(api: str, raw: bytes) -> dict[str, Any] | None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: PLC0415
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # noqa: PLC0415
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.responses.utils import construct_input_messages  # noqa: PLC0415
    from vllm.renderers import chat_utils  # noqa: PLC0415

    try:
        body = json.loads(raw)
        if api == "chat":
            request = ChatCompletionRequest.model_validate(body)
            messages = request.messages
        elif api == "responses":
            request = ResponsesRequest.model_validate(body)
            messages = construct_input_messages(request_input=request.input)
        else:
            request = AnthropicMessagesRequest.model_validate(body)
            messages = AnthropicServingMessages.to_chat_completion_request(request).messages
        parts = []
        for message in messages:
            content = message.get("content")
            for part in () if content is None or isinstance(content, str) else content:
                if isinstance(part, str):
                    continue
                kind, value = chat_utils._parse_chat_message_content_mm_part(part)
                if kind not in chat_utils.TEXT_PART_TYPES | {"tool_reference"}:
                    if kind not in chat_utils.MM_PARSER_MAP:
                        return None
                    parts.append([kind, value, part.get("uuid")])
    except Exception:
        return None
    xargs = getattr(request, "vllm_xargs", None) or {}
    return {
        "parts": parts,
        "handles": [request.ec_transfer_params, request.kv_transfer_params],
        "xargs": sorted(xargs),
    }


if __name__ == "__main__":
    from triptych.engine import compat

    compat.apply(compat.detect())
    answers = [view(api, text.encode("latin-1")) for api, text in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)
