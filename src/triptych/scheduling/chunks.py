"""What the autoregressive and the generation scheduler have in common: a mixin before one of vLLM's schedulers.

Every method here calls vLLM's own and adds to it; docs/scheduling.md lists them with their reasons. Requests that wait
for a chunk are in the adapter's parking lot, outside vLLM's queues: vLLM neither schedules nor counts them, and with
nothing else to do its engine core sleeps until the adapter wakes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from triptych.engine.seams import SCHEDULING, require
from triptych.scheduling.config import STREAM, StageConfig, adapter_config, stage_config, stream_of
from triptych.scheduling.output import Refused, StageRequestData
from triptych.scheduling.status import register_status
from triptych.scheduling.wake import engine_core, waker
from triptych.transfer.adapter.adapter import ChunkTransferAdapter
from triptych.transfer.adapter.loops import is_streamed

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object

_LOG: Final = logging.getLogger(__name__)
_UNSENT: Final = "unsent_outputs"  # of a request whose stage sends everything at its end


class WaitingQueues:
    """vLLM's two waiting queues as the adapter sees them: only requests of streams, and none that vLLM waits for."""

    def __init__(self, scheduler: ChunkScheduling) -> None:
        self._scheduler = scheduler

    def __iter__(self) -> Iterator[Request]:
        for queue in (self._scheduler.waiting, self._scheduler.kv_holding_waiting):
            for request in queue:
                if is_streamed(request) and not self._scheduler._is_blocked_waiting_status(request.status):
                    yield request

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def add_request(self, request: Request) -> None:
        self._scheduler._enqueue_waiting_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            holds = self._scheduler._holds_kv_blocks(request)
            (self._scheduler.kv_holding_waiting if holds else self._scheduler.waiting).prepend_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = list(requests)
        self._scheduler.waiting.remove_requests(gone)
        self._scheduler.kv_holding_waiting.remove_requests(gone)
        self._scheduler.deferred_waiting.difference_update(gone)


