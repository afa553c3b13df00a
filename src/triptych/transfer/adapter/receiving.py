"""The receiving half of an adapter: from chunks on the connector to what a request waits for."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from triptych.transfer.adapter.codec import apply_chunk
from triptych.transfer.adapter.loops import TransferLoops, at_edge
from triptych.transfer.adapter.lot import ParkingLot
from triptych.transfer.adapter.publish import Condition, PendingUpdate, prepare, publish, section, truthy
from triptych.transfer.adapter.receiver import LoadEntry, ReceiverStream, ReceiverStreams
from triptych.transfer.adapter.settings import AdapterSettings
from triptych.transfer.errors import EndOfStream, WireError
from triptych.transfer.prompt import Window

logger = logging.getLogger(__name__)


class Receiving(TransferLoops):
    """Registers requests that want a chunk, takes it when it is there, and publishes it on the scheduler's thread."""

    _settings: AdapterSettings
    stage_id: int

    def _init_receiving(self) -> None:
        self._receivers = ReceiverStreams()
        self._lot = ParkingLot(self._settings.window)
        # Over records and lot. Connectors may be called with it held, waits may not.
        self._receiver_lock = threading.RLock()
        self._pending_ar_prompt_updates: dict[str, PendingUpdate] = {}
        self._max_model_len = self._settings.max_model_len
        self._streaming_prompt_previous_chunks, self._streaming_prompt_recompute_on_capacity = (
            self._settings.prompt_window
        )
        self._pauses: list[tuple[float, int, LoadEntry]] = []
        self._pause_numbers = itertools.count()
        self._pollers = 0
        self._to_poll: queue.SimpleQueue[LoadEntry | None] = queue.SimpleQueue()
        self._deadlines_moved = False
        self._alarm_of: float | None = None

    @property
    def _receives(self) -> bool:
        return self._settings.enabled and self.stage_id > 0 and self._settings.role != "sender"

    def _receive_loops(self) -> Iterable[tuple[str, Callable[[], None]]]:
        if not self._receives:
            return []
        # A `get` of a connector that must be polled may block, and must not hold up the other streams.
        self._pollers = 0 if self._streams is not None else self._settings.timing.poll_threads
        return [("receive", self.recv_loop), *[("poll", self._poll_loop)] * self._pollers]

    def close(self) -> None:
        """As of both halves; threads that poll are told to end first."""
        for _ in range(self._pollers):
            self._to_poll.put(None)
        super().close()

    # On the scheduler's thread.

    def load_async(self, request: Any) -> None:
        """Want the request's next chunk; nothing where it is wanted already, or where this stage receives nothing."""
        if not self._receives:
            return
        try:
            with self._receiver_lock:
                entry = self._receivers.register(request)
                if entry is None:
                    return
                self._watch(entry)
        except Exception as error:
            self._fail_receive(request.request_id, str(error))
            return
        self._pending_load_reqs.append(entry)
        self._notify_receiver()

    def _watch(self, entry: LoadEntry) -> None:
        record = self._receivers.registered(entry)
        if self._streams is None or record is None or record.watched is not None:
            return
        stream = f"{entry.external_id}_{self.stage_id - 1}"
        owner = self._receivers.claim(record, stream)
        if owner is not None:
            raise ValueError(f"the stream {entry.external_id!r} already feeds the request {owner}")
        self._streams.watch(str(self.stage_id - 1), str(self.stage_id), stream, entry.metadata)

    def cleanup_receiver(self, request_id: str, reason: str | None = None) -> None:
        """Forget what is received for a request. A sender that has not finished is told to stop, and why."""
        with self._receiver_lock:
            record = self._receivers.close(request_id)
            self._finished_load_reqs.discard(request_id)
            self._pending_ar_prompt_updates.pop(request_id, None)
            self._lot.forget(request_id)
            waited_for = self._lot.slot_freed and len(self._lot) > 0
        if record is not None and record.watched is not None:
            self._unwatch(record.watched, record.reason or reason or f"stage {self.stage_id} has ended the request")
        if self._alarm_of is not None:
            self._move_deadlines()
        if waited_for:
            self._news()

    def _apply_pending_ar_prompt_updates(self, scheduler_requests: dict[str, Any] | None) -> list[str]:
        """Publish the chunks of requests that are ready. Returns the requests whose prompt was replaced."""
        replaced: list[str] = []
        window = Window(self._streaming_prompt_previous_chunks, self._streaming_prompt_recompute_on_capacity)
        for request_id in list(self._pending_ar_prompt_updates):
            with self._receiver_lock:
                record = self._receivers.by_id.get(request_id)
                if record is None or not record.ready:
                    continue
                update = self._pending_ar_prompt_updates.pop(request_id)
            request = update.request if scheduler_requests is None else scheduler_requests.get(request_id)
            if request is None:
                continue
            last = None
            if record.condition_seq is not None:
                last = Condition(record.condition_len or 0, record.condition_seq)
            try:
                anew, last = publish(update, request, last, window, self._max_model_len)
            except ValueError as error:
                record.ready, record.failed, record.reason = False, True, self._from(str(error))
                self._finished_load_reqs.discard(request_id)
                self._record_receive_failure(request_id, str(error))
                continue
            if last is not None:
                record.condition_len, record.condition_seq = last.length, last.seq
            if anew:
                record.replaced = True
                replaced.append(request_id)
        return replaced

    def collect_timed_out_request_ids(self, timeout_s: float | None = None) -> set[str]:
        """Requests that have waited for a chunk for longer than `timeout_s` seconds, each once; ≤ 0 is never.

        Without a limit, the configured one.
        """
        limit = self._settings.timing.chunk_timeout_s if timeout_s is None else timeout_s
        if limit <= 0 or not self._lot.clock:
            return set()
        with self._receiver_lock:
            expired = self._lot.clock.expire(time.monotonic(), limit)
            for request_id in expired:
                record = self._receivers.by_id.get(request_id)
                if record is not None:
                    record.reason = self._from(f"no chunk came for {limit:g} s")
        if expired:
            self._move_deadlines()
        return expired

    def _move_deadlines(self) -> None:
        """The receive thread reckons anew when its alarm is due."""
        with self._recv_cond:
            self._deadlines_moved = True
            self._recv_cond.notify()

    def next_deadline(self) -> float | None:
        """When the longest wait for a chunk will have lasted too long (seconds, monotonic); None where none can."""
        limit = self._settings.timing.chunk_timeout_s
        with self._receiver_lock:
            earliest = self._lot.clock.earliest()
        return None if earliest is None or limit <= 0 else earliest + limit

    # On the receive thread.

    def recv_loop(self) -> None:
        """Poll what may have a chunk, or have it polled; sleep when nothing may."""
        while not self.stop_event.is_set():
            self._answer_doorbell()
            entry = self._next_entry()
            if entry is not None and self._pollers:
                self._to_poll.put(entry)
                continue
            if entry is not None:
                self._poll(entry)
                continue
            self._sound_alarm()
            timeout = self._load_wait()
            with self._recv_cond:
                if not (self._pending_load_reqs or self.rung or self._deadlines_moved or self.stop_event.is_set()):
                    self._recv_cond.wait(timeout=timeout)
                self._deadlines_moved = False

    def _poll_loop(self) -> None:
        while (entry := self._to_poll.get()) is not None and not self.stop_event.is_set():
            self._poll(entry)

    def _poll(self, entry: LoadEntry) -> None:
        try:
            done = self._poll_single_request(entry)
        except Exception as error:
            logger.exception("a chunk of %s was not received", entry.request_id)
            self._fail_receive(entry.request_id, f"{type(error).__name__}: {error}")
            return
        if not done:
            self._poll_later(entry)

    def _poll_single_request(self, entry: LoadEntry) -> bool:
        """Take the next chunk of an entry's stream if it is there. True: the entry is done with; False: not yet."""
        with self._receiver_lock:
            record = self._receivers.registered(entry)
            number = record.chunks if record is not None else 0
        if record is None:
            return True
        key = f"{entry.external_id}_{self.stage_id - 1}_{number}"
        entry.took = False
        try:
            got = self.connector.get(str(self.stage_id - 1), str(self.stage_id), key, entry.metadata)
        except Exception as error:
            return self._poll_failed(entry, record, number, error)
        if got is None:
            return False
        try:
            with self._receiver_lock:
                if self._receivers.registered(entry) is None:
                    return True
                record.chunks += 1
                ready = self._receive(entry, record, number, got[0])
                if ready:
                    record.entry = None
                    self._finished_load_reqs.add(entry.request_id)
        except Exception as error:
            return self._poll_failed(entry, record, number, error)
        if ready:
            self._news()
        else:
            entry.took = True
        return ready

    def _receive(self, entry: LoadEntry, record: ReceiverStream, number: int, payload: Any) -> bool:
        """Note a chunk. False where it gives the request nothing to compute, so that the next one is wanted, too."""
        if not isinstance(payload, dict):
            raise ValueError(f"a chunk must be a map, not {type(payload).__name__}")
        request, meta = entry.request, section(payload, "meta")
        finished = truthy(meta.get("finished"), "meta.finished")
        segment_finished = truthy(meta.get("is_segment_finished"), "meta.is_segment_finished")
        ready = True
        if self._settings.autoregressive:
            window = Window(self._streaming_prompt_previous_chunks, self._streaming_prompt_recompute_on_capacity)
            self._pending_ar_prompt_updates[entry.request_id] = prepare(
                request, payload, number, window, self._max_model_len
            )
        else:
            ready = apply_chunk(request, payload, finished=finished, segment_finished=segment_finished)
        if finished:
            record.exhausted = True
            request.resumable = False
        record.segment_finished = record.segment_finished or segment_finished
        return ready

    def _poll_failed(self, entry: LoadEntry, record: ReceiverStream, number: int, error: Exception) -> bool:
        if isinstance(error, EndOfStream):
            reason = f"the stream ended after {number} chunks without saying that it was finished"
        elif isinstance(error, WireError | ValueError):
            reason = f"chunk {number} is not usable: {error}"
        else:
            reason = str(error) or type(error).__name__
        with self._receiver_lock:
            if self._receivers.registered(entry) is not None:
                self._fail_receive(entry.request_id, reason)
        return True

    def _fail_receive(self, request_id: str, reason: str) -> None:
        """The request's next chunk will never be there: the scheduler is told, and so is the sender."""
        told = self._from(reason)
        with self._receiver_lock:
            record = self._receivers.open(request_id)
            record.entry, record.failed, record.reason = None, True, told
            watched, record.watched = record.watched, None
            if watched is not None:
                self._receivers.by_stream.pop(watched, None)
        if watched is not None:
            self._unwatch(watched, told)
        self._record_receive_failure(request_id, told)

    def _from(self, reason: str) -> str:
        return at_edge(self.stage_id - 1, reason)

    def _unwatch(self, stream: str, reason: str) -> None:
        if self._streams is not None:
            try:
                self._streams.unwatch(stream, reason)
            except Exception:
                logger.exception("the sender of %s was not told that nobody receives it", stream)

    def _answer_doorbell(self) -> None:
        while self.rung:
            try:
                stream = self.rung.popleft()
            except IndexError:
                return
            record = self._receivers.by_stream.get(stream)
            entry = record.entry if record is not None else None
            if entry is not None:
                self._pending_load_reqs.append(entry)

    def _next_entry(self) -> LoadEntry | None:
        with self._recv_cond:
            if self._pending_load_reqs:
                entry: LoadEntry = self._pending_load_reqs.popleft()
                return entry
            if self._pauses and self._pauses[0][0] <= time.monotonic():
                return heapq.heappop(self._pauses)[2]
            return None

    def _poll_later(self, entry: LoadEntry) -> None:
        """Once more now, if it took a chunk; when its doorbell rings, where there is one; else after a pause."""
        if entry.took:
            entry.delay_s = 0.0
            self._pending_load_reqs.append(entry)
            self._notify_receiver()
            return
        if self._streams is not None:
            return
        timing = self._settings.timing
        entry.delay_s = min(entry.delay_s * 2 or timing.poll_interval_s, timing.poll_interval_max_s)
        with self._recv_cond:
            heapq.heappush(self._pauses, (time.monotonic() + entry.delay_s, next(self._pause_numbers), entry))
            self._deadlines_moved = True
            self._recv_cond.notify()

    def _load_wait(self) -> float | None:
        """How long the receive thread may sleep, in seconds; None where nothing will happen by itself."""
        due = self.next_deadline() if self._alarm_of is None else None
        if self._pauses:
            first = self._pauses[0][0]
            due = first if due is None else min(due, first)
        return None if due is None else max(0.0, due - time.monotonic()) + 0.0005

    def _sound_alarm(self) -> None:
        """Wake the scheduler once for each deadline that has passed."""
        with self._receiver_lock:
            earliest, limit = self._lot.clock.earliest(), self._settings.timing.chunk_timeout_s
            if earliest is None or limit <= 0 or time.monotonic() - earliest <= limit:
                self._alarm_of = None
                return
            rung, self._alarm_of = self._alarm_of, earliest
        if rung != earliest:
            self._news()
