"""The connector between instances of one process: the contract of `StreamConnector`, over real sockets and memory."""

from __future__ import annotations

import contextlib
import gc
import os
import threading

import pytest

from tests.transfer.connectors.rig import Bench, take, until
from triptych.transfer.connectors import hub
from triptych.transfer.connectors.base import Mark
from triptych.transfer.connectors.shm import SharedMemoryConnector
from triptych.transfer.connectors.sockets import BELL, SENDER, Folder
from triptych.transfer.errors import (
    BrokenStream,
    ClosedError,
    ConnectorError,
    EndOfStream,
    WireError,
    WouldBlock,
)
from triptych.transfer.wire import Frames, Tensor

SIZES = (10, 5000, 100_000, 3_000_000)


def blob(size: int, fill: int = 7) -> dict[str, object]:
    return {"codes": Tensor("uint8", (size,), bytes([fill]) * size)}


def content(found: object) -> bytes:
    assert isinstance(found, dict)
    return bytes(found["codes"].buffer)


def put(connector: SharedMemoryConnector, key: str, data: object, generation: int = 1, *, last: bool = False) -> int:
    done, nbytes, _ = connector.put("0", "1", key, data, Mark(generation, last))
    assert done
    return nbytes


# --- chunks


@pytest.mark.parametrize("size", SIZES)
def test_a_chunk_arrives_as_it_was_put(bench: Bench, size: int) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    receiver.watch("0", "1", "s")
    nbytes = put(sender, "s_0", blob(size), last=True)
    assert nbytes > size
    assert content(take(receiver, events, "s_0")) == bytes([7]) * size


@pytest.mark.parametrize("size", SIZES)
def test_chunks_from_before_the_watch_arrive_in_order(bench: Bench, size: int) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    for n in range(4):
        put(sender, f"s_{n}", blob(size, n), last=n == 3)
    receiver.watch("0", "1", "s")
    for n in range(4):
        assert content(take(receiver, events, f"s_{n}")) == bytes([n]) * size
    with pytest.raises(EndOfStream, match="4 chunks"):
        receiver.get("0", "1", "s_4")


def test_a_sender_that_comes_later_than_the_watch_is_found(bench: Bench) -> None:
    receiver, events = bench.told(1)
    receiver.watch("0", "1", "s")
    put(bench.make(), "s_0", "late")
    assert take(receiver, events, "s_0") == "late"


def test_a_get_without_a_watch_asks_and_takes_once(bench: Bench) -> None:
    sender, receiver = bench.make(), bench.make(1)
    assert sender.put("0", "1", "plain", "value")[0]
    assert sender._pending_keys == {"plain"}
    assert receiver.get("0", "1", "plain") == ("value", 6)
    sender.reap()
    assert not sender._pending_keys
    assert sender.get("0", "1", "plain") is None
    assert bench.make(1).get("0", "1", "plain") is None


def test_a_get_of_what_is_not_there_leaves_it_to_others(bench: Bench) -> None:
    sender, first, second = bench.make(), bench.make(1), bench.make(1)
    put(sender, "other_0", 1)
    assert first.get("0", "1", "s_0") is None
    put(sender, "s_0", "for the second")
    assert second.get("0", "1", "s_0") == ("for the second", 15)


def test_a_get_where_there_is_no_sender_at_all_does_not_wait(bench: Bench) -> None:
    assert bench.make(1).get("0", "1", "s_0") is None


def test_the_owner_can_take_its_own_chunks(bench: Bench) -> None:
    sender = bench.make(inline_bytes=100)
    for n, size in enumerate((10, 5000)):
        put(sender, f"s_{n}", blob(size), last=n == 1)
        found = sender.get("0", "1", f"s_{n}")
        assert found is not None
        assert content(found[0]) == bytes([7]) * size
        assert sender.get("0", "1", f"s_{n}") is None
    assert sender.statistics().sending == 0
    assert sender.statistics().bytes_held == 0


@pytest.mark.parametrize(
    "name", ["a/b", "../../etc/passwd", "x" * 1000, "名前 ☃", "", "with\nline\0null", "\udc80", "a_1_2"]
)
def test_any_id_is_legal(bench: Bench, name: str) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    receiver.watch("0", "1", name)
    put(sender, f"{name}_0", "here", last=True)
    assert take(receiver, events, f"{name}_0") == "here"


def test_two_deployments_never_meet(bench: Bench) -> None:
    put(bench.make(deployment="one"), "s_0", 1)
    assert bench.make(1, deployment="two").get("0", "1", "s_0") is None
    assert bench.make(1, deployment="one").get("0", "1", "s_0") == (1, 1)


