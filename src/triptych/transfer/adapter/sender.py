"""Streams that this stage sends: one record per external id and generation, and what may happen to it.

A generation lives from its first queued chunk until it is retired:

    open ──────────── terminal queued ──── terminal's attempt is over ──▶ retired
      │ cleanup            │ cleanup (fenced: the terminal still goes out)      ▲
      │                    └──▶ cancelled, terminal queued ─────────────────────┤
      ├─ a send in flight ─────▶ cancelled, until that send returns ────────────┤
      └─ idle ──────────────────────────────────────────────────────────────────┘

`SenderStreams` is the one place where this changes; its methods do no I/O and are called with its lock held.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, TypedDict


class SaveTask(TypedDict, total=False):
    """One chunk to be made and sent. `payload`: made already, by an attempt that its consumer's credit ended."""

    multimodal_output: Any
    request: Any
    is_finished: bool
    is_segment_finished: bool
    new_token_ids: list[int] | None
    sender_token: SenderStream
    segment_generation: int
    payload: Any


@dataclass(eq=False, slots=True)
class SenderStream:
    """One generation of an external id. Also the token by which a queued task knows that it still counts.

    `number`: its own, never used again. `put`: chunks that were published, so the number of the next; `attempted`:
    keys that may exist. `segment`, `watermark`: below which chunks come too late. `ended`: why nothing more is sent
    (the consumer stopped it, or a chunk was lost). `request_payload`, `code_prompt_token_ids`: a stage input
    processor's own state. `backlog`: tasks that wait for the consumer's credit, since `blocked_since`; `queued`: those
    and all others that were accepted and not sent yet; `held`: its request was taken out of the scheduler until there
    are only `enough`.
    """

    external_id: str = ""
    number: int = 0
    request_id: str | None = None
    cancelled: bool = False
    terminal_pending: bool = False
    delivered: bool = False
    in_flight: int = 0
    put: int = 0
    attempted: int = 0
    ramp: int = 0
    segment: int | None = None
    watermark: int | None = None
    ended: str | None = None
    request_payload: Any = None
    code_prompt_token_ids: Any = None
    backlog: deque[SaveTask] = field(default_factory=deque)
    blocked_since: float | None = None
    queued: int = 0
    held: bool = False
    enough: int = 0


@dataclass(frozen=True, slots=True)
class ReclaimTask:
    """Take back what was published of a stream and not consumed; with a reason its receiver is told that it ended.

    Queued behind the sends that it concerns, and before any of the next generation.
    """

    external_id: str
    stream: SenderStream | None
    reason: str | None = None


class Facts(NamedTuple):
    """Of a chunk that the scheduler hands over: its segment, the tokens that it was made of, and what ends with it."""

    generation: int
    confirmed: int
    boundary: bool
    terminal: bool


class Admission(Enum):
    """What becomes of a chunk that the scheduler hands over."""

    ACCEPT = auto()
    ANEW = auto()  # in a generation of its own: the one before is cancelled, and only a send in flight is left of it
    LATE = auto()
    DRAINING = auto()


def admission(stream: SenderStream | None, request_id: str, chunk: Facts) -> Admission:
    """Whether a chunk still belongs to what this stream sends.

    A segment's boundary and the request's terminal are never too late by their tokens: after a preemption the
    counter may be behind.
    """
    if stream is None:
        return Admission.ACCEPT
    if stream.terminal_pending:
        return Admission.DRAINING
    if stream.cancelled:
        return Admission.ANEW
    if stream.ended is not None:
        if stream.request_id != request_id:
            return Admission.DRAINING
        # The terminal passes: it retires the generation.
        return Admission.ACCEPT if chunk.terminal else Admission.LATE
    if stream.segment is not None and chunk.generation < stream.segment:
        return Admission.LATE
    behind = stream.watermark is not None and chunk.confirmed < stream.watermark
    return Admission.LATE if behind and not chunk.boundary and not chunk.terminal else Admission.ACCEPT


