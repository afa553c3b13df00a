"""`triptych sim` as a process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner

from triptych.cli.sim import sim as command
from triptych.sim.serve import read_engines

START = [sys.executable, "-c", "from triptych.cli.sim import sim; sim()"]


@asynccontextmanager
async def running(*flags: str, lines: int = 1) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """A process and the addresses that it prints."""
    process = await asyncio.create_subprocess_exec(
        *START, *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    urls = []
    try:
        async with asyncio.timeout(30):
            for _ in range(lines):
                line = (await process.stdout.readline()).decode()
                assert line.startswith("listening on http://"), line
                urls.append(line.split()[-1])
        yield process, urls
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def post(url: str, path: str, body: Any) -> Any:
    """POST some JSON."""
    request = Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})

    def call() -> Any:
        with urlopen(request, timeout=10) as answer:
            return json.load(answer)

    return await asyncio.to_thread(call)


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **more}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_prints_its_address_answers_and_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    async with running("--model", "m", "--output-tokens", "3") as (process, (url,)):
        answer = await post(url, "/v1/chat/completions", chat({"type": "text", "text": "hi"}))
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("m", 3)
        process.send_signal(number)
        out, err = await asyncio.wait_for(process.communicate(), 10)
        assert (process.returncode, out, err) == (0, b"", b"")


async def test_a_request_that_kills_the_engine_ends_the_process_with_1_and_says_why() -> None:
    async with running("--fault", '{"kind": "die"}') as (process, (url,)):
        with pytest.raises(OSError):
            await post(url, "/v1/chat/completions", chat())
        out, _ = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 1
    assert out == b"combined engine died: fault\n"


async def test_engines_of_separate_processes_hand_over_through_a_folder_and_the_side_channel(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    words = {"type": "text", "text": "what?"}
    path = "/v1/chat/completions"
    folder = ["--ec", "example", "--ec-dir", str(tmp_path / "ec")]
    config = tmp_path / "engines.yaml"
    config.write_text(json.dumps([{"role": "decode"}, {"role": "combined"}]))
    async with (
        running("--role", "encode", *folder) as (_, (encoder,)),
        running("--role", "prefill", *folder) as (_, (prefill,)),
        running("--engines", str(config), lines=2) as (_, (decode, plain)),
    ):
        expected = await post(plain, path, chat(words, image, max_tokens=9))
        ((name, entry),) = (await post(encoder, path, chat(image, max_tokens=1)))["ec_transfer_params"].items()
        part = {"type": "image_embeds", "image_embeds": entry["metadata"], "uuid": name}
        params = {"do_remote_decode": True}
        first = await post(prefill, path, chat(words, part, max_tokens=1, kv_transfer_params=params))
        last = chat(words, part, max_tokens=9, kv_transfer_params=first["kv_transfer_params"])
        got = await post(decode, path, last)
    assert got["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--role", "encode"], "ec:"),
        (["--ec", "example"], "ec_dir:"),
        (["--kv", "example"], "kv_dir:"),
        (["--fault", "{}"], "kind"),
        (["--fault", "no json"], "Expecting value"),
        (["--role", "nope"], "--role"),
        (["--dp-size", "0"], "dp_size:"),
    ],
)
def test_a_bad_flag_is_named(flags: list[str], words: str) -> None:
    result = CliRunner().invoke(command, flags)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "must be a list"),
        ("[7]", "engine 0 must be a mapping"),
        ("[{role: decode}, {rolle: decode}]", "engine 1: .*rolle"),
        ("[{role: nope}]", "engine 0: role: 'nope'"),
        ("[", "engines.yaml"),
    ],
)
def test_a_bad_engine_file_is_explained(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_engines(file)


def test_a_taken_port_is_an_error_of_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = CliRunner().invoke(command, ["--port", str(taken.getsockname()[1])])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")


def test_help_has_examples() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert "triptych sim --role encode" in result.output
