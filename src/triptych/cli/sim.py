"""`triptych sim`: a simulated engine."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., None]

EXAMPLES = """\b
Examples:
  A plain engine on port 8000, 20 ms a token:
    triptych sim --port 8000 --model m --token-ms 20
\b
  E+P+D, encoder output handed over in a folder, KV as NIXL does:
    triptych sim --role encode  --port 7201 --ec example --ec-dir ec &
    triptych sim --role prefill --port 7202 --ec example --ec-dir ec &
    triptych sim --role decode  --port 7203 &
\b
  Make the next encode leg hang, see what came, stop the faults:
    curl localhost:7201/sim/faults -d '[{"kind": "hang"}]'
    curl localhost:7201/sim/seen
    curl -X DELETE localhost:7201/sim/faults
"""


def _milliseconds(name: str, what: str) -> Callable[[Command], Command]:
    return click.option(f"--{name}-ms", default=0.0, show_default=True, metavar="MS", help=what)


@click.command("sim", epilog=EXAMPLES)
@click.option(
    "--role",
    type=click.Choice(["encode", "prefill", "decode", "combined"]),
    default="combined",
    show_default=True,
)
@click.option("--model", default="sim", show_default=True, help="Served model name.")
@click.option("--alias", "aliases", multiple=True, help="Further name of the same model. Repeatable.")
@click.option("--lora", "loras", multiple=True, help="Name of an adapter. Repeatable.")
@click.option("--api-key", help="Key that requests under /v1 must carry.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, show_default=True, help="0: any free port.")
@click.option("--tls-cert", type=click.Path(exists=True, dir_okay=False), help="Certificate chain (PEM).")
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False), help="Its key (PEM).")
@click.option("--side-port", default=0, help="Port that handles name for peers. 0: any free port.")
@click.option(
    "--ec",
    type=click.Choice(["none", "example", "eccpu", "mooncake"]),
    default="none",
    show_default=True,
    help="Dialect of encoder output.",
)
@click.option(
    "--ec-role",
    type=click.Choice(["producer", "consumer", "both", "none"]),
    help="Default: producer for encode, none for decode, else consumer.",
)
@click.option("--ec-dir", help="Folder that the engines share (EC example).")
@click.option(
    "--kv",
    type=click.Choice(["none", "nixl", "example"]),
    help="Dialect of KV. Default: nixl for prefill and decode, else none.",
)
@click.option("--kv-dir", help="Folder that the engines share (KV example).")
@click.option("--kv-lease", default=30.0, show_default=True, help="Seconds that a prefill keeps blocks.")
@click.option(
    "--stale-kv",
    type=click.Choice(["fail", "corrupt"]),
    default="fail",
    show_default=True,
    help="Blocks read twice or too late: an error, or other tokens as a real engine would answer.",
)
@click.option("--metadata/--no-metadata", default=True, help="Encoders return placeholder metadata.")
@click.option("--push-wait", default=60.0, show_default=True, help="Seconds to wait for a push (EC mooncake).")
@click.option("--dp-size", default=1, show_default=True, help="Ranks of a consumer (EC mooncake).")
@click.option("--trust-mm-kwargs", is_flag=True, help="Take mm_processor_kwargs and media_io_kwargs.")
@click.option("--output-tokens", type=int, help="Length of every answer. Default: 12 to 31, by content.")
@_milliseconds("request", "Cost of a request.")
@_milliseconds("item", "Cost of encoding one media item.")
@_milliseconds("prompt-token", "Cost of computing one prompt token.")
@_milliseconds("token", "Cost of one output token; in a stream the gap before its event.")
@_milliseconds("mb", "Cost of a megabyte of request body.")
@click.option(
    "--death",
    type=click.Choice(["exit", "500"]),
    default="exit",
    show_default=True,
    help="What the engine does when a request kills it.",
)
@click.option("--keep-alive", default=5.0, show_default=True, help="Seconds until an idle connection is closed.")
@click.option("--keep-bodies", default=0, help="Keep the last N requests for /sim/seen?bodies.")
@click.option("--fault", "faults", multiple=True, metavar="JSON", help="A fault rule to start with. Repeatable.")
@click.option(
    "--engines",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run the engines of this YAML file (a list of settings by name) in one process; other flags but --fault "
    "are ignored then.",
)
@click.pass_context
def sim(ctx: click.Context, /, engines: Path | None, faults: tuple[str, ...], **flags: Any) -> None:
    """A stand-in engine: vLLM's HTTP protocol, its hand-over dialects and its refusals, without a model.

    Its tokens follow from the model name, the prompt and the media that it took, so two answers are equal where two
    engines saw the same. It costs no time unless told to. Once it is up it prints one line: listening on URL.
    """
    # Everything below is imported late: --help needs none of it.
    import uvloop

    from triptych.sim.config import Costs, SimConfig
    from triptych.sim.faults import convert
    from triptych.sim.serve import read_engines, serve

    cert, key = flags.pop("tls_cert"), flags.pop("tls_key")
    if cert or key:
        if not cert:
            raise click.UsageError("--tls-key: needs --tls-cert too")
        flags["tls"] = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        flags["tls"].load_cert_chain(cert, key)
    costs = {name: flags.pop(f"{name}_ms") / 1000 for name in ("request", "item", "prompt_token", "token", "mb")}
    try:
        rules = [convert(json.loads(fault)) for fault in faults]
        configs = [SimConfig(costs=Costs(**costs), **flags)] if engines is None else read_engines(engines)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        status = uvloop.run(serve(configs, rules, click.echo))
    except OSError as error:
        raise click.ClickException(str(error)) from error
    ctx.exit(status)
