"""Every leg, every fault, every plan, streamed or not: the contract's answer, its accounts, and nothing left.

One engine for each role, so there is nowhere to go on a retry. The table says what a fault means by itself; what it
means to the client depends on the leg (contract, "Errors, and what the client sees" and "Encode stage", 5).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.gateway.raw import Answer
from tests.gateway.rig import PLANS, POSTS, ROLES, PlanName, Rig, chat
from triptych.sim.faults import Fault

OWN = {"error": {"message": "this engine's own words", "type": "Odd", "param": "it", "code": 418}}
SMALL = 65_536
MIB = 1 << 20


@dataclass(frozen=True)
class What:
    """A fault and what it means for a leg that is called and read whole.

    word: how the leg ended, as the contract says it. status: what the client is told if the leg fails its request;
    0: the engine's own answer. rule: None where the engine does not even listen.
    """

    word: str
    status: int = 502
    rule: dict[str, Any] | None = field(default_factory=dict)
    hangs: bool = False
    limits: dict[str, int] = field(default_factory=dict)


# Each deadline only where it is the failing leg's: the others must not pass on a machine that is busy.
HURRY = {
    "encode": {"encode": 0.2},
    "prefill": {"prefill": 0.2},
    "final": {"first_byte": 0.2, "stream_idle": 0.2},
}
CAPS = {"prefill_answer_bytes": SMALL, "answer_bytes": SMALL, "event_bytes": SMALL}

BEFORE_HEAD: dict[str, What] = {
    "refused": What("connect_error", rule=None),
    "reset": What("connect_error", rule={"kind": "reset"}),
    "close": What("connect_error", rule={"kind": "close"}),
    "hang": What("timeout", 504, {"kind": "hang"}, hangs=True),
    "4xx": What("http_error", 0, {"kind": "status", "status": 418, "body": OWN}),
    "4xx-after-work": What("http_error", 0, {"kind": "status", "status": 422, "body": OWN, "after_work": True}),
    "429": What("http_error", 0, {"kind": "status", "status": 429, "body": OWN, "headers": {"retry-after": "7"}}),
    "5xx": What("http_error", rule={"kind": "status", "status": 500, "body": OWN}),
    "503": What("http_error", rule={"kind": "status", "status": 503, "body": OWN}),
    "garbage": What("invalid_response", rule={"kind": "garbage"}),
    "half-a-head": What("invalid_response", rule={"kind": "garbage", "body": "HTTP/1.1 200 OK\r\ncontent-ty"}),
    "no-json": What("invalid_response", rule={"kind": "garbage_json"}),
    "empty": What("invalid_response", rule={"kind": "garbage_json", "body": ""}),
}
WHOLE: dict[str, What] = BEFORE_HEAD | {
    "hang-in-body": What("timeout", 504, {"kind": "hang_body"}, hangs=True),
    "cut": What("invalid_response", rule={"kind": "cut"}),
    "reset-in-body": What("invalid_response", rule={"kind": "reset_body"}),
    "short": What("invalid_response", rule={"kind": "wrong_length", "size": 9}),
    "oversize": What("oversize", rule={"kind": "oversize", "size": SMALL + 1}, limits=CAPS),
    "oversize-unsaid": What("oversize", rule={"kind": "oversize", "size": 4 * MIB}, limits=CAPS),
}
ENCODE = WHOLE | {
    "no-object": What("invalid_response", rule={"kind": "garbage_json", "body": "[1, 2]"}),
    "oversize": What("oversize", rule={"kind": "oversize", "size": MIB + 1}),
    "handles-no-object": What(
        "invalid_response", rule={"kind": "garbage_json", "body": {"ec_transfer_params": ["no object"]}}
    ),
    "201": What("http_error", rule={"kind": "status", "status": 201, "body": {"ec_transfer_params": {}}}),
}
PREFILL = WHOLE | {
    "no-object": What("invalid_response", rule={"kind": "garbage_json", "body": "[1, 2]"}),
    "handles-no-object": What(
        "invalid_response", rule={"kind": "garbage_json", "body": {"kv_transfer_params": "no object"}}
    ),
}
IN_STREAM: dict[str, What] = {
    "cut": What("invalid_response", rule={"kind": "cut"}),
    "cut-in-event": What("invalid_response", rule={"kind": "cut", "partial": True}),
    "reset": What("invalid_response", rule={"kind": "reset_body"}),
    "reset-in-event": What("invalid_response", rule={"kind": "reset_body", "partial": True}),
    "garbage": What("invalid_response", rule={"kind": "wrong_length"}),
    "end-without-end-mark": What("invalid_response", rule={"kind": "end"}),
    "hang": What("timeout", 504, {"kind": "hang_body"}, hangs=True),
    "hang-in-event": What("timeout", 504, {"kind": "hang_body", "partial": True}, hangs=True),
    "oversize": What("oversize", rule={"kind": "oversize", "size": 2 * MIB}, limits=CAPS),
}


def legs_of(role: str) -> list[PlanName]:
    return [plan for plan in PLANS if role in ROLES[plan]]


def rig_for(plan: PlanName, leg: str, what: What, **settings: Any) -> Rig:
    return Rig(plan, deadlines=HURRY[leg] if what.hangs else {}, limits=what.limits, **settings)


async def break_engine(rig: Rig, role: str, what: What, **more: Any) -> None:
    sim = rig.sim(role)
    if what.rule is None:
        await sim.stop()
    else:
        sim.faults.add(Fault(path=POSTS, count=None, **{**what.rule, **more}))


def body_for(plan: PlanName, stream: bool) -> dict[str, Any]:
    return chat(images=2 if plan.startswith("e") else 0, stream=stream)


def tells(answer: Answer, status: int, leg: str, url: str) -> None:
    """The answer is an error of the gateway's, in OpenAI's form, that names the leg and its engine."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["message"].startswith(f"{leg} engine {url}"), error["message"]


