"""The tables of a stream's life: what they allow, whose fault the rest is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.transfer.connectors.streams import (
    RECEIVING,
    SENDING,
    ReceiveAct,
    ReceiveEvent,
    Receiving,
    SendAct,
    SendEvent,
    Sending,
    join_key,
    receiving,
    rows,
    sending,
    split_key,
)
from triptych.transfer.errors import ConnectorError, WireError


def test_a_stream_that_ends_well_is_over_when_its_last_chunk_is_consumed() -> None:
    life = sending()
    assert life.on(SendEvent.PUT) is SendAct.ACCEPT
    assert life.on(SendEvent.DRAINED) is SendAct.NOTHING  # consumed so far is not the end
    assert life.on(SendEvent.LAST) is SendAct.ACCEPT
    assert life.on(SendEvent.DRAINED) is SendAct.FORGET
    assert life.state is Sending.OVER


def test_a_chunk_behind_the_last_is_the_callers_fault() -> None:
    life = sending()
    life.on(SendEvent.LAST)
    with pytest.raises(ConnectorError, match="a chunk is put, and it is ended"):
        life.on(SendEvent.PUT)
    assert life.state is Sending.ENDED


def test_a_chunk_behind_the_last_is_the_peers_fault_at_the_receiver() -> None:
    life = receiving()
    life.on(ReceiveEvent.LAST)
    for event in (ReceiveEvent.CHUNK, ReceiveEvent.LAST):
        with pytest.raises(WireError, match="comes, and it is ending"):
            life.on(event)


def test_a_stopped_stream_refuses_until_its_sender_ends_it() -> None:
    life = sending()
    assert life.on(SendEvent.STOP) is SendAct.REPORT
    assert life.on(SendEvent.PUT) is SendAct.REFUSE
    assert life.on(SendEvent.LAST) is SendAct.REFUSE
    assert life.state is Sending.OVER


def test_a_complete_stream_outlives_its_sender_and_a_cut_one_does_not() -> None:
    whole, cut = receiving(), receiving()
    whole.on(ReceiveEvent.LAST)
    cut.on(ReceiveEvent.CHUNK)
    assert (whole.on(ReceiveEvent.LOST), whole.state) == (ReceiveAct.NOTHING, Receiving.ENDING)
    assert (cut.on(ReceiveEvent.LOST), cut.state) == (ReceiveAct.BREAK, Receiving.BROKEN)


def test_what_was_put_before_a_failure_is_taken_before_it_is_told() -> None:
    life = receiving()
    life.on(ReceiveEvent.CHUNK)
    assert life.on(ReceiveEvent.FAIL) is ReceiveAct.CUT
    assert life.state is Receiving.BREAKING
    life.on(ReceiveEvent.TAKEN)
    assert life.state is Receiving.BROKEN


@pytest.mark.parametrize("end", [s for s in Sending if s is not Sending.OVER])
def test_every_state_of_a_sender_can_be_left_for_good(end: Sending) -> None:
    assert any(start is end and then is Sending.OVER for (start, _), (then, _) in SENDING.items())


@pytest.mark.parametrize("end", [s for s in Receiving if s not in (Receiving.COMPLETE, Receiving.GONE)])
def test_every_state_of_a_receiver_can_be_unwatched(end: Receiving) -> None:
    assert RECEIVING[end, ReceiveEvent.UNWATCH] == (Receiving.GONE, ReceiveAct.LEAVE)


def test_what_is_over_stays_over() -> None:
    assert not [start for start, _ in SENDING if start is Sending.OVER]
    assert not [start for start, _ in RECEIVING if start in (Receiving.COMPLETE, Receiving.GONE)]


def test_every_action_of_the_tables_is_used_and_every_state_is_reached() -> None:
    assert {act for _, act in SENDING.values()} == set(SendAct)
    assert {act for _, act in RECEIVING.values()} == set(ReceiveAct)
    assert {then for then, _ in SENDING.values()} == set(Sending)
    assert {then for then, _ in RECEIVING.values()} | {Receiving.WATCHING} == set(Receiving)


def test_the_tables_can_be_printed() -> None:
    assert rows(SENDING)[0] == ("open", "a chunk is put", "open", "keep the chunk, send it to its watcher")
    assert len(rows(RECEIVING)) == len(RECEIVING)


@given(st.text(), st.integers(0, 10**18 - 1))
def test_a_key_is_its_stream_and_its_number(stream: str, number: int) -> None:
    assert split_key(join_key(stream, number)) == (stream, number, True)


@given(st.text())
def test_every_text_is_a_key(key: str) -> None:
    stream, number, numbered = split_key(key)
    assert (join_key(stream, number) if numbered else stream) == key


@pytest.mark.parametrize("key", ["k", "", "k_", "k_01", "k_-1", "k_+1", "k_1_", "k_٣", "k_²", "k_" + "9" * 40, "k_1\n"])
def test_a_key_without_a_plain_number_is_a_stream_of_one_chunk(key: str) -> None:
    assert split_key(key) == (key, 0, False)
