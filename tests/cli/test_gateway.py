from __future__ import annotations

import re
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from triptych.cli.gateway import ALIASES, gateway
from triptych.cli.gateway_flags import FLAGS
from triptych.config.problems import Problem, SettingsError
from triptych.gateway.settings import GatewaySettings
from triptych.gateway.sources import variable

A, B = "http://a:1", "http://b:1"


class Served:
    """Stands in for the gateway's process: keeps the settings, and does what the test says."""

    def __init__(self) -> None:
        self.settings: GatewaySettings | None = None
        self.act: Callable[[GatewaySettings], int] = lambda settings: 0

    def run(self, settings: GatewaySettings) -> int:
        self.settings = settings
        return self.act(settings)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served()
    module = types.ModuleType("triptych.gateway.process")
    module.run = served.run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triptych.gateway.process", module)
    return served


def call(*arguments: str) -> Result:
    return CliRunner().invoke(gateway, arguments, prog_name="triptych gateway", standalone_mode=False)


def settings_of(served: Served, *arguments: str) -> GatewaySettings:
    result = call(*arguments)
    assert result.exception is None, result.output
    assert served.settings is not None, result.output
    return served.settings


def test_flags_reach_the_gateway(served: Served) -> None:
    settings = settings_of(
        served, "--encode", f"{A},{B}", "--combined", "http://c:1", "--combined", "http://d:1",
        "--deadlines.first-byte", "3",
        "--limits.bytes", "2GiB", "--no-access-log", "--encode-priority", "--open", "uuid,embeds", "--name", "m",
    )  # fmt: skip
    (model,) = settings.models
    assert [e.url for e in model.encode] == [A, B]
    assert [e.url for e in model.combined] == ["http://c:1", "http://d:1"]
    assert (model.name, model.encode_priority) == ("m", True)
    assert settings.deadlines.first_byte == 3
    assert settings.limits.bytes == 2 << 30
    assert settings.access_log is False
    assert settings.open == {"uuid", "embeds"}


def test_underscores_are_as_good_as_dashes(served: Served) -> None:
    assert settings_of(served, "--combined", A, "--deadlines.first_byte", "3").deadlines.first_byte == 3


@pytest.mark.parametrize("word", ["disable", "none"])
def test_the_reference_proxys_command_line_works_unchanged(served: Served, word: str) -> None:
    settings = settings_of(
        served, "--host", "127.0.0.1", "--port", "10001", "--encode-servers-urls", A,
        "--prefill-servers-urls", word, "--decode-servers-urls", f"{B},http://c:1",
    )  # fmt: skip
    (model,) = settings.models
    assert settings.listen == "127.0.0.1:10001"
    assert ([e.url for e in model.encode], model.prefill) == ([A], ())
    assert [e.url for e in model.decode] == [B, "http://c:1"]


def test_variables_and_the_file_are_read(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g.yaml").write_text(f"combined: {A}\nlog_level: error\ndeadlines: {{encode: 5, prefill: 6}}\n")
    monkeypatch.setenv("TRIPTYCH_DEADLINES__PREFILL", "7")
    settings = settings_of(served, "--config", str(tmp_path / "g.yaml"), "--log-level", "debug")
    assert (settings.log_level, settings.deadlines.encode, settings.deadlines.prefill) == ("debug", 5, 7)


def test_the_status_is_that_of_the_gateway(served: Served) -> None:
    served.act = lambda settings: 3
    assert call("--combined", A).return_value == 3


def test_wrong_settings_are_listed_and_start_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_LIMIT__ITEMS", "3")
    result = call("--combined", "a:1", "--deadlines.connect", "-1")
    assert result.return_value == 2
    assert served.settings is None
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "triptych gateway: 3 settings are wrong; nothing was started.",
        "  TRIPTYCH_LIMIT__ITEMS: no such setting; did you mean `TRIPTYCH_LIMITS__ITEMS`?",
        "  --combined: combined[0].url: 'a:1' is not an engine address: write it as http://HOST:PORT or https://HOST:PORT",
        "  --deadlines.connect: deadlines.connect: must be above 0 (got '-1'); the default is 2.0",
    ]


def test_the_name_in_a_message_is_the_flag_that_was_typed(served: Served) -> None:
    for name in ("--decode", "--decode-servers-urls"):
        assert f"  {name}: decode[0].url: " in call(name, "x").stderr
    shown = call("--combined", A, "--no-access-log", "--encode-priority", "--check").stdout
    assert re.search(r"^access_log: false +# --no-access-log$", shown, re.M)
    assert re.search(r"^encode_priority: true +# --encode-priority$", shown, re.M)


def test_what_the_gateway_refuses_at_its_start_is_told_alike(served: Served) -> None:
    def refuse(settings: GatewaySettings) -> int:
        raise SettingsError([Problem("--ec", "ec", "no such dialect: give example")])

    served.act = refuse
    result = call("--combined", A)
    assert result.return_value == 2
    assert "  --ec: ec: no such dialect: give example" in result.stderr


def test_an_unknown_flag_is_guessed(served: Served) -> None:
    result = call("--combined", A, "--deadlines.conect", "3")
    assert isinstance(result.exception, click.UsageError)
    assert result.exception.exit_code == 2
    assert "--deadlines.connect" in result.exception.format_message()


def test_check_prints_settings_and_origins_and_starts_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_ENGINE_API_KEY", "hunter2")
    result = call("--combined", A, "--api-keys", "hunter2", "--check")
    assert result.return_value == 0
    assert served.settings is None
    assert re.search(r"^  - http://a:1 +# --combined$", result.stdout, re.M)
    assert re.search(r"^engine_api_key: '\*+' +# TRIPTYCH_ENGINE_API_KEY$", result.stdout, re.M)
    assert re.search(r"^listen: .* +# default$", result.stdout, re.M)
    assert "hunter2" not in result.output
    assert "valid" in result.stderr


def test_check_of_wrong_settings_is_2(served: Served) -> None:
    assert call("--encode", A, "--check").return_value == 2


@pytest.mark.parametrize("name", ["listen", "admin"])
def test_a_port_in_use_is_told_without_a_traceback(served: Served, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        def bind(settings: GatewaySettings) -> int:
            with socket.create_server(("127.0.0.1", taken.getsockname()[1])):
                return 0

        served.act = bind
        other = {"listen": ["--admin", "off"], "admin": ["--listen", "127.0.0.1:0"]}[name]
        result = call("--combined", A, f"--{name}", address, *other)
    assert result.exception is None
    assert result.return_value == 1
    assert result.stderr == (
        f"triptych gateway: cannot listen on {address} (`{name}`, from --{name}): address already in use.\n"
        f"  Choose another with --{name} HOST:PORT, or free this one.\n"
    )


def test_a_foreign_host_is_told(served: Served) -> None:
    def bind(settings: GatewaySettings) -> int:
        raise OSError(99, "cannot assign requested address")

    served.act = bind
    result = call("--combined", A, "--listen", "192.0.2.1:80", "--admin", "off")
    assert result.return_value == 1
    assert "cannot listen on 192.0.2.1:80" in result.stderr


def test_other_system_errors_are_not_blamed_on_an_address(served: Served) -> None:
    def fail(settings: GatewaySettings) -> int:
        raise OSError(24, "Too many open files")

    served.act = fail
    result = call("--combined", A, "--listen", "127.0.0.1:0", "--admin", "off")
    assert isinstance(result.exception, OSError)


# --- help


def help_text() -> str:
    return CliRunner().invoke(gateway, ["--help"], prog_name="triptych gateway").output


def test_help_begins_with_examples_that_work(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = help_text()
    assert text.index("Examples:") < text.index("A flag wins over") < text.index("Engines:")
    (tmp_path / "gateway.yaml").write_text(f"combined: {A}\n")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^    (?:(TRIPTYCH_.*) )?triptych gateway ?(.*)$", text, re.M)
    assert len(examples) == 4
    for environ, arguments in examples:
        with monkeypatch.context() as patch:
            for pair in environ.split():
                patch.setenv(*pair.split("=", 1))
            assert call(*arguments.split()).return_value == 0


def test_help_shows_every_setting_with_its_default_by_section(served: Served) -> None:
    text = help_text()
    at = 0
    for section, loc, _, _, default, _ in FLAGS:
        flag = "--" + ".".join(loc).replace("_", "-")
        assert text.index(f"\n{section}:\n") <= text.index(f"\n  {flag} ", at), flag
        at = text.index(f"\n  {flag} ", at)
        assert f"[{default}]" in text[at:]
    for flag in (*ALIASES.values(), "--host", "--port"):
        assert f"\n  {flag} " in text


def test_every_setting_has_one_flag_named_as_in_the_file() -> None:
    names = {param.name: param for param in gateway.params}
    for _, loc, kind, *_ in FLAGS:
        option = names["__".join(loc)]
        flag = "--" + ".".join(loc).replace("_", "-")
        assert option.opts == [flag]
        assert option.secondary_opts == ([f"--no-{flag[2:]}"] if kind == "bool" else [])
        assert variable(loc) == "TRIPTYCH_" + flag[2:].replace(".", "__").replace("-", "_").upper()
