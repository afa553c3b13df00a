"""`triptych demo`."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

import click

EPILOG = """\b
Examples:
  triptych demo                 real vLLM engines on this machine, then stays up
  triptych demo --once          the same, exits 0 if every proof holds
  triptych demo --engine sim    simulated engines: no model, no vLLM, a few seconds
"""


@click.command(epilog=EPILOG)
@click.option("--once", is_flag=True, help="End after the proofs; the exit status says whether they hold.")
@click.option(
    "--engine",
    type=click.Choice(["vllm", "sim"]),
    default="vllm",
    show_default=True,
    help="Real vLLM processes, or simulated engines.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Where the gateway listens; any free port if 0.")
def demo(once: bool, engine: Literal["vllm", "sim"], port: int) -> None:
    """See image questions answered by an encode, a prefill and a decode engine.

    Starts three engines with a tiny random-weight model and the gateway before them, asks a handful of questions with
    the official openai client, and shows for each which engines did what, with times, and proof: that prefill took the
    encoder's output, that decode took prefill's KV, and that each answer is a plain engine's, token for token.
    """
    from rich.console import Console

    from triptych.demo.run import demo as run

    sys.exit(asyncio.run(run(Console(soft_wrap=True), engine, once=once, port=port)))
