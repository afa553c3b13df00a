"""A launcher to be killed: supervises two fake engines with families until it is stopped. Prints what they print."""

from __future__ import annotations

import asyncio
import os
import sys

from tests.launch.helpers import spec
from triptych.launch.events import Line
from triptych.launch.ports import Reservations
from triptych.launch.supervisor import Supervisor


async def main() -> None:
    with Reservations() as ports:
        supervisor = Supervisor([spec(name, ports, "family", "stubborn") for name in ("a", "b")])
        supervisor.listen(lambda event: print(event.text, flush=True) if isinstance(event, Line) else None)
        await supervisor.start()
        children = [process.child for process in supervisor.processes.values()]
        pids = [pid for child in children if child for pid in (child.pid, child._process.pid)]
        if "fork" in sys.argv:
            # One that was never meant to know of the channels keeps them open after the launcher's death.
            fork = os.fork()
            if fork == 0:
                sys.stdin.read()
                os._exit(0)
            print(f"fork {fork}")
        print("ready", *pids, flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main())
