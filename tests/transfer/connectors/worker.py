"""A bare process at one end of an edge: `worker send|receive FOLDER DEPLOYMENT SEED`.

One more stream never ends, so that whoever is killed leaves one that is cut. Prints one line for each thing that
matters to who started it. A chunk says which stream and number it is of.
"""

from __future__ import annotations

import os
import queue
import random
import sys

from triptych.transfer.connectors.base import Mark
from triptych.transfer.connectors.shm import SharedMemoryConnector
from triptych.transfer.errors import BrokenStream, EndOfStream, WouldBlock
from triptych.transfer.wire import Tensor

STREAMS = 6
CHUNKS = 12
OPEN = "open"
SIZES = (10, 3000, 20_000, 300_000)


class Inbox:
    """Events in a queue."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def ready(self, stream: str) -> None:
        self.events.put(("ready", stream))

    def writable(self, stream: str) -> None:
        self.events.put(("writable", stream))

    def stopped(self, stream: str, reason: str, generation: int | None = None) -> None:
        self.events.put(("stopped", f"{stream}: {reason}"))


def say(text: str) -> None:
    print(text, flush=True)


def send(connector: SharedMemoryConnector, dice: random.Random) -> None:
    """Streams without end, several at a time; each begins with a generation of its own."""
    inbox = Inbox()
    connector.listen(inbox)
    at = dict.fromkeys(range(STREAMS), 0)
    begun = {slot: slot for slot in range(STREAMS)}
    blocked: set[str] = set()
    opened = 1
    connector.put("0", "1", f"{OPEN}_0", "open", Mark(opened))
    while True:
        free = [slot for slot in at if f"s{slot}" not in blocked]
        if not free or not inbox.events.empty():
            kind, what = inbox.events.get(timeout=30)
            if kind == "stopped":
                say(f"stopped {what}")
                if what.startswith(OPEN):
                    opened += 1
                    connector.put("0", "1", f"{OPEN}_0", "open", Mark(opened))
            blocked.discard(what.partition(":")[0])
            continue
        slot = dice.choice(free)
        number, size = at[slot], dice.choice(SIZES)
        data = {
            "from": os.getpid(),
            "stream": slot,
            "number": number,
            "x": Tensor("uint8", (size,), bytes([slot]) * size),
        }
        try:
            connector.put("0", "1", f"s{slot}_{number}", data, Mark(begun[slot], number == CHUNKS - 1))
        except WouldBlock:
            blocked.add(f"s{slot}")
            continue
        except BrokenStream:
            number = -1
        at[slot] = (number + 1) % CHUNKS if number >= 0 else 0
        if not at[slot]:
            begun[slot] += STREAMS


def receive(connector: SharedMemoryConnector) -> None:
    """Take whatever comes, and look whether it is of the stream that it came by."""
    inbox = Inbox()
    connector.listen(inbox)
    due = {f"s{slot}": 0 for slot in range(STREAMS)}
    kept: dict[str, object] = {}
    taken = 0
    for name in (OPEN, *due):
        connector.watch("0", "1", name)
    while True:
        _, name = inbox.events.get(timeout=30)
        try:
            if name == OPEN:
                for number in range(2):
                    connector.get("0", "1", f"{OPEN}_{number}")
                continue
            while (found := connector.get("0", "1", f"{name}_{due[name]}")) is not None:
                data = found[0]
                slot = int(name[1:])
                body = bytes(data["x"].buffer)
                if (data["stream"], data["number"]) != (slot, due[name]) or body.strip(bytes([slot])):
                    say(f"WRONG {name} {due[name]}: {data}")
                kept[name] = data
                due[name] += 1
                taken += 1
                if taken % 100 == 0:
                    say(f"taken from {data['from']}")
                if due[name] == CHUNKS:
                    due[name] = 0
                    connector.watch("0", "1", name)
        except EndOfStream:
            say(f"WRONG {name} ended at {due[name]}")
        except BrokenStream as error:
            say(f"broken {error}")
            connector.unwatch(name)
            due[name] = 0
            connector.watch("0", "1", name)


def main() -> None:
    """The command line."""
    role, folder, deployment, seed = sys.argv[1:]
    stage = 0 if role == "send" else 1
    connector = SharedMemoryConnector(
        {"stage_id": stage, "runtime_dir": folder, "deployment": deployment, "arena_bytes": 8 << 20}
    )
    say("up")
    if role == "send":
        send(connector, random.Random(seed))
    else:
        receive(connector)


if __name__ == "__main__":
    main()
