"""Clients for simulated engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

from triptych.sim import Sim

Client = Callable[[Sim], openai.AsyncOpenAI]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """Makes the official client for an engine, without its retries; all share one pool, which is dear to make."""
    async with openai.DefaultAsyncHttpxClient() as pool:

        def make(sim: Sim, key: str = "none") -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(
                base_url=f"{sim.url}/v1", api_key=key, max_retries=0, timeout=20, http_client=pool
            )

        yield make


def image(payload: str, **more: Any) -> dict[str, Any]:
    """An image part with inline data."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{payload}"}, **more}


def audio(payload: str, **more: Any) -> dict[str, Any]:
    """An audio part with inline data."""
    return {"type": "input_audio", "input_audio": {"data": payload, "format": "wav"}, **more}


def user(*parts: Any) -> list[dict[str, Any]]:
    """One user message; strings become text parts."""
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


def embeds(identifier: str, metadata: dict[str, Any], kind: str = "image") -> dict[str, Any]:
    """A metadata-only part."""
    return {"type": f"{kind}_embeds", f"{kind}_embeds": metadata, "uuid": identifier}
