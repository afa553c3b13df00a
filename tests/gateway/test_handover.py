"""The hand-over dialects (contract, "Prefill -> decode" and its dialects)."""

from __future__ import annotations

import json
import random

import pytest

from triptych.gateway.handover import EcContext, EcDialect, KvContext, ec_dialects, kv_dialects
from triptych.gateway.settings import EngineSettings

CONSUMER = EngineSettings.model_validate({"url": "http://c:1", "ec_zmq": ["tcp://c:1", "tcp://c:2"]})
CONTEXT = EcContext("r", CONSUMER, ("t0", "t1", "t2"), rank=1)
KV = KvContext("r", CONSUMER, CONSUMER, "0" * 32)


@pytest.fixture(params=["example", "eccpu"])
def merging(request: pytest.FixtureRequest) -> EcDialect:
    return ec_dialects()[request.param]


@pytest.fixture
def mooncake() -> EcDialect:
    return ec_dialects()["mooncake"]


def test_the_dialects_that_are_there_from_the_start() -> None:
    assert {"example", "eccpu", "mooncake"} <= set(ec_dialects())
    assert {"nixl", "example"} <= set(kv_dialects())


def test_handles_are_merged_in_item_order_and_the_first_of_a_hash_wins(merging: EcDialect) -> None:
    merged = merging.consumer_params(CONTEXT, [b'{"a":1,"b" : 2.50}', None, b'{"b":9,"c":[ 3 ]}'])
    assert merged == b'{"a":1,"b" : 2.50,"c":[ 3 ]}'


@pytest.mark.parametrize("handles", [[None, None], [b"{}", None]])
def test_encoders_that_hand_over_nothing_leave_the_consumer_without(
    merging: EcDialect, handles: list[bytes | None]
) -> None:
    assert merging.consumer_params(CONTEXT, handles) is None


def test_merging_dialects_tell_encoders_nothing_and_leave_the_consumer_free(merging: EcDialect) -> None:
    assert merging.encode_params(CONTEXT, 0) is None
    assert merging.consumer_rank(CONTEXT) is None
    assert not merging.pins_consumer


def test_mooncake_tells_the_encoder_which_consumer_and_under_which_id(mooncake: EcDialect) -> None:
    params = mooncake.encode_params(CONTEXT, 2)
    assert params is not None
    assert json.loads(params) == {"consumer_zmq": "tcp://c:2", "ec_items": [{"transfer_id": "t2"}]}
    assert mooncake.pins_consumer


def test_mooncake_leaves_a_failed_item_out_of_what_the_consumer_waits_for(mooncake: EcDialect) -> None:
    params = mooncake.consumer_params(CONTEXT, [b'{"h0":{"x":1}}', None, b'{"h2":{}}'])
    assert params is not None
    assert json.loads(params) == {
        "h0": {"x": 1},
        "h2": {},
        "ec_items": [{"mm_hash": "h0", "transfer_id": "t0"}, {"mm_hash": "h2", "transfer_id": "t2"}],
    }
    assert mooncake.consumer_params(CONTEXT, [None, None, None]) is None


def test_mooncake_pins_the_rank_whose_address_the_encoder_was_told(mooncake: EcDialect) -> None:
    assert mooncake.consumer_rank(CONTEXT) == 1
    assert {mooncake.rank(CONSUMER, random.Random(seed)) for seed in range(20)} == {0, 1}


def test_nixl_carries_what_prefill_answered_and_nothing_where_it_answered_nothing() -> None:
    nixl = kv_dialects()["nixl"]
    told = json.loads(nixl.prefill_members(KV)["kv_transfer_params"])
    assert told == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert nixl.decode_members(KV, b'{"x" :1}') == {"kv_transfer_params": b'{"x" :1}'}
    assert nixl.decode_members(KV, None) == {}


def test_shared_storage_carries_nothing() -> None:
    example = kv_dialects()["example"]
    assert (example.prefill_members(KV), example.decode_members(KV, None)) == ({}, {})