def test_only_the_replica_that_was_named_is_asked(bench: Bench) -> None:
    one, two, receiver = bench.make(port=5001), bench.make(port=5002), bench.make(1)
    put(one, "s_0", "one")
    put(two, "s_0", "two")
    found = receiver.get("0", "1", "s_0", {"source_host": "here", "source_port": 5002})
    assert found == ("two", 4)
    assert one._pending_keys == {"s_0"}


def test_one_of_two_senders_with_the_same_name_keeps_its_own(bench: Bench) -> None:
    one, two, (receiver, events) = bench.make(), bench.make(), bench.told(1)
    put(one, "s_0", "x", last=True)
    put(two, "s_0", "x", last=True)
    receiver.watch("0", "1", "s")
    take(receiver, events, "s_0")
    until(lambda: one.reap() or two.reap() or len(one._pending_keys) + len(two._pending_keys) == 1, "one was taken")
    assert bench.make(1).get("0", "1", "s_0") == ("x", 2)


def test_a_chunk_that_does_not_decode_is_a_wire_error_and_is_consumed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = bench.make(), bench.make(1)
    monkeypatch.setattr(hub, "encode", lambda obj: Frames(b"\xc1" * 9000, []))
    put(sender, "s_0", None)
    monkeypatch.undo()
    with pytest.raises(WireError, match="does not decode"):
        receiver.get("0", "1", "s_0")
    assert receiver.get("0", "1", "s_0") is None
    until(lambda: sender.reap() or sender.statistics().bytes_held == 0, "its memory comes back")


def test_what_has_no_wire_form_is_refused_and_nothing_is_left(bench: Bench) -> None:
    sender = bench.make()
    with pytest.raises(WireError, match="no wire form"):
        put(sender, "s_0", object())
    assert sender.statistics().sending == 0


def test_a_number_that_is_not_the_next_is_the_callers_fault(bench: Bench) -> None:
    sender = bench.make()
    put(sender, "s_0", 1)
    for number in (0, 2):
        with pytest.raises(ConnectorError, match=f"chunk {number} .* where 1 is due"):
            put(sender, f"s_{number}", 1)
    with pytest.raises(BrokenStream, match="not open"):
        put(sender, "t_3", 1)


# --- memory


