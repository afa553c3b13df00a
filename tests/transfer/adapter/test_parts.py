"""The parts: windows on records, lanes and clocks, admission, settings, and what a chunk makes of its request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.adapter.stages import request
from triptych.transfer.adapter.codec import apply_chunk
from triptych.transfer.adapter.lot import Lane, ParkingLot, StallClock
from triptych.transfer.adapter.publish import Condition, prepare, publish
from triptych.transfer.adapter.receiver import ReceiverStream
from triptych.transfer.adapter.sender import (
    Admission,
    Facts,
    SenderStream,
    admission,
    confirmed_tokens,
    segment_of,
)
from triptych.transfer.adapter.sending import accepts
from triptych.transfer.adapter.settings import AdapterSettings, Timing, connector_spec
from triptych.transfer.adapter.views import FieldView, FlagView
from triptych.transfer.prompt import Window

KEYS = st.sampled_from("abcd")

# Windows on records.


@given(st.lists(st.tuples(st.sampled_from(["set", "del", "pop", "get"]), KEYS, st.integers(1, 9))))
def test_a_field_is_a_map(steps: list[tuple[str, str, int]]) -> None:
    records: dict[str, ReceiverStream] = {}
    view, model = FieldView(records, "condition_len", ReceiverStream), dict[str, int]()
    for step, key, value in steps:
        if step == "set":
            view[key] = model[key] = value
        elif step == "del" and key in model:
            del view[key], model[key]
        elif step == "del":
            with pytest.raises(KeyError):
                del view[key]
        elif step == "pop":
            assert view.pop(key, None) == model.pop(key, None)
        else:
            assert view.get(key) == model.get(key)
        assert dict(view) == model
        assert len(view) == len(model)
        assert (key in view) == (key in model)
    assert all(record.chunks == 0 for record in records.values())


def test_a_counter_counts_nought_where_there_is_none_and_makes_nothing_when_read() -> None:
    records: dict[str, ReceiverStream] = {}
    view = FieldView(records, "chunks", ReceiverStream, counter=True)
    assert view["x"] == 0
    assert "x" not in view
    assert not records
    view["x"] += 2
    assert dict(view) == {"x": 2}
    with pytest.raises(KeyError):
        FieldView(records, "entry", ReceiverStream)["x"]


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "replace"]), KEYS)))
def test_a_flag_is_a_set(steps: list[tuple[str, str]]) -> None:
    records: dict[str, ReceiverStream] = {}
    view, model = FlagView(records, "ready", ReceiverStream), set[str]()
    for step, key in steps:
        if step == "replace":
            view.replace({key, "z"})
            model = {key, "z"}
        else:
            getattr(view, step)(key)
            getattr(model, step)(key)
        assert view == model
        assert len(view) == len(model)


# Lanes and clocks.


@given(st.lists(st.tuples(st.sampled_from(["append", "pop", "popleft"]), KEYS)))
def test_a_lane_keeps_the_order_of_coming(steps: list[tuple[str, str]]) -> None:
    made = {key: SimpleNamespace(request_id=key) for key in "abcd"}
    lane, model = Lane(), list[Any]()
    for step, key in steps:
        if step == "append":
            lane.append(made[key])
            if made[key] not in model:
                model.append(made[key])
        elif step == "pop":
            found = lane.pop(key)
            assert (found is not None) == (made[key] in model)
            model = [one for one in model if one is not found]
        elif model:
            assert lane.popleft() is model.pop(0)
        else:
            with pytest.raises(IndexError):
                lane.popleft()
        assert lane == model
        assert len(lane) == len(model)
        assert (made[key] in lane) == lane.has(key) == (made[key] in model)


def test_a_lane_knows_a_request_from_another_of_its_id() -> None:
    one, other = SimpleNamespace(request_id="a"), SimpleNamespace(request_id="a")
    lane = Lane([one])
    assert other not in lane
    with pytest.raises(ValueError, match="a is not in the lane"):
        lane.remove(other)
    lane.remove(one)
    assert not lane


@given(st.lists(st.tuples(st.sampled_from(["start", "set", "pop", "expire"]), KEYS, st.integers(0, 20))))
def test_a_clock_reports_exactly_those_that_have_waited_too_long(steps: list[tuple[str, str, int]]) -> None:
    clock, model = StallClock(), dict[str, float]()
    for step, key, value in steps:
        if step == "start":
            clock.start(key, value)
            model.setdefault(key, value)
        elif step == "set":
            clock[key] = model[key] = value
        elif step == "pop":
            assert clock.pop(key, None) == model.pop(key, None)
        else:
            late = {one for one, since in model.items() if value - since > 3}
            assert clock.expire(value, 3) == late
            model = {one: since for one, since in model.items() if one not in late}
        assert dict(clock) == model
        assert clock.earliest() == min(model.values(), default=None)


def test_a_window_of_none_is_no_window() -> None:
    lot = ParkingLot(0)
    assert all(lot.ensure_active(SimpleNamespace(request_id=str(n))) for n in range(100))
    assert not lot.active


# Admission.


@pytest.mark.parametrize(
    ("state", "facts", "verdict"),
    [
        (None, {}, "ACCEPT"),
        ({}, {}, "ACCEPT"),
        ({"cancelled": True}, {}, "ANEW"),
        ({"cancelled": True, "terminal_pending": True}, {}, "DRAINING"),
        ({"terminal_pending": True}, {}, "DRAINING"),
        ({"terminal_pending": True}, {"terminal": True}, "DRAINING"),
        ({"segment": 2}, {"generation": 1}, "LATE"),
        ({"segment": 2}, {"generation": 1, "boundary": True}, "LATE"),
        ({"segment": 2}, {"generation": 2}, "ACCEPT"),
        ({"segment": 2}, {"generation": 3}, "ACCEPT"),
        ({"watermark": 5}, {"confirmed": 4}, "LATE"),
        ({"watermark": 5}, {"confirmed": 5}, "ACCEPT"),
        ({"watermark": 5}, {"confirmed": 4, "boundary": True}, "ACCEPT"),
        ({"watermark": 5}, {"confirmed": 4, "terminal": True}, "ACCEPT"),
        ({"ended": "lost", "request_id": "r"}, {}, "LATE"),
        ({"ended": "lost", "request_id": "r"}, {"terminal": True}, "ACCEPT"),
        ({"ended": "lost", "request_id": "other"}, {}, "DRAINING"),
    ],
)
def test_what_is_admitted(state: dict[str, Any] | None, facts: dict[str, Any], verdict: str) -> None:
    stream = None if state is None else SenderStream(**state)
    chunk = Facts(**{"generation": 0, "confirmed": 0, "boundary": False, "terminal": False, **facts})
    assert admission(stream, "r", chunk) is Admission[verdict]


@pytest.mark.parametrize(("value", "segment"), [(None, 0), (3, 3), (True, 0), ("3", 0), (1.5, 0)])
def test_a_segment_is_a_number_or_the_first(value: object, segment: int) -> None:
    assert segment_of(SimpleNamespace(_omni_segment_generation=value)) == segment
    assert segment_of(SimpleNamespace()) == 0


def test_confirmed_tokens_are_never_fewer_than_none() -> None:
    assert confirmed_tokens(SimpleNamespace(num_computed_tokens=2, num_output_placeholders=5)) == 0
    assert confirmed_tokens(SimpleNamespace(num_computed_tokens=2)) == 2


def test_what_a_function_accepts() -> None:
    assert accepts(lambda a: a, "a")
    assert accepts(lambda **rest: rest, "a")
    assert not accepts(lambda b: b, "a")
    assert not accepts(dict.fromkeys, "a")


# Settings.


def config(**model: Any) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(**model), scheduler_config=SimpleNamespace(max_num_seqs=4))


def test_a_window_is_no_larger_than_what_can_run() -> None:
    assert AdapterSettings.from_config(config(active_stream_window=9)).window == 4
    assert AdapterSettings.from_config(config(active_stream_window=3)).window == 3
    assert AdapterSettings.from_config(config(active_stream_window=-1)).window == 0
    assert AdapterSettings.from_config(config()).window == 0


def test_a_processor_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a function, not 'pkg:name'"):
        AdapterSettings.from_config(config(custom_process_next_stage_input_func="pkg:name"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_timeout_s", -1),
        ("send_timeout_s", "5"),
        ("poll_threads", 0),
        ("max_backlog", True),
        ("poll_interval_s", float("nan")),
    ],
)
def test_options_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"the connector's option {name} must be a number"):
        Timing.from_options({name: value})


@pytest.mark.parametrize("raw", [{"name": "tcp", "extra": {"a": 1}}, SimpleNamespace(name="tcp", extra={"a": 1})])
def test_a_connector_is_named_by_a_mapping_or_an_object(raw: object) -> None:
    spec = connector_spec(SimpleNamespace(stage_id=3, stage_connector_config=raw))
    assert (spec.name, spec.extra) == ("tcp", {"a": 1, "stage_id": 3})


@pytest.mark.parametrize(
    ("stage_id", "options", "sends"),
    [
        (0, {}, True),
        (1, {}, False),
        (1, {"processor": print}, True),
        (2, {"role": "both"}, True),
        (0, {"role": "receiver"}, False),
        (0, {"enabled": False}, False),
    ],
)
def test_which_stages_send(stage_id: int, options: dict[str, Any], sends: bool) -> None:
    assert AdapterSettings(**options).sends(stage_id) is sends


# A chunk becomes part of its request.


def test_a_first_chunk_of_real_tokens_is_the_prompt_and_one_of_placeholders_is_not() -> None:
    made = request(resumable=True)
    first = {"ids": {"prompt": [9]}, "meta": {"next_stage_prompt_len": 2}}
    assert not prepare(made, first, 0, Window(), 0).extends
    assert prepare(made, first, 1, Window(), 0).extends
    assert prepare(made, {"ids": {"tokens": [5]}}, 0, Window(), 0).extends


def test_a_request_that_is_not_resumable_is_not_extended() -> None:
    made = request()
    payload = {"meta": {"next_stage_prompt_len": 2}}
    assert not prepare(made, payload, 5, Window(1), 0).extends
    assert publish(prepare(made, payload, 5, Window(1), 0), made, None, Window(1), 0) == (False, Condition(2, 0))
    assert made.prompt_token_ids == [1, 2, 3]
    assert made.additional_information is payload  # type: ignore[attr-defined]
    assert payload["meta"]["streaming_condition_seq"] == 0


def test_only_conditions_are_numbered() -> None:
    made, last = request(), None
    numbers = []
    for length in (3, None, 4, 0, True, 5):
        payload: dict[str, Any] = {"meta": {} if length is None else {"next_stage_prompt_len": length}}
        _, last = publish(prepare(made, payload, 0, Window(1), 0), made, last, Window(1), 0)
        numbers.append(payload["meta"].get("streaming_condition_seq"))
    assert numbers == [0, None, 1, None, None, 2]
    assert last == Condition(5, 2)


@pytest.mark.parametrize(
    ("audio", "prompt", "stays"),
    [
        (torch.tensor([[1, 2], [3, 4]]), [0], True),
        (torch.tensor([5, 6]), [5, 6], False),
        ([5, 6], [5, 6], False),
    ],
)
def test_codes_are_the_prompt_or_stay_behind_a_placeholder(audio: Any, prompt: list[int], stays: bool) -> None:
    made = request(num_computed_tokens=3)
    made.append_output_token_ids(8)
    assert apply_chunk(made, {"codes": {"audio": audio, "ref": "voice"}}, finished=False, segment_finished=False)
    assert made.prompt_token_ids == list(made.all_token_ids) == prompt
    assert list(made.output_token_ids) == []
    assert (made.num_computed_tokens, made.num_prompt_tokens, made.num_tokens) == (0, len(prompt), len(prompt))
    record = made.additional_information  # type: ignore[attr-defined]
    assert ("audio" in record["codes"]) is stays
    assert record["codes"]["ref"] == "voice"


@pytest.mark.parametrize(
    ("finished", "segment_finished", "ready", "prompt"),
    [(False, False, False, [1, 2, 3]), (True, False, True, []), (False, True, True, [0]), (True, True, True, [0])],
)
def test_a_chunk_of_nothing_counts_only_where_something_ends(
    finished: bool, segment_finished: bool, ready: bool, prompt: list[int]
) -> None:
    made = request(prefill_stats=None)
    payload = {"codes": {"audio": torch.empty((4, 0), dtype=torch.long)}, "meta": {"step": 1}}
    assert apply_chunk(made, payload, finished=finished, segment_finished=segment_finished) is ready
    assert made.prompt_token_ids == prompt
    assert made.additional_information["meta"] == {"step": 1}  # type: ignore[attr-defined]
    assert (made.prefill_stats is not None) is ready


def test_information_is_merged_key_by_key_and_the_end_is_not() -> None:
    old = {"meta": {"finished": False, "step": 1}, "a": {"x": 1, "y": 2}, "b": [1]}
    made = request(additional_information=old)
    apply_chunk(
        made, {"meta": {"finished": True, "phase": 2}, "a": {"y": 3}, "b": [2]}, finished=True, segment_finished=False
    )
    assert made.additional_information == {  # type: ignore[attr-defined]
        "meta": {"finished": False, "step": 1, "phase": 2},
        "a": {"x": 1, "y": 3},
        "b": [2],
    }
    assert old["a"] == {"x": 1, "y": 2}, "what others hold is not changed"


def test_a_snapshot_replaces_what_was_known() -> None:
    made = request(additional_information={"meta": {"cache_epoch": 0}, "gone": 1})
    payload = {"codes": {"audio": [1]}, "meta": {"replace_runtime_additional_information": True, "cache_epoch": 1}}
    apply_chunk(made, payload, finished=False, segment_finished=False)
    record = made.additional_information  # type: ignore[attr-defined]
    assert record == {"meta": {"replace_runtime_additional_information": True, "cache_epoch": 1}}
    assert made.model_intermediate_buffer is record  # type: ignore[attr-defined]