def is_engines_own(answer: Answer, what: What) -> None:
    assert what.rule is not None
    assert answer.status == what.rule["status"], answer
    assert answer.json == OWN
    assert answer.headers["server"] == "uvicorn"
    for name, value in what.rule.get("headers", {}).items():
        assert answer.headers[name] == value


def text_of(answer: Answer) -> str:
    """The generated text, streamed or not."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        *events, rest = answer.events
        assert rest == b""
        assert events[-1] == b"data: [DONE]"
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    content = answer.json["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


# --- the encode leg


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", ENCODE)
@pytest.mark.parametrize("plan", legs_of("encode"))
async def test_soft_policy_a_failed_encode_leg_is_counted_and_the_request_goes_on(
    plan: PlanName, fault: str, stream: bool
) -> None:
    what = ENCODE[fault]
    async with rig_for(plan, "encode", what) as rig:
        await break_engine(rig, "encode", what)
        answer = await rig.post(body_for(plan, stream))
        assert answer.status == 200, answer
        await rig.settled()
        legs = {key: count for key, count in rig.legs().items() if key[0] == "encode"}
        assert legs == {("encode", what.word): 2}
        assert rig.count("requests", plan=plan, status="200") == 1
        tried = 0 if what.rule is None else 2
        assert rig.seen("encode") == tried
        failures = [line for line in rig.log if line["event"] == "encode leg failed"]
        assert [line["status"] for line in failures] == [what.word] * 2
        assert all(rig.sim("encode").url == line["engine"] for line in failures)

        rig.sim("encode").faults.clear()
        again = await rig.post(body_for(plan, stream))
        assert text_of(again) == text_of(answer)
        await rig.settled()


@pytest.mark.parametrize("fault", ["reset", "hang", "4xx", "oversize", "garbage"])
@pytest.mark.parametrize("plan", legs_of("encode"))
async def test_soft_policy_the_other_items_still_merge(plan: PlanName, fault: str) -> None:
    what = ENCODE[fault]
    async with rig_for(plan, "encode", what) as rig:
        await break_engine(rig, "encode", what, leg="-enc1")
        answer = await rig.post(chat(images=3))
        assert answer.status == 200
        await rig.settled()
        consumer = "prefill" if plan == "e_p_d" else "combined"
        assert rig.legs()[("encode", "success")] == 2
        assert rig.legs()[("encode", what.word)] == 1
        assert rig.count("handles_merged") == 2
        seen = rig.sim(consumer).seen
        assert sum(seen.taken.values()) + sum(seen.encodes.values()) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", ENCODE)
@pytest.mark.parametrize("plan", legs_of("encode"))
async def test_strict_policy_a_failed_encode_leg_fails_the_request(plan: PlanName, fault: str, stream: bool) -> None:
    what = ENCODE[fault]
    async with rig_for(plan, "encode", what, encode_failure="strict") as rig:
        await break_engine(rig, "encode", what)
        answer = await rig.post(body_for(plan, stream))
        if what.status:
            tells(answer, what.status, answer.json["error"]["message"].split(" ")[0], rig.sim("encode").url)
            assert answer.json["error"]["message"].startswith("enc")
        else:
            is_engines_own(answer, what)
        await rig.settled()
        legs = rig.legs()
        assert legs.pop(("encode", what.word)) >= 1
        # What was still running when the first one failed was given up; nothing after it was begun.
        assert set(legs) <= {("encode", "cancelled")} | {(role, "cancelled") for role in ROLES[plan][1:]}
        assert all(rig.seen(role) == 0 for role in ROLES[plan][1:])
        assert rig.count("requests", plan=plan, status=str(answer.status)) == 1


# --- the prefill leg


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", PREFILL)
@pytest.mark.parametrize("plan", legs_of("prefill"))
async def test_a_failed_prefill_leg_fails_the_request(plan: PlanName, fault: str, stream: bool) -> None:
    what = PREFILL[fault]
    async with rig_for(plan, "prefill", what) as rig:
        await break_engine(rig, "prefill", what)
        answer = await rig.post(body_for(plan, stream))
        if what.status:
            tells(answer, what.status, "prefill", rig.sim("prefill").url)
        else:
            is_engines_own(answer, what)
        await rig.settled()
        assert rig.legs()[("prefill", what.word)] == 1
        assert rig.seen("prefill") == (0 if what.rule is None else 1)
        assert rig.seen("decode") == 0
        assert rig.count("requests", plan=plan, status=str(answer.status)) == 1


# --- the answering leg


def final_cases() -> list[Any]:
    whole = [(plan, fault, False) for plan in PLANS for fault in WHOLE]
    streams = [(plan, fault, True) for plan in PLANS for fault in BEFORE_HEAD]
    return [
        pytest.param(*case, id=f"{case[0]}-{case[1]}-{'stream' if case[2] else 'whole'}") for case in whole + streams
    ]


@pytest.mark.parametrize(("plan", "fault", "stream"), final_cases())
async def test_an_error_before_the_status_line_is_never_a_200(plan: PlanName, fault: str, stream: bool) -> None:
    what = WHOLE[fault]
    async with rig_for(plan, "final", what) as rig:
        await break_engine(rig, "final", what)
        answer = await rig.post(body_for(plan, stream))
        if what.word == "http_error":
            is_engines_own(answer, what)  # of any status: the status line is the answering engine's own
        else:
            tells(answer, what.status, rig.final, rig.sim("final").url)
        await rig.settled()
        assert rig.legs()[(rig.final, what.word)] == 1
        assert rig.seen(rig.final) == (0 if what.rule is None else 1)
        assert rig.count("requests", plan=plan, status=str(answer.status)) == 1


@pytest.mark.parametrize("fault", IN_STREAM)
@pytest.mark.parametrize("plan", PLANS)
async def test_a_stream_that_breaks_before_its_first_event_is_never_a_200(plan: PlanName, fault: str) -> None:
    what = IN_STREAM[fault]
    async with rig_for(plan, "final", what) as rig:
        await break_engine(rig, "final", what, events=0)
        answer = await rig.post(body_for(plan, True))
        tells(answer, what.status, rig.final, rig.sim("final").url)
        await rig.settled()
        assert rig.legs()[(rig.final, what.word)] == 1
        assert rig.count("requests", plan=plan, status=str(what.status)) == 1


@pytest.mark.parametrize("gap", [0, 0.01], ids=["at-once", "one-by-one"])
@pytest.mark.parametrize("fault", IN_STREAM)
@pytest.mark.parametrize("plan", PLANS)
async def test_a_stream_that_breaks_ends_with_an_error_that_names_the_leg(
    plan: PlanName, fault: str, gap: float
) -> None:
    """`gap`: seconds between events, which then come to the gateway one by one."""
    what = IN_STREAM[fault]
    sims = {ROLES[plan][-1]: {"costs": {"token": gap}}}
    async with rig_for(plan, "final", what, sims=sims) as rig:
        await break_engine(rig, "final", what, events=3)
        async with rig.client() as client:
            client.send(body_for(plan, True))
            answer = await client.answer()
            assert answer.status == 200
            assert answer.complete
            *whole, error, tail = answer.events
            assert tail == b""
            assert b"[DONE]" not in answer.body
            assert len(whole) == 3
            assert all(json.loads(event.removeprefix(b"data: "))["choices"] for event in whole)
            told = json.loads(error.removeprefix(b"data: "))["error"]
            assert told["code"] == what.status
            assert told["message"].startswith(f"{rig.final} engine {rig.sim('final').url}")
            assert await client.ended()
            await rig.settled()
        assert rig.legs()[(rig.final, what.word)] == 1
        assert rig.count("requests", plan=plan, status="200") == 1
        assert rig.count("stream_errors", leg=rig.final, kind=what.word) == 1


# --- what lies just inside the limits


async def test_an_encode_answer_of_exactly_one_mebibyte_is_read() -> None:
    async with Rig("e_pd", encode_failure="strict") as rig:
        rig.sim("encode").faults.add(Fault(kind="oversize", size=MIB, path=POSTS))
        answer = await rig.post(chat(images=1))
        assert answer.status == 200, answer
        assert rig.legs()[("encode", "success")] == 1
        await rig.settled()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_answer_of_exactly_its_limit_is_read(role: str) -> None:
    async with Rig("p_d", limits=CAPS) as rig:
        rig.sim(role).faults.add(Fault(kind="oversize", size=SMALL, path=POSTS))
        answer = await rig.post(chat())
        assert answer.status == 200, answer
        await rig.settled()


@pytest.mark.parametrize("fault", ["slow_first_byte", "slow_body", "trickle"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("plan", PLANS)
async def test_slow_engines_are_waited_for(plan: PlanName, stream: bool, fault: str) -> None:
    async with Rig(plan) as rig:
        for role in ROLES[plan]:
            rig.sim(role).faults.add(Fault(kind=fault, seconds=0.01, chunk=997, path=POSTS, count=None))
        answer = await rig.post(body_for(plan, stream))
        assert text_of(answer)
        await rig.settled()
