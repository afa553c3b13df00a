"""Feeding a parser the same bytes in every way that a network may split them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from triptych.http.errors import ParseError
from triptych.http.head import RequestHead, ResponseHead
from triptych.http.parser import END, RequestParser, ResponseParser

TRAILING = b"GET /trailing HTTP/1.1\r\nhost: t\r\n\r\n"


def splits(data: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """The whole, byte by byte, and in two at every place."""
    yield "whole", [data]
    yield "bytes", [data[i : i + 1] for i in range(len(data))]
    for i in range(1, len(data)):
        yield f"at {i}", [data[:i], data[i:]]


class Message:
    """What came out of a parser for one message."""

    def __init__(self) -> None:
        self.heads: list[RequestHead | ResponseHead] = []
        self.body = b""
        self.ended = False
        self.rest = b""

    def take(self, events: list[object]) -> None:
        for event in events:
            assert not self.ended, "an event behind END"
            if isinstance(event, bytes):
                assert event, "an empty piece of a body"
                self.body += event
            elif event is END:
                self.ended = True
            else:
                assert isinstance(event, RequestHead | ResponseHead)
                self.heads.append(event)


def parse_request(pieces: list[bytes], limit: int = 65_536) -> Message:
    parser = RequestParser(limit)
    message = Message()
    for piece in pieces:
        message.take(list(parser.feed(piece)))
    message.rest = parser.rest
    return message


def parse_response(pieces: list[bytes], method: bytes = b"GET", limit: int = 65_536, eof: bool = False) -> Message:
    parser = ResponseParser(limit)
    parser.begin(method)
    message = Message()
    for piece in pieces:
        message.take(list(parser.feed(piece)))
    if eof:
        message.ended = parser.eof()
    message.rest = parser.rest
    return message


def every_way(
    parse: Callable[[list[bytes]], Message], data: bytes, *, trailing: bytes = b""
) -> Iterator[tuple[str, Message]]:
    """`data` parsed in every split, and with `trailing` behind it, which must be left alone."""
    for name, pieces in splits(data):
        yield name, parse(pieces)
    if trailing:
        for name, pieces in (("whole + trailing", [data + trailing]), ("trailing apart", [data, trailing])):
            message = parse(pieces)
            assert message.rest == trailing
            yield name, message


def refusals(parse: Callable[[list[bytes]], Message], data: bytes) -> set[int]:
    """The statuses with which `data` is refused over all splits; 0 for a split that was not refused."""
    statuses = set()
    for _, pieces in splits(data):
        try:
            parse(pieces)
        except ParseError as error:
            statuses.add(error.status)
        else:
            statuses.add(0)
    return statuses
