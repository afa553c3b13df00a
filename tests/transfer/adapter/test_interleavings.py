"""Senders and receivers that come, send, end, abort and take each other's names, in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.request import Request, RequestStatus

from tests.transfer.adapter.stages import Queues, drain, end, pair, poll, request, send, tokens

NAMES = st.sampled_from(["a", "a_0", "b"])
# Generation g sends the tokens g * 1000, g * 1000 + 1, …
EACH = 1000


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.from_, self.to, self.exchange = pair(credit=2, to={"max_num_seqs": 100})
        self.sending: dict[str, tuple[Request, int, int]] = {}
        self.queues = Queues(self.to)
        self.receiving: dict[str, Request] = {}
        self.generations = 0

    # The sending stage.

    @rule(name=NAMES)
    def begin(self, name: str) -> None:
        if name not in self.sending:
            self.generations += 1
            self.sending[name] = request(name), self.generations, 0

    @precondition(lambda self: self.sending)
    @rule(data=st.data(), count=st.integers(1, 4))
    def send(self, data: Any, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.sending)))
        for _ in range(count):
            made, generation, sent = self.sending[name]
            self.sending[name] = made, generation, sent + 1
            send(self.from_, made, tokens(generation * EACH + sent))

    @precondition(lambda self: self.sending)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        made, generation, sent = self.sending.pop(data.draw(st.sampled_from(sorted(self.sending))))
        made.status = RequestStatus.FINISHED_STOPPED
        send(self.from_, made, tokens(generation * EACH + sent))

    @precondition(lambda self: self.sending)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        self._end_sender(data.draw(st.sampled_from(sorted(self.sending))))

    def _end_sender(self, name: str) -> None:
        made, _, _ = self.sending.pop(name)
        self.from_.finish_requests(made.request_id, RequestStatus.FINISHED_ABORTED, {made.request_id: made})

    @rule()
    def save_one(self) -> None:
        self.from_._hear_consumers()
        if self.from_._pending_save_reqs:
            self.from_._send_single_request(self.from_._pending_save_reqs.popleft())

    @rule()
    def save_all(self) -> None:
        assert not drain(self.from_)

    @rule()
    def collect_at_sender(self) -> None:
        gone = self.from_.collect_failed_send_request_ids() | self.from_.collect_stopped_request_ids()
        for name, (made, _, _) in list(self.sending.items()):
            if made.request_id in gone:
                self._end_sender(name)

    # The receiving stage.

    @rule(name=NAMES)
    def want(self, name: str) -> None:
        if name not in self.receiving:
            self.receiving[name] = made = request(name)
            self.queues.add(made)
            self.queues.tick()

    @rule()
    def receive(self) -> None:
        poll(self.to)

    @rule()
    def step(self) -> None:
        self.queues.tick()
        for request_id in self.to.collect_failed_receive_request_ids():
            self._end_receiver(request_id)
        self.queues.run()
        for made in list(self.receiving.values()):
            if made.request_id in self.to.upstream_exhausted_requests and not self.to.is_parked(made.request_id):
                self._end_receiver(made.request_id)

    @precondition(lambda self: self.receiving)
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        self._end_receiver(self.receiving[data.draw(st.sampled_from(sorted(self.receiving)))].request_id)

    def _end_receiver(self, request_id: str) -> None:
        for name, made in list(self.receiving.items()):
            if made.request_id == request_id:
                del self.receiving[name]
                self.queues.finish(made)

    # What always holds.

    @invariant()
    def every_receiver_has_the_beginning_of_one_generation(self) -> None:
        for made in self.receiving.values():
            got = list(made.prompt_token_ids or ())[3:]
            if got:
                assert got == list(range(got[0], got[0] + len(got)))
                assert got[0] % EACH == 0

    @invariant()
    def a_parked_request_is_in_no_queue(self) -> None:
        for made in [*self.queues.waiting, *self.queues.running]:
            assert not self.to.is_parked(made.request_id)

    def teardown(self) -> None:
        for name in list(self.sending):
            self._end_sender(name)
        for made in list(self.receiving.values()):
            self._end_receiver(made.request_id)
        connector: Any = self.from_.connector
        while self.from_._pending_save_reqs or self.from_._senders.by_id or connector._pending_keys:
            drain(self.from_)
            # Finished streams that nobody receives wait for somebody to read them.
            for stream in list(self.exchange.streams.values()):
                for number in sorted(stream.chunks):
                    self.to.connector.get("0", "1", f"{stream.name}_{number}")
        end(self.from_)
        end(self.to)
        assert not self.exchange.watchers


Interleavings.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
