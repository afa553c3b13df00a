"""What the streams know of a link and of the memory that chunks are in: two small interfaces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from triptych.transfer.connectors.frames import ALIGN, Buffer, Message, gather
from triptych.transfer.errors import ConnectorError, WouldBlock

if TYPE_CHECKING:
    from triptych.transfer.connectors.records import Loan, Watching


class Peer(ABC):
    """One end of a link, as the streams see it. `post` only queues: no I/O."""

    def __init__(self) -> None:
        self.watches: dict[int, Watching] = {}  # the peer's watches of streams of ours
        self.loans: dict[int, Loan] = {}  # memory of ours that it may read
        self.borrowed = 0  # bytes of its memory that we read in place

    @property
    @abstractmethod
    def name(self) -> str:
        """Who it is, for error texts: `stage 1 (pid 4711)`."""

    @abstractmethod
    def post(self, message: Message) -> None:
        """Send this, behind what was posted before."""


class Stored:
    """Where the bytes of one chunk are. `sizes`: of its head and of each buffer; `nbytes`: their sum."""

    __slots__ = ("data", "nbytes", "offset", "sizes", "taken")

    def __init__(self, sizes: tuple[int, ...], nbytes: int, taken: int, offset: int | None = None) -> None:
        self.sizes = sizes
        self.nbytes = nbytes
        self.taken = taken  # bytes of the store
        self.offset = offset  # in shared memory; None: in `data`
        self.data: Buffer = b""


class Store(ABC):
    """The memory that an end keeps its chunks in, bounded."""

    size: int  # bytes in all

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes taken now."""

    @abstractmethod
    def reserve(self, sizes: tuple[int, ...]) -> Stored:
        """Room for a chunk.

        Raises:
            WouldBlock: there is none now.
            ConnectorError: there never is.
        """

    @abstractmethod
    def fill(self, stored: Stored, parts: Sequence[Buffer]) -> None:
        """The one copy that a sender makes. Needs no lock: nobody else knows of the room yet."""

    @abstractmethod
    def free(self, stored: Stored) -> None:
        """Give the room back, once."""

    def read(self, stored: Stored) -> Buffer:
        """The chunk's parts, laid out as `layout(stored.sizes, self.align(stored))` says."""
        return stored.data

    def align(self, stored: Stored) -> int:
        """Where parts begin: at multiples of this."""
        return ALIGN


MIB: Final = 1 << 20


class HeapStore(Store):
    """Ordinary memory: for chunks that go over the wire whole. `each`: bytes of a chunk at most."""

    def __init__(self, size: int = 256 * MIB, each: int | None = None) -> None:
        self.size = size
        self._each = size if each is None else each
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    def reserve(self, sizes: tuple[int, ...]) -> Stored:
        nbytes = sum(sizes)
        if nbytes > self._each:
            raise ConnectorError(f"a chunk of {nbytes} bytes: at most {self._each} fit")
        if self._used + nbytes > self.size:
            raise WouldBlock(f"{self._used} of {self.size} bytes are taken, and a chunk has {nbytes}")
        self._used += nbytes
        return Stored(sizes, nbytes, nbytes)

    def fill(self, stored: Stored, parts: Sequence[Buffer]) -> None:
        stored.data = gather(parts)

    def free(self, stored: Stored) -> None:
        stored.data = b""
        self._used -= stored.taken
