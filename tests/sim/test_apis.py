"""vLLM's APIs, seen through the official client."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import openai
import pytest
import trustme

from tests.sim.conftest import Client, audio, image, user
from tests.sim.raw import Raw, chat
from triptych.sim import Sim


async def test_chat_answers_in_vllms_shape_with_null_handover_fields() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        raw.send(chat())
        status, body = await raw.answer()
    answer = json.loads(body)
    assert status == 200
    assert answer["kv_transfer_params"] is None
    assert answer["ec_transfer_params"] is None
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4
    assert list(answer) == [
        "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage", "prompt_logprobs",
        "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics",
    ]  # fmt: skip


async def test_chat_stream_is_role_chunk_tokens_finish_usage_done(client: Client) -> None:
    async with Sim() as sim:
        whole = await client(sim).chat.completions.create(model="sim", messages=user("hi"), max_tokens=5)
        async with Raw(sim) as raw:
            raw.send(
                {
                    "messages": user("hi"),
                    "max_tokens": 5,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            )
            status, headers = await raw.head()
            assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            frames = (await raw.chunks()).split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    events = [json.loads(frame.removeprefix(b"data: ")) for frame in frames[:-2]]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"]["content"] for e in events[1:-1]) == whole.choices[0].message.content
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * 5 + ["length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5


async def test_stream_without_include_usage_has_no_usage(client: Client) -> None:
    async with Sim() as sim:
        stream = await client(sim).chat.completions.create(model="sim", messages=user("hi"), stream=True)
        assert [chunk.usage async for chunk in stream if chunk.usage] == []


async def test_several_choices_differ(client: Client) -> None:
    async with Sim() as sim:
        answer = await client(sim).chat.completions.create(model="sim", messages=user("hi"), n=3, max_tokens=8)
    assert len({choice.message.content for choice in answer.choices}) == 3


async def test_completions_default_to_16_tokens_and_take_many_prompts(client: Client) -> None:
    async with Sim(output_tokens=100) as sim:
        answer = await client(sim).completions.create(model="sim", prompt=["a", "b"])
        one = await client(sim).completions.create(model="sim", prompt="b")
        stream = await client(sim).completions.create(model="sim", prompt="b", stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert len(answer.choices) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32
    assert answer.choices[1].text == one.choices[0].text == streamed


async def test_responses_whole_and_streamed(client: Client) -> None:
    async with Sim() as sim:
        whole = await client(sim).responses.create(model="sim", input="hi")
        async with client(sim).responses.stream(model="sim", input="hi") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert whole.status == "completed"
    assert final.output_text == whole.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


async def test_embeddings(client: Client) -> None:
    async with Sim() as sim:
        floats = await client(sim).embeddings.create(model="sim", input=["a", "b"], encoding_format="float")
        packed = await client(sim).embeddings.create(model="sim", input="b")
    assert len(floats.data[0].embedding) == 64
    assert floats.data[0].embedding != floats.data[1].embedding
    assert packed.data[0].embedding == pytest.approx(floats.data[1].embedding)


async def test_messages_whole_streamed_and_refused() -> None:
    body = {"model": "sim", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    async with Sim() as sim, Raw(sim) as raw:
        raw.send(body, "/v1/messages")
        _, whole = await raw.answer()
        raw.send(body | {"stream": True}, "/v1/messages")
        await raw.head()
        frames = [f for f in (await raw.chunks()).split(b"\n\n") if f]
        raw.send(body | {"model": "nope"}, "/v1/messages")
        status, refused = await raw.answer()
    answer = json.loads(whole)
    assert answer["stop_reason"] == "max_tokens"
    assert "kv_transfer_params" not in answer
    names = [frame.split(b"\n")[0].removeprefix(b"event: ").decode() for frame in frames]
    assert names == [
        "message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    text = "".join(json.loads(f.split(b"data: ")[1])["delta"]["text"] for f in frames if b"text_delta" in f)
    assert text == answer["content"][0]["text"]
    assert status == 404
    assert json.loads(refused)["type"] == "error"


async def test_messages_ignore_what_that_api_does_not_have() -> None:
    body = {"model": "sim", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    async with Sim() as sim, Raw(sim) as raw:
        raw.send(body | {"mm_processor_kwargs": {"a": 1}, "priority": 3, "min_tokens": 9}, "/v1/messages")
        assert (await raw.answer())[0] == 200
        raw.send(body | {"max_tokens": "many"}, "/v1/messages")
        assert (await raw.answer())[0] == 400


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    async with Sim(tls=context) as sim, openai.DefaultAsyncHttpxClient(verify=trust) as pool:
        assert sim.url.startswith("https://")
        answer = await pool.get(f"{sim.url}/version")
        assert answer.json() == {"version": "0.32.0"}


async def test_transcription_of_an_upload(client: Client) -> None:
    async with Sim() as sim:
        one = await client(sim).audio.transcriptions.create(model="sim", file=("a.wav", b"RIFFaaaa"))
        same = await client(sim).audio.transcriptions.create(model="sim", file=("b.wav", b"RIFFaaaa"))
        other = await client(sim).audio.transcriptions.create(model="sim", file=("a.wav", b"RIFFbbbb"))
        with pytest.raises(openai.NotFoundError):
            await client(sim).audio.transcriptions.create(model="nope", file=("a.wav", b"RIFF"))
    assert one.text == same.text != other.text


async def test_models_aliases_and_adapters(client: Client) -> None:
    async with Sim(model="base", aliases=["nick"], loras=["tuned"]) as sim:
        cards = {card.id: card async for card in client(sim).models.list()}
        answers = {}
        for name in cards:
            made = await client(sim).chat.completions.create(model=name, messages=user("hi"))
            answers[name] = (made.model, made.choices[0].message.content)
    assert list(cards) == ["base", "nick", "tuned"]
    assert cards["tuned"].parent == "base"  # type: ignore[attr-defined]
    assert answers["nick"] == answers["base"]
    assert answers["tuned"][0] == "tuned"
    assert answers["tuned"][1] != answers["base"][1]


async def test_unknown_model_is_404_and_wrong_key_401(client: Client) -> None:
    async with Sim(api_key="secret") as sim:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client(sim).chat.completions.create(model="sim", messages=user("hi"))
        with pytest.raises(openai.NotFoundError, match=r"The model `nope` does not exist"):
            await client(sim, "secret").chat.completions.create(model="nope", messages=user("hi"))
        async with Raw(sim) as raw:
            for path, expected in (("/health", 200), ("/version", 200), ("/metrics", 200), ("/v1/models", 401)):
                raw.send(b"", path, "GET")
                assert (await raw.answer())[0] == expected
    assert refused.value.response.json() == {"error": "Unauthorized"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        ({"model": "sim"}, "body.messages"),
        (chat(max_tokens="x"), "body.max_tokens"),
        (chat(kv_transfer_params="x"), "body.kv_transfer_params"),
        (chat(vllm_xargs={"a": {}}), "body.vllm_xargs.a.str"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(stream_options={"include_usage": True}), "stream_options"),
        (chat(min_tokens=5), None),
        (chat(priority=1), None),
        (chat(mm_processor_kwargs={"a": 1}), "mm_processor_kwargs"),
        (chat(max_tokens=10**9), "max_tokens"),
        ({"messages": user({"type": "nope"})}, "type"),
    ],
)
async def test_bad_input_is_400_in_vllms_shape(body: Any, param: str | None) -> None:
    async with Sim() as sim, Raw(sim) as raw:
        raw.send(body)
        status, answer = await raw.answer()
    error = json.loads(answer)["error"]
    assert (status, error["code"], error["param"]) == (400, 400, param)
    assert error["type"] in ("Bad Request", "BadRequestError")


async def test_lone_surrogates_and_big_integers_are_taken_as_vllm_takes_them() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        raw.send(b'{"messages":[{"role":"user","content":"\\ud800"}],"x":123456789012345678901234567890}')
        assert (await raw.answer())[0] == 200


async def test_content_type_must_be_json() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        raw.send(chat(), headers={"content-type": "text/plain"})
        assert (await raw.answer())[0] == 400


async def test_answer_follows_model_text_and_media_in_order(client: Client) -> None:
    async with Sim() as sim, Sim(model="other") as other:

        async def ask(engine: Sim, *parts: Any) -> str | None:
            made = await client(engine).chat.completions.create(model=engine.config.model, messages=user(*parts))
            return made.choices[0].message.content

        first = await ask(sim, "what?", image("AAAA"), image("BBBB"))
        assert await ask(sim, "what?", image("AAAA"), image("BBBB")) == first
        assert await ask(sim, "what?", image("AAAA", uuid="u1"), image("BBBB", uuid="u2")) == first
        others = {
            await ask(sim, "what?", image("BBBB"), image("AAAA")),
            await ask(sim, "what?", image("AAAA"), image("AAAA")),
            await ask(sim, "who?", image("AAAA"), image("BBBB")),
            await ask(sim, "what?", image("AAAA"), audio("BBBB")),
            await ask(other, "what?", image("AAAA"), image("BBBB")),
        }
    assert len(others) == 5
    assert first not in others


async def test_media_of_every_api_is_the_same_media(client: Client) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    async with Sim() as sim, Raw(sim) as raw:
        await client(sim).chat.completions.create(model="sim", messages=user(image("AAAA")))
        part: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
        await client(sim).responses.create(model="sim", input=[{"role": "user", "content": [part]}])
        raw.send({"model": "sim", "max_tokens": 1, "messages": [message]}, "/v1/messages")
        assert (await raw.answer())[0] == 200
        assert list(sim.seen.encodes.values()) == [3]


async def test_metrics_count_as_vllms_do() -> None:
    async with Sim() as sim, Raw(sim) as raw:
        raw.send(chat(max_tokens=3))
        await raw.answer()
        raw.send(b"", "/metrics", "GET")
        _, text = await raw.answer()
    assert b'vllm:generation_tokens_total{engine="0",model_name="sim"} 3.0' in text
    assert b'source="external_kv_transfer"} 0.0' in text


async def test_idle_connection_is_closed_silently_after_the_keep_alive_time() -> None:
    async with Sim(keep_alive=0.05) as sim, Raw(sim) as raw:
        raw.send(chat())
        _, headers = await raw.head()
        assert "connection" not in headers
        await raw.reader.readexactly(int(headers["content-length"]))
        assert await raw.rest() == b""
