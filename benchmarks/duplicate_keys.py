"""A body full of copies of a hand-over parameter: what reading and rewriting it costs, against `json.loads` of it.

A gateway that looks for a client's copies one by one, or removes them one by one, takes seconds here; this one makes
one pass. Bars: 50,000 copies in at most 3 times `json.loads` of the same body, 100,000 in at most 2.2 times the 50,000
(CPU time, medians of 20 interleaved runs). "Handled" is all that the gateway does with such a body: validate, parse,
look for media, strip, put its own handles in.
"""

import gc
import json
import time
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.bars import Bar
from triptych.body.edit import Buffer
from triptych.body.media import find_media
from triptych.body.request import RequestBody

COPIES = 50_000
AGAINST_LOADS = 3.0
AGAINST_HALF = 2.2
HANDLES = b'{"h":{"item_indices":[0],"metadata":{"image_grid_thw":[1,8,8]}}}'


def top_level(*members: bytes) -> Callable[[int], bytes]:
    """Bodies with that many members at top level, taken in turn."""
    return lambda count: b'{"model":"m",' + b",".join((members * count)[:count]) + b',"messages":[]}'


def in_xargs(member: bytes) -> Callable[[int], bytes]:
    return lambda count: b'{"vllm_xargs":{' + b",".join([member] * count) + b'},"messages":[]}'


SHAPES: dict[str, Callable[[int], bytes]] = {
    "object": top_level(b'"ec_transfer_params":{"a":1}'),
    "scalar": top_level(b'"ec_transfer_params":1'),
    "string": top_level(b'"kv_transfer_params":"x\\"y"'),
    "nested": top_level(b'"ec_transfer_params":{"h":{"item_indices":[0],"metadata":{"image_grid_thw":[1,8,8]}}}'),
    "nested deeper": top_level(b'"ec_transfer_params":{"a":[[{"b":[{"c":[1,{"d":[[2]]}]}]}]]}'),
    "spelled with \\u005f": top_level(b'"ec\\u005ftransfer\\u005fparams":{"a":1}'),
    "with white space": top_level(b'\n  "ec_transfer_params" : { "a" : 1 }\n'),
    "both in turn": top_level(b'"ec_transfer_params":{"a":1}', b'"kv_transfer_params":{"a":1}'),
    "inside vllm_xargs": in_xargs(b'"kv_transfer_params":"x"'),
}


def handle(raw: bytes) -> Sequence[Buffer]:
    """All that the gateway does with such a body; what an engine gets."""
    body = RequestBody(raw)
    find_media(body, "chat")
    return body.rewrite({"ec_transfer_params": HANDLES})


def check(raw: bytes) -> None:
    """The result holds the gateway's handles and no others."""
    result = b"".join(handle(raw))
    if result.count(b"transfer") != 1 or not result.endswith(HANDLES + b"}"):
        raise SystemExit("the rewritten body is wrong")


def cpu(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def measure(works: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Median CPU seconds of each, interleaved so that a slow moment of the machine falls on all of them."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(runs):
        for work, seconds in zip(works, times, strict=True):
            gc.collect()
            seconds.append(cpu(work))
    return [median(seconds) for seconds in times]


def run(runs: int = 20) -> list[Bar]:
    """Every shape: the copies against `json.loads`, and twice as many against the copies."""
    bars = []
    for name, shape in SHAPES.items():
        half, whole = shape(COPIES), shape(2 * COPIES)
        check(half)
        loads, once, twice = measure(
            [lambda raw=half: json.loads(raw), lambda raw=half: handle(raw), lambda raw=whole: handle(raw)], runs
        )
        detail = f"{once * 1e3:.1f} / {loads * 1e3:.1f} ms"
        bars.append(Bar(f"{COPIES} duplicate keys / json.loads, {name}", once / loads, AGAINST_LOADS, detail))
        detail = f"{twice * 1e3:.1f} / {once * 1e3:.1f} ms"
        bars.append(Bar(f"{2 * COPIES} / {COPIES} duplicate keys, {name}", twice / once, AGAINST_HALF, detail))
        print(f"  {bars[-2]}\n  {bars[-1]}", flush=True)
    return bars
