"""The gateway as a process: listeners, signals, drain."""

from __future__ import annotations

import asyncio
import gc
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import uvloop

import triptych
from triptych.config.values import host_port
from triptych.gateway.admin import Admin
from triptych.gateway.app import Gateway
from triptych.gateway.errors import ApiError
from triptych.gateway.health import Prober
from triptych.gateway.logs import Log
from triptych.gateway.settings import ROLES, GatewaySettings
from triptych.http.client import Client
from triptych.http.head import Header
from triptych.http.server import Server, ServerLimits


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that listens. api and admin: bound addresses, admin empty if off."""

    gateway: Gateway
    server: Server
    api: list[tuple[str, int]]
    admin: list[tuple[str, int]]

    @property
    def url(self) -> str:
        """The API's address."""
        host, port = self.api[0]
        scheme = "https" if self.gateway.settings.tls else "http"
        return f"{scheme}://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"

    async def drain(self) -> bool:
        """Take no more, let what runs end within the drain deadline; True if all of it did."""
        self.gateway.draining = True
        return await self.server.drain(self.gateway.settings.deadlines.drain)


@asynccontextmanager
async def running(
    settings: GatewaySettings, log: Log, on_drain: Callable[[], None] = lambda: None
) -> AsyncIterator[Running]:
    """A gateway with its listeners and probes, until the block ends. Raises OSError where it cannot listen."""
    async with AsyncExitStack() as stack:
        client = Client(
            connect_timeout=settings.deadlines.connect,
            max_header_bytes=settings.limits.header_bytes,
            ssl_context=_engine_tls(settings),
        )
        stack.push_async_callback(client.close)
        gateway = Gateway(settings, client, log)
        await stack.enter_async_context(gateway.pipelines)
        server = Server(gateway.handle, _limits(settings), on_bad_request=_bad_request)
        stack.push_async_callback(server.close)
        api = await server.start(*host_port(settings.listen), ssl=_server_tls(settings))
        admin_at: list[tuple[str, int]] = []
        if settings.admin != "off":
            admin = Admin(
                fleet=gateway.fleet,
                admission=gateway.admission,
                metrics=gateway.metrics,
                requests=gateway.requests,
                log=log,
                drain=on_drain,
            )
            stack.push_async_callback(admin.close)
            admin_at = await admin.start(*host_port(settings.admin))
        await stack.enter_async_context(Prober(gateway.fleet, settings.health, client, log))
        yield Running(gateway, server, api, admin_at)


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once. Returns the exit status."""
    return uvloop.run(_serve(settings))


async def _serve(settings: GatewaySettings) -> int:
    log = Log(settings.log_format, settings.log_level, access=settings.access_log)
    detach = log.attach()
    ending, hurry = asyncio.Event(), asyncio.Event()

    def asked() -> None:
        (hurry if ending.is_set() else ending).set()

    # What start-up made stays: the collector need not look at it again, nor so often at requests' short-lived objects,
    # which reference counts free (measured: a tenth of the CPU of a request).
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    try:
        async with running(settings, log, ending.set) as gateway:
            log.info("listening", url=gateway.url, admin=_first_address(gateway.admin), version=triptych.__version__)
            await ending.wait()
            log.info("draining", requests=gateway.server.running, deadline=settings.deadlines.drain)
            drain = asyncio.ensure_future(gateway.drain())
            hurried = asyncio.ensure_future(hurry.wait())
            await asyncio.wait((drain, hurried), return_when=asyncio.FIRST_COMPLETED)
            clean = drain.done() and drain.result()
            for task in (drain, hurried):
                task.cancel()
            await asyncio.gather(drain, hurried, return_exceptions=True)
            log.info("ended", clean=clean, cut=gateway.server.running)
            return 0
    finally:
        detach()


def _first_address(addresses: Sequence[tuple[str, int]]) -> str | None:
    return f"http://{addresses[0][0]}:{addresses[0][1]}" if addresses else None


def _limits(settings: GatewaySettings) -> ServerLimits:
    deadlines = settings.deadlines
    return ServerLimits(
        header_bytes=settings.limits.header_bytes,
        connections=settings.limits.connections,
        header_timeout=deadlines.header,
        body_timeout=deadlines.body,
        keep_alive_timeout=deadlines.keep_alive,
        write_timeout=deadlines.write,
    )


def _bad_request(status: int, message: str) -> tuple[Sequence[Header], bytes]:
    error = ApiError(status, message, retry_after=1 if status == 503 else None)
    return error.head(), error.body("other")


def _server_tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    if settings.tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings.tls.certificate, settings.tls.key)
    return context


def _engine_tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    """None where no engine speaks TLS: reading the system's trust store takes a good part of the start."""
    if not any(e.url.startswith("https://") for m in settings.models for r in ROLES for e in getattr(m, r)):
        return None
    context = ssl.create_default_context(cafile=settings.engine_tls.ca)
    if not settings.engine_tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
