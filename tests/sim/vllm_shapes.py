"""Run as a program beside vLLM: says which answers of a simulated engine are not as vLLM would write them.

stdin: JSON list of [shape, text]; stdout: JSON list of complaints. An answer is right where vLLM's own model takes it
and writes the same JSON again: the same keys in the same order, null where vLLM has null, absent where it has none.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import json
import sys
import types
from typing import Any

# A CUDA build of torchvision beside a CPU torch: skip the registrations that fail; leave its siblings out.
for name in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
    sys.modules.setdefault(name, types.ModuleType(name))
for name in ("torchaudio", "torchcodec"):
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def main() -> None:
    from vllm.entrypoints.anthropic.protocol import (
        AnthropicErrorResponse,
        AnthropicMessagesResponse,
        AnthropicStreamEvent,
    )
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionResponse,
        ChatCompletionStreamResponse,
    )
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse
    from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelList

    whole: dict[str, Any] = {
        "chat": ChatCompletionResponse,
        "completion": CompletionResponse,
        "error": ErrorResponse,
        "anthropic error": AnthropicErrorResponse,
        "models": ModelList,
    }
    as_set: dict[str, Any] = {
        "chat chunk": ChatCompletionStreamResponse,
        "completion chunk": CompletionStreamResponse,
        "message event": AnthropicStreamEvent,
    }

    def written(shape: str, text: str) -> Any:
        if shape in whole:
            return whole[shape].model_validate_json(text).model_dump()
        if shape in as_set:
            return json.loads(as_set[shape].model_validate_json(text).model_dump_json(exclude_unset=True))
        if shape == "message":
            return AnthropicMessagesResponse.model_validate_json(text).model_dump(exclude_none=True)
        return ResponsesResponse.model_validate_json(text).model_dump(mode="json", by_alias=True)

    complaints = []
    for shape, text in json.load(sys.stdin):
        try:
            theirs = json.dumps(written(shape, text))
        except ValueError as error:
            complaints.append(f"{shape}: vLLM does not take it: {error}")
            continue
        ours = json.dumps(json.loads(text))
        if ours != theirs:
            complaints.append(f"{shape}: ours {ours}\nvLLM's {theirs}")
    json.dump(complaints, sys.stdout)


if __name__ == "__main__":
    main()
