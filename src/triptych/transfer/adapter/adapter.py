"""The adapter of a stage: what its scheduler calls, on top of a sending and a receiving half."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from vllm.v1.request import RequestStatus

from triptych.transfer.adapter.loops import is_streamed, nobody
from triptych.transfer.adapter.lot import Lane
from triptych.transfer.adapter.receiver import ReceiverStream
from triptych.transfer.adapter.receiving import Receiving
from triptych.transfer.adapter.sender import SenderStream
from triptych.transfer.adapter.sending import Sending
from triptych.transfer.adapter.settings import AdapterSettings, connector_spec
from triptych.transfer.adapter.views import FieldView, FlagView
from triptych.transfer.connectors.base import Connector
from triptych.transfer.connectors.registry import ConnectorFactory

__all__ = ["ChunkTransferAdapter", "ConnectorFactory"]

# Requests in any other state wait for something of vLLM's own, or are over.
PARKABLE: Final = (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED)


class ChunkTransferAdapter(Sending, Receiving):
    """Sends each chunk as it is made, and keeps a request out of the scheduler's queues until its next chunk is there.

    Made in the scheduler's process before its first step; `start` begins to move chunks, `close` ends it. The status
    WAITING_FOR_CHUNK must have been registered with vLLM. All but `has_news`, `wake` and the collectors is called on
    the scheduler's thread.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._threads = []
        self.rung = deque()
        self.told = deque()
        self.wake: Callable[[], None] = nobody
        self._settings = AdapterSettings.from_config(vllm_config)
        self.custom_process_next_stage_input_func = self._settings.processor
        self._init_sending()
        self._init_receiving()
        self._init_views()
        self.connector = self.create_connector(vllm_config.model_config)
        self.stage_id = self.connector.stage_id

    @classmethod
    def create_connector(cls, model_config: Any) -> Connector:
        """The connector that the stage is configured with, shared memory if with none. Raises ConnectorError."""
        return ConnectorFactory.create_connector(connector_spec(model_config))

    # What processors and schedulers know by name: windows on the records.

    def _init_views(self) -> None:
        senders, receivers = self._senders.by_id, self._receivers.by_id
        sent, received = self._senders.make, ReceiverStream
        self._sender_tokens: dict[str, SenderStream] = senders
        self._segment_generation = FieldView(senders, "segment", sent)
        self.requests_num_chunks_sent = FieldView(senders, "watermark", sent)
        self.request_payload = FieldView(senders, "request_payload", sent)
        self.code_prompt_token_ids = FieldView(senders, "code_prompt_token_ids", sent)
        self.put_req_chunk = FieldView(senders, "put", sent, counter=True)
        self.ramp_chunk_count = FieldView(senders, "ramp", sent, counter=True)
        self.get_req_chunk = FieldView(receivers, "chunks", received, counter=True)
        self.request_ids_mapping = FieldView(receivers, "external_id", received)
        self._registered_load_entries = FieldView(receivers, "entry", received)
        self._streaming_condition_lengths = FieldView(receivers, "condition_len", received)
        self._streaming_condition_seqs = FieldView(receivers, "condition_seq", received)
        self.upstream_exhausted_requests = FlagView(receivers, "exhausted", received)
        self.segment_finished_requests = FlagView(receivers, "segment_finished", received)
        self.replaced_streaming_prompt_ids = FlagView(receivers, "replaced", received)
        self._ready = FlagView(receivers, "ready", received)
        self._active_streams = self._lot.active
        self._waiting_since = self._lot.clock
        self.requests_origin_status = self._lot.origin

    @property
    def requests_with_ready_chunks(self) -> FlagView[ReceiverStream]:
        """Requests with a published chunk that was not scheduled yet."""
        return self._ready

    @requests_with_ready_chunks.setter
    def requests_with_ready_chunks(self, request_ids: Iterable[str]) -> None:
        self._ready.replace(request_ids)

    @property
    def waiting_for_chunk_waiting_requests(self) -> Lane:
        """Requests parked out of the waiting queue, those outside the window included."""
        return self._lot.waiting

    @waiting_for_chunk_waiting_requests.setter
    def waiting_for_chunk_waiting_requests(self, requests: Iterable[Any]) -> None:
        self._lot.waiting = Lane(requests)

    @property
    def waiting_for_chunk_running_requests(self) -> Lane:
        """Requests parked out of the running list."""
        return self._lot.running

    @waiting_for_chunk_running_requests.setter
    def waiting_for_chunk_running_requests(self, requests: Iterable[Any]) -> None:
        self._lot.running = Lane(requests)

    @property
    def _held_non_active(self) -> Lane:
        return self._lot.held

    def num_parked(self) -> int:
        """How many requests are out of the scheduler's queues."""
        return len(self._lot)

    def is_parked(self, request_id: str) -> bool:
        """Whether a request is out of the scheduler's queues."""
        return self._lot.has(request_id)

    def has_news(self) -> bool:
        """Whether a tick or a collector has something to do, at a cost that no number of streams changes."""
        if self._finished_load_reqs or self._send_failures or self._receive_failures or self._stopped:
            return True
        if self._senders.relieved or (self._lot.slot_freed and len(self._lot) > 0):
            return True
        deadline = self.next_deadline()
        return deadline is not None and deadline <= time.monotonic()

    # The scheduler's tick.

    def tick(self, waiting: Any, running: list[Any], scheduler_requests: dict[str, Any] | None = None) -> None:
        """Bring back what has its chunk, park what has none; what is parked and has no news stays as it is.

        A running request whose own consumer is far behind is parked as well, until that has caught up.

        `waiting` has `add_request`, `prepend_requests`, `remove_requests` and iterates; `running` is a list.
        """
        if self._senders.blocked or self._senders.relieved:
            self._heed_consumers(waiting, running, scheduler_requests)
        if not self._receives:
            return
        with self._receiver_lock:
            for request_id in list(self._finished_load_reqs):
                self._bring_back(request_id, waiting, running, scheduler_requests)
            if self._lot.slot_freed:
                self._promote(waiting, running, scheduler_requests)
            if waiting or running:
                self._process(waiting, running, scheduler_requests)

    def process_pending_chunks(
        self, waiting_queue: Any, running_queue: list[Any], *, scheduler_requests: dict[str, Any] | None = None
    ) -> None:
        """Park what has no chunk, leave what has; with `restore_queues` after each step, a tick that forgets nothing.

        With `scheduler_requests`, parked requests that are not in it are dropped first.
        """
        if not self._receives:
            return
        with self._receiver_lock:
            self._drop_strangers(scheduler_requests)
            self._process(waiting_queue, running_queue, scheduler_requests)

    def restore_queues(
        self, waiting_queue: Any, running_queue: list[Any], scheduler_requests: dict[str, Any] | None = None
    ) -> None:
        """Put every parked request back into the queue it came from, in order; nothing is parked afterwards."""
        with self._receiver_lock:
            self._drop_strangers(scheduler_requests)
            for request in self._lot.waiting:
                waiting_queue.add_request(request)
            for lane in (self._lot.running, self._lot.held, self._lot.stalled):
                running_queue.extend(lane)
            for lane in self._lot.lanes:
                lane.clear()

    def postprocess_scheduler_output(self, scheduler_output: Any, requests: dict[str, Any] | None = None) -> None:
        """After a step was planned: chunks of what is scheduled are used up, and go to the worker with it."""
        cached = scheduler_output.scheduled_cached_reqs
        for new in scheduler_output.scheduled_new_reqs:
            self._ready.discard(new.req_id)
            if new.req_id in self.replaced_streaming_prompt_ids:
                self.replaced_streaming_prompt_ids.discard(new.req_id)
                self.requests_num_chunks_sent.pop(self.request_ids_mapping.get(new.req_id, new.req_id), None)
        for request_id in cached.req_ids:
            self._ready.discard(request_id)
        if requests is None:
            return
        cached.additional_information = information = {}
        for request_id in cached.req_ids:
            request = requests.get(request_id)
            information[request_id] = getattr(request, "additional_information", None)
            if information[request_id] is not None:
                request.additional_information = None  # type: ignore[union-attr]

    # The end of a request.

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: Any, requests: dict[str, Any] | None = None
    ) -> list[str]:
        """Before the scheduler ends requests (None: all): a parked one gets its status back, all state of each goes.

        Returns the ids of those that were parked. Streams that they feed or are fed by are told.
        """
        known = requests or {}
        if request_ids is None:
            request_ids = list(known)
        parked: list[str] = []
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = known.get(request_id)
            with self._receiver_lock:
                held, _ = self._lot.take(request_id)
                origin = self._lot.origin.pop(request_id, None)
            if held is not None:
                parked.append(request_id)
                if origin is not None:
                    (request or held).status = origin
            external_id = getattr(request or held, "external_req_id", None)
            if not isinstance(external_id, str):
                external_id = self.request_ids_mapping.get(request_id, request_id)
            self.cleanup_receiver(request_id, f"stage {self.stage_id} ended the request: {_name_of(finished_status)}")
            if not self.has_sender(external_id) and request is not None and _is_abort(finished_status):
                self._announce_abort(external_id)
            self.cleanup_sender(external_id)
        return parked

    def cleanup(self, request_id: str, external_id: str | None = None) -> None:
        """All state of a request goes, on both sides; what is queued to be sent is not touched."""
        if external_id is None:
            external_id = self.request_ids_mapping.get(request_id, request_id)
        self.cleanup_receiver(request_id)
        self.cleanup_sender(external_id)

    # The parking lot and the scheduler's queues. With the receiver lock held.

    def _ensure_active_stream(self, request: Any) -> bool:
        return self._lot.ensure_active(request)

    def _process(self, waiting: Any, running: list[Any], known: dict[str, Any] | None) -> None:
        waits = RequestStatus["WAITING_FOR_CHUNK"]
        # Running requests come into the window first.
        outside = [r for r in running if is_streamed(r) and not self._lot.ensure_active(r)]
        if outside:
            self._lot.held.extend(outside)
            running[:] = [r for r in running if r not in self._lot.held]
        gone = [r for r in list(waiting) if self._parks(r, RequestStatus.WAITING, self._lot.waiting, waits)]
        if gone:
            waiting.remove_requests(gone)
        running[:] = [r for r in running if not self._parks(r, RequestStatus.RUNNING, self._lot.running, waits)]
        replaced = set(self._apply_pending_ar_prompt_updates(known))
        if replaced:
            for request in [r for r in waiting if r.request_id in replaced]:
                request.status = RequestStatus.WAITING
            for request in [r for r in running if r.request_id in replaced]:
                request.status = RequestStatus.WAITING
                waiting.add_request(request)
            running[:] = [r for r in running if r.request_id not in replaced]
        while len(running) > self._settings.max_num_seqs:
            request = running.pop()
            request.status = RequestStatus.PREEMPTED
            waiting.prepend_requests([request])

    def _parks(self, request: Any, target: Any, lane: Lane, waits: Any) -> bool:
        """Decide for one request of a queue: True if it was parked in the lane, False if it stays."""
        request_id = request.request_id
        if not is_streamed(request) or (request.status != waits and request.status not in PARKABLE):
            return False
        if not self._lot.ensure_active(request):
            lane.append(request)
            return True
        if request.status != waits:
            record = self._receivers.by_id.get(request_id)
            if record is not None and record.ready:
                return False
            if record is not None and (record.exhausted or record.segment_finished):
                request.additional_information = None
                return False
            # A preempted request goes back as one: the worker knows it already.
            self._lot.origin[request_id] = request.status if request.status == RequestStatus.PREEMPTED else target
            self.load_async(request)
            request.status = waits
            self._lot.clock.start(request_id, time.monotonic())
        elif request_id in self._finished_load_reqs:
            before = self._lot.origin.get(request_id)
            request.status = before if before == RequestStatus.PREEMPTED else target
            self._finished_load_reqs.discard(request_id)
            self._ready.add(request_id)
            self._lot.clock.pop(request_id, None)
            if self._alarm_of is not None:
                self._move_deadlines()
            return False
        else:
            self._lot.origin.setdefault(request_id, target)
        lane.append(request)
        return True

    def _bring_back(self, request_id: str, waiting: Any, running: list[Any], known: dict[str, Any] | None) -> None:
        request, lane = self._lot.take(request_id)
        if request is None:
            return
        if known is not None and request_id not in known:
            self.cleanup_receiver(request_id)
        elif lane is self._lot.waiting:
            waiting.add_request(request)
        else:
            running.append(request)

    def _heed_consumers(self, waiting: Any, running: list[Any], known: dict[str, Any] | None) -> None:
        limit = self._settings.timing.hold_backlog
        with self._sender_state_lock:
            relieved, self._senders.relieved = self._senders.relieved, set()
            stalled = [r for r in running if is_streamed(r) and self._senders.hold(r.external_req_id, limit)]
        with self._receiver_lock:
            self._lot.stalled.extend(stalled)
            if stalled:
                running[:] = [r for r in running if r not in self._lot.stalled]
            for request_id in relieved:
                if self._lot.stalled.has(request_id):
                    self._bring_back(request_id, waiting, running, known)

    def _promote(self, waiting: Any, running: list[Any], known: dict[str, Any] | None) -> None:
        """Give free places in the window to those that wait for one, the longest first."""
        self._lot.slot_freed = False
        for lane in (self._lot.held, self._lot.waiting):
            for request in list(lane):
                if len(self._lot.active) >= self._lot.window:
                    return
                if request.request_id not in self._lot.active and self._lot.ensure_active(request):
                    self._bring_back(request.request_id, waiting, running, known)

    def _drop_strangers(self, known: dict[str, Any] | None) -> None:
        if known is not None:
            for request_id in self._lot.strangers(known):
                self.cleanup_receiver(request_id)


def _name_of(status: Any) -> str:
    return str(getattr(status, "name", status)).lower()


def _is_abort(status: Any) -> bool:
    return status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
