"""A simulated engine as a library: `async with Sim(role="prefill") as sim: ...`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec

from triptych.http.request import Request
from triptych.http.server import Server, ServerLimits
from triptych.sim.app import App
from triptych.sim.config import Costs, SimConfig
from triptych.sim.delivery import JSON
from triptych.sim.engine import Engine
from triptych.sim.errors import EngineError
from triptych.sim.faults import Faults
from triptych.sim.seen import Seen
from triptych.sim.side import SideServer

LAST_WORDS = 0.25
"""seconds that a dying engine's answers get to go out"""


class Sim:
    """One simulated engine, listening on a port of this machine, in this event loop.

    Takes a `SimConfig`, or its fields as keywords. `costs` may be a mapping. Raises `ValueError` for a bad field.
    """

    def __init__(self, config: SimConfig | None = None, **fields: Any) -> None:
        if isinstance(fields.get("costs"), dict):
            fields["costs"] = Costs(**fields["costs"])
        for name in ("aliases", "loras", "known_consumers"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        self.config = replace(config, **fields) if config is not None else SimConfig(**fields)
        self.seen = Seen(keep_bodies=self.config.keep_bodies)
        self.faults = Faults()
        self.died = asyncio.Event()
        self.port = 0
        self.side_ports: list[int] = []
        self._sides: list[SideServer] = []
        self._server: Server | None = None
        self._engine: Engine | None = None
        self._app: App | None = None
        self._dying: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "dead" if self.dead else "up" if self._server is not None else "down"
        return f"<Sim {self.config.role} {self.config.model} {self.config.host}:{self.port} {state}>"

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Listen. After a `stop` or a death: again, on the same port, with an engine that has forgotten everything
        but its counters. Raises OSError where a port is taken."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def _start(self) -> None:
        config = self.config
        self.died.clear()
        for rank in range(config.dp_size):
            side = SideServer(partial(self._side, rank))
            port = self.side_ports[rank] if self.side_ports else (config.side_port + rank if config.side_port else 0)
            await side.start(config.host, port)
            self._sides.append(side)
        self.side_ports = [side.port for side in self._sides]
        self._engine = Engine(config, self.seen, self.side_ports[0], self._on_death)
        self._app = app = App(config, self._engine, self.seen, self.faults, self._admin)
        limits = ServerLimits(keep_alive_timeout=config.keep_alive, body_timeout=3600.0, write_timeout=3600.0)
        self._server = Server(app.handle, limits, on_bad_request=_bad_request)
        addresses = await self._server.start(config.host, self.port or config.port, ssl=config.tls)
        self.port = addresses[0][1]

    async def stop(self) -> None:
        """Close every connection and stop listening."""
        if self._dying is not None and self._dying is not asyncio.current_task():
            self._dying.cancel()
            await asyncio.wait([self._dying])
        self._dying = None
        if self._app is not None:
            self._app.closing = True
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        sides, self._sides = self._sides, []
        for side in sides:
            await side.close()
        if self._engine is not None:
            self._engine.close()

    async def drain(self, timeout: float) -> bool:
        """Stop accepting, wait for running requests; True when all ended in time."""
        return True if self._server is None else await self._server.drain(timeout)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def kill(self) -> None:
        """Die now, as a killed process: every connection is cut, the port refuses."""
        self.engine.die("killed")
        if self._dying is not None:
            self._dying.cancel()
            await asyncio.wait([self._dying])
            self._dying = None
        await self.stop()
        self.died.set()

    def _on_death(self) -> None:
        if self.config.death == "exit":
            self._dying = asyncio.get_running_loop().create_task(self._fade())
        else:
            self.died.set()

    async def _fade(self) -> None:
        await self.drain(LAST_WORDS)
        await self.stop()
        self.died.set()

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Raises RuntimeError before `start`."""
        if self._engine is None:
            raise RuntimeError("the engine was not started")
        return self._engine

    @property
    def url(self) -> str:
        """Address, without a slash at the end."""
        scheme = "http" if self.config.tls is None else "https"
        return f"{scheme}://{self.config.host}:{self.port}"

    @property
    def zmq(self) -> str:
        """Push address of rank 0 for EC `mooncake` (`consumer_zmq`)."""
        return self.zmq_addresses[0]

    @property
    def zmq_addresses(self) -> list[str]:
        """Push address of each rank."""
        return [f"tcp://{self.config.host}:{port}" for port in self.side_ports]

    @property
    def dead(self) -> bool:
        return self._engine is not None and self._engine.dead

    @property
    def connections(self) -> int:
        """Open HTTP connections."""
        return 0 if self._server is None else len(self._server.connections)

    @property
    def pinned(self) -> int:
        """KV handles whose blocks are still kept for a decoder (nixl)."""
        return getattr(self.engine.kv, "pinned", 0)

    def close_idle(self) -> int:
        """Close the connections that wait for a request, without a word; returns how many."""
        if self._server is None:
            return 0
        idle = [c for c in self._server.connections if c._task is None and not c._parser.started]
        for connection in idle:
            connection.close()
        return len(idle)

    # --- admin -------------------------------------------------------------------------------------------------------

    def _side(self, rank: int, message: dict[str, Any]) -> dict[str, Any]:
        answer = self.engine.side(message, rank)
        self.seen.touch()
        return answer

    async def _admin(self, request: Request) -> None:
        """`/sim/seen`, `/sim/faults`, `/sim/reset`, `/sim/close_idle`, `/sim/info`."""
        call = (request.method, request.path)
        body = await request.read_body(64 << 20)
        out: Any = {"ok": True}
        status = 200
        if call == ("GET", "/sim/seen"):
            out = self.seen.to_json(bodies=b"bodies" in request.query)
        elif call == ("GET", "/sim/info"):
            out = {
                "role": self.config.role,
                "model": self.config.model,
                "side_ports": self.side_ports,
                "dead": self.dead,
                "pinned": self.pinned,
                "connections": self.connections,
            }
        elif call == ("POST", "/sim/faults"):
            try:
                rules = msgspec.json.decode(body)
                self.faults.add(*(rules if isinstance(rules, list) else [rules]))
            except (ValueError, TypeError) as error:
                status, out = 400, EngineError(400, "BadRequestError", str(error)).openai()
        elif call == ("GET", "/sim/faults"):
            out = self.faults.rules
        elif call == ("DELETE", "/sim/faults"):
            self.faults.clear()
        elif call == ("POST", "/sim/reset"):
            self.reset_seen()
        elif call == ("POST", "/sim/close_idle"):
            out = {"closed": self.close_idle()}
        else:
            status, out = 404, EngineError(404, "Not Found", "Not Found").openai()
        await request.respond(status, JSON, msgspec.json.encode(out))

    def reset_seen(self) -> None:
        """Set the counters to zero (requests in flight stay counted)."""
        self.seen.reset()


def _bad_request(status: int, message: str) -> tuple[Sequence[tuple[bytes, bytes]], bytes]:
    return JSON, EngineError(status, "Bad Request", message).body()
