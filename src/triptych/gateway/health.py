"""Probes: whether engines are alive, and which models they serve. All state is in `triptych.gateway.engines`.

One task per engine asks `health.path` every `interval` (spread by a tenth, so that engines are not asked in step) and
`/v1/models` every `models_interval`, sooner when the engine's names are unknown or it has just come back.

Any HTTP answer below 500 is a sign of life: vLLM's `/health` needs no key and says 503 when its core is dead, so a 401
or 404 comes from something in front of a working engine or from a wrong `health.path`. Ejecting on it would take a
whole deployment down for a mistake in the settings; it is told in the log instead. What `/v1/models` answers never
counts for health.
"""

from __future__ import annotations

import asyncio
import random
from types import TracebackType
from typing import Any, Self

import msgspec

import triptych
from triptych.gateway.engines import Change, Deployment, Engine, Fleet
from triptych.gateway.logs import Log, exception_fields
from triptych.gateway.settings import Health
from triptych.http.client import Client
from triptych.http.errors import HttpError
from triptych.http.head import Header

_HEALTH_BYTES = 64 * 1024
_MODELS_BYTES = 4 * 1024 * 1024
_SPREAD = 0.1


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


class Prober:
    """Keeps a fleet's health and names up to date while it is entered (`async with`)."""

    def __init__(
        self, fleet: Fleet, settings: Health, client: Client, log: Log, rng: random.Random | None = None
    ) -> None:
        """client: used for probes; its owner closes it."""
        self._fleet = fleet
        self._settings = settings
        self._client = client
        self._log = log
        self._spread = (rng or random.Random()).uniform
        self._tasks: list[asyncio.Task[None]] = []
        self._told: dict[Engine, str] = {}  # what the log last said of an engine's odd answers
        self._models_due: dict[Engine, float] = {}

    async def __aenter__(self) -> Self:
        self._fleet.watchers.append(self._changed)
        for deployment in self._fleet.deployments:
            for engine in deployment.engines():
                name = f"probe {engine.url}"
                self._tasks.append(asyncio.create_task(self._keep_probing(deployment, engine), name=name))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fleet.watchers.remove(self._changed)

    async def round(self) -> None:
        """Probe every engine once, all at the same time."""
        async with asyncio.TaskGroup() as group:
            for deployment in self._fleet.deployments:
                for engine in deployment.engines():
                    group.create_task(self.probe(deployment, engine))

    async def probe(self, deployment: Deployment, engine: Engine) -> None:
        """One probe of one engine, and a look at its models when that is due."""
        why_not = await self._ask_health(deployment, engine)
        engine.probed(why_not)
        now = asyncio.get_running_loop().time()
        if why_not is None and (engine.names is None or now >= self._models_due.get(engine, 0.0)):
            self._models_due[engine] = now + self._settings.models_interval
            await self._ask_models(deployment, engine)

    async def _keep_probing(self, deployment: Deployment, engine: Engine) -> None:
        while True:
            try:
                await self.probe(deployment, engine)
            except Exception as error:  # a mistake of ours must not end the probing
                self._log.error("probe failed by itself", engine=engine.url, **exception_fields(error))
            await asyncio.sleep(self._settings.interval * self._spread(1 - _SPREAD, 1 + _SPREAD))

    async def _ask_health(self, deployment: Deployment, engine: Engine) -> str | None:
        """What is wrong with the engine; None if it is alive."""
        path = self._settings.path
        try:
            async with asyncio.timeout(self._settings.timeout):
                status, _ = await self._get(deployment, engine, path, _HEALTH_BYTES)
        except TimeoutError:
            return f"{path} did not answer within {self._settings.timeout:g} s"
        except (HttpError, OSError) as error:
            return str(error)
        if status >= 500:
            return f"{path} answered {status}"
        if status >= 300:
            self._tell_once(engine, f"{path} answered {status}; counted as alive, see setting health.path")
        return None

    async def _ask_models(self, deployment: Deployment, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout):
                status, body = await self._get(deployment, engine, "/v1/models", _MODELS_BYTES)
            if status in (401, 403):
                self._tell_once(engine, f"/v1/models answered {status}: set engine_api_key to the engine's key")
                return
            if status != 200:
                self._tell_once(engine, f"/v1/models answered {status}")
                return
            cards = msgspec.json.decode(body, type=_Models).data
        except TimeoutError:
            self._tell_once(engine, f"/v1/models did not answer within {self._settings.timeout:g} s")
            return
        except (HttpError, OSError, msgspec.MsgspecError) as error:
            self._tell_once(engine, f"/v1/models: {error}")
            return
        engine.reported([c for c in cards if isinstance(c.get("id"), str) and c["id"]])
        name = deployment.settings.name
        if engine in deployment.answering and name and engine.names and name not in engine.names:
            others = ", ".join(sorted(engine.names)[:5])
            self._tell_once(engine, f"serves {others}, but is configured for {name}: it will refuse that name")

    async def _get(self, deployment: Deployment, engine: Engine, path: str, limit: int) -> tuple[int, bytes]:
        headers: list[Header] = [
            (b"accept", b"application/json"),
            (b"user-agent", b"triptych/" + triptych.__version__.encode()),
        ]
        if key := deployment.settings.engine_api_key:
            headers.append((b"authorization", b"Bearer " + key.get_secret_value().encode()))
        response = await self._client.request(engine.origin, b"GET", path.encode(), headers)
        try:
            return response.status, await response.read(limit)
        finally:
            response.close()

    def _tell_once(self, engine: Engine, what: str) -> None:
        if self._told.get(engine) != what:
            self._told[engine] = what
            self._log.warning("engine answers oddly", engine=engine.url, role=engine.role, what=what)

    def _changed(self, change: Change) -> None:
        engine = change.engine
        if change.what == "names":
            models = sorted(engine.names or ())
            self._log.info("engine serves", engine=engine.url, role=engine.role, models=models[:16], count=len(models))
            return
        if change.what == "recovered":
            self._models_due.pop(engine, None)  # it may have been started anew with other models
        level = "warning" if change.what == "ejected" else "info"
        self._log.event(level, f"engine {change.what}", engine=engine.url, role=engine.role, why=change.why or None)
