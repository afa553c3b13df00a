"""Random faults, random clients that leave at random, for minutes; at the end nothing is left and nothing has grown.

`TRIPTYCH_SOAK_SECONDS` says how long (default 240; its short form in CI runs a few seconds), `TRIPTYCH_SOAK_SEED` which
run. A failure prints the seed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.raw import Answer, Raw
from tests.gateway.rig import BODIES, POSTS, ROLES, PlanName, Rig, eventually
from triptych.sim.faults import Fault

CLIENTS = 64
# Read when this module is, since the tests take such variables away.
SECONDS = float(os.environ.get("TRIPTYCH_SOAK_SECONDS", "240"))
SEED = int(os.environ.get("TRIPTYCH_SOAK_SEED", str(random.SystemRandom().randrange(1 << 32))))
FORM = {"content-type": "multipart/form-data; boundary=f"}
STATUSES = {200, 400, 404, 408, 413, 418, 422, 429, 500, 502, 503, 504}


def resident() -> int:
    """This process's memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def any_fault(rng: random.Random) -> Fault:
    kind = rng.choice(
        ["status", "hang", "hang_body", "reset", "reset_body", "close", "garbage", "garbage_json", "cut", "end",
         "slow_first_byte", "slow_body", "trickle", "oversize", "wrong_length", "sse_error", "close_after"]
    )  # fmt: skip
    return Fault(
        kind=kind,
        path=POSTS,
        status=rng.choice([400, 418, 422, 429, 500, 502, 503, 504]),
        seconds=rng.choice([None, 0.01, 0.2]) if kind in ("hang", "hang_body") else 0.02,
        events=rng.randrange(5),
        partial=rng.random() < 0.5,
        rst=rng.random() < 0.5,
        size=rng.choice([70_000, 1_048_576, 1_048_577, 3_000_000]) if kind == "oversize" else rng.choice([-5, 7]),
        chunk=rng.choice([64, 500, 1000]),  # smaller ones would trickle for minutes, which is no fault
        after_work=rng.random() < 0.3,
    )


