"""Chunks over TCP between two connectors: what arrives, in which order, and how streams end."""

from __future__ import annotations

import random
import socket
import threading
from typing import Any

import pytest

from tests.transfer.connectors.tcp_rig import SECRET, End, end, pair, until
from triptych.transfer.connectors.base import Mark
from triptych.transfer.connectors.tcp import TcpConnector
from triptych.transfer.errors import BrokenStream, ClosedError, ConnectorError, EndOfStream, WouldBlock
from triptych.transfer.wire import Tensor

LAST = Mark(0, True)


BLOB = random.Random(7).randbytes(65_521)


def tensor(size: int, seed: int = 0) -> dict[str, Any]:
    return {"codes": {"audio": Tensor("uint8", (size,), (BLOB[seed:] + BLOB * (size // len(BLOB) + 1))[:size])}}


def content(obj: Any) -> bytes:
    return bytes(obj["codes"]["audio"].buffer)


def test_a_chunk_arrives_at_whoever_watches_the_replica_that_metadata_names() -> None:
    with pair() as (sender, receiver):
        metadata = sender.put("r_0_0", {"a": 1})
        assert set(metadata) == {"source_host", "source_port"}
        receiver.watch("r_0", metadata)
        receiver.told.wait("ready", "r_0")
        assert receiver.get("r_0_0", metadata) == {"a": 1}
        assert receiver.get("r_0_0", metadata) is None  # once
        sender.put("r_0_1", {"a": 2}, mark=LAST)
        assert receiver.take("r_0_1") == {"a": 2}
        with pytest.raises(EndOfStream):
            receiver.get("r_0_2")
        until(lambda: not sender.connector._pending_keys, "consumption to be told")


def test_a_watch_may_come_long_before_its_chunk_and_its_sender() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with end(1, peers={"0": [f"127.0.0.1:{port}"]}) as receiver:
        receiver.watch("r_0")
        until(lambda: any(d.failures >= 2 for d in receiver.connector._dialers.values()), "two failed attempts")
        with end(0, port=port) as sender:
            sender.put("r_0_0", "at last")
            assert receiver.take("r_0_0") == "at last"


def test_a_get_without_a_watch_asks_the_replica_and_waits_for_its_answer() -> None:
    with pair() as (sender, receiver):
        metadata = sender.put("r_0_0", {"a": 1})
        assert receiver.get("r_0_0", metadata) == {"a": 1}
        assert receiver.get("nothing_0_0", metadata) is None


def test_a_name_is_resolved_without_keeping_the_caller_waiting() -> None:
    with pair() as (sender, receiver):
        metadata = {**sender.put("r_0_0", "x"), "source_host": "localhost"}
        receiver.watch("r_0", metadata)
        assert receiver.take("r_0_0") == "x"


def test_a_get_without_a_watch_waits_for_a_name_to_be_resolved() -> None:
    with pair() as (sender, receiver):
        metadata = {**sender.put("r_0_0", "x"), "source_host": "localhost"}
        assert receiver.get("r_0_0", metadata) == "x"


def test_whoever_put_a_chunk_may_take_it_itself() -> None:
    with end(0) as sender:
        sender.put("r_0_0", {"a": 1})
        assert sender.connector.get("0", "1", "r_0_0") == ({"a": 1}, 4)
        assert not sender.connector._pending_keys


@pytest.mark.parametrize("size", [0, 1, 1000, 65_000, 262_144, 262_145, 3_000_000, 20_000_000])
def test_tensors_of_any_size_arrive_in_memory_of_their_own(size: int) -> None:
    with pair() as (sender, receiver):
        obj = tensor(size)
        metadata = sender.put("r_0_0", obj)
        receiver.watch("r_0", metadata)
        found = receiver.take("r_0_0")
        assert content(found) == content(obj)
        assert not size or not found["codes"]["audio"].buffer.readonly


@pytest.mark.parametrize("stream", ["a/b/../c_0", "x" * 1000 + "_0", "日本語 🎵_0", "\udcff\n\0_0", "", "_"])
def test_any_text_is_a_stream_s_name(stream: str) -> None:
    with pair() as (sender, receiver):
        metadata = sender.put(f"{stream}_0", "hello")
        receiver.watch(stream, metadata)
        assert receiver.take(f"{stream}_0") == "hello"


def test_64_streams_at_once_keep_their_chunks_apart_and_in_order() -> None:
    with pair() as (sender, receiver):
        metadata = sender.where()
        names = [f"request-{i}_0" for i in range(64)]
        for name in names:
            receiver.watch(name, metadata)

        def send() -> None:
            numbers = dict.fromkeys(names, 0)
            rng = random.Random(1)
            able = set(names)
            told = 0
            while left := {name for name in names if numbers[name] < 12}:
                if not able & left:
                    sender.told.wait("writable", count=told + 1)
                writable = [entry[1] for entry in list(sender.told.log) if entry[0] == "writable"]
                able.update(writable[told:])
                told = len(writable)
                name = rng.choice(sorted(able & left or left))
                number = numbers[name]
                obj = {"name": name, "n": number, **tensor(rng.choice([10, 10_000, 300_000]), number)}
                try:
                    sender.put(f"{name}_{number}", obj, mark=Mark(0, number == 11))
                    numbers[name] += 1
                except WouldBlock:
                    able.discard(name)

        thread = threading.Thread(target=send)
        thread.start()
        for number in range(12):
            for name in names:
                found = receiver.take(f"{name}_{number}")
                assert (found["name"], found["n"]) == (name, number)
                size = len(found["codes"]["audio"].buffer)
                assert content(found) == content(tensor(size, number))
        thread.join(10)
        assert not thread.is_alive()
        until(lambda: sender.connector.statistics().sending == 0, "streams to end")
        assert sender.connector.statistics().bytes_held == 0
        assert receiver.connector.statistics().watching == 0


def test_a_stalled_stream_runs_out_of_credit_and_its_neighbours_go_on() -> None:
    with pair(credit_chunks=4) as (sender, receiver):
        metadata = sender.where()
        receiver.watch("stalled_0", metadata)
        receiver.watch("lively_0", metadata)
        for number in range(4):
            sender.put(f"stalled_0_{number}", tensor(1_000_000))
        with pytest.raises(WouldBlock):
            sender.put("stalled_0_4", tensor(10))
        for number in range(50):
            sender.put(f"lively_0_{number}", {"n": number})
            assert receiver.take(f"lively_0_{number}") == {"n": number}
        assert sender.told.count("writable", "stalled_0") == 0
        for number in range(4):
            assert content(receiver.take(f"stalled_0_{number}")) == content(tensor(1_000_000))
        sender.told.wait("writable", "stalled_0")
        sender.put("stalled_0_4", tensor(10))


def test_a_small_chunk_overtakes_another_stream_s_large_ones() -> None:
    with pair(credit_bytes=1 << 30, buffer_bytes=1 << 30) as (sender, receiver):
        metadata = sender.where()
        receiver.watch("large_0", metadata)
        receiver.watch("small_0", metadata)
        sender.put("warm_0_0", 1)
        for number in range(3):
            sender.put(f"large_0_{number}", tensor(48 << 20))
        sender.put("small_0_0", "quick")
        receiver.told.wait("ready", "small_0")
        assert receiver.told.count("ready", "large_0") < 3


def test_a_failed_stream_gives_what_was_put_before_and_then_the_reason() -> None:
    with pair() as (sender, receiver):
        metadata = sender.put("r_0_0", "before")
        receiver.watch("r_0", metadata)
        receiver.told.wait("ready", "r_0")
        sender.connector.fail("0", "1", "r_0", "the processor raised")
        assert receiver.take("r_0_0") == "before"
        error = receiver.end_of("r_0_1")
        assert isinstance(error, BrokenStream)
        assert "the processor raised" in str(error)
        assert "stage 0 at 127.0.0.1" in str(error)


def test_a_sender_hears_that_its_consumer_has_stopped_and_why() -> None:
    with pair() as (sender, receiver):
        metadata = sender.put("r_0_0", "x")
        receiver.watch("r_0", metadata)
        receiver.take("r_0_0")
        receiver.connector.unwatch("r_0", "the client went away")
        assert "the client went away" in sender.told.wait("stopped", "r_0")[2]
        with pytest.raises(BrokenStream, match="the client went away"):
            sender.put("r_0_1", "y")


def test_a_stream_that_is_left_in_the_middle_of_a_large_chunk_gives_all_memory_back() -> None:
    with pair(buffer_bytes=64 << 20) as (sender, receiver):
        metadata = sender.where()
        for turn in range(5):
            receiver.watch(f"r{turn}_0", metadata)
            sender.put(f"r{turn}_0_0", tensor(40 << 20))
            receiver.connector.unwatch(f"r{turn}_0", "no more")
            until(lambda: sender.connector.statistics().bytes_held == 0, "memory to come back")
        receiver.watch("last_0", metadata)
        sender.put("last_0_0", "still there")
        assert receiver.take("last_0_0") == "still there"
        (link,) = receiver.connector._links
        assert link._joiner.lanes == 1  # type: ignore[attr-defined]


def test_a_name_that_is_used_again_never_gives_chunks_of_its_earlier_use() -> None:
    with pair() as (sender, receiver):
        metadata = sender.put("r_0_0", "old", mark=Mark(1))
        receiver.watch("r_0", metadata)
        assert receiver.take("r_0_0") == "old"
        sender.put("r_0_0", "new", mark=Mark(2))
        assert isinstance(receiver.end_of("r_0_1"), BrokenStream)
        receiver.connector.unwatch("r_0")
        receiver.watch("r_0", metadata)
        assert receiver.take("r_0_0") == "new"


def test_two_replicas_of_a_stage_each_send_their_own_streams() -> None:
    with end(0) as first, end(0) as second:
        places = [f"127.0.0.1:{e.where()['source_port']}" for e in (first, second)]
        with end(1, peers={"0": places}) as receiver:
            receiver.watch("a_0")
            receiver.watch("b_0")
            first.put("a_0_0", 1)
            second.put("b_0_0", 2)
            assert receiver.take("a_0_0") == 1
            assert receiver.take("b_0_0") == 2


def test_a_watch_that_names_one_replica_is_not_for_another() -> None:
    with end(0) as first, end(0) as second, end(1) as receiver:
        first.put("r_0_0", "the wrong one")
        metadata = second.where()
        assert receiver.get("x_0_0", first.where()) is None  # both are connected
        receiver.watch("r_0", metadata)
        second.put("r_0_0", "the right one")
        assert receiver.take("r_0_0") == "the right one"


def test_a_stage_in_the_middle_receives_and_sends_with_one_connector() -> None:
    with end(0) as first, end(1) as middle, end(2) as last:
        middle.watch("r_0", first.put("r_0_0", [1]))
        metadata = middle.put("r_1_0", [*middle.take("r_0_0"), 2])
        last.watch("r_1", metadata)
        assert last.take("r_1_0") == [1, 2]


def test_an_idle_connector_does_not_wake_up() -> None:
    with pair() as (sender, receiver):
        metadata = sender.where()
        for i in range(200):
            receiver.watch(f"idle-{i}_0", metadata)
        inbound = receiver.connector._inbound
        until(lambda: not any(s.asked or not s.told for s in inbound.watched()), "the sender's answers")
        turns = 0
        original = receiver.connector._loop._turn

        def count() -> None:
            nonlocal turns
            turns += 1
            original()

        receiver.connector._loop._turn = count
        # Time for anything that polls to show itself: there is no event for nothing happening.
        threading.Event().wait(0.3)
        assert turns <= 2


# -- options


def test_without_a_secret_it_stays_on_the_loopback_interface_and_says_what_to_do() -> None:
    for config in ({"host": "0.0.0.0"}, {"host": "192.0.2.1"}, {"peers": {"0": ["192.0.2.1:7000"]}}):
        with pytest.raises(ConnectorError, match="TRIPTYCH_TRANSFER_SECRET"):
            TcpConnector(config)
    with end(1) as receiver, pytest.raises(ConnectorError, match=r"192\.0\.2\.1 is not this machine"):
        receiver.watch("r_0", {"source_host": "192.0.2.1", "source_port": 7000})


def test_a_host_that_stands_for_all_needs_one_to_connect_to() -> None:
    with end(0, host="0.0.0.0", secret=SECRET) as sender, pytest.raises(ConnectorError, match="advertise"):
        sender.put("r_0_0", 1)
    with (
        end(0, host="0.0.0.0", advertise="127.0.0.1", secret=SECRET) as sender,
        end(1, secret=SECRET) as receiver,
    ):
        receiver.watch("r_0", sender.put("r_0_0", 1))
        assert receiver.take("r_0_0") == 1


def test_ipv6() -> None:
    with end(0, host="::1") as sender:
        port = sender.where()["source_port"]
        with end(1, peers={"0": [f"[::1]:{port}"]}) as receiver:
            receiver.watch("r_0")
            sender.put("r_0_0", 1)
            assert receiver.take("r_0_0") == 1


def test_a_watch_for_a_stage_that_nobody_knows_the_place_of_is_refused_at_once() -> None:
    with end(1) as receiver, pytest.raises(ConnectorError, match="nobody knows where stage 0 is"):
        receiver.watch("r_0")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"port": 70000}, "port"),
        ({"port": True}, "port"),
        ({"secret": "short"}, "16 characters"),
        ({"peers": ["127.0.0.1:1"]}, "peers"),
        ({"peers": {"0": ["127.0.0.1"]}}, "127.0.0.1"),
        ({"peers": {"0": ["::1:70"]}}, "IPv6"),
        ({"peers": {"0": ["[::1]:0"]}}, "no port"),
        ({"peers": {"0": 7}}, "peers"),
        ({"deployment": "x" * 300}, "deployment"),
        ({"tls": {"certificate": "x"}}, "tls"),
        ({"tls": {"cert": "/nowhere", "key": "/nowhere"}}, "is not a file"),
        ({"credit_chunks": 0}, "credit_chunks"),
        ({"tensors": "numpy"}, "tensors"),
        ({"silence_s": 0}, "silence_s"),
    ],
)
def test_an_option_that_cannot_be_is_named(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ConnectorError, match=why):
        TcpConnector(config)


def test_a_port_that_is_taken_is_said_at_the_start() -> None:
    with end(0) as sender, pytest.raises(ConnectorError, match="cannot listen at"):
        TcpConnector({"port": sender.where()["source_port"]})


def test_the_secret_is_not_in_what_a_connector_shows_of_itself() -> None:
    with end(0, secret=SECRET, extra={"secret": SECRET, "role": "sender"}) as sender:
        shown = f"{sender.connector!r} {sender.connector.config!r} {vars(sender.connector)!r}"
        assert SECRET not in shown
        assert sender.connector.config["extra"]["role"] == "sender"


def test_after_close_everything_says_so_and_nothing_is_left() -> None:
    with pair() as (sender, receiver):
        receiver.watch("r_0", sender.put("r_0_0", "x"))
        receiver.told.wait("ready", "r_0")
        before = threading.active_count()
        for made in (sender, receiver):
            made.connector.close()
            made.connector.close()
        assert threading.active_count() == before - 2
        for call in (lambda: sender.put("r_0_1", 1), lambda: receiver.get("r_0_0"), lambda: receiver.watch("r_0")):
            with pytest.raises(ClosedError):
                call()
        for made in (sender, receiver):
            found = made.connector.statistics()
            assert (found.sending, found.bytes_held, found.peers) == (0, 0, 0)


def test_a_connector_sends_for_one_stage() -> None:
    with end(0) as sender:
        sender.put("r_0_0", 1)
        with pytest.raises(ConnectorError, match="one stage"):
            sender.connector.put("3", "4", "r_3_0", 1)


@pytest.mark.parametrize("count", [1500, pytest.param(10_000, marks=pytest.mark.soak)])
def test_streams_that_are_over_leave_nothing_behind(count: int) -> None:
    def run(sender: End, receiver: End, metadata: dict[str, Any], first: int, count: int) -> None:
        for i in range(first, first + count):
            name = f"r{i}_0"
            receiver.watch(name, metadata)
            sender.put(f"{name}_0", i, mark=Mark(0, i % 3 != 0))
            if i % 3:
                assert receiver.take(f"{name}_0") == i
            else:
                receiver.connector.unwatch(name, "enough")
                sender.told.wait("stopped", name)
                sender.connector.fail("0", "1", name, "as told")
            receiver.told.log.clear()
            sender.told.log.clear()

    with pair() as (sender, receiver):
        metadata = sender.put("first_0_0", "connected", mark=LAST)
        receiver.watch("first_0", metadata)
        receiver.take("first_0_0")
        run(sender, receiver, metadata, 0, count)
        until(lambda: sender.connector.statistics().sending == 0, "streams to end")
        assert sender.connector.statistics() == (0, 0, 0, 1)
        assert receiver.connector.statistics() == (0, 0, 0, 1)
        (link,) = receiver.connector._links
        assert link._joiner.lanes == 0  # type: ignore[attr-defined]
        (link,) = sender.connector._links
        assert not link._cutter  # type: ignore[attr-defined]
        assert not link.watches
