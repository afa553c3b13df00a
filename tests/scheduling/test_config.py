"""A stage's configuration: what is wrong is said before anything is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triptych.processors.tokens import forward
from triptych.scheduling.config import SOURCE, STREAM, adapter_config, stage_config, stream_of

SENDER = {"id": 0, "role": "sender", "processor": "triptych.processors.tokens:forward"}


def test_a_sender_sends_and_a_receiver_receives() -> None:
    sender, receiver = stage_config({"stage": SENDER}), stage_config({"stage": {"id": 1, "role": "receiver"}})
    assert (sender.sends, sender.receives) == (True, False)
    assert (receiver.sends, receiver.receives) == (False, True)
    assert receiver.connector.name == "shm"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "needs to know its stage"),
        ({}, "needs to know its stage"),
        ({"stage": {"id": 0}}, "`role`"),
        ({"stage": {"id": "x", "role": "sender"}}, r"\$\.id"),
        ({"stage": {**SENDER, "role": "listener"}}, r"\$\.role"),
        ({"stage": {**SENDER, "colour": 1}}, "`colour`"),
        ({"stage": {**SENDER, "id": -1}}, "may not be negative"),
        ({"stage": {**SENDER, "window": -1}}, "may not be negative"),
        ({"stage": {**SENDER, "chunk_timeout": -1}}, "may not be negative"),
        ({"stage": {"id": 0, "role": "receiver"}}, "no stage before it"),
        ({"stage": {"id": 1, "role": "both"}}, "needs a `processor`"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_field(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stage_config(given)


def test_the_adapter_reads_the_same() -> None:
    config = stage_config(
        {"stage": {**SENDER, "window": 3, "connector": {"name": "shm", "extra": {"deployment": "d"}}}}
    )
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=128, hf_config=None),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    made = adapter_config(config, vllm_config).model_config
    assert made.custom_process_next_stage_input_func is forward
    assert (made.stage_id, made.worker_type, made.active_stream_window, made.max_num_seqs) == (0, "ar", 3, 4)
    assert made.stage_connector_config["name"] == "shm"
    assert made.stage_connector_config["extra"] == {"deployment": "d", "role": "sender", "chunk_timeout_s": 600.0}


def params(**extra: Any) -> Any:
    return SimpleNamespace(extra_args=extra or None)


def test_a_request_names_its_stream_and_who_sends_it() -> None:
    assert stream_of(params()) is None
    assert stream_of(None) is None
    assert stream_of(params(**{STREAM: "a/b"})) == ("a/b", None)
    assert stream_of(params(**{STREAM: "é" * 1000})) == ("é" * 1000, None)
    assert stream_of(params(**{STREAM: "x", SOURCE: "10.0.0.1:80"})) == ("x", {"host": "10.0.0.1", "zmq_port": 80})


@pytest.mark.parametrize(
    "extra",
    [
        {STREAM: 1},
        {STREAM: ""},
        {STREAM: "x" * 5000},
        {STREAM: "x", SOURCE: "nowhere"},
        {STREAM: "x", SOURCE: "h:0"},
        {STREAM: "x", SOURCE: "h:99999"},
        {STREAM: "x", SOURCE: 7},
    ],
)
def test_what_a_client_says_wrongly_of_its_stream_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="triptych_s"):
        stream_of(params(**extra))