class SenderStreams:
    """All streams of this stage, by external id.

    `blocked`: since when those have waited that have no credit, the longest first. `on_retired` is told of each
    generation that was retired before its terminal was delivered. `relieved`: held requests that may go on.
    """

    def __init__(self, on_retired: Callable[[SenderStream], None]) -> None:
        self.by_id: dict[str, SenderStream] = {}
        self.blocked: dict[str, float] = {}
        self.relieved: set[str] = set()
        self._on_retired = on_retired
        # Not from 0: a stage that was started again must not repeat the numbers of its predecessor.
        self._numbers = itertools.count(time.time_ns())

    def open(self, external_id: str) -> SenderStream:
        """The stream of that id, a new generation if there is none."""
        stream = self.by_id.get(external_id)
        if stream is None:
            stream = self.by_id[external_id] = self.make(external_id)
        return stream

    def make(self, external_id: str) -> SenderStream:
        """A new generation, registered by nobody yet."""
        return SenderStream(external_id=external_id, number=next(self._numbers))

    def supersede(self, external_id: str) -> None:
        """Retire a cancelled generation though a send of it is in flight: what that publishes is taken back after it,
        and before anything of the next generation, since all of it is done in the order of the queue."""
        self._retire(self.by_id[external_id])

    def accept(self, request: Any, chunk: Facts, *, counts_segments: bool) -> SenderStream:
        """Note an admitted chunk: watermark, segment, fence. The boundary's watermark goes with its segment."""
        stream = self.open(request.external_req_id)
        stream.request_id = request.request_id
        if chunk.boundary:
            stream.segment = chunk.generation + 1 if counts_segments else chunk.generation
            stream.watermark = None
        else:
            stream.segment = max(chunk.generation, stream.segment or 0)
            stream.watermark = chunk.confirmed
        stream.terminal_pending = stream.terminal_pending or chunk.terminal
        stream.queued += 1
        return stream

    def begin(self, task: SaveTask) -> SenderStream | None:
        """The stream that a task taken from the queue is to be sent on, now in flight.

        None where it is not: its generation is over, or it waits behind others for credit.
        """
        terminal = task["is_finished"]
        external_id = task["request"].external_req_id
        stream = task.get("sender_token") or self.open(external_id)
        if not stream.external_id:
            stream.external_id = external_id
        current = self.by_id.get(external_id) is stream
        if stream.ended is not None or not (terminal or (current and not stream.cancelled)):
            self._unqueue(stream)
            self.settle(stream, terminal=terminal, flown=False)
            return None
        if stream.backlog:
            stream.backlog.append(task)
            return None
        stream.in_flight += 1
        return stream

    def sent(self, stream: SenderStream) -> None:
        """A chunk was published."""
        stream.put += 1
        stream.ramp += 1
        self._unblock(stream)

    def block(self, stream: SenderStream, task: SaveTask, now: float) -> bool:
        """The consumer has no room: keep the task until it has. False where the task is not wanted any more."""
        stream.in_flight -= 1
        if stream.cancelled and not task["is_finished"]:
            self._unqueue(stream)
            self.settle(stream, terminal=False, flown=False)
            return False
        stream.backlog.append(task)
        if stream.blocked_since is None:
            stream.blocked_since = now
            if self.by_id.get(stream.external_id) is stream:
                self.blocked[stream.external_id] = now
        return True

    def resume(self, external_id: str) -> deque[SaveTask]:
        """The tasks that waited for credit, oldest first; they are not the stream's any more."""
        stream = self.by_id.get(external_id)
        if stream is None:
            return deque()
        tasks, stream.backlog = stream.backlog, deque()
        return tasks

    def settle(self, stream: SenderStream, *, terminal: bool, flown: bool = True) -> None:
        """A task's attempt is over; so may be its generation."""
        if flown:
            stream.in_flight -= 1
            self._unqueue(stream)
        if terminal:
            stream.terminal_pending = False
        if (terminal or stream.cancelled) and not stream.in_flight and not stream.terminal_pending:
            self._retire(stream)

    def end(self, stream: SenderStream, reason: str) -> bool:
        """Nothing more is sent. Returns whether this was news."""
        if stream.ended is not None or stream.delivered:
            return False
        stream.ended = reason
        fenced = any(task["is_finished"] for task in stream.backlog)
        self._unqueue(stream, len(stream.backlog))
        stream.backlog.clear()
        self._unblock(stream)
        if fenced:
            self.settle(stream, terminal=True, flown=False)
        return True

    def cleanup(self, external_id: str) -> bool:
        """The request is over here. An idle generation is retired; another is cancelled: its chunks that were not
        sent yet are dropped, and the attempt that it waits for retires it. False where there is none.
        """
        stream = self.by_id.get(external_id)
        if stream is None:
            return False
        stream.cancelled = True
        kept = deque(task for task in stream.backlog if task["is_finished"])
        self._unqueue(stream, len(stream.backlog) - len(kept))
        stream.backlog = kept
        if not stream.in_flight and not stream.terminal_pending:
            self._retire(stream)
        return True

    def overdue(self, now: float, limit_s: float) -> list[SenderStream]:
        """Streams whose consumer has taken nothing for longer than the limit."""
        late: list[SenderStream] = []
        for external_id, since in self.blocked.items():
            if now - since <= limit_s:
                break
            stream = self.by_id.get(external_id)
            if stream is not None:
                late.append(stream)
        return late

    def hold(self, external_id: str, limit: int) -> bool:
        """Whether the stream's request should make no more: its consumer has no room, and `limit` chunks wait.

        If so, `relieved` will have it when half of them are gone, or the stream is over.
        """
        stream = self.by_id.get(external_id)
        if stream is None or external_id not in self.blocked or stream.queued < limit or stream.request_id is None:
            return False
        stream.held, stream.enough = True, limit // 2
        return True

    def _unqueue(self, stream: SenderStream, count: int = 1) -> None:
        stream.queued = max(0, stream.queued - count)
        if stream.held and (stream.queued <= stream.enough or stream.ended is not None):
            stream.held = False
            if stream.request_id is not None:
                self.relieved.add(stream.request_id)

    def _unblock(self, stream: SenderStream) -> None:
        stream.blocked_since = None
        if self.by_id.get(stream.external_id) is stream:
            self.blocked.pop(stream.external_id, None)

    def _retire(self, stream: SenderStream) -> None:
        stream.cancelled = True
        self._unblock(stream)
        if self.by_id.get(stream.external_id) is not stream:
            return  # its keys are a successor's now
        del self.by_id[stream.external_id]
        if not stream.delivered:
            self._on_retired(stream)


def segment_of(request: Any) -> int:
    """The request's segment counter, 0 where it has none."""
    value = getattr(request, "_omni_segment_generation", None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def confirmed_tokens(request: Any) -> int:
    """Computed tokens that are certain: those scheduled ahead of their output are not."""
    placeholders = getattr(request, "num_output_placeholders", 0)
    return max(0, int(request.num_computed_tokens) - (placeholders if isinstance(placeholders, int) else 0))
