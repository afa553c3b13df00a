"""`triptych serve`: one topology, from the command line to the last process's end."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

from triptych.launch.display import Display
from triptych.launch.events import Event, GaveUp
from triptych.launch.load import EVERY, look
from triptych.launch.plan import GATEWAY
from triptych.launch.ports import PortError
from triptych.launch.running import NotInstalled, Running, launch
from triptych.launch.supervisor import Policy, StartError
from triptych.launch.topology import Topology

STOPPED, FAILED, NOT_INSTALLED, FORCED = 0, 1, 78, 130


async def serve(
    topology: Topology, display: Display, *, log_dir: Path | None = None, policy: Policy | None = None
) -> int:
    """Runs a topology until SIGINT, SIGTERM or SIGHUP; returns the exit status.

    The first signal stops everything in order, a second one kills. Raises SettingsError before anything is started.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    outcome = STOPPED
    running: Running | None = None
    asked = False

    def prepared(made: Running) -> None:
        nonlocal running
        running = made
        made.supervisor.listen(noticed)
        display.watch(made.supervisor)
        display.say(f"model {topology.served_name}; logs in {made.log_dir}")

    def noticed(event: Event) -> None:
        if isinstance(event, GaveUp) and event.process == GATEWAY:
            end(FAILED)

    def end(status: int) -> None:
        nonlocal asked, outcome
        if not asked:
            asked, outcome = True, status
            task.cancel()

    def signalled(name: str) -> None:
        nonlocal outcome
        if not asked:
            display.say(f"{name}: stopping; once more to kill", "bold")
            end(STOPPED)
        elif running is not None:
            outcome = FORCED
            running.supervisor.kill()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, signalled, number.name)
    try:
        async with launch(topology, log_dir=log_dir, policy=policy, prepared=prepared) as running:
            display.started()
            display.say(_welcome(running))
            await _watch(running, display)
    except asyncio.CancelledError:
        if not asked:
            raise
        task.uncancel()
    except StartError as error:
        display.say(f"triptych: {error.report()}", "bold red")
        return FAILED
    except (PortError, NotInstalled, OSError) as error:
        display.say(f"triptych: {error}", "bold red")
        return NOT_INSTALLED if isinstance(error, NotInstalled) else FAILED
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
    return outcome


async def _watch(running: Running, display: Display) -> None:
    """Show what the processes have to do, for ever."""
    if not display.live:
        await asyncio.get_running_loop().create_future()
    urls = {engine.name: f"{engine.url}/metrics" for engine in running.engines.values()}
    if running.admin_url is not None:
        urls[GATEWAY] = f"{running.admin_url}/metrics"
    while True:
        display.loads(await look(urls))
        await asyncio.sleep(EVERY)


def _welcome(running: Running) -> str:
    if running.gateway_url is None:
        lines = [f"  {engine.name}  {engine.url}" for engine in running.engines.values()]
        return "\n".join(["", "All engines are ready; there is no gateway.", *lines, "", "Ctrl-C stops everything."])
    name = running.topology.served_name
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16})
    return (
        f"\n{name} is served on {running.gateway_url}\n\n"
        f"  curl {running.gateway_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
        "Ctrl-C stops everything."
    )
