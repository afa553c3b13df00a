"""The gateway as the last receiver of a pipeline: chunks of sound, from the connector's thread into the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from triptych.gateway.settings import SoundSettings
from triptych.transfer.connectors.base import ConnectorSpec, StreamConnector
from triptych.transfer.connectors.registry import ConnectorFactory
from triptych.transfer.errors import BrokenStream, ConnectorError, EndOfStream, WireError
from triptych.transfer.wire import Tensor

RATES = range(8_000, 192_001)
_MOST_SAMPLES = 1 << 26


class SoundBroken(Exception):
    """The sound will not be completed; the text says why and of which stage."""


class Chunk(NamedTuple):
    """A piece of sound. pcm: int16 samples, little-endian, one channel; rate: samples a second, 0 for no sound."""

    pcm: bytes
    rate: int
    last: bool


class SoundReceiver:
    """Receives the sound of one model. `async with` it: made in the loop that uses it."""

    def __init__(self, settings: SoundSettings, stages: int) -> None:
        """stages: how many there are, with the first. Raises ConnectorError for options that cannot be."""
        self._sender, self._own = str(stages - 1), str(stages)
        extra = {**settings.extra, "stage_id": stages, "tensors": "view", "role": "receiver"}
        connector = ConnectorFactory.create_connector(ConnectorSpec(settings.connector, extra))
        if not isinstance(connector, StreamConnector):
            connector.close()
            raise ConnectorError(f"sound: the connector {settings.connector!r} cannot tell of chunks that come")
        self._connector = connector
        self._streams: dict[str, SoundStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._connector.listen(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stream in list(self._streams.values()):
            stream.close("the gateway ends")
        await asyncio.to_thread(self._connector.close)

    def open(self, stream: str, source: str | None) -> SoundStream:
        """Receive the sound of a stream, from the replica of the last stage that sends as `source`.

        Raises ConnectorError.
        """
        name = f"{stream}_{self._sender}"
        metadata = _metadata(source)
        made = self._streams[name] = SoundStream(self, name, metadata)
        try:
            self._connector.watch(self._sender, self._own, name, metadata)
        except BaseException:
            del self._streams[name]
            raise
        return made

    @property
    def open_streams(self) -> int:
        """How many are being received."""
        return len(self._streams)

    # --- the connector's thread

    def ready(self, stream: str) -> None:
        """There is something of this stream."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._ring, stream)

    def writable(self, stream: str) -> None:
        """Nothing is sent."""

    def stopped(self, stream: str, reason: str, generation: int | None = None) -> None:
        """Nothing is sent."""

    def _ring(self, stream: str) -> None:
        found = self._streams.get(stream)
        if found is not None:
            found.bell.set()

    # --- of a stream

    def _take(self, stream: SoundStream) -> Any:
        key = f"{stream.name}_{stream.taken}"
        got = self._connector.get(self._sender, self._own, key, stream.metadata)
        return None if got is None else got[0]

    def _drop(self, stream: SoundStream, reason: str | None) -> None:
        if self._streams.get(stream.name) is stream:
            del self._streams[stream.name]
            with contextlib.suppress(ConnectorError):
                self._connector.unwatch(stream.name, reason)


class SoundStream:
    """One request's sound. `close` it on every path."""

    def __init__(self, receiver: SoundReceiver, name: str, metadata: Mapping[str, Any] | None) -> None:
        self.name = name
        self.metadata = metadata
        self.taken = 0
        self.bell = asyncio.Event()
        self._receiver = receiver
        self._rate = 0
        self._ended = False

    async def next(self) -> Chunk:
        """The next chunk, as soon as it is there; behind the last one, one without sound that is the last again.

        Raises:
            SoundBroken: it will not come, or is not sound.
        """
        while not self._ended:
            self.bell.clear()
            try:
                payload = self._receiver._take(self)
            except EndOfStream:
                self._ended = True
                break
            except (BrokenStream, WireError, ConnectorError) as error:
                raise SoundBroken(str(error)) from error
            if payload is not None:
                self.taken += 1
                chunk = _chunk(payload, self._rate)
                self._rate = chunk.rate
                self._ended = chunk.last
                return chunk
            await self.bell.wait()
        return Chunk(b"", self._rate, True)

    def close(self, reason: str | None = None) -> None:
        """No more of it. reason: why, where it has not ended; the last stage is told."""
        self._receiver._drop(self, None if self._ended else reason or "the gateway does not want the rest")


def _metadata(source: str | None) -> dict[str, Any] | None:
    if not source:
        return None
    host, _, port = source.rpartition(":")
    return {"source_host": host.strip("[]"), "source_port": int(port)}


def _chunk(payload: Any, rate: int) -> Chunk:
    """A chunk from what came over the wire, nothing of which is trusted. Raises SoundBroken."""
    if not isinstance(payload, dict):
        raise SoundBroken("a chunk of sound is no map")
    last = _flag(_part(payload, "meta").get("finished"))
    extra = _part(payload, "extra")
    samples = extra.get("sound")
    if samples is None:
        return Chunk(b"", rate, last)
    if not isinstance(samples, Tensor) or samples.dtype != "int16" or len(samples.shape) != 1:
        raise SoundBroken(f"a chunk's sound is {samples!r}, not int16 samples of one channel")
    if samples.shape[0] > _MOST_SAMPLES:
        raise SoundBroken(f"a chunk has {samples.shape[0]} samples")
    told = extra.get("sample_rate")
    if not isinstance(told, int) or isinstance(told, bool) or told not in RATES:
        raise SoundBroken(f"a chunk's sample rate is {told!r}: from {RATES.start} to {RATES.stop - 1}")
    if rate and told != rate:
        raise SoundBroken(f"the sample rate changed from {rate} to {told}")
    return Chunk(bytes(samples.buffer), told, last)


def _part(payload: dict[str, Any], name: str) -> dict[str, Any]:
    part = payload.get(name)
    if part is None:
        return {}
    if not isinstance(part, dict):
        raise SoundBroken(f"a chunk's `{name}` is no map")
    return part


def _flag(value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.dtype != "bool" or len(value.buffer) != 1:
            raise SoundBroken("a chunk's `finished` is not one flag")
        return bool(value.buffer[0])
    if value is None or isinstance(value, bool):
        return bool(value)
    raise SoundBroken(f"a chunk's `finished` is {value!r}")
