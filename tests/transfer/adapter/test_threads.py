"""The adapter with its threads: nothing is moved without them, they sleep without a period, and they end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.transfer.adapter.memory import Exchange, MemoryConnector
from tests.transfer.adapter.stages import PATIENCE_S, Bell, Queues, adapter, codes, end, pair, request, send, tokens
from triptych.transfer.adapter.adapter import ChunkTransferAdapter
from triptych.transfer.connectors.base import Connector

STOPPED = RequestStatus.FINISHED_STOPPED


@pytest.fixture
def running() -> Any:
    """Starts adapters, and closes them in the end."""
    started: list[ChunkTransferAdapter] = []

    def start(*stages: ChunkTransferAdapter) -> list[Bell]:
        bells = []
        for stage in stages:
            stage.wake = bell = Bell()
            bells.append(bell)
            stage.start()
            started.append(stage)
        return bells

    yield start
    for stage in started:
        stage.close()
        assert not stage._threads


class Waits:
    """Counts how often a condition is waited on, and lets a test wait for the next time."""

    def __init__(self, condition: threading.Condition) -> None:
        self.timeouts: list[float | None] = []
        self._more = threading.Semaphore(0)
        self._wait = condition.wait
        condition.wait = self  # type: ignore[method-assign, assignment]

    def __call__(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        self._more.release()
        return self._wait(timeout=timeout)

    def next(self) -> None:
        assert self._more.acquire(timeout=PATIENCE_S), "the thread does not come to rest"


def test_chunks_go_from_stage_to_stage_while_they_are_made(running: Callable[..., list[Bell]]) -> None:
    from_, to, exchange = pair(credit=2)
    _, bell = running(from_, to)
    sent, made = request(), request()
    queues = Queues(to, [made])
    queues.tick()
    for number in range(20):
        if number == 19:
            sent.status = STOPPED
        send(from_, sent, tokens(100 + number))
    for number in range(20):
        bell.wait_until(to.has_news)
        queues.tick()
        assert queues.run() == [made]
        assert made.prompt_token_ids[-1] == 100 + number
        queues.tick()
    assert made.prompt_token_ids == [1, 2, 3, *range(100, 120)]
    assert queues.running == [made], "nothing more to wait for"
    queues.finish(made, STOPPED)
    end(to)
    assert not exchange.watchers


def test_many_streams_at_once_keep_their_own_chunks(running: Callable[..., list[Bell]]) -> None:
    from_, to, _ = pair(credit=2, to={"max_num_seqs": 64})
    _, bell = running(from_, to)
    sent = [request(f"e{n}") for n in range(64)]
    made = [request(f"e{n}", f"r{n}") for n in range(64)]
    queues = Queues(to, made)
    queues.tick()
    for number in range(5):
        for n, one in enumerate(sent):
            if number == 4:
                one.status = STOPPED
            send(from_, one, tokens(1000 * n + number))
    while not all(one.request_id in to.upstream_exhausted_requests for one in made) or to.has_news():
        bell.wait_until(to.has_news)
        queues.tick()
        queues.run()
        queues.tick()
    for n, one in enumerate(made):
        assert one.prompt_token_ids == [1, 2, 3, *(1000 * n + number for number in range(5))]


def test_a_failure_of_the_sender_wakes_both_schedulers(running: Callable[..., list[Bell]]) -> None:
    def failing(**_: object) -> None:
        raise ZeroDivisionError("no frames")

    from_, to, _ = pair(processor=failing)
    sender_bell, bell = running(from_, to)
    sent, made = request(), request()
    to.load_async(made)
    send(from_, sent, None)
    sender_bell.wait_until(lambda: bool(from_._send_failures))
    bell.wait_until(lambda: bool(to._receive_failures))
    assert from_.collect_failed_send_request_ids() == {sent.request_id: "stage 0 -> 1: ZeroDivisionError: no frames"}
    assert list(to.collect_failed_receive_request_ids()) == [made.request_id]


def test_a_consumer_that_stops_wakes_the_sender_s_scheduler(running: Callable[..., list[Bell]]) -> None:
    from_, to, _ = pair(credit=1)
    bell, arrivals = running(from_, to)
    sent = request()
    made = request()
    Queues(to, [made]).tick()
    for number in range(4):
        send(from_, sent, tokens(number))
    arrivals.wait_until(to.has_news)
    to.cleanup_receiver(made.request_id, "enough")
    bell.wait_until(lambda: bool(from_._stopped))
    assert from_.collect_stopped_request_ids() == {sent.request_id: "stage 0 -> 1: enough"}


def test_a_deadline_wakes_the_scheduler_by_itself(running: Callable[..., list[Bell]]) -> None:
    to = adapter(MemoryConnector(Exchange(), 1), extra={"chunk_timeout_s": 0.05})
    (bell,) = running(to)
    made = request()
    Queues(to, [made]).tick()
    bell.wait_until(to.has_news)
    assert to.collect_timed_out_request_ids() == {made.request_id}


def test_threads_with_nothing_to_do_sleep_without_a_period(running: Callable[..., list[Bell]]) -> None:
    from_, to, _ = pair(to={"max_num_seqs": 2000, "extra": {"chunk_timeout_s": 3600}})
    save, receive = Waits(from_._save_cond), Waits(to._recv_cond)
    running(from_, to)
    save.next()
    receive.next()
    assert save.timeouts == [None]
    assert receive.timeouts == [None]
    queues = Queues(to, [request(f"e{n}", f"r{n}") for n in range(1000)])
    queues.tick()
    while to._pending_load_reqs:
        receive.next()
    assert all(timeout is None or timeout > 3000 for timeout in receive.timeouts)


class Polled(Connector):
    """A connector that must be asked, and whose `get` waits for what is `blocked`."""

    def __init__(self, stage_id: int = 1) -> None:
        self.stage_id = stage_id
        self.config = {}
        self.chunks: dict[str, object] = {}
        self.blocked: dict[str, threading.Event] = {}
        self.asked: dict[str, int] = {}
        self.entered = threading.Event()
        self.closed = 0

    def put(self, from_stage: str, to_stage: str, put_key: str, data: object) -> tuple[bool, int, None]:
        self.chunks[put_key] = data
        return True, 1, None

    def get(self, from_stage: str, to_stage: str, get_key: str, metadata: Any = None) -> tuple[Any, int] | None:
        self.asked[get_key] = self.asked.get(get_key, 0) + 1
        if (release := self.blocked.get(get_key)) is not None:
            self.entered.set()
            assert release.wait(PATIENCE_S)
        return (self.chunks.pop(get_key), 1) if get_key in self.chunks else None

    def close(self) -> None:
        self.closed += 1


def test_a_poll_that_blocks_does_not_hold_up_other_streams(running: Callable[..., list[Bell]]) -> None:
    connector = Polled()
    to = adapter(connector, worker_type="generation", extra={"poll_threads": 2})
    connector.blocked["slow_0_0"] = release = threading.Event()
    (bell,) = running(to)
    slow, quick = request("slow"), request("quick")
    to.load_async(slow)
    assert connector.entered.wait(PATIENCE_S)
    connector.chunks["quick_0_0"] = codes(7)
    to.load_async(quick)
    bell.wait_until(lambda: quick.request_id in to._finished_load_reqs)
    assert slow.request_id not in to._finished_load_reqs
    connector.chunks["slow_0_0"] = codes(8)
    release.set()
    bell.wait_until(lambda: slow.request_id in to._finished_load_reqs)
    assert (quick.prompt_token_ids, slow.prompt_token_ids) == ([7], [8])


def test_polls_of_what_is_not_there_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    to = adapter(Polled(), extra={"poll_interval_s": 0.01, "poll_interval_max_s": 0.05})
    now = 100.0
    monkeypatch.setattr("triptych.transfer.adapter.receiving.time.monotonic", lambda: now)
    to.load_async(request())
    pauses = []
    for _ in range(5):
        entry = to._next_entry()
        assert entry is not None
        to._poll(entry)
        assert to._next_entry() is None
        pauses.append(to._pauses[0][0] - now)
        assert to._load_wait() == pytest.approx(pauses[-1], abs=0.001)
        now += pauses[-1]
    assert pauses == pytest.approx([0.01, 0.02, 0.04, 0.05, 0.05])


def test_a_chunk_of_a_polled_connector_comes_without_a_doorbell(running: Callable[..., list[Bell]]) -> None:
    connector = Polled()
    to = adapter(connector, worker_type="generation", extra={"poll_interval_s": 0.001})
    (bell,) = running(to)
    made = request()
    to.load_async(made)
    bell.wait_until(lambda: True)
    connector.chunks["ext_0_0"] = codes(9)
    bell.wait_until(to.has_news)
    assert made.prompt_token_ids == [9]


def test_a_wake_up_that_raises_ends_no_thread(running: Callable[..., list[Bell]]) -> None:
    from_, to, _ = pair()
    running(from_, to)
    done = threading.Semaphore(0)

    def wake() -> None:
        done.release()
        raise RuntimeError("the engine is gone")

    to.wake = wake
    for number in range(2):
        made = request(f"e{number}")
        to.load_async(made)
        send(from_, request(f"e{number}"), tokens(number))
        assert done.acquire(timeout=PATIENCE_S)


def test_nothing_moves_before_the_start_and_all_of_it_after() -> None:
    from_, _, exchange = pair()
    send(from_, request(), tokens(1))
    assert not exchange.streams
    put = threading.Event()
    connector = from_.connector
    original = connector.put

    def noticed(**place: Any) -> Any:
        put.set()
        return original(**place)

    connector.put = noticed  # type: ignore[method-assign]
    from_.start()
    from_.start()
    assert len(from_._threads) == 1, "a stage without one before it receives nothing"
    assert put.wait(PATIENCE_S)
    from_.close()


@pytest.mark.parametrize("started", [False, True])
def test_closing_ends_threads_and_connector_and_may_be_repeated(started: bool) -> None:
    to = adapter(Polled(), extra={"poll_threads": 3})
    if started:
        to.start()
        assert len(to._threads) == 5
    threads = list(to._threads)
    to.close()
    to.close()
    assert not any(thread.is_alive() for thread in threads)
    connector = to.connector
    assert isinstance(connector, Polled)
    assert connector.closed == 2
    to.start()
    assert not to._threads, "what was closed stays closed"
