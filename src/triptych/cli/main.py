"""`triptych`: the commands by name. A command's module is imported when it is asked for, never for `--help`."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import NamedTuple, NoReturn

import click

from triptych import __version__

INTERRUPTED = 130
# EX_CONFIG: the same status that an engine process ends with where vLLM is missing.
NOT_INSTALLED = 78


class Lazy(NamedTuple):
    """Where a command lives, and its line in `triptych --help`."""

    module: str
    attribute: str
    help: str


COMMANDS: dict[str, Lazy] = {
    "gateway": Lazy("triptych.cli.gateway", "gateway", "Run the gateway in front of engines that are already there."),
    "serve": Lazy("triptych.cli.serve", "serve", "Start the engines of a topology file, and the gateway before them."),
    "check": Lazy("triptych.cli.serve", "check", "Check a topology file and print the commands that it stands for."),
    "demo": Lazy("triptych.cli.demo", "demo", "See an image question answered by encode, prefill and decode engines."),
    "sim": Lazy("triptych.cli.sim", "sim", "Run a simulated engine, for load, faults and quick tests."),
    "shm": Lazy("triptych.cli.shm", "shm", "See and collect what stages of this host share."),
    "models": Lazy("triptych.cli.models", "models", "Write tiny random-weight models to try things with."),
}

# Which extra brings a module that the core does without.
EXTRAS = {"torch": "engine", "vllm": "engine", "transformers": "engine", "safetensors": "engine", "openai": "demo"}


class LazyGroup(click.Group):
    """A group whose commands are in `COMMANDS` and are imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        command = getattr(importlib.import_module(lazy.module), lazy.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{lazy.module}.{lazy.attribute} is not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="triptych", message="%(prog)s %(version)s")
def cli() -> None:
    """Disaggregated multimodal serving on stock vLLM: encode, prefill and decode behind one OpenAI-compatible address.

    \b
    triptych demo                                    everything on this machine, with proofs
    triptych gateway --encode URL --decode URL       in front of your own engines
    triptych COMMAND --help                          more about a command
    """


def main() -> NoReturn:
    """The console script: runs a command and ends the process with its status, without a traceback on Ctrl-C."""
    sys.exit(_run())


def _run() -> int:
    try:
        status = cli.main(prog_name="triptych", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        click.echo(_how_to_install(error.name or "", extra), err=True)
        return NOT_INSTALLED
    return status if isinstance(status, int) else 0


def _how_to_install(module: str, extra: str) -> str:
    if extra == "engine":
        return (
            f"triptych: this needs vLLM ({module} is not installed).\n"
            "  with a GPU:      pip install 'triptych[engine]'\n"
            "  without a GPU:   pip install 'triptych[engine-cpu]', or `make setup` in a checkout\n"
            "Without vLLM, `triptych demo --engine sim` and `triptych sim` run simulated engines."
        )
    return f"triptych: this needs {module}: pip install 'triptych[{extra}]'"
