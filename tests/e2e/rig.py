"""Real vLLM processes for tests: a topology in a thread of its own, gateways in the test's loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Self

from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from triptych.gateway.logs import Log
from triptych.gateway.process import Running as RunningGateway
from triptych.gateway.process import running
from triptych.gateway.settings import GatewaySettings
from triptych.launch.plan import Plan
from triptych.launch.running import EngineHandle, Running, launch
from triptych.launch.topology import Topology

START_SECONDS = 420.0


class Engines:
    """A topology without a gateway, up between `__enter__` and `__exit__`."""

    def __init__(self, topology: dict[str, Any], log_dir: Path) -> None:
        self._topology = Topology.model_validate({"gateway": False, **topology})
        self._log_dir = log_dir
        self._up = threading.Event()
        self._running: Running | None = None
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="engines")

    def begin(self) -> None:
        """Start without waiting; `__enter__` waits."""
        self._thread.start()

    def __enter__(self) -> Self:
        if self._thread.ident is None:
            self.begin()
        self._up.wait(START_SECONDS)
        if self._error is not None:
            self._thread.join()
            raise self._error
        assert self._running is not None, f"engines not up within {START_SECONDS} s"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with launch(self._topology, log_dir=self._log_dir) as self._running:
                self._up.set()
                await self._stop.wait()
        except BaseException as error:
            self._error = error
        finally:
            self._up.set()

    def __getitem__(self, name: str) -> EngineHandle:
        assert self._running is not None
        return self._running.engines[name]

    @property
    def plan(self) -> Plan:
        """What was started."""
        assert self._running is not None
        return self._running.plan

    def names(self) -> list[str]:
        """Every engine's."""
        assert self._running is not None
        return list(self._running.engines)

    def url(self, name: str) -> str:
        """The address of an engine, such as `encode-0`."""
        return self[name].url

    def log(self, name: str) -> str:
        """What an engine has written to its log so far."""
        return (self._log_dir / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        """SIGKILL the engine's whole process group, as the kernel's OOM killer would."""
        pid = self[name].pid
        assert pid is not None
        os.killpg(os.getpgid(pid), signal.SIGKILL)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the engine's whole process group."""
        pid = self[name].pid
        assert pid is not None
        os.killpg(os.getpgid(pid), number)

    async def healthy_again(self, name: str, seconds: float = 240.0) -> None:
        """Until the engine answers /health."""
        async with asyncio.timeout(seconds):
            while not await asyncio.to_thread(alive, self.url(name)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.5)


def alive(url: str) -> bool:
    """Whether an engine says that it is well."""
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def counter(url: str, name: str, **labels: str) -> float:
    """A counter of an engine's /metrics page, over all series that have these labels."""
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def items_taken(url: str) -> float:
    """Encoder outputs that the consumer loaded from the store."""
    return counter(url, "triptych_ec_items_total", result="hit")


def kv_taken(url: str) -> float:
    """Prompt tokens whose KV the engine got from another one."""
    return counter(url, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def computed(url: str) -> float:
    """Prompt tokens that the engine computed by itself."""
    return counter(url, "vllm:prompt_tokens_by_source_total", source="local_compute")


@contextlib.asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[RunningGateway]:
    """A gateway in this loop, on free ports; patient with engines that share two cores with everything else."""
    given = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "health": {"timeout": 15.0, "failures": 5}}
    given |= {"deadlines": {"connect": 20.0, "encode": 120.0, "prefill": 120.0}, **settings}
    made = GatewaySettings.model_validate(given)
    async with running(made, Log("text", "warning", access=False)) as up:
        yield up


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    """The official client, without retries of its own."""
    async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=180) as made:
        yield made


Messages = list[dict[str, Any]]


async def tokens(url: str, messages: Messages, *, max_tokens: int = 12, **more: Any) -> list[int]:
    """The token ids of a greedy answer."""
    async with client(url) as openai:
        answer = await openai.chat.completions.create(
            model="tiny",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"return_token_ids": True, **more},
        )
    choice = answer.choices[0]
    ids: list[int] = choice.token_ids  # type: ignore[attr-defined]
    assert len(ids) == max_tokens
    return ids


async def streamed_tokens(url: str, messages: Messages, *, max_tokens: int = 12) -> list[int]:
    """The same, from a stream."""
    ids: list[int] = []
    async with client(url) as openai:
        stream = await openai.chat.completions.create(
            model="tiny",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        async for event in stream:
            for choice in event.choices:
                ids += getattr(choice, "token_ids", None) or []
    return ids


@contextlib.contextmanager
def started(log_dir: Path, *topologies: dict[str, Any]) -> Iterator[tuple[Engines, ...]]:
    """Several topologies, started at the same time, up until the block ends."""
    made = [Engines(topology, log_dir / str(number)) for number, topology in enumerate(topologies)]
    for engines in made:
        engines.begin()
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(engines) for engines in made)


async def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until something holds that has no event to wait for."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - processes and gauges, not tasks of this loop
            await asyncio.sleep(0.02)
