"""Simulated engines with a gateway in front, all in the test's event loop, and what must be left of a request: nothing.

async with Rig("e_p_d", encode_failure="strict") as rig:
    rig.sim("prefill").faults.add(Fault(kind="reset", path=POSTS))
    answer = await rig.post(chat(stream=True, images=1))
    await rig.settled()
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal, Self

from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.raw import Answer, Raw
from triptych.gateway.app import Gateway
from triptych.gateway.logs import Log
from triptych.gateway.process import Running, running
from triptych.gateway.settings import GatewaySettings
from triptych.sim import MemoryStore, Sim

PlanName = Literal["plain", "e_pd", "p_d", "e_p_d"]
PLANS: tuple[PlanName, ...] = ("plain", "e_pd", "p_d", "e_p_d")
ROLES: dict[str, tuple[str, ...]] = {
    "plain": ("combined",),
    "e_pd": ("encode", "combined"),
    "p_d": ("prefill", "decode"),
    "e_p_d": ("encode", "prefill", "decode"),
}
POSTS = "/v1/*"


class Rig:
    """A plan's engines and a gateway. Entered, every engine has been probed once; there is no second probe.

    engines: how many of each role (1). sims: fields of the simulators by role. deadlines, limits, health, and other
    settings as the gateway's. elsewhere: a port, by role, that stands for that engine.

    probing: engines are probed on, by `health`.

    On leaving it checks that no socket is left, and that nothing went wrong by itself (`errors`, `unhandled`).
    """

    def __init__(
        self,
        plan: PlanName,
        *,
        engines: Mapping[str, int] | None = None,
        sims: Mapping[str, Mapping[str, Any]] | None = None,
        health: Mapping[str, Any] | None = None,
        ec: str = "example",
        elsewhere: Mapping[str, int] | None = None,
        probing: bool = False,
        **settings: Any,
    ) -> None:
        self.plan = plan
        self.ec = ec
        self.pools: dict[str, list[Sim]] = {}
        self.lines: list[bytes] = []
        self.ignore: set[str] = set()  # kinds of what may be left (`left`)
        self.unhandled: list[Mapping[str, Any]] = []
        self.running: Running
        self._engines = engines or {}
        self._sims = sims or {}
        self._elsewhere = elsewhere or {}
        self._probing = probing
        self._settings = settings
        self._health = {"interval": 3600, **(health or {})}
        self._stack = AsyncExitStack()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sockets: set[str] = set()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._sockets = open_sockets()
        self._tasks = asyncio.all_tasks()
        gc.freeze()  # what is here already is not looked through at the end
        loop.set_exception_handler(lambda _, context: self.unhandled.append(context))
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _start(self) -> None:
        store = MemoryStore()
        split = "prefill" in ROLES[self.plan]
        for role in ROLES[self.plan]:
            fields: dict[str, Any] = {"role": role, "keep_bodies": 64}
            if "encode" in ROLES[self.plan] and role != "decode":
                fields |= {"ec": self.ec}
                if self.ec == "example":
                    fields |= {"ec_dir": store}
            fields |= self._sims.get(role, {})
            self.pools[role] = [
                await self._stack.enter_async_context(Sim(**fields)) for _ in range(self._engines.get(role, 1))
            ]
        lists: dict[str, Any] = {role: [sim.url for sim in sims] for role, sims in self.pools.items()}
        if self.ec == "mooncake":
            consumers = "prefill" if split else "combined"
            lists[consumers] = [{"url": sim.url, "ec_zmq": list(sim.zmq_addresses)} for sim in self.pools[consumers]]
        lists |= {role: [f"http://127.0.0.1:{port}"] for role, port in self._elsewhere.items()}
        settings = GatewaySettings.model_validate(
            {
                "listen": "127.0.0.1:0",
                "admin": "off",
                "ec": self.ec,
                "health": self._health,
                **lists,
                **self._settings,
            }
        )
        log = Log("json", "debug", write=self.lines.append, delay=0)
        self._stack.callback(log.attach())
        self.running = await self._stack.enter_async_context(running(settings, log))
        self.gateway.client.sweep_interval = 0.05  # deadlines are seen up to two sweeps late
        if self._elsewhere:
            await self._know_by_word()
        await eventually(lambda: self.gateway.fleet.probed and self.probes_done, "the first probes", 10.0)
        self._tasks = asyncio.all_tasks()
        for sim in self.all_sims:
            sim.close_idle()  # a test that wants a connection used before makes one by a request
            sim.reset_seen()
        if self._probing:
            return
        await eventually(lambda: not any(p.idle for p in self.gateway.client.pools()), "idle connections", 5.0)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._stack.aclose()
        gc.collect()
        gc.unfreeze()
        left = lambda: open_sockets() - self._sockets  # noqa: E731
        if kind is None:
            await eventually(lambda: not left(), lambda: f"sockets: {left()}", 2.0)
        assert not self.unhandled, self.unhandled
        assert not self.errors, self.errors

    async def _know_by_word(self) -> None:
        """Say of the engines that are elsewhere that they are alive, since no probe would."""
        urls = {f"http://127.0.0.1:{port}" for port in self._elsewhere.values()}
        unknown = [e for e in self.gateway.fleet.engines() if e.url in urls]
        for engine in unknown:
            engine.probed(None)
            engine.reported([{"id": "sim"}])
        probes = [t for t in asyncio.all_tasks() if any(t.get_name() == f"probe {url}" for url in urls)]
        for task in probes:
            task.cancel()

    # --- parts

    @property
    def gateway(self) -> Gateway:
        return self.running.gateway

    @property
    def probes_done(self) -> bool:
        """Whether every engine's models are known too, so that no probe is on its way."""
        return all(e.names is not None for e in self.gateway.fleet.engines()) and not self._busy

    @property
    def all_sims(self) -> list[Sim]:
        return [sim for sims in self.pools.values() for sim in sims]

    def sim(self, role: str, index: int = 0) -> Sim:
        """The engine of that role; `final` is the one that answers."""
        return self.pools[self.final if role == "final" else role][index]

    @property
    def final(self) -> str:
        """The role that answers."""
        return ROLES[self.plan][-1]

    @property
    def log(self) -> list[dict[str, Any]]:
        """Log lines, parsed."""
        return [json.loads(line) for chunk in self.lines for line in chunk.splitlines()]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Log lines of errors: mistakes of the gateway's own."""
        return [line for line in self.log if line["level"] == "error"]

    def client(self, **options: Any) -> Raw:
        host, port = self.running.api[0]
        return Raw(host, port, **options)

    async def post(self, body: Any, path: str = "/v1/chat/completions", **options: Any) -> Answer:
        """One request on a connection of its own."""
        async with self.client() as client:
            client.send(body, path, **options)
            return await client.answer()

    # --- what was counted

    def count(self, name: str, **labels: str) -> float:
        """The sum of a counter's or gauge's samples (name without prefix and `_total`) that have these labels."""
        _, text = self.gateway.metrics.render()
        names = {f"triptych_{name}", f"triptych_{name}_total"}
        return sum(
            sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
            if sample.name in names and labels.items() <= sample.labels.items()
        )

    def legs(self) -> dict[tuple[str, str], int]:
        """Ended legs by role and status, those that there are."""
        _, text = self.gateway.metrics.render()
        return {
            (sample.labels["leg"], sample.labels["status"]): int(sample.value)
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
            if sample.name == "triptych_legs_total" and sample.value
        }

    def seen(self, role: str) -> int:
        """Requests that engines of that role have seen, probes left out."""
        return sum(
            count
            for sim in self.pools[role]
            for path, count in sim.seen.requests.items()
            if path not in ("/health", "/v1/models")
        )

    # --- nothing is left

    async def settled(self, within: float = 1.0, *, clients: int = 0) -> None:
        """Wait until nothing is left of any request; fails with what is after `within` seconds.

        clients: connections of clients that may stay open.
        """
        await eventually(lambda: not self.left(clients), lambda: f"left: {self.left(clients)}", within)
        await asyncio.sleep(0)  # the log lines of one turn of the loop are written in the next
        await asyncio.sleep(0)

    def left(self, clients: int = 0) -> dict[str, Any]:
        """What is still there of requests."""
        gateway, server = self.gateway, self.running.server
        left: dict[str, Any] = {
            "requests admitted": gateway.admission.requests,
            "bytes admitted": gateway.admission.nbytes,
            "requests queued": gateway.admission.queued,
            "handlers": server.running,
            "client connections": max(0, len(server.connections) - clients),
            "upstream connections": self._busy,
            "tasks": [t for t in asyncio.all_tasks() - self._tasks if t is not asyncio.current_task()],
        }
        for engine in gateway.fleet.engines():
            left[f"leases on {engine.url}"] = engine.in_flight
        for deployment in gateway.fleet.deployments:
            for role, pool in deployment.pools.items():
                left[f"waiting for {role}"] = pool.waiting
        for sim in self.all_sims:
            left[f"in flight on {sim.url}"] = sim.seen.in_flight
        return {what: rest for what, rest in left.items() if rest and what not in self.ignore}

    @property
    def _busy(self) -> int:
        return sum(len(pool.busy) + pool.connecting for pool in self.gateway.client.pools())