class Soak:
    """64 clients and somebody who breaks things."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.rig = rig
        self.rng = rng
        self.until = 0.0
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self.client(random.Random(self.rng.random())))
            group.create_task(self.breaker(random.Random(self.rng.random())))
        for sim in self.rig.all_sims:
            sim.faults.clear()

    @property
    def going(self) -> bool:
        return time.monotonic() < self.until

    async def breaker(self, rng: random.Random) -> None:
        while self.going:
            sim = rng.choice(self.rig.all_sims)
            if rng.random() < 0.02:
                await sim.kill()
                await asyncio.sleep(rng.random() * 0.3)
                await sim.start()
            elif rng.random() < 0.1:
                sim.close_idle()
            elif len(sim.faults.rules) < 3:
                sim.faults.add(any_fault(rng))
            await asyncio.sleep(0.005)

    async def client(self, rng: random.Random) -> None:
        while self.going:
            client = self.rig.client(receive_buffer=rng.choice([None, None, 4096]))
            try:
                async with asyncio.timeout(30):
                    await client.open()
                    for _ in range(rng.randrange(1, 6)):
                        if not await self.request(client, rng):
                            break
            except TimeoutError:
                self.wrong.append("a client waited for 30 s")
            except OSError:
                self.outcomes["lost"] += 1
            finally:
                if rng.random() < 0.5:
                    client.reset()
                await client.close()

    async def request(self, client: Raw, rng: random.Random) -> bool:
        """One request; whether the connection is good for another."""
        stream = rng.random() < 0.5
        api = rng.choice([*BODIES, "form"])
        if api == "form":
            path, headers = "/v1/audio/transcriptions", FORM
            raw = b'--f\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n'
            raw += b'--f\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
            raw += rng.randbytes(rng.choice([10, 100_000])).replace(b"\r", b"") + b"\r\n--f--\r\n"
        else:
            path, make = BODIES[api]
            headers = {}
            raw = json.dumps(make("x" * rng.choice([1, 3000]), images=rng.randrange(4), stream=stream)).encode()
        leaves = rng.random() < 0.3
        at = rng.randrange(len(raw)) if leaves and rng.random() < 0.3 else len(raw)
        if rng.random() < 0.3:
            client.head(None, path, headers=headers)
            client.chunk(raw[:at])
            if at == len(raw):
                client.chunk(b"")
        else:
            client.head(len(raw), path, headers=headers)
            client.writer.write(raw[:at])
        if leaves:
            await asyncio.sleep(rng.choice([0, 0.001, 0.01, 0.1]) * rng.random())
            if rng.random() < 0.2:
                client.half_close()
                await asyncio.sleep(0.01)
            self.outcomes["left"] += 1
            return False
        try:
            answer = await client.answer(within=25)
        except TimeoutError:
            last = [t.to_dict() for t in self.rig.gateway.requests if t.ended is None]
            self.wrong.append(f"no answer to {path} (stream {stream}): {last}")
            return False
        self.outcomes[str(answer.status)] += 1
        self.check(api, stream, answer)
        return answer.complete and answer.headers.get("connection") != "close" and b"error" not in answer.body[-2000:]

    def check(self, api: str, stream: bool, answer: Answer) -> None:
        if answer.status not in STATUSES:
            self.wrong.append(f"status {answer.status}: {answer.body[:200]!r}")
        kind = answer.headers.get("content-type", "")
        if answer.status >= 400 and not answer.complete:
            self.wrong.append(f"a cut error of {answer.status}")
        if kind.startswith("text/event-stream"):
            if answer.complete and not answer.body.endswith(b"\n\n"):
                self.wrong.append(f"a partial event: {answer.body[-200:]!r}")
            told = b'"code":502' in answer.body or b'"code":504' in answer.body
            if api == "chat" and told and b"engine http" in answer.body and b"[DONE]" in answer.body:
                self.wrong.append("a [DONE] after an error of the gateway")
        elif answer.complete and kind == "application/json" and answer.status == 200:
            json.loads(answer.body)


def settings() -> dict[str, Any]:
    return {
        "deadlines": {"encode": 0.5, "prefill": 0.5, "first_byte": 0.5, "stream_idle": 0.5, "body": 1, "write": 1},
        "limits": {"requests": 48, "queue": 8, "answer_bytes": 2_000_000, "encode_legs_per_engine": 4},
        "health": {"interval": 0.2, "failures": 2, "timeout": 0.5},
        "access_log": False,
    }


async def soak(plan: PlanName, seconds: float) -> Counter[str]:
    rng = random.Random(f"{SEED} {plan}")
    quick = {role: {"keep_bodies": 0} for role in ROLES[plan]}
    async with Rig(plan, engines=dict.fromkeys(ROLES[plan], 2), sims=quick, probing=True, **settings()) as rig:
        run = Soak(rig, rng)
        await run.run(seconds / 4)  # until everything has its size
        await rested(rig)
        before = resident()
        await run.run(seconds * 3 / 4)
        await rested(rig)
        grown = resident() - before
        print(f"seed {SEED}, {plan}: {sum(run.outcomes.values())} requests, {dict(run.outcomes)}, grown by {grown:,}")
        assert not run.wrong, (SEED, Counter(run.wrong).most_common(5))
        assert run.outcomes["200"] > 0.1 * sum(run.outcomes.values()), (SEED, run.outcomes)
        if seconds > 30:
            assert grown < 16 << 20, (SEED, f"grown by {grown:,} bytes")
        counted = rig.count("requests")
        assert counted > 0
        # Whole again: every engine comes back, and a request finds its way.
        await eventually(lambda: all(e.healthy for e in rig.gateway.fleet.engines()), "healthy engines", 10.0)
        answer = await rig.post(BODIES["chat"][1](images=1))
        assert answer.status == 200, (SEED, answer)
        return run.outcomes


async def rested(rig: Rig) -> None:
    """Nothing of any request is left."""
    for sim in rig.all_sims:
        sim.seen.cancels.clear()
    await rig.settled(10.0)
    gc.collect()


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 2 + 120)
@pytest.mark.parametrize("plan", ["plain", "e_pd", "p_d", "e_p_d"])
async def test_soak(plan: PlanName) -> None:
    await soak(plan, SECONDS / 4)


async def test_soak_in_short() -> None:
    outcomes = await soak("e_p_d", 4.0)
    assert set(outcomes) & {"502", "504"}