class ChunkScheduling(_Base):  # type: ignore[misc]
    """Requests that send chunks, and requests that wait for them, under a scheduler of vLLM's. `worker`: the kind of
    stage that it is for."""

    worker: ClassVar[str] = "ar"
    chunk_transfer_adapter: ChunkTransferAdapter
    requests: dict[str, Request]
    running: list[Request]
    max_num_active_reqs: int
    _stage: StageConfig
    _failed: dict[str, str]
    _by_stream: dict[str, str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's arguments. Raises ValueError for a wrong stage configuration, ConnectorError, EngineCoreNotFound,
        SeamError."""
        require(SCHEDULING)
        super().__init__(*args, **kwargs)
        register_status()
        self._stage = stage_config(self.vllm_config.additional_config)
        self._check()
        self._failed = {}
        self._by_stream = {}
        self._waiting_queues = WaitingQueues(self)
        wake = waker(engine_core())
        self.chunk_transfer_adapter = ChunkTransferAdapter(adapter_config(self._stage, self.vllm_config))
        self.chunk_transfer_adapter.wake = wake
        self.chunk_transfer_adapter.start()
        _LOG.info("stage %d: %s, %s", self._stage.id, self._stage.role, self._stage.connector.name)

    def _check(self) -> None:
        if self._stage.worker != self.worker:
            raise ValueError(f"{type(self).__name__} is for `worker` {self.worker!r}, not {self._stage.worker!r}")

    def shutdown(self) -> None:
        self.chunk_transfer_adapter.close()
        super().shutdown()

    # --- requests come

    def add_request(self, request: Request) -> None:
        """A new request joins its stream, if it names one; one that cannot is ended with an error in the next step."""
        new = request.request_id not in self.requests
        super().add_request(request)
        if new:
            self._join(request)

    def _join(self, request: Request) -> None:
        try:
            stream = stream_of(request.sampling_params)
        except ValueError as error:
            self._failed[request.request_id] = str(error)
            return
        if stream is None:
            if self._stage.worker == "generation":  # without chunks it would have nothing to do, for ever
                self._failed[request.request_id] = (
                    f"stage {self._stage.name or self._stage.id} serves requests of a pipeline only: "
                    f"vllm_xargs.{STREAM} is missing"
                )
            return
        name, source = stream
        if name in self._by_stream:
            self._failed[request.request_id] = f"a request of the stream {name[:200]!r} is running already"
            return
        self._by_stream[name] = request.request_id
        request.external_req_id = name
        if self._stage.worker == "generation":
            request.skip_reading_prefix_cache = True  # what is not computed anew gives no output
        if self._stage.receives:
            # Its tokens do not tell what is computed of it, its chunks do: no other request may find its blocks.
            request.cache_salt = name
            request.block_hashes.clear()
            request.update_block_hashes()
        request.additional_information = None
        request.payload_sender_info = source
        request.prompt_tokens_sent = -1  # of the prompt that the worker knows

    # --- a step

    def has_requests(self) -> bool:
        """Also where a chunk, a failure or a deadline is to be looked at, though nothing may come of it."""
        return bool(self._failed) or self.chunk_transfer_adapter.has_news() or super().has_requests()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Bring requests back whose chunk has come, park those that lack theirs, then let vLLM schedule."""
        self._collect_failures()
        self._tick()
        places = self.max_num_active_reqs
        # A parked request that has run keeps its slot in the newer model runner; the older one has no limit of them.
        self.max_num_active_reqs = places - (self._begun_and_parked() if self.use_v2_model_runner else 0)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_active_reqs = places
        if self._stage.receives:
            self._hand_over(output)
            self._make_room(output)
        return output

    def _make_room(self, output: Any) -> None:
        """Where nothing could be scheduled, the last of those that hold blocks gives its own back.

        vLLM preempts running requests when blocks are short. Ours wait, blocks in hand, whenever their prompt has
        grown; with none running they would wait for each other for ever.
        """
        if output.num_scheduled_tokens or self.running:
            return
        blocked = self._is_blocked_waiting_status
        holding = [
            request for request in self.kv_holding_waiting if is_streamed(request) and not blocked(request.status)
        ]
        if len(holding) > 1:
            last = max(holding, key=lambda request: request.arrival_time)
            self._waiting_queues.remove_requests([last])
            last.status = RequestStatus.RUNNING  # as which alone vLLM preempts a request
            self._preempt_request(last, time.monotonic())

    def _begun_and_parked(self) -> int:
        adapter = self.chunk_transfer_adapter
        return adapter.num_parked() - len(adapter.waiting_for_chunk_waiting_requests)

    def _tick(self) -> None:
        streamed = [request for request in self.running if is_streamed(request)]
        before = set(streamed)
        waiting = self._waiting_queues
        self.chunk_transfer_adapter.tick(waiting, streamed, self.requests)
        changed = [request for request in streamed if self._has_changed(request)] if self._stage.receives else []
        kept = set(streamed).difference(changed)
        running = [request for request in self.running if request not in before or request in kept]
        running += [request for request in streamed if request in kept and request not in before]
        self.running[:] = running
        for request in changed:
            self._begin_again(request)
        if self._stage.receives:
            for request in waiting:
                self._restate(request)

    @staticmethod
    def _has_changed(request: Request) -> bool:
        """Whether its prompt is not the one that the worker has: it has grown, or was replaced."""
        return request.num_prompt_tokens != request.prompt_tokens_sent or not request.num_computed_tokens

    def _begin_again(self, request: Request) -> None:
        """A running request has another prompt: the worker learns of that only from a request that is scheduled anew,
        as with vLLM's own streaming input."""
        if not request.num_computed_tokens:
            self._free_request_blocks(request)  # a prompt that was replaced
        self._drop_in_flight(request)
        del request.block_hashes[request.num_computed_tokens // self.hash_block_size :]
        request.update_block_hashes()
        request.status = RequestStatus.WAITING
        self._enqueue_waiting_request(request)

    @staticmethod
    def _drop_in_flight(request: Request) -> None:
        """A step that was planned before its chunk came: what it samples belongs behind a prompt that is no more."""
        if request.num_in_flight_tokens > request.num_stale_output_tokens:
            request.drop_stale_output = True
            request.num_stale_output_tokens = request.num_in_flight_tokens
            request.num_output_placeholders = 0
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)

    def _restate(self, request: Request) -> None:
        """A preempted request goes on from where its answer was, unless that has become part of its prompt."""
        self._drop_in_flight(request)
        if request.status == RequestStatus.PREEMPTED and request.num_prompt_tokens != request.prompt_tokens_sent:
            request.status = RequestStatus.WAITING
        elif request.status == RequestStatus.WAITING and request.num_output_tokens:
            request.status = RequestStatus.PREEMPTED

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """Another segment of a session begins: it has chunks of its own to wait for."""
        super()._update_request_as_session(session, update)
        self.chunk_transfer_adapter.segment_finished_requests.discard(session.request_id)

    def _hand_over(self, output: Any) -> None:
        """What is scheduled takes its chunk along."""
        for index, data in enumerate(output.scheduled_new_reqs):
            request = self.requests.get(data.req_id)
            if request is not None and is_streamed(request):
                request.prompt_tokens_sent = request.num_prompt_tokens
                output.scheduled_new_reqs[index] = StageRequestData.of(data, request)
        self.chunk_transfer_adapter.postprocess_scheduler_output(output, self.requests)

    # --- what is counted

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests, parked ones among the latter: metrics and load balancers see them."""
        running, waiting = super().get_request_counts()
        return running, waiting + self.chunk_transfer_adapter.num_parked()

    def get_num_unfinished_requests(self) -> int:
        """Without parked requests: no step could do anything for them, and the engine core may sleep."""
        unfinished: int = super().get_num_unfinished_requests()
        if self.pause_state == PauseState.UNPAUSED:
            unfinished -= self.chunk_transfer_adapter.num_parked()
        return unfinished

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Where running requests are preempted, those that are parked are, too: they hold blocks."""
        parked = self._take_begun_back() if reset_running_requests else []
        done: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        for request in parked:
            request.status = RequestStatus["WAITING_FOR_CHUNK"]
            self.chunk_transfer_adapter.requests_origin_status[request.request_id] = RequestStatus.PREEMPTED
        return done

    def _take_begun_back(self) -> list[Request]:
        """Put what is parked into vLLM's queues until the next step, and what holds blocks among the running. Returns
        those that wait for a chunk, as running ones."""
        self.chunk_transfer_adapter.restore_queues(self._waiting_queues, self.running, self.requests)
        held = [request for request in self._waiting_queues if self._holds_kv_blocks(request)]
        self._waiting_queues.remove_requests(held)
        self.running += held
        waits = [request for request in self.running if request.status == RequestStatus["WAITING_FOR_CHUNK"]]
        for request in [*held, *waits]:
            request.status = RequestStatus.RUNNING
        return waits

    # --- what a step has made

    def _send_on(self, outputs: dict[int, EngineCoreOutputs], scheduled: Mapping[str, Request | None]) -> None:
        """Queue for the next stage what a step produced. What the stage's model said is for that stage only: clients
        get tokens and the end."""
        for of_client in outputs.values():
            kept = []
            for output in of_client.outputs:
                request = scheduled.get(output.request_id)
                if isinstance(output.pooling_output, Refused):
                    self._failed.setdefault(output.request_id, output.pooling_output.reason)
                    continue
                if request is not None and is_streamed(request) and self._stage.sends:
                    self._send(request, output)
                if isinstance(output.pooling_output, dict):  # what a model says; vLLM's own is a tensor
                    output.pooling_output = None
                    if not output.new_token_ids and output.finish_reason is None:
                        continue
                kept.append(output)
            of_client.outputs = kept

    def _send(self, request: Request, output: EngineCoreOutput) -> None:
        """One output. A stop that does not end the request is the end of a segment."""
        stopped = output.finish_reason is not None
        if not self._stage.overlap and not stopped:
            # The request as it is now, so that it does not look finished when this is sent.
            held: list[Any] = vars(request).setdefault(_UNSENT, [])
            held.append((output.pooling_output, copy(request), output.new_token_ids))
            return
        self._send_held(request)
        self.chunk_transfer_adapter.save_async(
            output.pooling_output,
            request,
            is_segment_finished=stopped and not request.is_finished() and getattr(request, "resumable", False) is True,
            new_token_ids=output.new_token_ids,
        )

    def _send_held(self, request: Request) -> None:
        for said, state, tokens in vars(request).pop(_UNSENT, ()):
            self.chunk_transfer_adapter.save_async(said, state, new_token_ids=tokens)

    # --- failures

    def _collect_failures(self) -> None:
        """Requests that something went wrong with, with the first reason known of each."""
        adapter = self.chunk_transfer_adapter
        if not adapter.has_news():
            return
        stage = self._stage
        late = f"stage {stage.id} waited more than {stage.chunk_timeout} s for stage {stage.id - 1}"
        found = [
            adapter.collect_failed_receive_request_ids(),
            adapter.collect_failed_send_request_ids(),
            adapter.collect_stopped_request_ids(),
            dict.fromkeys(adapter.collect_timed_out_request_ids(), late),
        ]
        for reasons in found:
            for request_id, reason in reasons.items():
                self._failed.setdefault(request_id, reason)

    def _end_failed(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """End them, and tell their clients."""
        self._collect_failures()
        failed, self._failed = self._failed, {}
        for request_id, reason in failed.items():
            for request in self.finish_requests(request_id, RequestStatus.FINISHED_ERROR):
                _LOG.error("request %s failed: %s", request_id, reason)
                request.stop_reason = reason
                self._emit(outputs, request, finish_reason=request.get_finished_reason())

    # --- requests go

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """vLLM lets go of a request, however it ended: so does the receiving side. The sending one may still owe the
        next stage its last chunk."""
        if is_streamed(request):
            self._by_stream.pop(request.external_req_id, None)
            self.chunk_transfer_adapter.cleanup_receiver(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Finish requests, those too that are parked with the adapter, and resumable ones between two segments.

        vLLM takes a request whose segment has stopped for finished and would leave it, and its place, for ever; as long
        as some queue still has it, it is made one that vLLM finishes.
        """
        if request_ids is None:
            ids = list(self.requests)
        else:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        between = {rid: place for rid in ids if (place := self._between_segments(rid)) is not None}
        self.chunk_transfer_adapter.finish_requests(ids, finished_status, self.requests)
        for rid, status in between.items():
            request = self.requests[rid]
            # The counter of requests that wait for input is right only if the request is counted out as one.
            if status == RequestStatus.WAITING_FOR_STREAMING_REQ or request.is_finished():
                request.status = status
        finished: list[Request] = super().finish_requests(ids, finished_status)
        return finished

    def _between_segments(self, request_id: str) -> RequestStatus | None:
        """The state in which vLLM would have the queue that this request is in, if its segment has stopped."""
        request = self.requests.get(request_id)
        if request is None or request.resumable is not True or request.status != RequestStatus.FINISHED_STOPPED:
            return None
        if request in self.kv_holding_waiting:
            return RequestStatus.WAITING_FOR_STREAMING_REQ
        if request in self.running:
            return RequestStatus.RUNNING
        if request in self.waiting:
            return RequestStatus.WAITING
        return None

    def _emit(self, outputs: dict[int, EngineCoreOutputs], request: Request, **fields: Any) -> None:
        """Add an output of this request to those of a step."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            stop_reason=request.stop_reason,
            events=request.take_events(),
            trace_headers=request.trace_headers,
            **fields,
        )
        of_client = outputs.get(request.client_index)
        if of_client is None:
            of_client = outputs[request.client_index] = EngineCoreOutputs()
        of_client.outputs.append(output)
