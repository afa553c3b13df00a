"""Timelines: moments in order, a header that tells no address, a ring that ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from triptych.gateway import timeline
from triptych.gateway.timeline import Ring, Timeline


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(timeline, "_now", clock)
    return clock


def example(clock: Clock) -> Timeline:
    """Two encode legs side by side, prefill, and a decode leg that is tried on two engines."""
    t = Timeline("req-1", "chat")
    t.plan, t.model = "E+P+D", "m"
    clock.now += 0.001
    t.admit()
    enc = [t.leg(f"enc{i}", "encode", f"http://secret-e{i}:1") for i in range(2)]
    for leg in enc:
        leg.start()
    clock.now += 0.010
    enc[0].first_byte()
    enc[0].end("success")
    clock.now += 0.005
    enc[1].end("timeout")
    prefill = t.leg("prefill", "prefill", "http://secret-p:1")
    prefill.start()
    clock.now += 0.020
    prefill.first_byte()
    prefill.end("success")
    decode = t.leg("decode", "decode", "http://secret-d0:1")
    decode.start()
    clock.now += 0.002
    decode.engine = "http://secret-d1:1"
    decode.start()
    clock.now += 0.003
    decode.first_byte()
    return t


def test_record_has_every_moment_as_offset_from_the_beginning(clock: Clock) -> None:
    t = example(clock)
    clock.now += 0.001
    assert t.first_token() == pytest.approx(0.042)
    assert t.first_token() is None, "there is one first token"
    clock.now += 0.1
    t.legs[-1].bytes_in = 12
    t.legs[-1].end("success")
    assert t.end(200) == pytest.approx(0.142)
    d = t.to_dict()
    assert (d["id"], d["api"], d["plan"], d["model"], d["status"]) == ("req-1", "chat", "E+P+D", "m", 200)
    assert (d["admitted"], d["first"], d["seconds"]) == (0.001, 0.042, 0.142)
    assert [leg["name"] for leg in d["legs"]] == ["enc0", "enc1", "prefill", "decode"]
    assert d["legs"][0] == {
        "name": "enc0",
        "role": "encode",
        "engine": "http://secret-e0:1",
        "status": "success",
        "queued": 0.001,
        "started": 0.001,
        "first": 0.011,
        "ended": 0.011,
        "bytes_out": 0,
        "bytes_in": 0,
    }
    assert d["legs"][1]["status"] == "timeout"
    assert d["legs"][1]["first"] is None
    assert d["legs"][3]["tried"] == ["http://secret-d0:1"]
    assert (d["legs"][3]["queued"], d["legs"][3]["started"], d["legs"][3]["bytes_in"]) == (0.036, 0.038, 12)
    json.dumps(d)


def test_leg_lasts_from_its_queueing_to_its_end(clock: Clock) -> None:
    leg = Timeline("a").leg("enc0", "encode")
    clock.now += 1
    leg.start()
    clock.now += 2
    assert leg.seconds == 3
    leg.end("success")
    clock.now += 5
    assert leg.seconds == 3


def test_first_word_on_an_end_stays(clock: Clock) -> None:
    t = Timeline("a")
    leg = t.leg("decode", "decode")
    leg.end("timeout")
    t.end(504)
    clock.now += 1
    leg.end("cancelled")
    assert t.end(200) == 0
    assert (leg.status, t.status) == ("timeout", 504)


def test_server_timing_is_a_valid_header_and_tells_no_engine(clock: Clock) -> None:
    value = example(clock).server_timing()
    assert value == (
        b'admission;dur=1.0, encode;dur=15.0;desc="2 legs", prefill;dur=20.0, decode;dur=5.0, total;dur=41.0'
    )
    assert b"secret" not in value
    metric = rb"[a-z]+;dur=[0-9.]+(;desc=\"[0-9a-z ]+\")?"
    assert re.fullmatch(rb"%b(, %b)*" % (metric, metric), value)


def test_span_of_legs_ends_with_the_last_to_end(clock: Clock) -> None:
    t = Timeline("a")
    slow, quick = (t.leg(name, "encode") for name in ("enc0", "enc1"))
    clock.now += 0.001
    quick.end("success")
    clock.now += 0.004
    slow.end("success")
    clock.now += 1
    assert t.server_timing().startswith(b'encode;dur=5.0;desc="2 legs", ')


def test_server_timing_stays_short_with_many_legs(clock: Clock) -> None:
    t = Timeline("a")
    for i in range(1000):
        t.leg(f"enc{i}", "encode").end("success")
    assert len(t.server_timing()) < 100


def test_running_request_shows_its_time_until_now(clock: Clock) -> None:
    t = example(clock)
    assert t.summary()["running"] is True
    assert t.summary()["status"] is None
    assert t.seconds == pytest.approx(0.041)


def test_reasons_are_kept_in_order() -> None:
    t = Timeline("a")
    t.reason("no_encoder")
    t.reason("n")
    assert t.reasons == ("no_encoder", "n")
    assert t.summary()["reasons"] == ["no_encoder", "n"]


def test_ring_keeps_the_last_ones_only() -> None:
    ring = Ring(3)
    made = [Timeline(str(i)) for i in range(5)]
    for t in made:
        ring.add(t)
    assert list(ring) == made[2:]
    assert ring.get("1") is None
    assert ring.get("3") is made[3]
    again = Timeline("3")
    ring.add(again)
    assert ring.get("3") is again


def test_ring_of_none_keeps_none() -> None:
    ring = Ring(0)
    ring.add(Timeline("a"))
    assert len(ring) == 0
    assert ring.get("a") is None


def test_repr_tells_what_it_is() -> None:
    t = Timeline("a")
    assert repr(t) == "<Timeline a: no plan, 0 legs, running>"
    t.plan = "P+D"
    t.end(200)
    assert repr(t) == "<Timeline a: P+D, 0 legs, 200>"