def test_a_tensor_is_read_in_place_until_its_last_view_is_gone(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    receiver.watch("0", "1", "s")
    put(sender, "s_0", blob(1 << 20), last=True)
    found = take(receiver, events, "s_0")
    view = found["codes"].buffer[100:200]
    until(lambda: sender.reap() or not sender._pending_keys, "it is consumed")
    del found
    gc.collect()
    assert sender.statistics().bytes_held >= 1 << 20
    view[:3] = b"mad"  # a reader's own affair
    assert bytes(view) == b"mad" + bytes([7]) * 97
    del view
    until(lambda: sender.statistics().bytes_held == 0, "the memory comes back")


def test_what_a_reader_wrote_is_not_in_the_next_chunk(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    receiver.watch("0", "1", "s")
    for n in range(3):
        put(sender, f"s_{n}", blob(50_000, n))
        found = take(receiver, events, f"s_{n}")
        assert content(found) == bytes([n]) * 50_000
        found["codes"].buffer[:] = b"\xff" * 50_000
        del found
        until(lambda: sender.statistics().bytes_held == 0, "the memory comes back")


def test_a_reader_that_keeps_everything_gets_copies_before_it_can_starve_the_sender(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(arena_bytes=1 << 20), bench.told(1)
    receiver.watch("0", "1", "s")
    kept = []
    for n in range(40):
        put(sender, f"s_{n}", blob(100_000, n))
        kept.append(take(receiver, events, f"s_{n}"))
        until(lambda: sender.reap() or not sender._pending_keys, "it is consumed")
        until(lambda: sender.statistics().bytes_held < 300_000, "copied chunks come back")
    assert [content(found) for found in kept] == [bytes([n]) * 100_000 for n in range(40)]


def test_memory_outlives_its_sender_for_as_long_as_it_is_read(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    put(sender, "s_0", blob(1 << 20), last=True)
    receiver.watch("0", "1", "s")
    events.wait("ready", "s")
    sender.close()
    found = receiver.get("0", "1", "s_0")
    assert found is not None
    assert content(found[0]) == bytes([7]) * (1 << 20)


# --- credit


def test_a_stream_without_credit_would_block_and_is_told_when_it_has_some(bench: Bench) -> None:
    (sender, told), (receiver, events) = bench.told(credit_chunks=2), bench.told(1)
    put(sender, "s_0", 0)
    put(sender, "s_1", 1)
    with pytest.raises(WouldBlock, match="2 chunks of 's' are not consumed"):
        put(sender, "s_2", 2)
    put(sender, "t_0", "a neighbour goes on")
    receiver.watch("0", "1", "s")
    take(receiver, events, "s_0")
    told.wait("writable", "s")
    put(sender, "s_2", 2)


def test_bytes_are_credit_too_and_come_back_with_the_memory(bench: Bench) -> None:
    (sender, told), (receiver, events) = bench.told(credit_bytes=150_000), bench.told(1)
    put(sender, "s_0", blob(100_000))
    with pytest.raises(WouldBlock, match="bytes of 's' are not given back"):
        put(sender, "s_1", blob(100_000))
    receiver.watch("0", "1", "s")
    take(receiver, events, "s_0")
    told.wait("writable", "s")
    put(sender, "s_1", blob(100_000))


def test_stalled_streams_however_many_leave_room_for_the_others(bench: Bench) -> None:
    sender = bench.make(arena_bytes=4 << 20)
    for stalled in range(12):
        fill(sender, f"stalled{stalled}")
    put(sender, "neighbour_0", blob(100_000))


def fill(sender: SharedMemoryConnector, stream: str) -> None:
    """Put until there is no credit."""
    for n in range(100):
        try:
            put(sender, f"{stream}_{n}", blob(100_000))
        except WouldBlock:
            return
    pytest.fail("there is no end to the credit")


def test_a_stream_that_waits_for_memory_is_told_when_any_comes_back(bench: Bench) -> None:
    sender, told = bench.told(arena_bytes=1 << 20)
    put(sender, "a_0", blob(900_000))
    with pytest.raises(WouldBlock, match="shared memory are taken"):
        put(sender, "b_0", blob(900_000))
    assert sender.discard(["a_0"]) == 1
    told.wait("writable", "b")
    put(sender, "b_0", blob(900_000))


def test_a_chunk_larger_than_all_memory_is_an_error_that_says_so(bench: Bench) -> None:
    sender = bench.make(arena_bytes=1 << 20)
    with pytest.raises(ConnectorError, match="larger than all shared memory"):
        put(sender, "s_0", blob(2 << 20))
    assert sender.statistics().sending == 0


# --- ends


def test_a_failed_stream_gives_what_was_put_before_and_then_the_reason(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    receiver.watch("0", "1", "s")
    put(sender, "s_0", "before")
    sender.fail("0", "1", "s", "the processor raised")
    assert take(receiver, events, "s_0") == "before"
    with pytest.raises(BrokenStream, match=r"stage 0 \(pid \d+\): the processor raised"):
        take(receiver, events, "s_1")
    receiver.unwatch("s")
    assert receiver.statistics().watching == 0
    until(lambda: sender.reap() or sender.statistics().sending == 0, "it is forgotten")


def test_a_stream_that_failed_before_its_first_chunk_is_told_too(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    sender.fail("0", "1", "s", "it never began")
    receiver.watch("0", "1", "s")
    with pytest.raises(BrokenStream, match="it never began"):
        take(receiver, events, "s_0")


def test_withdrawn_chunks_are_gone_exactly_and_their_receiver_is_told(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    for n in range(3):
        put(sender, f"s_{n}", blob(10_000))
    put(sender, "s_1_0", "another stream with the same beginning")
    receiver.watch("0", "1", "s")
    take(receiver, events, "s_0")
    until(lambda: sender.reap() or "s_0" not in sender._pending_keys, "it is consumed")
    assert sender.discard(["s_0", "s_1", "s_2", "s_3", "nope"]) == 2
    assert sender._pending_keys == {"s_1_0"}
    until(lambda: receiver._inbound._streams["s"].reason, "the receiver knows")
    with pytest.raises(BrokenStream, match="withdrawn"):
        take(receiver, events, "s_1")
    assert sender.get("0", "1", "s_1") is None
    until(lambda: sender.statistics().bytes_held < 5000, "the memory comes back")


def test_a_name_can_be_used_again_at_once_after_it_was_withdrawn(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    put(sender, "s_0", "old", 1)
    assert sender.discard(["s_0"]) == 1
    put(sender, "s_0", "new", 2)
    receiver.watch("0", "1", "s")
    assert take(receiver, events, "s_0") == "new"


def test_a_new_generation_never_reaches_who_watches_the_one_before(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    receiver.watch("0", "1", "s")
    put(sender, "s_0", "old", 1)
    assert take(receiver, events, "s_0") == "old"
    put(sender, "s_0", "new 0", 2)
    put(sender, "s_1", "new 1", 2)
    with pytest.raises(BrokenStream, match="begun the stream anew"):
        take(receiver, events, "s_1")
    receiver.unwatch("s")
    receiver.watch("0", "1", "s")
    until(lambda: receiver.get("0", "1", "s_0") == ("new 0", 6), "the new one comes")


def test_a_complete_generation_is_still_delivered_when_the_name_is_begun_anew(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    receiver.watch("0", "1", "s")
    put(sender, "s_0", "old 0", 1)
    assert take(receiver, events, "s_0") == "old 0"
    put(sender, "s_1", "old 1", 1, last=True)
    put(sender, "s_0", "new", 2, last=True)
    assert take(receiver, events, "s_1") == "old 1"
    receiver.watch("0", "1", "s")
    until(lambda: receiver.get("0", "1", "s_0") == ("new", 4), "the new one comes")
    until(lambda: sender.reap() or sender.statistics()[:3] == (0, 0, 0), "nothing is left")


def test_an_end_is_still_known_when_the_name_is_watched_again(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    receiver.watch("0", "1", "s")
    put(sender, "s_0", "only", last=True)
    take(receiver, events, "s_0")
    receiver.watch("0", "1", "s")
    with pytest.raises(EndOfStream):
        receiver.get("0", "1", "s_1")
    put(sender, "s_0", "another", 2)
    put(sender, "s_1", "and more", 2)
    events.wait("ready", "s", 3)
    assert receiver.get("0", "1", "s_0") == ("another", 8)
    assert receiver.get("0", "1", "s_1") == ("and more", 9)


def test_a_sender_is_told_that_its_consumer_wants_no_more(bench: Bench) -> None:
    (sender, told), (receiver, events) = bench.told(), bench.told(1)
    receiver.watch("0", "1", "s")
    put(sender, "s_0", blob(10_000))
    put(sender, "s_1", blob(10_000))
    take(receiver, events, "s_0")
    receiver.unwatch("s", "the client left")
    assert "the client left" in told.wait("stopped", "s")[2]
    with pytest.raises(BrokenStream, match="the client left"):
        put(sender, "s_2", 1)
    until(lambda: sender.statistics() == (0, 0, 0, 1), "nothing is left")
    put(sender, "s_0", "a later generation", 2)
    receiver.watch("0", "1", "s")
    assert take(receiver, events, "s_0") == "a later generation"


def test_a_consumer_that_leaves_without_a_word_costs_its_sender_nothing(bench: Bench) -> None:
    (sender, told), (receiver, events) = bench.told(credit_chunks=2), bench.told(1)
    receiver.watch("0", "1", "s")
    put(sender, "s_0", 0)
    take(receiver, events, "s_0")
    receiver.unwatch("s")
    until(lambda: sender.reap() or sender._outbound.streams["s"].life.state == "dropped", "it is known")
    for n in range(1, 20):
        put(sender, f"s_{n}", n, last=n == 19)
    assert sender.statistics()[:3] == (0, 0, 0)
    assert not [event for event in told.seen if event[0] == "stopped"]


def test_a_closed_sender_breaks_its_open_streams_and_keeps_what_is_complete(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    receiver.watch("0", "1", "cut")
    receiver.watch("0", "1", "whole")
    put(sender, "whole_0", "all of it", last=True)
    put(sender, "cut_0", "some of it")
    events.wait("ready", "cut")
    events.wait("ready", "whole")
    sender.close()
    events.wait("ready", "cut", 2)
    with pytest.raises(BrokenStream, match=r"stage 0 \(pid \d+\): it has closed its connector"):
        receiver.get("0", "1", "cut_0")
    assert receiver.get("0", "1", "whole_0") == ("all of it", 10)


def test_what_was_put_just_before_the_close_arrives(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    receiver.watch("0", "1", "s")
    put(sender, "s_0", "first")
    take(receiver, events, "s_0")
    put(sender, "s_1", blob(1 << 20), last=True)
    sender.close()
    assert content(take(receiver, events, "s_1")) == bytes([7]) * (1 << 20)


def test_a_receiver_that_closes_gives_its_sender_s_memory_back_and_stops_it(bench: Bench) -> None:
    (sender, told), (receiver, events) = bench.told(), bench.told(1)
    receiver.watch("0", "1", "s")
    for n in range(3):
        put(sender, f"s_{n}", blob(100_000))
    kept = take(receiver, events, "s_0")
    receiver.close()
    assert "closed" in told.wait("stopped", "s")[2]
    until(lambda: sender.statistics() == (0, 0, 0, 0), "nothing is left")
    with pytest.raises(BrokenStream, match=r"stage 1 \(pid \d+\)"):
        put(sender, "s_3", 1)
    assert len(content(kept)) == 100_000


def test_the_only_sender_of_a_stage_that_goes_breaks_streams_that_wait_for_it(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    put(sender, "x_0", 1)
    receiver.watch("0", "1", "x")
    take(receiver, events, "x_0")
    receiver.watch("0", "1", "waits")
    sender.close()
    with pytest.raises(BrokenStream, match="closed its connector"):
        take(receiver, events, "waits_0")


def test_everything_is_refused_after_the_close(bench: Bench) -> None:
    connector = bench.make()
    put(connector, "s_0", 1)
    connector.close()
    connector.close()
    calls = (
        lambda: put(connector, "s_1", 1),
        lambda: connector.get("0", "1", "s_0"),
        lambda: connector.watch("0", "1", "s"),
        lambda: connector.fail("0", "1", "s", "why"),
    )
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert connector.discard(["s_0"]) == 0
    assert not connector._pending_keys


def test_a_close_ends_the_thread_and_leaves_no_socket_and_no_descriptor(bench: Bench) -> None:
    gc.collect()
    before = descriptors()
    sender, receiver = bench.make(), bench.make(1)
    put(sender, "s_0", blob(100_000))
    assert receiver.get("0", "1", "s_0") is not None
    gc.collect()
    sender.close()
    receiver.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("triptych-shm")]
    folder = Folder("default", bench.folder)
    try:
        assert not folder.names(SENDER) + folder.names(BELL)
    finally:
        folder.close()
    assert descriptors() == before


def descriptors() -> dict[str, str]:
    """What this process has open, but for the listing itself."""
    out = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            out[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return out


def test_no_state_is_left_of_ten_thousand_streams_a_third_of_them_aborted(bench: Bench) -> None:
    (sender, _), (receiver, events) = bench.told(), bench.told(1)
    receiver.watch("0", "1", "first")
    put(sender, "first_0", 0, last=True)
    take(receiver, events, "first_0")
    for n in range(10_000):
        name = f"s{n % 500}" if n % 2 else f"once{n}"
        put(sender, f"{name}_0", n, n)
        if n % 3 == 0:
            sender.discard([f"{name}_0"])
        else:
            put(sender, f"{name}_1", n, n, last=True)
            assert receiver.get("0", "1", f"{name}_0") == (n, receiver_size(n))
            assert receiver.get("0", "1", f"{name}_1") is not None
    until(lambda: sender.reap() or sender.statistics() == (0, 0, 0, 1), "nothing is left")
    assert receiver.statistics() == (0, 0, 0, 1)
    assert not sender._outbound.streams
    assert not sender._outbound._waiting
    assert not receiver._inbound._numbers


def receiver_size(n: int) -> int:
    return 1 if n < 128 else 2 if n < 256 else 3


# --- options


@pytest.mark.parametrize(
    ("option", "value"),
    [("arena_bytes", -1), ("arena_bytes", "lots"), ("credit_chunks", 0), ("stage_id", True), ("port", 70000),
     ("deployment", 5), ("tensors", "jax"), ("inline_bytes", 1 << 40)],
)  # fmt: skip
def test_an_option_that_cannot_be_is_named(bench: Bench, option: str, value: object) -> None:
    with pytest.raises(ConnectorError, match=option):
        SharedMemoryConnector({option: value})


def test_options_of_others_are_left_alone_and_can_be_read() -> None:
    connector = SharedMemoryConnector({"codec_chunk_frames": 25, "role": "sender"})
    assert connector.config["extra"]["codec_chunk_frames"] == 25
    connector.close()
    wrapped = SharedMemoryConnector({"extra": {"codec_chunk_frames": 25, "stage_id": 3}})
    assert wrapped.config["extra"]["codec_chunk_frames"] == 25
    assert wrapped.stage_id == 3
    wrapped.close()


def test_a_fork_is_refused_and_does_not_keep_its_parent_s_sockets_open(bench: Bench) -> None:
    sender, (receiver, events) = bench.make(), bench.told(1)
    receiver.watch("0", "1", "s")
    put(sender, "s_0", 1)
    take(receiver, events, "s_0")
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            sender.put("0", "1", "s_1", 1)
            os.write(ready[1], b"0")
        except ConnectorError:
            os.write(ready[1], b"1")
        os.read(done[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"1"
        sender.close()
        with pytest.raises(BrokenStream):
            take(receiver, events, "s_1")
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        for fd in (*ready, *done):
            os.close(fd)
