"""Hand-over between engines, and what a real engine would refuse, fail or die of."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.sim.conftest import Client, audio, embeds, image, user
from triptych.sim import MemoryStore, Sim
from triptych.sim.content import digest
from triptych.sim.media import encode

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def ask(client: openai.AsyncOpenAI, messages: Any, **extra: Any) -> Any:
    """A chat answer; keywords that the client does not know go into the body."""
    limit = extra.pop("max_tokens", 20)
    return await client.chat.completions.create(model="sim", messages=messages, max_tokens=limit, extra_body=extra)


def text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


# --- encoder output -----------------------------------------------------------------------------------------------


async def test_encoder_answers_one_entry_per_distinct_hash_with_every_place(client: Client) -> None:
    async with Sim(role="encode", ec="example", ec_dir=MemoryStore()) as encoder:
        made = await ask(client(encoder), user(image("AA"), image("BB"), image("AA"), audio("CC")))
    handles = made.ec_transfer_params
    assert [entry["item_indices"] for entry in handles.values()] == [[0, 2], [1], [3]]
    assert list(next(iter(handles.values()))["metadata"]) == ["image_grid_thw"]
    assert list(list(handles.values())[2]["metadata"]) == ["audio_num_tokens"]
    assert (text(made), made.choices[0].finish_reason, made.usage.completion_tokens) == ("", "stop", 0)
    assert sum(encoder.seen.encodes.values()) == 4


async def test_encoder_without_metadata_answers_empty_metadata_and_null_for_text(client: Client) -> None:
    async with Sim(role="encode", ec="example", ec_dir=MemoryStore(), metadata=False) as encoder:
        made = await ask(client(encoder), user(image("AA")))
        plain = await ask(client(encoder), user("only text"))
    assert [entry["metadata"] for entry in made.ec_transfer_params.values()] == [{}]
    assert plain.ec_transfer_params is None


@pytest.mark.parametrize("dialect", ["example", "eccpu"])
@pytest.mark.parametrize("form", ["raw", "metadata"])
async def test_consumer_takes_the_encoders_output_and_answers_as_a_plain_engine(
    client: Client, dialect: Any, form: str, tmp_path: Path
) -> None:
    ec = {"ec": dialect, "ec_dir": tmp_path}
    parts = [image("AA"), audio("BB"), image("CC")]
    async with Sim(role="encode", **ec) as encoder, Sim(**ec) as consumer, Sim() as plain:
        expected = text(await ask(client(plain), user("what?", *parts)))
        handles = (await ask(client(encoder), user(*parts))).ec_transfer_params
        names = list(handles)
        if form == "metadata":
            kinds = ("image", "audio", "image")
            parts = [embeds(name, handles[name]["metadata"], kind) for name, kind in zip(names, kinds, strict=True)]
        got = await ask(client(consumer), user("what?", *parts), ec_transfer_params=handles)
        assert text(got) == expected
        assert sum(consumer.seen.taken.values()) == 3
        assert not consumer.seen.encodes


async def test_engine_that_is_both_answers_tokens_and_handles(client: Client) -> None:
    async with Sim(ec="example", ec_dir=MemoryStore(), ec_role="both") as both, Sim() as plain:
        got = await ask(client(both), user("?", image("AA")))
        assert text(got) == text(await ask(client(plain), user("?", image("AA"))))
        assert len(got.ec_transfer_params) == 1


@pytest.mark.parametrize("dialect", ["example", "eccpu"])
async def test_raw_media_without_a_stored_item_is_encoded_here(client: Client, dialect: Any) -> None:
    async with Sim(ec=dialect, ec_dir=MemoryStore()) as consumer, Sim() as plain:
        assert text(await ask(client(consumer), user(image("AA")))) == text(await ask(client(plain), user(image("AA"))))
        assert consumer.seen.ec["fallback"] == 1


@pytest.mark.parametrize("dialect", ["example", "eccpu"])
async def test_metadata_only_part_with_an_unknown_hash_kills_the_engine(client: Client, dialect: Any) -> None:
    async with Sim(ec=dialect, ec_dir=MemoryStore()) as consumer:
        with pytest.raises(openai.InternalServerError, match="EngineCore encountered an issue"):
            await ask(client(consumer), user(embeds("unknown", {"image_grid_thw": [1, 8, 8]})))
        await asyncio.wait_for(consumer.died.wait(), 5)
        with pytest.raises(openai.APIConnectionError):
            await ask(client(consumer), user("hi"))
        assert consumer.dead


async def test_metadata_that_does_not_match_the_stored_rows_kills_the_engine(client: Client) -> None:
    store = MemoryStore()
    async with (
        Sim(role="encode", ec="example", ec_dir=store) as encoder,
        Sim(ec="example", ec_dir=store, death="500") as consumer,
    ):
        (name,) = (await ask(client(encoder), user(image("AA")))).ec_transfer_params
        with pytest.raises(openai.InternalServerError):
            await ask(client(consumer), user(embeds(name, {"image_grid_thw": [1, 2, 2]})))
        assert consumer.seen.deaths == ["Expected number of multimodal embeddings to match number of input items"]
        with pytest.raises(openai.InternalServerError):
            await ask(client(consumer), user("the dead answer 500 from now on"))


async def test_client_uuid_that_names_another_item_is_believed(client: Client) -> None:
    """The poisoning that a gateway has to close: the engine takes what is stored under the uuid."""
    store = MemoryStore()
    # Two images whose towers give the same number of rows, so that the swap goes unnoticed.
    payloads = (f"P{number}" for number in range(1000))
    one, other = islice((p for p in payloads if encode(digest(p.encode()), "image").rows == 16), 2)
    async with Sim(role="encode", ec="example", ec_dir=store) as encoder, Sim(ec="example", ec_dir=store) as consumer:
        await ask(client(encoder), user(image(one, uuid="mine")))
        honest = text(await ask(client(consumer), user(image(one))))
        assert text(await ask(client(consumer), user(image(other, uuid="mine")))) == honest


async def test_uuid_that_is_a_path_touches_nothing_and_is_counted(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "ec"
    async with Sim(role="encode", ec="example", ec_dir=folder) as encoder:
        await ask(client(encoder), user(image("AA", uuid="../evil"), image("BB", uuid=f"{tmp_path}/abs")))
        assert encoder.seen.ec["escapes"] == 2
    assert os.listdir(tmp_path) == []


async def test_mixing_raw_and_embeds_of_one_modality_is_400_of_two_it_is_not(client: Client) -> None:
    store = MemoryStore()
    async with Sim(role="encode", ec="example", ec_dir=store) as encoder, Sim(ec="example", ec_dir=store) as consumer:
        handles = (await ask(client(encoder), user(image("AA")))).ec_transfer_params
        ((name, entry),) = handles.items()
        part = embeds(name, entry["metadata"])
        with pytest.raises(openai.BadRequestError, match="Mixing raw image and embedding inputs is not allowed"):
            await ask(client(consumer), user(part, image("BB")))
        await ask(client(consumer), user(part, audio("BB")))


async def test_metadata_only_part_on_an_engine_that_is_no_consumer_is_400(client: Client) -> None:
    part = embeds("h", {"image_grid_thw": [1, 8, 8]})
    async with Sim() as plain, Sim(role="encode", ec="example", ec_dir=MemoryStore()) as encoder:
        for sim in (plain, encoder):
            with pytest.raises(openai.BadRequestError, match="enable-mm-embeds"):
                await ask(client(sim), user(part))


async def test_a_uuid_makes_the_engine_ignore_the_type_of_a_part(client: Client) -> None:
    async with Sim() as plain:
        part = {"type": "text", "text": "t", "image_embeds": {"image_grid_thw": [1, 8, 8]}, "uuid": "h"}
        with pytest.raises(openai.BadRequestError, match="enable-mm-embeds"):
            await ask(client(plain), user(part))


async def test_uuid_only_part_is_400_unless_the_media_was_seen_before(client: Client) -> None:
    part = {"type": "image_url", "image_url": None, "uuid": "u"}
    async with Sim() as plain:
        with pytest.raises(openai.BadRequestError, match="Cache miss for image at index 0"):
            await ask(client(plain), user(part))
        first = text(await ask(client(plain), user(image("AA", uuid="u"))))
        assert text(await ask(client(plain), user(part))) == first


async def test_responses_refuse_embeds_by_type_but_take_them_by_key(client: Client) -> None:
    store = MemoryStore()
    async with Sim(role="encode", ec="example", ec_dir=store) as encoder, Sim(ec="example", ec_dir=store) as consumer:
        handles = (await ask(client(encoder), user(image("AA")))).ec_transfer_params
        ((name, entry),) = handles.items()
        part: Any = embeds(name, entry["metadata"])
        with pytest.raises(openai.BadRequestError):
            await client(consumer).responses.create(model="sim", input=[{"role": "user", "content": [part]}])
        part = part | {"type": "input_image"}
        await client(consumer).responses.create(model="sim", input=[{"role": "user", "content": [part]}])
        assert consumer.seen.ec["taken"] == 1


# --- eccpu --------------------------------------------------------------------------------------------------------


async def test_eccpu_entry_has_address_size_and_shape(client: Client) -> None:
    async with Sim(role="encode", ec="eccpu") as encoder:
        made = await ask(client(encoder), user(image("AA")))
    (entry,) = made.ec_transfer_params.values()
    assert list(entry) == ["item_indices", "metadata", "peer_host", "peer_port", "size_bytes", "shape"]
    _, height, width = entry["metadata"]["image_grid_thw"]
    assert entry["shape"] == [height * width // 4, 64]
    assert entry["size_bytes"] == height * width // 4 * 64 * 4


@pytest.mark.parametrize("wrong", ["shape", "size", "peer", "gone"])
@pytest.mark.parametrize("raw", [True, False])
async def test_eccpu_consumer_falls_back_to_media_or_fails_that_request_alone(
    client: Client, wrong: str, raw: bool
) -> None:
    async with (
        Sim(role="encode", ec="eccpu") as encoder,
        Sim(role="encode", ec="eccpu") as other,
        Sim(ec="eccpu") as consumer,
    ):
        handles = (await ask(client(encoder), user(image("AA")))).ec_transfer_params
        ((name, entry),) = handles.items()
        part = image("AA") if raw else embeds(name, entry["metadata"])
        if wrong == "shape":
            entry["shape"][0] += 1
        elif wrong == "size":
            entry["size_bytes"] = 7
        elif wrong == "peer":
            entry["peer_port"] = other.side_ports[0]
        else:
            await encoder.kill()
        if raw:
            await ask(client(consumer), user(part), ec_transfer_params=handles)
            assert consumer.seen.ec["fallback"] == 1
        else:
            with pytest.raises(openai.InternalServerError, match="Internal server error"):
                await ask(client(consumer), user(part), ec_transfer_params=handles)
        assert consumer.seen.ec["refused"] == 1
        await ask(client(consumer), user("the engine lives"))


# --- mooncake -----------------------------------------------------------------------------------------------------


async def push(client: Client, encoder: Sim, address: str, payload: str, transfer: str) -> dict[str, Any]:
    """An encode leg that pushes to a consumer."""
    params = {"consumer_zmq": address, "ec_items": [{"transfer_id": transfer}]}
    made = await ask(client(encoder), user(image(payload)), ec_transfer_params=params, max_tokens=1)
    handles: dict[str, Any] = made.ec_transfer_params
    return handles


async def test_mooncake_pushes_to_the_consumer_named_and_answers_the_transfer_id(client: Client) -> None:
    async with Sim(role="encode", ec="mooncake") as encoder, Sim(ec="mooncake") as consumer, Sim() as plain:
        expected = text(await ask(client(plain), user("?", image("AA"))))
        handles = await push(client, encoder, consumer.zmq, "AA", "t1")
        ((name, entry),) = handles.items()
        assert entry["transfer_id"] == "t1"
        params = handles | {"ec_items": [{"mm_hash": name, "transfer_id": "t1"}]}
        part = embeds(name, entry["metadata"])
        assert text(await ask(client(consumer), user("?", part), ec_transfer_params=params)) == expected
        assert (encoder.seen.ec["pushed"], consumer.seen.ec["received"], consumer.seen.ec["taken"]) == (1, 1, 1)


async def test_mooncake_consumer_waits_for_a_push_that_comes_late(client: Client) -> None:
    async with Sim(role="encode", ec="mooncake") as encoder, Sim(ec="mooncake") as consumer:
        params = {"ec_items": [{"transfer_id": "t1"}]}
        waiting = asyncio.create_task(ask(client(consumer), user(image("AA")), ec_transfer_params=params))
        await consumer.seen.until(lambda: consumer.seen.in_flight == 1)
        await push(client, encoder, consumer.zmq, "AA", "t1")
        await waiting
        assert consumer.seen.ec["taken"] == 1


async def test_mooncake_consumer_fails_an_announced_item_that_never_comes_even_with_the_media(client: Client) -> None:
    async with Sim(ec="mooncake", push_wait=0.05) as consumer:
        with pytest.raises(openai.InternalServerError):
            await ask(client(consumer), user(image("AA")), ec_transfer_params={"ec_items": [{"transfer_id": "t"}]})
        assert consumer.seen.ec["timeout"] == 1


@pytest.mark.parametrize(("mode", "fails"), [("encode", False), ("wait", True)])
async def test_mooncake_item_left_out_of_ec_items(client: Client, mode: Any, fails: bool) -> None:
    async with Sim(ec="mooncake", push_wait=0.05, unannounced=mode) as consumer:
        if fails:
            with pytest.raises(openai.InternalServerError):
                await ask(client(consumer), user(image("AA")))
        else:
            await ask(client(consumer), user(image("AA")))


async def test_mooncake_ids_without_hashes_go_by_position_so_a_gap_shifts_them(client: Client) -> None:
    async with Sim(role="encode", ec="mooncake") as encoder, Sim(ec="mooncake", push_wait=0.05) as consumer:
        handles = await push(client, encoder, consumer.zmq, "BB", "t2")
        (name,) = handles
        parts = user(image("AA"), image("BB"))
        with pytest.raises(openai.InternalServerError):
            await ask(client(consumer), parts, ec_transfer_params={"ec_items": [{"transfer_id": "t2"}]})
        await push(client, encoder, consumer.zmq, "BB", "t2")
        await ask(client(consumer), parts, ec_transfer_params={"ec_items": [{"mm_hash": name, "transfer_id": "t2"}]})
        assert consumer.seen.ec["fallback"] == 1


async def test_mooncake_push_goes_to_one_rank_and_the_request_must_be_pinned_to_it(client: Client) -> None:
    async with Sim(role="encode", ec="mooncake") as encoder, Sim(ec="mooncake", dp_size=2, push_wait=0.05) as consumer:
        for rank in ("0", "1"):
            await push(client, encoder, consumer.zmq_addresses[1], "AA", "t")
            call = client(consumer).chat.completions.create(
                model="sim",
                messages=user(image("AA")),  # type: ignore[arg-type]
                extra_body={"ec_transfer_params": {"ec_items": [{"transfer_id": "t"}]}},
                extra_headers={"X-data-parallel-rank": rank},
            )
            if rank == "0":
                with pytest.raises(openai.InternalServerError):
                    await call
            else:
                await call


async def test_mooncake_encoder_counts_what_it_could_not_push(client: Client) -> None:
    async with (
        Sim(ec="mooncake") as consumer,
        Sim(role="encode", ec="mooncake", known_consumers=("tcp://elsewhere:1",)) as encoder,
    ):
        await ask(client(encoder), user(image("AA")))
        assert encoder.seen.ec["unaddressed"] == 1
        await push(client, encoder, consumer.zmq, "AA", "t")
        assert encoder.seen.ec["refused"] == 1
        assert consumer.seen.ec["received"] == 0


# --- KV -----------------------------------------------------------------------------------------------------------


async def prefill(client: Client, sim: Sim, messages: Any, **extra: Any) -> dict[str, Any]:
    """A prefill leg; its KV parameters."""
    made = await ask(client(sim), messages, kv_transfer_params=REMOTE_DECODE, max_tokens=1, **extra)
    params: dict[str, Any] = made.kv_transfer_params
    return params


async def test_decode_answers_from_the_kv_of_the_prefill_and_frees_it(client: Client) -> None:
    messages = user("what?", image("AA"))
    async with Sim(role="prefill") as p, Sim(role="decode") as d, Sim() as plain:
        expected = text(await ask(client(plain), messages))
        params = await prefill(client, p, messages)
        assert list(params) == [
            "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
            "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens",
            "remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens",
        ]  # fmt: skip
        assert p.pinned == 1
        assert text(await ask(client(d), messages, kv_transfer_params=params)) == expected
        assert (p.pinned, d.seen.kv["used"], d.seen.local_tokens) == (0, 1, 0)
        assert not d.seen.encodes


async def test_decode_answers_from_whatever_kv_it_was_given(client: Client) -> None:
    async with Sim(role="prefill") as p, Sim(role="decode") as d, Sim() as plain:
        theirs = text(await ask(client(plain), user("their secret")))
        params = await prefill(client, p, user("their secret"))
        assert text(await ask(client(d), user("my question"), kv_transfer_params=params)) == theirs


async def test_remote_prefill_without_blocks_kills_the_decoder(client: Client) -> None:
    async with Sim(role="decode") as d:
        with pytest.raises(openai.InternalServerError):
            await ask(client(d), user("hi"), kv_transfer_params={"do_remote_prefill": True})
        await asyncio.wait_for(d.died.wait(), 5)


async def test_handle_without_an_address_hangs_for_ever(client: Client) -> None:
    async with Sim(role="prefill") as p, Sim(role="decode") as d:
        params = await prefill(client, p, user("hi"))
        del params["remote_port"]
        task = asyncio.create_task(ask(client(d), user("hi"), kv_transfer_params=params))
        await d.seen.until(lambda: d.seen.in_flight == 1)
        done, _ = await asyncio.wait([task], timeout=0.1)
        assert not done
        task.cancel()
        await d.seen.until(lambda: d.seen.in_flight == 0)
        assert [cancel.moment for cancel in d.seen.cancels] == ["working"]


@pytest.mark.parametrize("wrong", ["twice", "expired", "engine", "port", "blocks", "invented"])
async def test_kv_that_no_prefill_keeps_fails_the_request(client: Client, wrong: str) -> None:
    lease = 0.02 if wrong == "expired" else 30.0
    async with Sim(role="prefill", kv_lease=lease) as p, Sim(role="decode") as d:
        params = await prefill(client, p, user("hi"))
        if wrong == "twice":
            await ask(client(d), user("hi"), kv_transfer_params=params)
        elif wrong == "expired":
            await p.seen.until(lambda: p.seen.kv["expired"] == 1)
        elif wrong == "engine":
            params["remote_engine_id"] = "another"
        elif wrong == "port":
            params["remote_port"] = 1
        elif wrong == "blocks":
            params["remote_block_ids"] = [[4711]]
        else:
            params["remote_request_id"] = "chatcmpl-invented"
        with pytest.raises(openai.InternalServerError, match="Internal server error"):
            await ask(client(d), user("hi"), kv_transfer_params=params)
        assert d.seen.kv["refused"] == 1
        assert p.seen.kv["stale"] == (wrong not in ("engine", "port"))
        await ask(client(d), user("the engine lives"))


async def test_stale_kv_can_corrupt_the_answer_as_a_real_engine_would(client: Client) -> None:
    async with Sim(role="prefill", stale_kv="corrupt") as p, Sim(role="decode") as d:
        params = await prefill(client, p, user("hi"))
        good = text(await ask(client(d), user("hi"), kv_transfer_params=params))
        assert text(await ask(client(d), user("hi"), kv_transfer_params=params)) != good


async def test_swapped_blocks_read_another_requests_kv(client: Client) -> None:
    async with Sim(role="prefill") as p, Sim(role="decode") as d, Sim() as plain:
        theirs = text(await ask(client(plain), user("theirs")))
        first, second = [await prefill(client, p, user(words)) for words in ("mine", "theirs")]
        stolen = first | {"remote_block_ids": second["remote_block_ids"]}
        assert text(await ask(client(d), user("mine"), kv_transfer_params=stolen)) == theirs


async def test_several_choices_over_one_handle_are_not_what_a_plain_engine_answers(client: Client) -> None:
    async with Sim(role="prefill") as p, Sim(role="decode") as d, Sim() as plain:
        expected = await ask(client(plain), user("hi"), n=2)
        params = await prefill(client, p, user("hi"))
        got = await ask(client(d), user("hi"), n=2, kv_transfer_params=params)
        assert got.choices[0].message.content != expected.choices[0].message.content
        assert d.seen.kv["misused"] == 1


async def test_several_choices_on_the_prefill_pin_blocks_that_no_handle_names(client: Client) -> None:
    async with Sim(role="prefill", kv_lease=0.02) as p:
        params = await prefill(client, p, user("hi"), n=3)
        assert len(params["remote_block_ids"]) == 1
        await p.seen.until(lambda: p.seen.kv["expired"] == 3)


async def test_blocks_of_a_request_that_the_decoder_refuses_are_released(client: Client) -> None:
    async with Sim(role="prefill") as p, Sim(role="decode") as d:
        params = await prefill(client, p, user("hi"))
        with pytest.raises(openai.NotFoundError):
            await client(d).chat.completions.create(
                model="nope",
                messages=user("hi"),  # type: ignore[arg-type]
                extra_body={"kv_transfer_params": params},
            )
        assert (p.pinned, p.seen.kv["released"]) == (0, 1)


async def test_smuggled_parameters_fail_the_request_alone(client: Client) -> None:
    async with Sim(role="decode") as d:
        with pytest.raises(openai.InternalServerError):
            await ask(client(d), user("hi"), vllm_xargs={"kv_transfer_params": "x"})
        await ask(client(d), user("hi"))


async def test_engine_failure_in_a_stream_comes_as_role_error_done(client: Client) -> None:
    async with Sim(role="decode") as d:
        bad = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "x"}
        bad |= {"remote_request_id": "x", "remote_host": "127.0.0.1", "remote_port": 1}
        stream = await client(d).chat.completions.create(
            model="sim",
            messages=user("hi"),  # type: ignore[arg-type]
            stream=True,
            extra_body={"kv_transfer_params": bad},
        )
        first = await anext(stream)
        with pytest.raises(openai.APIError, match="Internal server error"):
            await anext(stream)
    assert first.choices[0].delta.role == "assistant"


@pytest.mark.parametrize("where", ["memory", "folder"])
async def test_kv_files_cover_whole_blocks_and_the_tail_needs_its_item(
    client: Client, where: str, tmp_path: Path
) -> None:
    kv: dict[str, Any] = {"kv": "example", "kv_dir": MemoryStore() if where == "memory" else tmp_path / "kv"}
    ec: dict[str, Any] = {"ec": "example", "ec_dir": MemoryStore()}
    words = "w" * 200
    async with AsyncExitStack() as stack:
        encoder = await stack.enter_async_context(Sim(role="encode", **ec))
        p = await stack.enter_async_context(Sim(role="prefill", **ec, **kv))
        d = await stack.enter_async_context(Sim(role="decode", **ec, **kv, ec_role="consumer"))
        bare = await stack.enter_async_context(Sim(role="decode", **kv, death="500"))
        plain = await stack.enter_async_context(Sim())
        expected = text(await ask(client(plain), user(words, image("AA"))))
        handles = (await ask(client(encoder), user(image("AA")))).ec_transfer_params
        ((name, entry),) = handles.items()
        messages = user(words, embeds(name, entry["metadata"]))
        first = await ask(client(p), messages, max_tokens=1)
        assert first.kv_transfer_params is None
        assert text(await ask(client(d), messages)) == expected
        assert d.seen.kv["hit"] == 1
        assert 0 < d.seen.local_tokens <= 32
        with pytest.raises(openai.InternalServerError):
            await ask(client(bare), messages)
