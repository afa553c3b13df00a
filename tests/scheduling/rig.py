"""A stage without an engine: vLLM's real scheduler, a connector in memory, and a worker that remembers like vLLM's."""

from __future__ import annotations

import contextlib
import copy
import queue
import time
import warnings
from collections import deque
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.transfer.adapter.memory import Exchange, MemoryConnector
from tests.transfer.adapter.stages import forward
from triptych.models.tiny import write_tiny
from triptych.transfer.connectors.base import Mark
from triptych.transfer.errors import BrokenStream

BLOCK = 4
BLOCKS = 256
PATIENCE_S = 20.0


@cache
def engine_config() -> Any:
    """What vLLM makes of its arguments for a tiny model; made once, and copied for each stage."""
    with TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = str(write_tiny("image", Path(directory) / "model"))
        return EngineArgs(
            model=model, skip_tokenizer_init=True, block_size=BLOCK, max_num_seqs=8, language_model_only=True
        ).create_engine_config()


def config(stage: dict[str, Any], *, ahead: bool = False, seqs: int = 8) -> Any:
    """The engine's configuration with this `stage` in it. `ahead`: with asynchronous scheduling."""
    made = copy.copy(engine_config())
    made.additional_config = {"stage": stage}
    made.scheduler_config = copy.copy(made.scheduler_config)
    made.scheduler_config.async_scheduling = ahead
    made.scheduler_config.max_num_seqs = seqs
    made.cache_config = copy.copy(made.cache_config)
    made.cache_config.num_gpu_blocks = BLOCKS
    return made


class Core(EngineCoreProc):
    """As much of vLLM's engine core as a scheduler meets: it makes it, and sleeps in its queue."""

    def __init__(self, kind: type[Any], vllm_config: Any) -> None:
        self.input_queue = queue.Queue()
        kv = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = kind(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], kv)]),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )


def answer(tokens: list[int]) -> int:
    """The next token of a model that is only arithmetic."""
    return 1000 + (sum((n + 1) * token for n, token in enumerate(tokens)) * 31 + len(tokens)) % 1000


