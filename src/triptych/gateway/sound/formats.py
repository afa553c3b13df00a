"""Sound formats: from int16 samples of one channel to what clients play.

`pcm` and `wav` need nothing; the others are PyAV's (FFmpeg), imported when the first of them is asked for. A WAV file
begins with its length, so it is made whole; all others come out as the samples go in.
"""

from __future__ import annotations

import importlib
import io
import struct
import threading
from typing import Any, Final, NamedTuple, Protocol

RATES: Final = range(8_000, 192_001)


class FormatUnavailable(Exception):
    """This format needs a package that is not installed; the text says which."""


class Encoder(Protocol):
    """Makes one stream. `close` it on every path; what is fed after that gives nothing."""

    def feed(self, pcm: bytes) -> bytes:
        """More samples (little-endian); what of the stream is ready. Raises ValueError for half a sample."""

    def finish(self) -> bytes:
        """The rest of the stream."""

    def close(self) -> None:
        """Free everything; may be called twice."""


class _Kind(NamedTuple):
    """container, codec: FFmpeg's names; rates: that the codec takes, none for all; options: of the container."""

    content_type: str
    container: str = ""
    codec: str = ""
    rates: tuple[int, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    bit_rate: int = 0


_USUAL_RATES: Final = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_KINDS: Final[dict[str, _Kind]] = {
    "wav": _Kind("audio/wav"),
    "pcm": _Kind("audio/pcm"),
    "mp3": _Kind(
        "audio/mpeg", "mp3", "libmp3lame", _USUAL_RATES, (("write_xing", "0"), ("id3v2_version", "0")), 64_000
    ),
    "opus": _Kind(
        "audio/ogg", "ogg", "libopus", (8000, 12000, 16000, 24000, 48000), (("page_duration", "20000"),), 48_000
    ),
    "flac": _Kind("audio/flac", "flac", "flac"),
    "aac": _Kind("audio/aac", "adts", "aac", _USUAL_RATES, (), 64_000),
}
FORMATS: Final = tuple(_KINDS)


def content_type(form: str, rate: int) -> bytes:
    """The content type of a format; of bare samples, with what is needed to play them."""
    kind = _kind(form, rate).content_type
    return f"{kind};rate={rate};channels=1".encode() if form == "pcm" else kind.encode()


def encoder(form: str, rate: int) -> Encoder:
    """An encoder of a format for samples at a rate.

    Raises ValueError for a format or a rate that there is not, FormatUnavailable.
    """
    kind = _kind(form, rate)
    if form == "pcm":
        return _Pcm()
    if form == "wav":
        return _Wav(rate)
    return _Av(kind, rate)


def whole(form: str, rate: int, pcm: bytes) -> bytes:
    """All samples in one file. Raises as `encoder` and `Encoder.feed` do."""
    made = encoder(form, rate)
    try:
        return made.feed(pcm) + made.finish()
    finally:
        made.close()


def _kind(form: str, rate: int) -> _Kind:
    kind = _KINDS.get(form)
    if kind is None:
        raise ValueError(f"there is no sound format {form!r}: there are {', '.join(FORMATS)}")
    if rate not in RATES:
        raise ValueError(f"a sample rate of {rate}: from {RATES.start} to {RATES.stop - 1}")
    return kind


def _even(pcm: bytes) -> bytes:
    if len(pcm) % 2:
        raise ValueError(f"{len(pcm)} bytes are no whole number of samples")
    return pcm


class _Pcm:
    def feed(self, pcm: bytes) -> bytes:
        return bytes(_even(pcm))

    def finish(self) -> bytes:
        return b""

    def close(self) -> None:
        pass


class _Wav:
    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._pieces: list[bytes] = []

    def feed(self, pcm: bytes) -> bytes:
        self._pieces.append(bytes(_even(pcm)))
        return b""

    def finish(self) -> bytes:
        data = b"".join(self._pieces)
        form = struct.pack("<IHHIIHH", 16, 1, 1, self._rate, self._rate * 2, 2, 16)
        return (
            b"RIFF"
            + struct.pack("<I", 36 + len(data))
            + b"WAVEfmt "
            + form
            + struct.pack("<4sI", b"data", len(data))
            + data
        )

    def close(self) -> None:
        self._pieces.clear()


class _Av:
    """One of FFmpeg's. What the container writes is taken from a buffer in memory after each step."""

    def __init__(self, kind: _Kind, rate: int) -> None:
        try:
            self._av: Any = importlib.import_module("av")
        except ImportError:
            raise FormatUnavailable(
                f"{kind.content_type} needs PyAV: pip install 'triptych[speech]' where the gateway runs; "
                "wav and pcm need nothing"
            ) from None
        self._rate = rate
        self._out = _Pipe()
        # Only what goes forward: a client cannot seek, so neither may the container.
        self._container: Any = self._av.open(
            self._out, mode="w", format=kind.container, container_options={"flush_packets": "1", **dict(kind.options)}
        )
        target = (
            rate
            if not kind.rates or rate in kind.rates
            else min((given for given in kind.rates if given >= rate), default=max(kind.rates))
        )
        self._stream: Any = self._container.add_stream(kind.codec, rate=target, layout="mono")
        if kind.bit_rate:
            self._stream.bit_rate = kind.bit_rate
        self._samples = 0
        # Whoever feeds may be given up while its thread still runs: it is waited for before anything is freed.
        self._turn = threading.Lock()

    def feed(self, pcm: bytes) -> bytes:
        with self._turn:
            return self._feed(_even(pcm))

    def _feed(self, pcm: bytes) -> bytes:
        if not pcm or self._container is _CLOSED:
            return b""
        count = len(pcm) // 2
        frame = self._av.AudioFrame(format="s16", layout="mono", samples=count)
        frame.planes[0].update(_padded(pcm, frame.planes[0].buffer_size))
        frame.sample_rate = self._rate
        frame.pts = self._samples
        self._samples += count
        for packet in self._stream.encode(frame):
            self._container.mux(packet)
        return self._out.take()

    def finish(self) -> bytes:
        with self._turn:
            if self._container is _CLOSED:
                return b""
            for packet in self._stream.encode(None):
                self._container.mux(packet)
            self._container.close()
            return self._out.take()

    def close(self) -> None:
        with self._turn:
            # A container that is closed in the middle still writes its end: to nobody.
            container, self._container = self._container, _CLOSED
            container.close()
            self._out.take()


class _Closed:
    def close(self) -> None:
        pass


_CLOSED: Final = _Closed()


def _padded(pcm: bytes, size: int) -> bytes:
    return pcm if len(pcm) == size else bytes(pcm) + bytes(size - len(pcm))


class _Pipe(io.RawIOBase):
    """Where a container writes; it can only go forward."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken
