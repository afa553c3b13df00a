"""`triptych gateway`: flags for every setting, checked as one with the file and the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from triptych.cli.gateway_flags import FLAGS

if TYPE_CHECKING:
    from triptych.config.problems import SettingsError
    from triptych.gateway.sources import Flag, Loaded

EXAMPLES = """\
one encoder before two engines that do prefill and decode (E+PD)
  triptych gateway --encode http://e:8000 --combined http://a:8000,http://b:8000

encode, prefill and decode apart (E+P+D)
  triptych gateway --encode http://e:8000 --prefill http://p:8000 --decode http://d:8000

settings from a file, one of them changed; check them and start nothing
  triptych gateway --config gateway.yaml --deadlines.encode 10 --check

settings from the environment
  TRIPTYCH_COMBINED=http://a:8000 TRIPTYCH_DEADLINES__ENCODE=10 triptych gateway
"""

RULES = (
    "A flag wins over a variable, a variable over the file, the file over the default. A setting is called the same "
    "in all three: --deadlines.first-byte, TRIPTYCH_DEADLINES__FIRST_BYTE, and `deadlines: {first_byte: …}` in YAML. "
    "Times are seconds; sizes are bytes, or a number with KiB, MiB or GiB."
)

# What users of vLLM's reference proxy type.
ALIASES = {
    "encode": "--encode-servers-urls",
    "prefill": "--prefill-servers-urls",
    "decode": "--decode-servers-urls",
}


class GatewayCommand(click.Command):
    """Help with the examples first and the flags by section."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        with formatter.section("Examples"):
            for line in EXAMPLES.splitlines():
                formatter.write(f"{'':{formatter.current_indent}}{line}".rstrip() + "\n")
        formatter.write_paragraph()
        formatter.write_text(RULES)
        self.format_options(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rest = [param for param in self.get_params(ctx) if not isinstance(param, SettingOption)]
        settings = [param for param in self.get_params(ctx) if isinstance(param, SettingOption)]
        _section("Command", rest, ctx, formatter)
        for section, members in groupby(settings, key=lambda option: option.section):
            _section(section, members, ctx, formatter)


def _section(
    title: str, options: Iterable[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    records = [record for option in options if (record := option.get_help_record(ctx))]
    with formatter.section(title):
        formatter.write_dl(records, col_max=34)


class SettingOption(click.Option):
    """The flag of one setting: its text is passed on as it is, so that all sources are checked by one model."""

    def __init__(self, section: str, loc: tuple[str, ...], declarations: list[str], **attributes: Any) -> None:
        super().__init__(declarations, default=None, expose_value=True, **attributes)
        self.section = section
        self.loc = loc

    def given(self, value: Any) -> tuple[str, str | bool | tuple[str, ...]] | None:
        """The flag as typed, and its value; None where it was not given."""
        if value is None or value == ():
            return None
        return (self.secondary_opts if value is False else self.opts)[0], value


def _options() -> list[click.Parameter]:
    options: list[click.Parameter] = []
    for section, loc, kind, metavar, default, text in FLAGS:
        flag = ".".join(loc).replace("_", "-")
        name = "__".join(loc)
        shown = f"{text}  [{default}]"
        if kind == "bool":
            options.append(SettingOption(section, loc, [f"--{flag}/--no-{flag}", name], help=shown))
        else:
            options.append(
                SettingOption(section, loc, [f"--{flag}", name], metavar=metavar, multiple=kind == "list", help=shown)
            )
    section = "Names that vLLM's reference proxy has for them"
    for role, flag in ALIASES.items():
        text = f"same as --{role}" + ("; `disable` or `none` for none" if role == "prefill" else "")
        options.append(
            SettingOption(section, (role,), [flag, f"{role}_alias"], metavar="URL,…", multiple=True, help=text)
        )
    for part in ("host", "port"):
        text = f"the {part} of --listen"
        options.append(SettingOption(section, (part,), [f"--{part}", part], metavar=part.upper(), help=text))
    return options


def flags_of(params: Iterable[click.Parameter], values: dict[str, Any]) -> list[Flag]:
    """The settings that were given as flags, as `sources.load` takes them."""
    from triptych.gateway.sources import Flag

    flags = []
    for param in params:
        if isinstance(param, SettingOption) and param.name not in ("host", "port"):
            given = param.given(values.get(param.name or ""))
            if given:
                flags.append(Flag(given[0], param.loc, given[1]))
    return flags


@click.command(
    cls=GatewayCommand,
    params=_options(),
    # --deadlines.first_byte is as good as --deadlines.first-byte.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
@click.option("-c", "--config", metavar="FILE", help="YAML file with settings; else TRIPTYCH_CONFIG names one.")
@click.option("--check", is_flag=True, help="Validate, print the settings in force and who set each, start nothing.")
@click.pass_context
def gateway(ctx: click.Context, /, config: str | None, check: bool, **values: Any) -> int:
    """Run the gateway: one OpenAI-compatible address before encode, prefill, decode and combined vLLM engines."""
    from triptych.config.problems import SettingsError
    from triptych.gateway.sources import load

    try:
        loaded = load(
            flags_of(ctx.command.params, values), os.environ, config, host=values.get("host"), port=values.get("port")
        )
        if check:
            return _check(loaded)
        return _serve(loaded)
    except SettingsError as error:
        _show(error)
        return 2


def _show(error: SettingsError) -> None:
    count = len(error.problems)
    head = "1 setting is wrong" if count == 1 else f"{count} settings are wrong"
    click.echo(f"triptych gateway: {head}; nothing was started.", err=True)
    for problem in error.problems:
        click.echo(f"  {problem}", err=True)


def _check(loaded: Loaded) -> int:
    from triptych.gateway.effective import effective

    click.echo(effective(loaded), nl=False)
    click.echo("triptych gateway: the settings are valid; nothing was started.", err=True)
    return 0


def _serve(loaded: Loaded) -> int:
    from triptych.gateway.process import run

    try:
        return run(loaded.settings)
    except OSError as error:
        message = _cannot_listen(error, loaded)
        if message is None:
            raise
        click.echo(message, err=True)
        return 1


def _cannot_listen(error: OSError, loaded: Loaded) -> str | None:
    """What to tell about an address that cannot be bound, or None where that is not what went wrong."""
    for name in ("listen", "admin"):
        address = getattr(loaded.settings, name)
        reason = _bind_error(address)
        if reason:
            origin = loaded.origins.get((name,))
            who = origin.source if origin else "the default"
            return (
                f"triptych gateway: cannot listen on {address} (`{name}`, from {who}): {reason}.\n"
                f"  Choose another with --{name} HOST:PORT, or free this one."
            )
    return None


def _bind_error(address: str) -> str | None:
    from triptych.config.values import host_port

    if address == "off":
        return None
    host, port = host_port(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"{host!r} is not a host of this machine ({error.strerror})"
    for family, kind, protocol, _, target in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(target)
                probe.listen(1)
            except OSError as error:
                return (error.strerror or str(error)).lower()
    return None
