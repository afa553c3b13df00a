"""Faults on order: rules that match requests, each applied a number of times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec

Kind = Literal[
    "status",  # `status`, `body` (text or JSON) and `headers` instead of the answer
    "hang",  # nothing, ever (or for `seconds`, then the answer)
    "hang_body",  # head and `events` events (or half the body), then nothing
    "reset",  # the connection is reset before the head
    "reset_body",  # … after `events` events or half the body
    "close",  # the connection is closed cleanly before the head
    "garbage",  # bytes that are not HTTP (`body`), then close
    "garbage_json",  # 200, but the body is not JSON (`body`)
    "cut",  # after `events` events or half the body the connection ends; `partial`: within an event
    "end",  # a stream that ends cleanly after `events` events, without its own end mark
    "slow_first_byte",  # `seconds` before the head
    "slow_body",  # head at once, `seconds` before the rest
    "trickle",  # `chunk` bytes of the body every `seconds`
    "oversize",  # the body is padded to exactly `size` bytes, still JSON
    "wrong_length",  # content-length says `size` more (or, negative, fewer) than there are
    "sse_error",  # an error event as vLLM sends it after `events` events, then the end
    "close_after",  # the whole answer, then the connection is closed without a word
    "die",  # the engine dies of the request
]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One rule. Matching: every condition that is set must hold. Fields that a kind does not name are ignored."""

    kind: Kind
    count: int | None = 1
    """how many requests it applies to; None: all"""
    skip: int = 0
    """let that many matching requests pass first"""
    path: str | None = None
    """request path, or a prefix of it that ends in *"""
    leg: str | None = None
    """text that the x-request-id contains, such as "-enc0" """
    item: int | str | None = None
    """the n-th media item that this engine sees (from 0), or the content digest of an item"""
    stream: bool | None = None
    after_work: bool = False
    """do the work of the request first (encode, pin blocks), then fail it"""
    status: int = 500
    body: Any = None
    headers: dict[str, str] = {}
    seconds: float | None = None
    events: int = 1
    partial: bool = False
    rst: bool = False
    """`cut`: end by a reset rather than by a close"""
    size: int = 2_000_000
    """bytes, for `oversize` and `wrong_length`"""
    chunk: int = 16
    message: str = "injected fault"

    @property
    def text(self) -> bytes:
        """`body` as bytes: a string as it is, anything else as JSON."""
        if isinstance(self.body, str):
            return self.body.encode("utf-8", "surrogatepass")
        if self.body is None:
            error = {"message": self.message, "type": "InternalServerError", "param": None, "code": self.status}
            return msgspec.json.encode({"error": error})
        return msgspec.json.encode(self.body)


class Faults:
    """The rules in force, in order; the first that matches is applied."""

    def __init__(self) -> None:
        self.rules: list[Fault] = []

    def add(self, *rules: Fault | dict[str, Any]) -> None:
        """Raises `ValueError` that names the field at fault."""
        # Copies: a rule counts down, and one may be given to several engines.
        self.rules.extend(msgspec.structs.replace(r) if isinstance(r, Fault) else convert(r) for r in rules)

    def clear(self) -> None:
        self.rules.clear()

    def pick(self, path: str, request_id: str, stream: bool, items: Iterable[tuple[int, str]]) -> Fault | None:
        """The rule for a request, used up by one. `items` are number and content digest of its media."""
        for index, rule in enumerate(self.rules):
            if not _matches(rule, path, request_id, stream, items):
                continue
            if rule.skip > 0:
                rule.skip -= 1
                continue
            if rule.count is not None:
                rule.count -= 1
                if rule.count <= 0:
                    del self.rules[index]
            return rule
        return None


def _matches(rule: Fault, path: str, request_id: str, stream: bool, items: Iterable[tuple[int, str]]) -> bool:
    if rule.path is not None and path != rule.path and not (
        rule.path.endswith("*") and path.startswith(rule.path[:-1])
    ):  # fmt: skip
        return False
    if rule.leg is not None and rule.leg not in request_id:
        return False
    if rule.stream is not None and rule.stream != stream:
        return False
    return rule.item is None or any(rule.item in item for item in items)


def convert(rule: dict[str, Any]) -> Fault:
    """A rule from JSON. Raises `ValueError` that names the field at fault."""
    try:
        return msgspec.convert(rule, Fault)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
