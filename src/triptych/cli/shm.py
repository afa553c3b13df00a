"""`triptych shm`: the shared memory of this host's stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from triptych.transfer.connectors.survey import Deployment, End

LIST_EXAMPLES = """\b
Examples:
  What is running, and what the dead have left:
    triptych shm ls
\b
  Bytes held by all stages, for a script:
    triptych shm ls --json | jq '[.[].ends[].arena.held // 0] | add'
"""

COLLECT_EXAMPLES = """\b
Examples:
  After a crash (the next start does the same):
    triptych shm gc
"""

_base = click.option(
    "--runtime-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where sockets are, if stages were given another place than the default.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("shm")
def shm() -> None:
    """Shared memory between the stages of this host: who sends, who receives, how much is held."""


@shm.command("ls", epilog=LIST_EXAMPLES)
@_base
@_json
def list_(runtime_dir: Path | None, as_json: bool) -> None:
    """List deployments, their stages' processes, and the memory that each holds.

    Bytes held are what an arena occupies: pages stay with it for the next chunks.
    """
    from triptych.transfer.connectors.survey import deployments
    from triptych.transfer.errors import ConnectorError

    try:
        found = deployments(runtime_dir)
    except ConnectorError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps([_plain(deployment) for deployment in found], indent=2))
        return
    if not found:
        click.echo("No stage of this user shares memory here.")
    for deployment in found:
        click.echo(f"{deployment.name}  {deployment.path}")
        for end in deployment.ends:
            click.echo(f"  {_line(end)}")
        if not deployment.ends:
            click.echo("  nobody")


@shm.command("gc", epilog=COLLECT_EXAMPLES)
@_base
@_json
def collect_(runtime_dir: Path | None, as_json: bool) -> None:
    """Remove the sockets that dead processes have left. Their memory is gone already: the kernel took it back."""
    from triptych.transfer.connectors.survey import collect
    from triptych.transfer.errors import ConnectorError

    try:
        gone = collect(runtime_dir)
    except ConnectorError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps([{"deployment": deployment, "removed": what} for deployment, what in gone], indent=2))
        return
    for deployment, what in gone:
        click.echo(f"{deployment}: removed {what}")
    if not gone:
        click.echo("Nothing to collect.")


def _plain(deployment: Deployment) -> dict[str, object]:
    ends = [{**end._asdict(), "arena": end.arena and end.arena._asdict()} for end in deployment.ends]
    return {**deployment._asdict(), "ends": ends}


def _line(end: End) -> str:
    port = f" port {end.port}" if end.port else ""
    state = end.command or "alive" if end.alive else "DEAD"
    memory = f"  {_mib(end.arena.held)} of {_mib(end.arena.size)} held" if end.arena else ""
    return f"stage {end.stage} {end.role}{port}  pid {end.pid}{memory}  {state}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
