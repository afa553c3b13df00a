"""`triptych models`: tiny random-weight models to try things with."""

from __future__ import annotations

from pathlib import Path

import click

from triptych.models.tiny import kinds, write_tiny


@click.group(invoke_without_command=False)
def models() -> None:
    """Write tiny random-weight models to try things with."""


@models.command()
@click.argument("kind", required=False, metavar="KIND")
@click.argument("directory", required=False, metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--list", "show", is_flag=True, help="Print the kinds there are, and do nothing else.")
def tiny(kind: str | None, directory: Path | None, show: bool) -> None:
    """Write the tiny model KIND to the directory DIR.

    It has about 350,000 random weights, answers in English words, and depends on what it is shown: enough to see that
    two set-ups give the same answer. The same KIND gives the same files everywhere. Does nothing where they are there
    already; refuses a directory with anything else in it.
    """
    if show:
        for name, summary in kinds().items():
            click.echo(f"{name:10} {summary}")
        return
    if kind is None or directory is None:
        raise click.UsageError("KIND and DIR are wanted, or --list")
    if kind not in kinds():
        raise click.BadParameter(f"{kind!r}; there are: {', '.join(kinds())}", param_hint="KIND")
    try:
        written = write_tiny(kind, directory)
    except OSError as error:
        raise click.ClickException(str(error)) from None
    click.echo(str(written))
