"""The demo from start to end: engines up, questions, proofs, and then it stays for whoever wants to try."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from openai import AsyncOpenAI, OpenAIError
from rich.console import Console
from rich.table import Table

from triptych.demo.ask import Answer, Told, ask, timeline_of
from triptych.demo.counters import Counts, read_counts
from triptych.demo.questions import QUESTIONS, Question, data_url
from triptych.launch.events import Event, Ready, Started
from triptych.launch.ports import PortError
from triptych.launch.running import NotInstalled, Running, launch
from triptych.launch.supervisor import StartError
from triptych.launch.topology import Topology

EngineKind = Literal["vllm", "sim"]
FAILED, NOT_INSTALLED, INTERRUPTED = 1, 78, 130
_TELL_EVERY = 10.0  # seconds between two words on what is still starting, where there is no live display
_WAIT_FOR_READY = 30.0


@dataclass(slots=True)
class Starting:
    """Shows how far the engines are, on a terminal by a moving line, elsewhere by a line now and then."""

    console: Console
    waiting: set[str] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)

    def noticed(self, event: Event) -> None:
        """Take one of the launcher's events."""
        if isinstance(event, Started) and event.process != "gateway":
            self.waiting.add(event.process)
        elif isinstance(event, Ready):
            self.waiting.discard(event.process)
            self.console.print(f"  {event.process:<12} ready after {event.seconds:.0f} s")

    async def show(self) -> None:
        """Until cancelled."""
        with self.console.status("") as status:
            told = time.monotonic()
            while True:
                now = time.monotonic()
                text = f"starting {', '.join(sorted(self.waiting)) or 'the gateway'} … {now - self.began:.0f} s"
                status.update(text)
                if not self.console.is_terminal and now - told >= _TELL_EVERY:
                    told = now
                    self.console.print(f"  {text}")
                await asyncio.sleep(0.5)


@dataclass(frozen=True, slots=True)
class Stage:
    """What the questions are asked on: the three engines behind the gateway, and a plain engine beside them."""

    running: Running
    plain: Running
    admin: str
    kind: EngineKind

    @property
    def model(self) -> str:
        return self.running.topology.served_name

    @property
    def gateway(self) -> str:
        return str(self.running.gateway_url)

    async def counts(self) -> Counts:
        engines = self.running.engines
        return await read_counts(engines["prefill-0"].url, engines["decode-0"].url, simulated=self.kind == "sim")


async def demo(console: Console, kind: EngineKind, *, once: bool, port: int) -> int:
    """Run the demo; the exit status. port: where the gateway listens, 0 for any free one."""
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    interrupted = False

    def asked_to_end() -> None:
        nonlocal interrupted
        if ending.is_set() or interrupted:
            return
        interrupted = True
        if staying:
            ending.set()
        else:
            main.cancel()

    staying = False
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked_to_end)
    try:
        async with _stage(console, kind, port) as stage:
            told = await _ask_all(console, stage)
            proved = _prove(console, told, kind)
            if once:
                return 0 if proved else FAILED
            _invite(console, stage)
            staying = True
            await ending.wait()
            console.print("stopping …")
        return 0 if proved else FAILED
    except asyncio.CancelledError:
        if not interrupted:
            raise
        main.uncancel()
        console.print("stopped")
        return INTERRUPTED
    except NotInstalled as error:
        console.print(f"[bold red]{error}[/]\nTo see the same with simulated engines: triptych demo --engine sim")
        return NOT_INSTALLED
    except StartError as error:
        console.print(error.report(), style="red", markup=False)
        return FAILED
    except (PortError, OSError, OpenAIError) as error:
        console.print(f"the demo failed: {error}", style="red", markup=False)
        return FAILED
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def topologies(kind: EngineKind, port: int, admin_port: int) -> tuple[Topology, Topology]:
    """The three engines with their gateway, and the plain engine that has the last word on what is right."""
    common: dict[str, Any] = {"engine": kind, "model": {"name": "sim"} if kind == "sim" else {"tiny": "image"}}
    split = common | {
        "ec": "example" if kind == "sim" else "triptych",
        "kv": "nixl",
        "engines": {"encode": 1, "prefill": 1, "decode": 1},
        "gateway": {
            "listen": f"127.0.0.1:{port}",
            "admin": f"127.0.0.1:{admin_port}",
            "media_to_consumer": "metadata",
            "access_log": False,
        },
    }
    plain = common | {"engines": {"combined": 1}, "gateway": False}
    return Topology.model_validate(split), Topology.model_validate(plain)


@contextlib.asynccontextmanager
async def _stage(console: Console, kind: EngineKind, port: int) -> AsyncIterator[Stage]:
    """Both topologies, started at the same time."""
    what = "real vLLM processes" if kind == "vllm" else "simulated engines"
    console.print(f"[bold]Triptych demo[/]: encode, prefill and decode as {what}, and a plain engine to compare with")
    admin_port = _free_port()
    split, plain = topologies(kind, port, admin_port)
    starting = Starting(console)
    async with contextlib.AsyncExitStack() as stack:
        display = asyncio.create_task(starting.show())
        try:
            split_up, plain_up = await _both(stack, starting, split, plain)
        finally:
            display.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await display
        yield Stage(split_up, plain_up, f"http://127.0.0.1:{admin_port}", kind)


