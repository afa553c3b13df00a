"""The sending half of an adapter: from what the scheduler has computed to chunks on the connector."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch

from triptych.transfer.adapter.loops import TransferLoops, at_edge, is_streamed
from triptych.transfer.adapter.publish import truthy
from triptych.transfer.adapter.sender import (
    Admission,
    Facts,
    ReclaimTask,
    SaveTask,
    SenderStream,
    SenderStreams,
    admission,
    confirmed_tokens,
    segment_of,
)
from triptych.transfer.adapter.settings import AdapterSettings
from triptych.transfer.adapter.snapshot import snapshot
from triptych.transfer.connectors.base import Mark
from triptych.transfer.errors import BrokenStream, WouldBlock
from triptych.transfer.payload import Meta, StagePayload, to_struct

logger = logging.getLogger(__name__)

DRAINING = "previous sender generation is still draining"
WITHDRAWN = "the request ended before its stream did"


class Attempt(Enum):
    """How one attempt to send a task ended, where it did not raise."""

    SENT = auto()
    NOTHING = auto()
    BLOCKED = auto()
    ENDED = auto()


class Sending(TransferLoops):
    """Queues chunks for the save thread, makes them, and sends them; `_senders` knows what may be sent."""

    _settings: AdapterSettings
    stage_id: int
    custom_process_next_stage_input_func: Callable[..., Any] | None
    _stopped: dict[str, str]

    def _init_sending(self) -> None:
        self._senders = SenderStreams(self._withdraw)
        self._sender_state_lock = threading.Lock()
        self._reclaimed_shm_total = 0
        self._stopped = {}
        self._processor_known: tuple[Any, bool] = (None, False)

    # On the scheduler's thread.

    def save_async(
        self,
        multimodal_output: Any = None,
        request: Any = None,
        is_segment_finished: bool = False,
        new_token_ids: list[int] | None = None,
        confirmed_num_computed_tokens: int | None = None,
        segment_generation: int | None = None,
        force_request_finished: bool = False,
    ) -> None:
        """Queue what a step has computed for a request; nothing is made or sent on this thread.

        A chunk that comes too late for its segment, or repeats computed tokens, is dropped. One whose external id is
        still being drained by a generation before is a send failure of this request.
        """
        if not self._settings.enabled or self._settings.role == "receiver" or not is_streamed(request):
            return
        finished = force_request_finished or bool(request.is_finished() and not request.resumable)
        if segment_generation is None:
            segment_generation = segment_of(request)
        if confirmed_num_computed_tokens is None:
            confirmed_num_computed_tokens = confirmed_tokens(request)
        chunk = Facts(segment_generation, confirmed_num_computed_tokens, is_segment_finished, finished)
        with self._sender_state_lock:
            verdict = admission(self._senders.by_id.get(request.external_req_id), request.request_id, chunk)
            if verdict is Admission.ANEW:
                self._senders.supersede(request.external_req_id)
                verdict = Admission.ACCEPT
            if verdict is Admission.ACCEPT:
                processed = self.custom_process_next_stage_input_func is not None
                seen = self._snapshot_processor_request(request) if processed else request
                counts = getattr(request, "_omni_segment_generation", None) is not None
                stream = self._senders.accept(request, chunk, counts_segments=counts)
                self._pending_save_reqs.append(
                    SaveTask(
                        multimodal_output=multimodal_output,
                        request=seen,
                        is_finished=finished,
                        is_segment_finished=is_segment_finished,
                        new_token_ids=list(new_token_ids) if new_token_ids is not None else None,
                        sender_token=stream,
                        segment_generation=segment_generation,
                    )
                )
        if verdict is Admission.ACCEPT:
            self._notify_sender()
        elif verdict is Admission.DRAINING:
            self._record_send_failure(request.request_id, DRAINING)

    def has_sender(self, external_id: str) -> bool:
        """Whether chunks of this id were queued or sent, and their generation is not over."""
        return external_id in self._senders.by_id

    def claim_segment(self, external_id: str) -> int:
        """The segment that the next chunk of this id must carry so as not to be late."""
        stream = self._senders.by_id.get(external_id)
        return (stream.segment or 0) if stream is not None else 0

    def is_congested(self, external_id: str) -> bool:
        """Whether the consumer of this stream is behind by all the credit that it gave."""
        return external_id in self._senders.blocked

    def cleanup_sender(self, external_id: str) -> None:
        """The request is over here. A terminal that is queued or in flight still goes out; other chunks do not."""
        with self._sender_state_lock:
            known = self._senders.cleanup(external_id)
        if known:
            self._notify_sender()

    def release_shm_resources(self, external_id: str) -> None:
        """The consumer ended early: take back what it has not read, after the sends that are queued now."""
        if self._streams is None:
            return
        with self._sender_state_lock:
            stream = self._senders.by_id.get(external_id)
            if stream is not None:
                self._pending_save_reqs.append(ReclaimTask(external_id, stream))
        self._notify_sender()

    def collect_stopped_request_ids(self) -> dict[str, str]:
        """Requests whose consumer does not want the rest, with its reason; each once."""
        with self._sender_state_lock:
            stopped, self._stopped = self._stopped, {}
        return stopped

    def _snapshot_processor_request(self, request: Any) -> Any:
        return snapshot(request)

    def _withdraw(self, stream: SenderStream) -> None:
        """A generation was retired undelivered: behind the queued sends, before those of the next one."""
        if self._streams is not None:
            reason = None if stream.ended is not None else self._edge(WITHDRAWN)
            self._pending_save_reqs.append(ReclaimTask(stream.external_id, stream, reason))

    def _announce_abort(self, external_id: str) -> None:
        """A request that sent nothing yet is aborted: its receiver waits already."""
        if self._streams is not None and self._settings.sends(self.stage_id):
            with self._sender_state_lock:
                self._pending_save_reqs.append(ReclaimTask(external_id, None, self._edge(WITHDRAWN)))
            self._notify_sender()

    # On the save thread.

    def save_loop(self) -> None:
        """Send what is queued; sleep when nothing is."""
        while not self.stop_event.is_set():
            self._hear_consumers()
            if self._pending_save_reqs:
                try:
                    self._send_single_request(self._pending_save_reqs.popleft())
                except Exception:
                    logger.exception("a chunk was not sent")
                continue
            self._give_up_overdue()
            if self._streams is not None:
                self._streams.reap()
            timeout = self._save_wait()
            with self._save_cond:
                if not self._pending_save_reqs and not self.told and not self.stop_event.is_set():
                    self._save_cond.wait(timeout=timeout)

    def _send_single_request(self, task: SaveTask | ReclaimTask) -> None:
        """One task of the queue. What the processor or the connector raises is recorded, and raised again."""
        if isinstance(task, ReclaimTask):
            self._reclaim(task)
            return
        with self._sender_state_lock:
            stream = self._senders.begin(task)
        if stream is None:
            self._limit_backlog(task.get("sender_token"))
            return
        outcome = None
        try:
            outcome = self._send_single_request_for_generation(task, stream)
        except Exception as error:
            self._fail_stream(stream, task["request"].request_id, f"{type(error).__name__}: {error}")
            raise
        finally:
            if outcome is Attempt.BLOCKED:
                self._keep(stream, task)
            else:
                with self._sender_state_lock:
                    self._senders.settle(stream, terminal=task["is_finished"])
                if self._senders.relieved:
                    self._news()

    def _send_single_request_for_generation(self, task: SaveTask, sender_token: SenderStream | None = None) -> Attempt:
        request, terminal = task["request"], task["is_finished"]
        external_id = request.external_req_id
        stream = sender_token or self._senders.open(external_id)
        payload: StagePayload | None = task.get("payload")
        if payload is None:
            payload = self._make_payload(task)
            if payload is None:
                return Attempt.NOTHING
            task["payload"] = payload
        stream.attempted = max(stream.attempted, stream.put + 1)
        place = {
            "from_stage": str(self.stage_id),
            "to_stage": str(self.stage_id + 1),
            "put_key": f"{external_id}_{self.stage_id}_{stream.put}",
        }
        try:
            if self._streams is not None:
                published = self._streams.put(**place, data=payload, mark=Mark(stream.number, terminal))[0]
            else:
                published = self.connector.put(**place, data=payload)[0]
        except WouldBlock:
            return Attempt.BLOCKED
        except BrokenStream as error:
            self._consumer_left(stream, str(error))
            return Attempt.ENDED
        if not published:
            self._fail_stream(stream, request.request_id, "the connector did not take the chunk")
            return Attempt.ENDED
        with self._sender_state_lock:
            self._senders.sent(stream)
            stream.delivered = stream.delivered or terminal
        if terminal and payload.meta is not None and truthy(payload.meta.finished, "meta.finished"):
            self.cleanup(request.request_id, external_id)
        return Attempt.SENT

    def cleanup(self, request_id: str, external_id: str | None = None) -> None:
        """Both halves' state of a request goes."""
        raise NotImplementedError

    def _make_payload(self, task: SaveTask) -> StagePayload | None:
        """The chunk, with what its receiver goes by; None where there is nothing to send."""
        processor = self.custom_process_next_stage_input_func
        terminal, boundary = task["is_finished"], task["is_segment_finished"]
        made: Any = None
        if processor is not None:
            if self._processor_known[0] is not processor:
                self._processor_known = (processor, accepts(processor, "new_token_ids"))
            more = {"new_token_ids": task.get("new_token_ids")} if self._processor_known[1] else {}
            made = processor(
                transfer_manager=self,
                multimodal_output=task["multimodal_output"],
                request=task["request"],
                is_finished=boundary or terminal,
                **more,
            )
        if made is None:
            if not boundary and not terminal:
                return None
            made = StagePayload()
        elif isinstance(made, dict):
            made = to_struct(made)
        elif not isinstance(made, StagePayload):
            raise TypeError(f"the stage input processor returned a {type(made).__name__}, not a StagePayload")
        return complete_meta(made, terminal=terminal, boundary=boundary)

    def _keep(self, stream: SenderStream, task: SaveTask) -> None:
        with self._sender_state_lock:
            self._senders.block(stream, task, time.monotonic())
        self._limit_backlog(stream)

    def _limit_backlog(self, stream: SenderStream | None) -> None:
        if stream is not None and len(stream.backlog) > self._settings.timing.max_backlog:
            self._fail_stream(stream, stream.request_id, f"its consumer is {len(stream.backlog)} chunks behind")

    def _hear_consumers(self) -> None:
        """Take up streams that have credit again, in front of the queue; end those that are not wanted."""
        suffix = f"_{self.stage_id}"
        while self.told:
            told = self.told.popleft()
            external_id = told.stream.removesuffix(suffix)
            if told.stopped is None:
                with self._sender_state_lock:
                    self._pending_save_reqs.extendleft(reversed(self._senders.resume(external_id)))
                continue
            stream = self._senders.by_id.get(external_id)
            # A name may have been begun anew since its older generation was stopped.
            if stream is not None and stream.attempted and told.generation in (None, stream.number):
                self._consumer_left(stream, told.stopped)

    def _consumer_left(self, stream: SenderStream, reason: str) -> None:
        with self._sender_state_lock:
            news = self._senders.end(stream, reason)
            if news and stream.request_id is not None and not stream.cancelled:
                self._stopped.setdefault(stream.request_id, self._edge(reason))
        if news:
            self._news()

    def _fail_stream(self, stream: SenderStream, request_id: str | None, reason: str) -> None:
        """A chunk is lost, and so is the stream: both ends are told."""
        told = self._edge(reason)
        with self._sender_state_lock:
            news = self._senders.end(stream, told)
            current = self._senders.by_id.get(stream.external_id) is stream
        if news and current and self._streams is not None:
            try:
                self._streams.fail(str(self.stage_id), str(self.stage_id + 1), self._name(stream.external_id), told)
            except Exception:
                logger.exception("the receiver of %s was not told that it failed", stream.external_id)
        if request_id is not None:
            self._record_send_failure(request_id, told)

    def _give_up_overdue(self) -> None:
        limit = self._settings.timing.send_timeout_s
        if not limit:
            return
        with self._sender_state_lock:
            late = self._senders.overdue(time.monotonic(), limit)
        for stream in late:
            self._fail_stream(stream, stream.request_id, f"its consumer has taken nothing for {limit:g} s")

    def _save_wait(self) -> float | None:
        limit = self._settings.timing.send_timeout_s
        with self._sender_state_lock:
            since = next(iter(self._senders.blocked.values()), None)
        return None if since is None or not limit else max(0.0, since + limit - time.monotonic()) + 0.001

    def _reclaim(self, task: ReclaimTask) -> None:
        if self._streams is None:
            return
        name = self._name(task.external_id)
        attempted = task.stream.attempted if task.stream is not None else 0
        if task.reason is not None:
            # Before anything is withdrawn, which ends the stream too: the receiver is told once, or the second word
            # could meet the next stream of this name.
            self._streams.fail(str(self.stage_id), str(self.stage_id + 1), name, task.reason)
        self._reclaimed_shm_total += self._streams.discard([f"{name}_{number}" for number in range(attempted)])

    def _name(self, external_id: str) -> str:
        return f"{external_id}_{self.stage_id}"

    def _edge(self, reason: str) -> str:
        return at_edge(self.stage_id, reason)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a keyword of that name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def complete_meta(payload: StagePayload, *, terminal: bool, boundary: bool) -> StagePayload:
    """Say in `meta` whether the request or its segment ends here, where the processor has not.

    A processor that streams a codec of its own decides itself when that is finished.
    """
    meta = payload.meta if payload.meta is not None else Meta()
    payload.meta = meta
    if meta.finished is None or not truthy(meta.codec_streaming, "meta.codec_streaming"):
        meta.finished = torch.tensor(terminal, dtype=torch.bool)
    if meta.is_segment_finished is None:
        meta.is_segment_finished = torch.tensor(boundary, dtype=torch.bool)
    return payload