async def eventually(
    holds: Callable[[], Any], what: str | Callable[[], str], within: float, *, every: float = 0.002
) -> None:
    """Wait until `holds()`; fails with `what` after `within` seconds. For what has no event to wait for."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    turns = 0  # on a machine that is busy with other things a second may pass in which nobody got a turn
    while not holds():
        turns += 1
        if loop.time() >= deadline and turns > 50:
            raise AssertionError(f"not within {within:g} s: {what if isinstance(what, str) else what()}")
        await asyncio.sleep(every)


def open_sockets() -> set[str]:
    """This process's sockets, as the kernel names them."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


# --- requests


def image(payload: str = "aW1hZ2U=") -> dict[str, Any]:
    """An image part with inline data (`payload` is base64)."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{payload}"}}


def chat(text: str = "what is this?", *, images: int = 0, stream: bool = False, **more: Any) -> dict[str, Any]:
    """A chat body with that many distinct images."""
    parts = [{"type": "text", "text": text}, *(image(f"aW1hZ2U{chr(65 + i)}") for i in range(images))]
    return {"model": "sim", "messages": [{"role": "user", "content": parts}], "stream": stream, **more}


def completions(text: str = "once", *, images: int = 0, stream: bool = False, **more: Any) -> dict[str, Any]:
    """A body of the old completions API, which has no images."""
    return {"model": "sim", "prompt": text, "stream": stream, **more}


def messages(text: str = "what?", *, images: int = 0, stream: bool = False, **more: Any) -> dict[str, Any]:
    """A body of the messages API."""
    source = {"type": "base64", "media_type": "image/png"}
    parts = [
        {"type": "text", "text": text},
        *({"type": "image", "source": {**source, "data": f"aW1hZ2U{chr(65 + i)}"}} for i in range(images)),
    ]
    return {
        "model": "sim",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": parts}],
        "stream": stream,
        **more,
    }


def responses(text: str = "what?", *, images: int = 0, stream: bool = False, **more: Any) -> dict[str, Any]:
    """A body of the responses API."""
    parts = [
        {"type": "input_text", "text": text},
        *(
            {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,aW1hZ2U{chr(65 + i)}"}
            for i in range(images)
        ),
    ]
    return {"model": "sim", "input": [{"role": "user", "content": parts}], "stream": stream, **more}


BODIES: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", chat),
    "completions": ("/v1/completions", completions),
    "messages": ("/v1/messages", messages),
    "responses": ("/v1/responses", responses),
}