async def _both(
    stack: contextlib.AsyncExitStack, starting: Starting, split: Topology, plain: Topology
) -> tuple[Running, Running]:
    """Launch both, each in a task of its own that ends it as well; leaving the stack ends both."""
    stop = asyncio.Event()
    logs = Path(tempfile.mkdtemp(prefix="triptych-demo-"))
    starting.console.print(f"  logs in {logs}", markup=False, highlight=False)

    async def keep(name: str, topology: Topology, up: asyncio.Future[Running]) -> None:
        try:
            async with launch(topology, log_dir=logs / name, listener=starting.noticed) as running:
                up.set_result(running)
                await stop.wait()
        except BaseException as error:
            if not up.done():
                if isinstance(error, asyncio.CancelledError):
                    up.cancel()
                else:
                    up.set_exception(error)
                    return
            raise

    loop = asyncio.get_running_loop()
    ups = [loop.create_future() for _ in range(2)]
    tasks = [
        asyncio.create_task(keep("split", split, ups[0])),
        asyncio.create_task(keep("plain", plain, ups[1])),
    ]

    async def end() -> None:
        stop.set()
        for task, up in zip(tasks, ups, strict=True):
            if not up.done():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    stack.push_async_callback(end)
    done, _ = await asyncio.wait(ups, return_when=asyncio.FIRST_EXCEPTION)
    for up in done:
        up.result()
    return ups[0].result(), ups[1].result()


async def _ask_all(console: Console, stage: Stage) -> list[Told]:
    """Every question, through the gateway and of the plain engine, told as it is answered."""
    told: list[Told] = []
    async with (
        AsyncOpenAI(base_url=f"{stage.gateway}/v1", api_key="none", max_retries=0, timeout=120) as client,
        AsyncOpenAI(base_url=f"{stage.plain.engines['combined-0'].url}/v1", api_key="none", max_retries=0) as plain,
    ):
        for question in QUESTIONS:
            before = await stage.counts()
            with console.status(f"asking: {question.title}"):
                answer = await ask(client, stage.model, question)
                reference = await ask(plain, stage.model, question)
            timeline = await timeline_of(stage.admin, answer.request_id)
            told.append(Told(question, answer, reference, timeline, await stage.counts() - before))
            _tell(console, told[-1])
    return told


def _tell(console: Console, told: Told) -> None:
    answer = told.answer
    console.print()
    console.print(f"[bold]{told.question.title}[/]: {told.question.text}", highlight=False)
    console.print(f"  answer  {answer.text.strip()!r}", markup=False, highlight=False)
    legs = "  ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in told.legs)
    first = "" if answer.first is None else f", first event after {answer.first * 1e3:.0f} ms"
    console.print(f"  legs    {legs}  (plan {told.plan}, {answer.seconds * 1e3:.0f} ms in all{first})", highlight=False)
    counts = told.counts
    took = f"prefill took {counts.items_taken} encoder outputs"
    if not told.question.pictures:
        took = "no encoder output needed"
    elif not counts.items_taken:
        took = "prefill still had the encoder's outputs"
    console.print(
        f"  proof   {took}; decode took the KV of {counts.kv_tokens} tokens; "
        + ("same tokens as the plain engine" if told.same else f"PLAIN ENGINE SAID {told.plain.text.strip()!r}"),
        style=None if told.same else "red",
        highlight=False,
        markup=False,
    )


@dataclass(frozen=True, slots=True)
class Proof:
    """One claim, and whether what was counted bears it out."""

    claim: str
    holds: bool


def proofs(told: Iterable[Told]) -> list[Proof]:
    """What the demo claims of all questions together."""
    told = list(told)
    pictures = [t for t in told if t.question.pictures]
    taken = sum(t.counts.items_taken for t in told)
    new = sum(t.question.new_pictures for t in told)
    kv = sum(t.counts.kv_tokens for t in told)
    return [
        Proof(
            f"every picture went encode → prefill → decode ({len(pictures)} requests)",
            all(t.plan == "e_p_d" for t in pictures),
        ),
        Proof(
            f"prefill took the encoder's output for all {new} pictures ({taken} taken) and encoded none itself",
            taken >= new and not any(t.counts.items_missed for t in told),
        ),
        Proof(f"decode took prefill's KV ({kv} tokens)", all(t.counts.kv_tokens > 0 for t in told)),
        Proof("each answer equals the plain engine's, token for token", all(t.same for t in told)),
        Proof(
            "different pictures got different answers",
            len({t.answer.tokens for t in told}) == len(told),
        ),
    ]


def _prove(console: Console, told: list[Told], kind: EngineKind) -> bool:
    table = Table(title="Proofs" if kind == "vllm" else "Proofs (simulated engines)", show_header=False, box=None)
    found = proofs(told)
    for proof in found:
        table.add_row("[green]yes[/]" if proof.holds else "[bold red]NO[/]", proof.claim)
    console.print()
    console.print(table)
    return all(proof.holds for proof in found)


def _invite(console: Console, stage: Stage) -> None:
    body = {
        "model": stage.model,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_url(lambda x, y: (x * 2, y * 2, 128))}},
                    {"type": "text", "text": "What is in this picture?"},
                ],
            }
        ],
        "max_tokens": 16,
    }
    console.print(f"\nThe gateway stays up at {stage.gateway} (metrics: {stage.admin}/metrics). Try it:\n")
    line = f"curl -s {stage.gateway}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'"
    console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print("\nCtrl-C ends it.")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


__all__ = ("Answer", "Proof", "Question", "demo", "proofs", "topologies")
