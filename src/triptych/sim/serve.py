"""Run simulated engines in a process of their own until a signal, or until one dies."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import yaml

from triptych.sim.config import SimConfig
from triptych.sim.faults import Fault
from triptych.sim.sim import Sim

DRAIN = 1.0
"""seconds that running requests get to end after a signal"""


async def serve(configs: Sequence[SimConfig], faults: Sequence[Fault], say: Callable[[str], None]) -> int:
    """Listen, say one line per engine, and return the exit status: 0 after SIGINT or SIGTERM, 1 after a death.

    Raises OSError where a port is taken.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        sims = []
        for config in configs:
            sim = await stack.enter_async_context(Sim(config))
            sim.faults.add(*faults)
            sims.append(sim)
            say(f"listening on {sim.url}")
        ends = [asyncio.create_task(event.wait()) for event in (stop, *(sim.died for sim in sims))]
        # An engine with death="500" goes on answering, as dead as it is.
        waited = [end for end, config in zip(ends[1:], configs, strict=True) if config.death == "exit"]
        await asyncio.wait([ends[0], *waited], return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if not stop.is_set():
            for sim in sims:
                for why in sim.seen.deaths:
                    say(f"{sim.config.role} engine died: {why}")
            return 1
        await asyncio.gather(*(sim.drain(DRAIN) for sim in sims))
    return 0


def read_engines(path: Path) -> list[SimConfig]:
    """Engines from a YAML or JSON file: a list of mappings with the fields of `SimConfig`.

    Raises ValueError that names the entry and the field at fault.
    """
    try:
        entries: Any = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: must be a list of engines")
    configs = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: engine {number} must be a mapping of settings")
        try:
            configs.append(Sim(**entry).config)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: engine {number}: {error}") from error
    return configs
