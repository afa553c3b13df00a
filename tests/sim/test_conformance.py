"""The simulator's answers against vLLM's own protocol models."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sim.conftest import image, user
from tests.sim.raw import Raw, chat
from triptych.sim import MemoryStore, Sim

SCRIPT = Path(__file__).with_name("vllm_shapes.py")


async def answers() -> list[tuple[str, str]]:
    """Answers of every shape."""
    found: list[tuple[str, str]] = []
    message = {"model": "sim", "max_tokens": 3, "messages": chat()["messages"]}
    usage = {"include_usage": True}
    full = {"include_usage": True, "continuous_usage_stats": True}

    async with Sim(loras=["tuned"]) as sim, Raw(sim) as raw:

        async def one(shape: str, body: Any, path: str = "/v1/chat/completions", method: str = "POST") -> None:
            raw.send(body, path, method)
            found.append((shape, (await raw.answer())[1].decode()))

        async def many(shape: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
            raw.send(body | {"stream": True}, path)
            await raw.head()
            for frame in (await raw.chunks()).split(b"\n\n"):
                data = frame.partition(b"data: ")[2]
                if data and data != b"[DONE]":
                    found.append((shape, data.decode()))

        await one("chat", chat(n=2, logprobs=True, return_token_ids=True))
        await one("completion", {"prompt": ["a", "b"], "echo": True}, "/v1/completions")
        await one("response", {"input": "hi", "max_output_tokens": 3}, "/v1/responses")
        await one("response", {"input": "hi"}, "/v1/responses")
        await one("message", message, "/v1/messages")
        await one("error", chat(model="nope"))
        await one("error", b"{")
        await one("anthropic error", message | {"model": "nope"}, "/v1/messages")
        await one("models", b"", "/v1/models", "GET")
        await many("chat chunk", chat(n=2))
        await many("chat chunk", chat(stream_options=usage))
        await many("chat chunk", chat(stream_options=full, logprobs=True, return_token_ids=True))
        await many("completion chunk", {"prompt": "a"}, "/v1/completions")
        await many("completion chunk", {"prompt": "a", "stream_options": full}, "/v1/completions")
        await many("message event", message, "/v1/messages")
    async with Sim(role="encode", ec="example", ec_dir=MemoryStore()) as sim, Raw(sim) as raw:
        await one("chat", {"messages": user(image("AA"))})
    return found


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
async def test_every_answer_is_what_vllms_own_models_write() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    found = await answers()
    out, err = await asyncio.wait_for(process.communicate(json.dumps(found).encode()), 110)
    assert process.returncode == 0, err.decode()[-2000:]
    assert json.loads(out.splitlines()[-1]) == []
    assert len(found) > 30
