"""Every kind of fault, seen from a bare socket; and the record of clients that leave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.sim.conftest import image, user
from tests.sim.raw import Raw, chat
from triptych.sim import Fault, MemoryStore, Sim
from triptych.sim.faults import KINDS

STREAM = chat(stream=True)


async def test_status_with_body_and_headers_once() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add({"kind": "status", "status": 503, "body": {"a": 1}, "headers": {"Retry-After": "7"}})
        raw.send(chat())
        status, headers = await raw.head()
        assert (status, headers["retry-after"]) == (503, "7")
        assert await raw.reader.readexactly(int(headers["content-length"])) == b'{"a":1}'
        raw.send(chat())
        assert (await raw.answer())[0] == 200
        assert sim.seen.faults == {"status": 1}


@pytest.mark.parametrize("body", [chat(), STREAM])
async def test_hang_before_the_head(body: Any) -> None:
    async with Sim() as sim:
        sim.faults.add(Fault(kind="hang"))
        async with Raw(sim) as raw:
            raw.send(body)
            await sim.seen.until(lambda: sim.seen.faults["hang"] == 1)
            with pytest.raises(TimeoutError):
                await raw.within(raw.reader.read(1), 0.05)
        await sim.seen.until(lambda: sim.seen.in_flight == 0)
        assert [cancel.moment for cancel in sim.seen.cancels] == ["working"]


async def test_hang_for_a_time_then_answers() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="hang", seconds=0.01))
        raw.send(chat())
        assert (await raw.answer())[0] == 200


async def test_hang_in_the_middle_of_a_body_and_of_an_event() -> None:
    async with Sim() as sim:
        sim.faults.add(Fault(kind="hang_body"), Fault(kind="hang_body", events=2, partial=True))
        async with Raw(sim) as raw:
            raw.send(chat())
            _, headers = await raw.head()
            half = await raw.reader.readexactly(int(headers["content-length"]) // 2)
            assert half.startswith(b'{"id"')
            with pytest.raises(TimeoutError):
                await raw.within(raw.reader.read(1), 0.05)
        async with Raw(sim) as raw:
            raw.send(STREAM)
            await raw.head()
            assert (await raw.chunk()).endswith(b"\n\n")
            assert (await raw.chunk()).endswith(b"\n\n")
            assert not (await raw.chunk()).endswith(b"\n\n")
            with pytest.raises(TimeoutError):
                await raw.within(raw.reader.read(1), 0.05)
        await sim.seen.until(lambda: sim.seen.in_flight == 0)
        assert [(c.moment, c.events) for c in sim.seen.cancels] == [("streaming", 0), ("streaming", 2)]


@pytest.mark.parametrize("body", [chat(), STREAM])
async def test_reset_before_the_head(body: Any) -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="reset"))
        raw.send(body)
        with pytest.raises(ConnectionResetError):
            await raw.rest()


async def test_close_before_the_head() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="close"))
        raw.send(chat())
        assert await raw.rest() == b""


@pytest.mark.parametrize("body", [chat(), STREAM])
async def test_reset_in_the_body(body: Any) -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="reset_body"))
        raw.send(body)
        with pytest.raises(ConnectionResetError):
            await raw.rest()


async def test_garbage_instead_of_http() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="garbage", body="\x00\x01 nonsense"))
        raw.send(chat())
        assert await raw.rest() == b"\x00\x01 nonsense"


async def test_garbage_json_whole_and_in_a_stream() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="garbage_json", count=2))
        for body in (chat(), STREAM):
            raw.send(body)
            status, answer = await raw.answer()
            assert status == 200
            with pytest.raises(json.JSONDecodeError):
                json.loads(answer)


async def test_cut_body_ends_early_and_cleanly() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="cut"))
        raw.send(chat())
        _, headers = await raw.head()
        assert len(await raw.rest()) == int(headers["content-length"]) // 2


@pytest.mark.parametrize("partial", [False, True])
async def test_cut_stream_has_whole_events_and_perhaps_a_partial_tail(partial: bool) -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="cut", events=3, partial=partial))
        raw.send(STREAM)
        await raw.head()
        rest = await raw.rest()
    assert rest.count(b"\n\n") == 3
    assert not rest.endswith(b"0\r\n\r\n")
    assert rest.endswith(b"\n\n\r\n") is not partial


async def test_stream_that_ends_without_its_end_mark() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="end", events=2))
        raw.send(STREAM)
        await raw.head()
        frames = await raw.chunks()
    assert frames.count(b"\n\n") == 2
    assert b"[DONE]" not in frames


@pytest.mark.parametrize("kind", ["slow_first_byte", "slow_body"])
@pytest.mark.parametrize("body", [chat(), STREAM])
async def test_slow_head_or_body(kind: Any, body: Any) -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind=kind, seconds=0.2))
        loop = asyncio.get_running_loop()
        start = loop.time()
        raw.send(body)
        _, headers = await raw.head()
        to_head = loop.time() - start
        await (raw.chunks() if "content-length" not in headers else raw.reader.read(1))
        assert (to_head >= 0.2) is (kind == "slow_first_byte")
        assert loop.time() - start >= 0.2


@pytest.mark.parametrize("body", [chat(), STREAM])
async def test_trickle_sends_everything_in_small_pieces(body: Any) -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="trickle", chunk=100, seconds=0.0))
        raw.send(body)
        if body is STREAM:
            await raw.head()
            assert len(await raw.chunk()) == 100
            assert b"[DONE]" in await raw.chunks()
        else:
            assert json.loads((await raw.answer())[1])["object"] == "chat.completion"


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1])
async def test_oversize_body_is_exactly_as_long_as_asked_and_still_whole(size: int) -> None:
    async with Sim(role="encode", ec="example", ec_dir=MemoryStore()) as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="oversize", size=size))
        raw.send({"messages": user(image("AA"))})
        _, body = await raw.answer()
    assert len(body) == size
    assert json.loads(body)["ec_transfer_params"]


async def test_oversize_event() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="oversize", size=100_000))
        raw.send(STREAM)
        await raw.head()
        frames = (await raw.chunks()).split(b"\n\n")
    assert max(map(len, frames)) + 2 == 100_000
    assert frames[-2] == b"data: [DONE]"


@pytest.mark.parametrize("by", [10, -10])
async def test_wrong_content_length(by: int) -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="wrong_length", size=by))
        raw.send(chat())
        _, headers = await raw.head()
        assert int(headers["content-length"]) - len(await raw.rest()) == by


async def test_broken_chunking() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="wrong_length"))
        raw.send(STREAM)
        await raw.head()
        assert (await raw.rest()).endswith(b"not a chunk size\r\n")


async def test_error_event_in_a_stream_then_done() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="sse_error", events=3, message="no more"))
        raw.send(STREAM)
        await raw.head()
        frames = (await raw.chunks()).split(b"\n\n")
    assert len(frames) == 6
    assert json.loads(frames[3].removeprefix(b"data: "))["error"]["message"] == "no more"
    assert frames[4] == b"data: [DONE]"


async def test_error_event_of_messages_and_the_broken_stream_of_responses() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="sse_error", events=3, count=2))
        raw.send({"model": "sim", "max_tokens": 5, "stream": True, "messages": chat()["messages"]}, "/v1/messages")
        await raw.head()
        frames = (await raw.chunks()).split(b"\n\n")
        assert frames[-2].startswith(b"event: error\ndata: ")
        assert not any(b"message_stop" in frame for frame in frames)
        raw.send({"input": "hi", "stream": True}, "/v1/responses")
        await raw.head()
        assert not (await raw.rest()).endswith(b"0\r\n\r\n")


async def test_close_after_a_whole_answer_says_nothing() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="close_after"))
        raw.send(chat())
        _, headers = await raw.head()
        assert "connection" not in headers
        assert len(await raw.rest()) == int(headers["content-length"])


async def test_idle_connections_can_be_closed_and_busy_ones_stay() -> None:
    async with Sim() as sim, Raw(sim) as idle, Raw(sim) as busy:
        sim.faults.add(Fault(kind="hang"))
        busy.send(chat())
        await sim.seen.until(lambda: sim.seen.faults["hang"] == 1)
        idle.send(chat())
        await idle.answer()
        await sim.seen.until(lambda: sim.seen.in_flight == 1)
        assert sim.close_idle() == 1
        assert await idle.rest() == b""
        assert sim.connections == 1


async def test_die_cuts_this_request_and_refuses_the_next() -> None:
    async with Sim() as sim:
        sim.faults.add(Fault(kind="die"))
        async with Raw(sim) as raw:
            raw.send(chat())
            assert await raw.rest() == b""
        await asyncio.wait_for(sim.died.wait(), 5)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", sim.port)
        await sim.start()
        async with Raw(sim) as raw:
            raw.send(chat())
            assert (await raw.answer())[0] == 200


async def test_one_rule_given_to_two_engines_counts_down_in_each() -> None:
    rule = Fault(kind="status", status=418)
    async with Sim() as one, Sim() as two:
        for sim in (one, two):
            sim.faults.add(rule)
        for sim in (one, two):
            async with Raw(sim) as raw:
                raw.send(chat())
                assert (await raw.answer())[0] == 418


async def test_killed_engine_cuts_what_runs() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add(Fault(kind="hang_body"))
        raw.send(STREAM)
        await raw.head()
        await raw.chunk()
        await sim.kill()
        assert await raw.rest() == b""
        assert sim.died.is_set()
        assert sim.seen.cancels == []


async def test_dead_engine_that_stays_up_is_unhealthy() -> None:
    async with Sim(death="500") as sim, Raw(sim) as raw:
        raw.send(b"", "/health", "GET")
        assert await raw.answer() == (200, b"")
        sim.engine.die("test")
        raw.send(b"", "/health", "GET")
        assert await raw.answer() == (503, b"")
        raw.send(chat())
        assert (await raw.answer())[0] == 500


@pytest.mark.parametrize(
    ("condition", "hit"),
    [
        ({"path": "/v1/chat/completions"}, True),
        ({"path": "/v1/*"}, True),
        ({"path": "/v1/completions"}, False),
        ({"leg": "-enc0"}, True),
        ({"leg": "-enc1"}, False),
        ({"stream": False}, True),
        ({"stream": True}, False),
        ({"item": 0}, True),
        ({"item": 1}, False),
        ({"skip": 1}, False),
        ({"count": 0}, True),
    ],
)
async def test_conditions(condition: dict[str, Any], hit: bool) -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add({"kind": "status", "status": 418} | condition)
        raw.send({"messages": user(image("AA"))}, headers={"x-request-id": "abc-enc0"})
        assert ((await raw.answer())[0] == 418) is hit


async def test_item_condition_counts_the_items_of_all_requests_and_knows_digests() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        sim.faults.add({"kind": "status", "status": 418, "item": 2})
        statuses = []
        for payload in ("AA", "BB", "CC", "DD"):
            raw.send({"messages": user(image(payload))})
            statuses.append((await raw.answer())[0])
        assert statuses == [200, 200, 418, 200]
        content = next(iter(sim.seen.encodes))
        sim.faults.add({"kind": "status", "status": 418, "item": content})
        raw.send({"messages": user(image("BB"))})
        assert (await raw.answer())[0] == 200
        raw.send({"messages": user(image("AA"))})
        assert (await raw.answer())[0] == 418


@pytest.mark.parametrize("stream", [False, True])
async def test_fault_after_the_work_leaves_the_blocks_pinned(stream: bool) -> None:
    async with Sim(role="prefill") as sim, Raw(sim) as raw:
        sim.faults.add({"kind": "reset", "after_work": True})
        raw.send(chat(kv_transfer_params={"do_remote_decode": True}, stream=stream))
        with pytest.raises(ConnectionResetError):
            await raw.rest()
        assert sim.pinned == 1


async def test_faults_over_http_and_back_off() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        raw.send([{"kind": "status", "status": 500, "count": None}], "/sim/faults")
        assert (await raw.answer())[0] == 200
        for _ in range(3):
            raw.send(chat())
            assert (await raw.answer())[0] == 500
        raw.send(b"", "/sim/faults", "DELETE")
        await raw.answer()
        raw.send(chat())
        assert (await raw.answer())[0] == 200
        for bad in ([{"kind": "nope"}], [{"kind": "hang", "sec": 1}], [7]):
            raw.send(bad, "/sim/faults")
            status, answer = await raw.answer()
            assert status == 400
            assert json.loads(answer)["error"]["message"]
        assert sim.faults.rules == []


def test_every_kind_is_tried_above() -> None:
    source = Path(__file__).read_text()
    assert [kind for kind in KINDS if f'"{kind}"' not in source] == []


async def test_counters_over_http() -> None:
    async with Sim(keep_bodies=1) as sim, Raw(sim) as raw:
        raw.send(chat("one"))
        await raw.answer()
        raw.send(chat("two"), headers={"x-request-id": "r2"})
        await raw.answer()
        raw.send(b"", "/sim/seen?bodies", "GET")
        seen = json.loads((await raw.answer())[1])
        assert seen["requests"] == {"/v1/chat/completions": 2}
        assert (seen["in_flight"], seen["max_in_flight"]) == (0, 1)
        assert len(seen["body_digests"]) == 1
        (kept,) = seen["bodies"]
        assert json.loads(kept["body"]) == chat("two")
        assert ["x-request-id", "r2"] in kept["headers"]
        raw.send(b"", "/sim/reset", "POST")
        await raw.answer()
        assert sim.seen.requests == {}
        raw.send(b"", "/sim/nope", "GET")
        assert (await raw.answer())[0] == 404


# --- clients that leave ---------------------------------------------------------------------------------------------


async def test_client_that_leaves_during_the_upload_is_recorded() -> None:
    async with Sim() as sim:
        async with Raw(sim) as raw:
            raw.writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: r\r\ncontent-length: 9\r\n\r\n{"
            )
            await sim.seen.until(lambda: sim.seen.in_flight == 1)
        await sim.seen.until(lambda: sim.seen.in_flight == 0)
        (cancel,) = sim.seen.cancels
    assert (cancel.path, cancel.request_id, cancel.moment) == ("/v1/chat/completions", "r", "upload")


async def test_client_that_leaves_while_the_engine_works_or_streams_is_recorded() -> None:
    async with Sim(costs={"request": 60}) as sim:
        async with Raw(sim) as raw:
            raw.send(chat())
            await sim.seen.until(lambda: sim.seen.in_flight == 1)
        await sim.seen.until(lambda: sim.seen.in_flight == 0)
        assert sim.seen.cancels[0].moment == "working"
    async with Sim(costs={"token": 60}) as sim:
        async with Raw(sim) as raw:
            raw.send(STREAM)
            await raw.head()
            await raw.chunk()
        await sim.seen.until(lambda: sim.seen.in_flight == 0)
        (cancel,) = sim.seen.cancels
    assert cancel.moment == "streaming"
    assert cancel.events == 1


async def test_costs_add_up() -> None:
    costs = {"request": 0.05, "item": 0.05, "token": 0.025, "prompt_token": 0.0005}
    async with Sim(costs=costs) as sim, Raw(sim) as raw:
        loop = asyncio.get_running_loop()
        start = loop.time()
        raw.send({"messages": user(image("AA"), image("BB")), "max_tokens": 4})
        await raw.answer()
        assert loop.time() - start >= 0.05 + 2 * 0.05 + 4 * 0.025


async def test_max_in_flight() -> None:
    async with Sim() as sim, Raw(sim) as one, Raw(sim) as two:
        sim.faults.add(Fault(kind="hang", count=None))
        one.send(chat())
        two.send(chat())
        await sim.seen.until(lambda: sim.seen.in_flight == 2)
    assert (sim.seen.in_flight, sim.seen.max_in_flight) == (0, 2)
