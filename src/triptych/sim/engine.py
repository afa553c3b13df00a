"""The engine: takes media, computes or loads prompts, produces answers, dies where a real one would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from triptych.sim.answer import Answer, answer_of
from triptych.sim.config import SimConfig
from triptych.sim.content import prompt_key
from triptych.sim.ec import Ec, EcCpu, ExampleEc, MooncakeEc
from triptych.sim.errors import EngineDied, GenerationFailed
from triptych.sim.job import Job, Prompt
from triptych.sim.kv import ExampleKv, Kv, NixlKv
from triptych.sim.media import Encoded, Item, encode
from triptych.sim.seen import Seen
from triptych.sim.side import Message, SideClient
from triptych.sim.store import bounded


class Engine:
    """One engine, without HTTP. `side_port` is where its peers find it; `on_death` is told once."""

    def __init__(self, config: SimConfig, seen: Seen, side_port: int, on_death: Callable[[], None]) -> None:
        self.config = config
        self.seen = seen
        self.dead = False
        self.known: dict[str, str] = {}
        self.client = SideClient()
        self._on_death = on_death
        self._cache: dict[str, Encoded] = {}
        self.ec: Ec | None = _ec(config, seen, self.client, side_port)
        self.kv: Kv | None = _kv(config, seen, self.client, side_port)
        self._takes = self.ec is not None and config.ec_part in ("consumer", "both")

    async def run(self, job: Job, body_bytes: int = 0) -> Answer:
        """Everything up to the first token. Raises `EngineDied` (the engine is dead then), `GenerationFailed`,
        `EngineError`."""
        self.check()
        costs = self.config.costs
        if costs.request or costs.mb:
            await asyncio.sleep(costs.request + costs.mb * body_bytes / 1e6)
        try:
            if job.smuggled:
                raise GenerationFailed("hand-over parameters of a wrong type")
            return await self._run(job)
        except EngineDied as death:
            self.die(death.why)
            raise

    def check(self) -> None:
        """Raises `EngineError` where the engine is dead."""
        if self.dead:
            raise EngineDied("dead before")

    def die(self, why: str) -> None:
        """The engine core is gone for good."""
        if not self.dead:
            self.dead = True
            self.seen.deaths.append(why)
            self._on_death()

    async def _run(self, job: Job) -> Answer:
        self._remember(job)
        if self.config.encode_only:
            encoded = [(item, await self._encode(item)) for prompt in job.prompts for item in prompt.items]
            answer = answer_of(job, [b""] * len(job.prompts), 0, empty=True)
            answer.ec = await self._publish(job, encoded)
            return answer
        keys = []
        kv = None
        offered: list[tuple[Item, Encoded]] = []
        for prompt in job.prompts:
            key, contents, taken = await self._read(job, prompt)
            keys.append(key)
            offered.extend(taken)
            if self.kv is not None:
                # As vLLM: with several sequences each pins its blocks, one handle comes back.
                for _ in range(job.n):
                    saved = self.kv.save(job, prompt, key, contents)
                    kv = kv or saved
        answer = answer_of(job, keys, self.config.output_tokens)
        answer.kv = kv
        if self.config.ec_part == "both":
            answer.ec = await self._publish(job, offered)
        self.seen.output_tokens += answer.output_tokens
        return answer

    async def _read(self, job: Job, prompt: Prompt) -> tuple[bytes, list[str], list[tuple[Item, Encoded]]]:
        """The state after a prompt, the contents that it stands for, and the encoder outputs taken for it."""
        loaded = await self.kv.load(job, prompt) if self.kv is not None else None
        covered = min(loaded.tokens, prompt.tokens) if loaded is not None else 0
        taken: list[tuple[Item, Encoded]] = []
        contents: list[str] = []
        for index, item in enumerate(prompt.items):
            if item.offset + item.rows > covered:
                output = await self._take(job, index, item)
                taken.append((item, output))
                contents.append(output.content)
            elif loaded is not None and loaded.contents is not None:
                contents.append(loaded.contents[index])
        self.seen.prompt_tokens += prompt.tokens
        self.seen.kv_tokens += covered
        self.seen.local_tokens += prompt.tokens - covered
        if self.config.costs.prompt_token and covered < prompt.tokens:
            await asyncio.sleep(self.config.costs.prompt_token * (prompt.tokens - covered))
        if loaded is not None and loaded.contents is None:
            return loaded.key, contents, taken
        key = prompt_key(job.weights, prompt.text, [*prompt.prompt_embeds, *contents])
        return key, contents, taken

    async def _take(self, job: Job, index: int, item: Item) -> Encoded:
        """The encoder output of an item, from wherever a real engine would have it."""
        if item.passthrough:
            assert item.content is not None
            return Encoded(item.content, item.modality, item.rows, item.metadata)
        cached = self._cache.get(item.identifier)
        if cached is not None:
            if cached.rows != item.rows:
                raise GenerationFailed("the cached encoder output has another size")
            return cached
        output = None
        if self._takes and self.ec is not None:
            output = await self.ec.fetch(job, index, item)
            if output is not None:
                self.seen.ec["taken"] += 1
                self.seen.taken[output.content] += 1
        if output is None:
            if item.content is None:
                raise EngineDied(f"no encoder output for {item.identifier}, and no media to encode")
            if self._takes:
                self.seen.ec["fallback"] += 1
            output = await self._encode(item)
        elif output.rows != item.rows:
            raise EngineDied("Expected number of multimodal embeddings to match number of input items")
        self._keep(item.identifier, output)
        return output

    async def _encode(self, item: Item) -> Encoded:
        if item.content is None:
            raise EngineDied(f"nothing to encode for {item.identifier}")
        cached = self._cache.get(item.identifier)
        if cached is not None:
            return cached
        if self.config.costs.item:
            await asyncio.sleep(self.config.costs.item)
        self.seen.encodes[item.content] += 1
        output = encode(item.content, item.modality)
        self._keep(item.identifier, output)
        return output

    def _keep(self, identifier: str, output: Encoded) -> None:
        limit = self.config.encoder_cache_items
        if limit:
            bounded(self._cache, identifier, output, limit)

    def _remember(self, job: Job) -> None:
        for identifier, content in job.remembered:
            bounded(self.known, identifier, content, self.config.processor_cache_items)

    async def _publish(self, job: Job, encoded: list[tuple[Item, Encoded]]) -> dict[str, Any] | None:
        return await self.ec.publish(job, encoded) if self.ec is not None and encoded else None

    async def rejected(self, params: Any) -> None:
        """A request with these kv_transfer_params was refused before it reached the engine."""
        if isinstance(params, dict) and self.kv is not None:
            await self.kv.rejected(params)

    def side(self, message: Message, rank: int) -> Message:
        """A message of another engine."""
        if self.dead:
            return {"ok": False, "why": "dead"}
        try:
            if str(message.get("op")).startswith("kv_"):
                return self.kv.answer(message) if self.kv is not None else {"ok": False, "why": "no KV connector"}
            return self.ec.answer(message, rank) if self.ec is not None else {"ok": False, "why": "no EC connector"}
        except (KeyError, TypeError, ValueError) as error:
            return {"ok": False, "why": f"malformed message: {error!r}"}

    def close(self) -> None:
        self.client.close()
        if self.kv is not None:
            self.kv.close()


def _ec(config: SimConfig, seen: Seen, client: SideClient, port: int) -> Ec | None:
    if config.ec == "example":
        return ExampleEc(config, seen)
    if config.ec == "eccpu":
        return EcCpu(config, seen, client, port)
    return MooncakeEc(config, seen, client) if config.ec == "mooncake" else None


def _kv(config: SimConfig, seen: Seen, client: SideClient, port: int) -> Kv | None:
    if config.kv_dialect == "nixl":
        return NixlKv(config, seen, client, port)
    return ExampleKv(config, seen) if config.kv_dialect == "example" else None
