"""`triptych serve` and `triptych check`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from triptych.launch.topology import Topology

WRONG_FILE = 2


@click.command(short_help="Start the engines of a topology file, and the gateway before them.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--log-dir", type=click.Path(path_type=Path, file_okay=False), help="Directory for log files.")
@click.option("-q", "--quiet", is_flag=True, help="Show no output of engines here; it is in the log files.")
@click.option("--plain", is_flag=True, help="No colours and no live table, as when the output is no terminal.")
@click.pass_context
def serve(ctx: click.Context, file: Path, log_dir: Path | None, quiet: bool, plain: bool) -> None:
    """Start the engines of a topology FILE with the right roles, connectors and ports, and the gateway before them.

    Waits until all are ready, restarts what crashes, and stops everything on Ctrl-C or SIGTERM: the gateway first, so
    that requests in flight end, then the engines. A second Ctrl-C kills.

    \b
    Examples
      triptych serve examples/e-pd.yaml            an encoder before an engine that does prefill and decode
      triptych serve examples/sim.yaml --quiet     simulated engines, on any machine
      triptych check examples/e-pd.yaml            what it would do
    """
    if not sys.platform.startswith("linux"):
        raise click.ClickException("engines are supervised with means that only Linux has; run the gateway elsewhere")
    topology = _load(file)
    from triptych.launch.display import Display
    from triptych.launch.serve import serve as run

    display = Display(sys.stdout, plain=plain, quiet=quiet)
    try:
        ctx.exit(asyncio.run(run(topology, display, log_dir=log_dir)))
    finally:
        display.close()


@click.command(short_help="Check a topology file and print the processes that it stands for.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--commands", is_flag=True, help="Also print each process's command line, as for a shell.")
def check(file: Path, commands: bool) -> None:
    """Check a topology FILE and print its graph of processes. Nothing is started.

    Errors name the file's line and the field. Ports that the file leaves open are examples.

    \b
    Examples
      triptych check examples/e-pd.yaml
      triptych check examples/e-p-d-nixl.yaml --commands
    """
    topology = _load(file)
    from triptych.launch import check as checks

    made = checks.dry_plan(topology)
    click.echo("\n".join(checks.graph(topology, made)))
    if commands:
        for spec in made.processes:
            click.echo(f"\n# {spec.name}: ready when {spec.ready_url} answers 200\n{checks.shell(spec)}")
        if made.gateway_config is not None:
            click.echo(f"\n# {made.gateway_file}\n{checks.shown_config(made)}")
    if problem := checks.missing(topology):
        click.echo(f"\nnot here: {problem}", err=True)


def _load(file: Path) -> Topology:
    """The topology of a file whose gateway settings are right as well; ends the command with the faults otherwise."""
    from triptych.config.problems import SettingsError
    from triptych.launch.check import gateway_front
    from triptych.launch.topology import load

    try:
        topology = load(file)
        gateway_front(topology)
    except SettingsError as error:
        click.echo(str(error), err=True)
        raise click.exceptions.Exit(WRONG_FILE) from None
    return topology