def answers(prompt: list[int], count: int) -> list[int]:
    """What that model says after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer(tokens))
    return tokens[len(prompt) :]


class Known:
    """A request as the worker knows it."""

    def __init__(self, tokens: list[int], blocks: list[int]) -> None:
        self.tokens = list(tokens)
        self.prompt = len(tokens)
        self.blocks = list(blocks)


class Worker:
    """Keeps tokens and key-value blocks as vLLM's model runner does, and fails where a step would read of a block what
    is not there. `seen`: what it was told of each request's chunks."""

    def __init__(self) -> None:
        self.requests: dict[str, Known] = {}
        self.memory: dict[int, list[int]] = {}
        self.seen: list[Any] = []
        self.most = 0

    def run(self, plan: Any) -> ModelRunnerOutput:
        for request_id in plan.finished_req_ids:
            self.requests.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in plan.scheduled_new_reqs:
            self.seen.append(replace(new, prompt_token_ids=list(new.prompt_token_ids)))
            self.requests[new.req_id] = Known(new.prompt_token_ids, new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            known = self.requests[request_id]
            computed[request_id] = cached.num_computed_tokens[index]
            blocks = (cached.new_block_ids[index] or [[]])[0]
            known.blocks = list(blocks) if request_id in cached.resumed_req_ids else [*known.blocks, *blocks]
            told = cached.all_token_ids.get(request_id)
            if told is not None:
                # The runner takes the answer from what it is told, and the prompt from what it was told at first.
                assert told[: known.prompt] == known.tokens[: known.prompt], request_id
                ahead = [] if request_id in cached.resumed_req_ids else known.tokens[len(told) :]
                known.tokens[known.prompt :] = told[known.prompt :] + ahead
        self.most = max(self.most, len(self.requests))
        sampled = [self._step(self.requests[r], computed[r], n) for r, n in plan.num_scheduled_tokens.items()]
        ids = list(plan.num_scheduled_tokens)
        return ModelRunnerOutput(ids, {r: n for n, r in enumerate(ids)}, sampled)

    def _step(self, known: Known, computed: int, count: int) -> list[int]:
        upto = computed + count
        assert upto <= len(known.tokens), "a step of tokens that the worker does not have"
        assert upto <= BLOCK * len(known.blocks)
        for position in range(upto):
            block = self.memory.setdefault(known.blocks[position // BLOCK], [-1] * BLOCK)
            if position >= computed:
                block[position % BLOCK] = known.tokens[position]
            assert block[position % BLOCK] == known.tokens[position], f"token {position} was computed of another one"
        if upto < len(known.tokens):
            return []
        token = answer(known.tokens)
        known.tokens.append(token)
        return [token]


class Stage:
    """A scheduler, its worker, and the clients' view: tokens and ends by request id.

    `depth`: how many steps are planned before the first one's output is looked at.
    """

    def __init__(
        self, kind: type[Any], exchange: Exchange, *, depth: int = 1, seqs: int = 8, slots: bool = False, **stage: Any
    ) -> None:
        stage.setdefault("connector", {"name": "memory", "extra": {}})
        self.core = Core(kind, config(stage, ahead=depth > 1, seqs=seqs))
        self.scheduler = self.core.scheduler
        self.adapter = self.scheduler.chunk_transfer_adapter
        self.exchange = exchange
        self.worker = Worker()
        self.said: dict[str, list[int]] = {}
        self.ends: dict[str, EngineCoreOutput] = {}
        self.counts: Any = None
        self._depth = depth
        self._flying: deque[tuple[Any, ModelRunnerOutput]] = deque()
        if slots:
            self.scheduler.use_v2_model_runner = True
        self._free = self.free_blocks

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, request_id: str, prompt: list[int], stream: str | None = None, **more: Any) -> Request:
        """A request comes, of a stream if one is named."""
        resumable = more.pop("resumable", False)
        extra = {"triptych_stream": stream} if stream is not None else None
        params = SamplingParams(max_tokens=more.pop("max_tokens", 4), extra_args=extra, ignore_eos=True, **more)
        made = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            resumable=resumable,
            block_hasher=hasher(),
        )
        self.scheduler.add_request(made)
        return made

    def step(self) -> bool:
        """One step of the engine core; False where it would sleep instead."""
        if self.scheduler.has_requests():
            plan = self.scheduler.schedule()
            self._flying.append((plan, self.worker.run(plan)))
            if len(self._flying) < self._depth and plan.total_num_scheduled_tokens:
                return True
        elif not self._flying:
            return False
        plan, output = self._flying.popleft()
        for of_client in self.scheduler.update_from_output(plan, output).values():
            self.counts = of_client.scheduler_stats or self.counts
            for one in of_client.outputs:
                self.said.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ends[one.request_id] = one
        return True

    def rest(self) -> None:
        """Step until there is nothing to do."""
        for _ in range(500):
            if not self.step():
                return
        raise AssertionError("the stage does not come to rest")

    def woken(self) -> None:
        """Wait until the adapter wakes the engine core, and step until there is nothing to do."""
        self.core.input_queue.get(timeout=PATIENCE_S)
        while not self.core.input_queue.empty():
            self.core.input_queue.get()
        self.rest()

    def until(self, done: Any) -> None:
        """Let the engine core be woken and work until something is so."""
        self.rest()
        while not done():
            self.woken()

    def close(self) -> None:
        """End the stage. Nothing is left of any request."""
        self.scheduler.shutdown()

    def sent_all(self) -> None:
        """The sending side comes to have nothing of any stream."""
        deadline = time.monotonic() + PATIENCE_S
        while self.adapter._senders.by_id:
            assert time.monotonic() < deadline, self.adapter._senders.by_id
            time.sleep(0.001)  # another thread's work, of which nobody tells

    def clean(self) -> None:
        """Nothing is held for a request that was."""
        self.rest()
        assert not self.scheduler.requests
        assert not self.scheduler.running
        assert self.scheduler.get_request_counts() == (0, 0)
        assert not self.scheduler.deferred_waiting
        assert self.scheduler.num_waiting_for_streaming_input == 0
        assert not self.scheduler._by_stream
        assert self.adapter.num_parked() == 0
        assert not self.adapter._receivers.by_id
        assert self.free_blocks == self._free
        assert not self.worker.requests


@cache
def hasher() -> Any:
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    return get_request_block_hasher(BLOCK, function)


class Upstream:
    """The stage before: gives streams their next chunk."""

    def __init__(self, exchange: Exchange) -> None:
        self.connector = MemoryConnector(exchange, 0)
        self.connector.listen(self)
        self.given: dict[str, int] = {}
        self.told: queue.Queue[tuple[str, str]] = queue.Queue()

    def give(self, stream: str, chunk: dict[str, Any]) -> None:
        number = self.given.get(stream, 0)
        self.given[stream] = number + 1
        terminal = bool(chunk["meta"]["finished"])
        self.connector.put("0", "1", f"{stream}_0_{number}", chunk, Mark(1, terminal))

    def ready(self, stream: str) -> None:
        """Not for a sender."""

    def writable(self, stream: str) -> None:
        """Its streams have credit enough."""

    def stopped(self, stream: str, reason: str, generation: int | None = None) -> None:
        self.told.put((stream, reason))


class Downstream:
    """The stage after: takes streams' chunks."""

    def __init__(self, exchange: Exchange) -> None:
        self.connector = MemoryConnector(exchange, 1)
        self.connector.listen(self)
        self._taken: dict[str, int] = {}
        self._news: queue.Queue[str] = queue.Queue()

    def watch(self, stream: str) -> None:
        self.connector.watch("0", "1", stream)

    def first(self, stream: str, meanwhile: Stage | None = None) -> Any:
        """The next chunk that was not taken. Raises BrokenStream, EndOfStream. `meanwhile`: a stage that goes on."""
        number = self._taken.get(stream, 0)
        deadline = time.monotonic() + PATIENCE_S
        while (got := self.connector.get("0", "1", f"{stream}_{number}")) is None:
            assert time.monotonic() < deadline, f"no chunk {number} of {stream}"
            if meanwhile is None or not meanwhile.step():
                with contextlib.suppress(queue.Empty):
                    self._news.get(timeout=0.05)  # rung for any stream: another may have taken this one's
        self._taken[stream] = number + 1
        return got[0]

    def all(self, stream: str, meanwhile: Stage | None = None) -> list[Any]:
        """All that come until the stream's last."""
        found = []
        while True:
            found.append(self.first(stream, meanwhile))
            if bool(found[-1]["meta"]["finished"]):
                return found

    def broken(self, stream: str) -> str:
        """Why the stream broke, once it has."""
        try:
            while True:
                self.first(stream)
        except BrokenStream as error:
            return str(error)

    def ready(self, stream: str) -> None:
        self._news.put(stream)

    def writable(self, stream: str) -> None:
        """It sends nothing."""

    def stopped(self, stream: str, reason: str, generation: int | None = None) -> None:
        """It sends nothing."""


def memory_factory(exchange: Exchange) -> Any:
    """Makes connectors on this exchange, whatever they are called."""
    return SimpleNamespace(create_connector=lambda spec: MemoryConnector(exchange, spec.extra["stage_id"]))


FORWARD = f"{forward.__module__}:{forward.__name__}"
