"""What can go wrong with a stream of chunks, told apart by whose fault it is (after anyio's memory streams)."""

from __future__ import annotations


class TransferError(Exception):
    """Anything that this layer raises. The text is for the user: what, why, and which stage or edge."""


class EndOfStream(TransferError):
    """The sender has finished, and all that it sent has been taken."""


class BrokenStream(TransferError):
    """The stream will not be completed: the sender failed, was aborted, died, or cut it. The text says which."""


class ClosedError(TransferError):
    """This side has closed the connector or the stream."""


class WouldBlock(TransferError):
    """The stream has no credit left: its consumer is behind. `Events.writable` tells when to try again."""


class WireError(TransferError):
    """What came is not what this layer sends: sizes, shapes, types, depth or framing are wrong."""


class ConnectorError(TransferError):
    """A connector cannot be made or cannot do what was asked: a name, an option, an address."""
