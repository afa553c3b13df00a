from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import yaml

from triptych.config.problems import SettingsError
from triptych.gateway.effective import effective
from triptych.gateway.settings import GatewaySettings
from triptych.gateway.sources import Flag, Loaded, known_settings, load, variable

A, B, C = "http://a:1", "http://b:1", "http://c:1"

Write = Callable[[str], str]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a settings file and gives its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("g.yaml").write_text(text)
        return "g.yaml"

    return write


def flag(name: str, *values: str) -> Flag:
    loc = tuple(name.removeprefix("--").replace("-", "_").split("."))
    return Flag(name, loc, values)


def problems(
    flags: Iterable[Flag] = (), environ: Mapping[str, str] | None = None, config: str | None = None, **more: str
) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(flags, environ, config, **more)
    return [str(problem) for problem in caught.value.problems]


def urls(loaded: Loaded, role: str = "combined") -> list[str]:
    return [engine.url for engine in getattr(loaded.settings.models[0], role)]


# --- who wins


@pytest.mark.parametrize(
    ("in_file", "variable_", "flag_", "value", "source"),
    [
        (None, None, None, 2.0, None),
        ("3", None, None, 3.0, "g.yaml:2"),
        ("3", "4", None, 4.0, "TRIPTYCH_DEADLINES__CONNECT"),
        ("3", None, "5", 5.0, "--deadlines.connect"),
        (None, "4", "5", 5.0, "--deadlines.connect"),
        (None, "4", None, 4.0, "TRIPTYCH_DEADLINES__CONNECT"),
        ("3", "4", "5", 5.0, "--deadlines.connect"),
    ],
)
def test_flags_win_over_variables_over_the_file_over_defaults(
    file: Write, *, in_file: str | None, variable_: str | None, flag_: str | None, value: float, source: str | None
) -> None:
    text = f"combined: {A}\n" + (f"deadlines: {{connect: {in_file}}}\n" if in_file else "")
    environ = {"TRIPTYCH_DEADLINES__CONNECT": variable_} if variable_ else {}
    flags = [flag("--deadlines.connect", flag_)] if flag_ else []
    loaded = load(flags, environ, file(text))
    assert loaded.settings.deadlines.connect == value
    origin = loaded.origins.get(("deadlines", "connect"))
    assert (origin.source if origin else None) == source


@pytest.mark.parametrize(
    ("in_file", "variable_", "flag_", "value"),
    [
        (A, None, None, [A]),
        (A, B, None, [B]),
        (A, B, C, [C]),
        (f"[{A}, {B}]", None, C, [C]),
        (f"'{A},{B}'", None, None, [A, B]),
        (None, f"{A}, {B}", None, [A, B]),
        (None, f'["{A}", {{"url": "{B}", "weight": 2}}]', None, [A, B]),
        (None, f'{{"url": "{B}", "weight": 2}}', None, [B]),
    ],
)
def test_lists_are_replaced_as_a_whole(
    file: Write, in_file: str | None, variable_: str | None, flag_: str | None, value: list[str]
) -> None:
    config = file(f"combined: {in_file}\n") if in_file else None
    environ = {"TRIPTYCH_COMBINED": variable_} if variable_ else {}
    assert urls(load([flag("--combined", flag_)] if flag_ else [], environ, config)) == value


def test_groups_are_merged_by_member(file: Write) -> None:
    config = file(f"combined: {A}\nlimits: {{items: 1, queue: 2}}\ntls: null\n")
    environ = {"TRIPTYCH_LIMITS__QUEUE": "3", "TRIPTYCH_LIMITS": '{"requests": 9, "queue": 4}'}
    limits = load([flag("--limits.connections", "7")], environ, config).settings.limits
    assert (limits.items, limits.queue, limits.requests, limits.connections) == (1, 3, 9, 7)


def test_repeated_flags_add_up() -> None:
    assert urls(load([flag("--combined", A, f"{B},{C}")])) == [A, B, C]


def test_an_empty_group_in_the_file_is_no_fault(file: Write) -> None:
    assert load(config=file(f"combined: {A}\ndeadlines:\n#  connect: 3\nencode:\n")).settings.deadlines.connect == 2


def test_the_file_may_be_named_by_a_variable_and_a_flag_wins(file: Write, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(f"combined: {B}\n")
    config = file(f"combined: {A}\n")
    assert urls(load(environ={"TRIPTYCH_CONFIG": config})) == [A]
    assert urls(load(environ={"TRIPTYCH_CONFIG": config}, config="other.yaml")) == [B]


@pytest.mark.parametrize("word", ["none", "disable", "OFF"])
def test_a_word_unsets_what_may_be_unset(file: Write, word: str) -> None:
    config = file(f"decode: {A}\nprefill: {B}\ndeadlines: {{total: 9}}\n")
    loaded = load([flag("--prefill", word)], {"TRIPTYCH_DEADLINES__TOTAL": word}, config)
    assert loaded.settings.deadlines.total is None
    assert urls(loaded, "prefill") == []


def test_flags_and_variables_reach_the_only_model_of_a_list(file: Write) -> None:
    config = file(f"models:\n  - name: m\n    combined: {A}\n")
    loaded = load([flag("--encode", B)], {"TRIPTYCH_EC": "eccpu"}, config)
    assert (loaded.settings.models[0].name, loaded.settings.models[0].ec) == ("m", "eccpu")
    assert (urls(loaded), urls(loaded, "encode")) == ([A], [B])


def test_a_list_of_models_replaces_lower_ones(file: Write) -> None:
    config = file(f"combined: {A}\n")
    environ = {"TRIPTYCH_MODELS": f'[{{"combined": "{B}"}}]'}
    assert urls(load(environ=environ, config=config)) == [B]


@pytest.mark.parametrize(
    ("in_file", "host", "port", "listen"),
    [
        (None, "127.0.0.1", None, "127.0.0.1:8000"),
        (None, None, "9000", "0.0.0.0:9000"),
        ("1.2.3.4:5", None, "9000", "1.2.3.4:9000"),
        ("1.2.3.4:5", "::1", None, "[::1]:5"),
    ],
)
def test_host_and_port_replace_their_part_of_listen(
    file: Write, in_file: str | None, host: str | None, port: str | None, listen: str
) -> None:
    config = file(f"combined: {A}\n" + (f"listen: {in_file}\n" if in_file else ""))
    assert load(config=config, host=host, port=port).settings.listen == listen


def test_every_setting_can_be_given_as_a_variable() -> None:
    """The names are those of the model: no setting is out of reach, and none has two variables."""
    variables = [variable(loc) for loc in known_settings()]
    assert len(variables) == len(set(variables))
    for name in ("TRIPTYCH_ENCODE", "TRIPTYCH_DEADLINES__FIRST_BYTE", "TRIPTYCH_ENGINE_TLS__CA", "TRIPTYCH_API_KEYS"):
        assert name in variables
    declared = {name for name in GatewaySettings.model_fields if name != "models"}
    assert declared <= {loc[0] for loc in known_settings()}


def test_variables_of_kubernetes_services_are_passed_over() -> None:
    environ = {
        "TRIPTYCH_COMBINED": A,
        "TRIPTYCH_SERVICE_HOST": "10.0.0.1",
        "TRIPTYCH_SERVICE_PORT": "8000",
        "TRIPTYCH_SERVICE_PORT_HTTP": "8000",
        "TRIPTYCH_PORT": "tcp://10.0.0.1:8000",
        "TRIPTYCH_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "TRIPTYCH_PORT_8000_TCP_PROTO": "tcp",
        "TRIPTYCH_PORT_8000_TCP_PORT": "8000",
        "TRIPTYCH_PORT_8000_TCP_ADDR": "10.0.0.1",
        "TRIPTYCH_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "TRIPTYCH_GATEWAY_PORT": "tcp://10.0.0.1:8000",
        "TRIPTYCH_GATEWAY_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    }
    assert load(environ=environ).settings.listen == "0.0.0.0:8000"


def test_a_variable_that_engines_get_is_no_fault() -> None:
    assert load(environ={"TRIPTYCH_COMBINED": A, "TRIPTYCH_ENGINE_COMPAT": "1"}).settings


# --- what is wrong: source, field, what, what to do


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("deadlines: {connect: -1}", "g.yaml:2: deadlines.connect: must be above 0 (got -1); the default is 2.0"),
        ("deadlines: {connect: soon}",
         "g.yaml:2: deadlines.connect: must be a number (got 'soon'); the default is 2.0"),
        ("deadlines:\n  first-byte: 3", "g.yaml:3: deadlines.first-byte: no such setting; did you mean `first_byte`?"),
        ("deadlines: 3", "g.yaml:2: deadlines: must be a group of settings (got 3)"),
        ("limits: {items: 2.5}", "g.yaml:2: limits.items: must be a whole number (got 2.5); the default is 128"),
        ("limits: {itmes: 3}", "g.yaml:2: limits.itmes: no such setting; did you mean `items`?"),
        ("connect: 3", "g.yaml:2: connect: no such setting; did you mean `deadlines.connect`?"),
        ("frobnicate: 3", "g.yaml:2: frobnicate: no such setting"),
        ("api_key: hunter2", "g.yaml:2: api_key: no such setting; did you mean `api_keys`?"),
        ("api_keys: [hunter2 x]", "g.yaml:2: api_keys[0]: holds a space or a character that no HTTP header can carry: "
         "is it quoted or cut wrongly?"),
        ("api_keys: [12345]", "g.yaml:2: api_keys[0]: must be a text: put it in quotes"),
        ("name: 7", "g.yaml:2: name: must be a text (got 7): put it in quotes"),
        ("access_log: perhaps", "g.yaml:2: access_log: must be true or false (got 'perhaps'); the default is true"),
        ("log_format: jsno", "g.yaml:2: log_format: must be one of json, text (got 'jsno'); did you mean `json`?"),
        ("prefer: 3", "g.yaml:2: prefer: must be one of disaggregated, combined (got 3)"),
        ("health: {path: x}", "g.yaml:2: health.path: is not of the form ^/[!-~]*$ (got 'x'); the default is /health"),
        ("deadlines: {total: .nan}", "g.yaml:2: deadlines.total: must be a finite number (got nan)"),
        ("encode: [http://e:1, ftp://u:hunter2@f:1]",
         "g.yaml:2: encode[1].url: 'ftp://***@f:1' is not an engine address: write it as http://HOST:PORT or https://HOST:PORT"),
        ("encode:\n- http://e:1,http://f:1\n- g:1", "g.yaml:4: encode[1].url: 'g:1' is not an engine address: "
         "write it as http://HOST:PORT or https://HOST:PORT"),
        ("encode:\n- url: http://e:1\n  wieght: 3",
         "g.yaml:4: encode[0].wieght: no such setting; did you mean `weight`?"),
        ("encode:\n- weight: 3", "g.yaml:3: encode[0].url: is missing: give it (http://HOST:PORT or https://HOST:PORT)"),
        (f"prefill: {B}", "g.yaml:2: prefill: prefill engines without decode engines: give `decode` engines too, "
         "or no `prefill`"),
        (f"decode: {A}", "g.yaml:1: combined[0].url: http://a:1 is listed in `decode` too: an engine has one role"),
        ("tls: {key: /none}", "g.yaml:2: tls.certificate: is missing: give it (PEM file with the certificate chain)\n"
         "g.yaml:2: tls.key: there is no file /none: give the path of a PEM file"),
        ("models: []", "g.yaml:1: combined: stands beside `models`: put it inside the model that it belongs to\n"
         "g.yaml:2: models: no model: give engines, for example --combined http://127.0.0.1:8000"),
        ("a: [", "g.yaml:2: a: no such setting"),
    ],
)  # fmt: skip
def test_file_faults_name_line_and_field(file: Write, text: str, expected: str) -> None:
    found = "\n".join(problems(config=file(f"combined: {A}\n{text}\n")))
    if text == "a: [":
        assert found.startswith("g.yaml:3: is not YAML")
    else:
        assert found == expected


def test_faults_inside_a_list_of_models_say_which(file: Write) -> None:
    text = f"models:\n- name: m\n  combined: {A}\n- combined: {B}\n  kvv: 3\n- name: m\n  combined: {C}\n  name: x\n"
    assert problems(config=file(text)) == [
        "g.yaml:8: models[2].name: stands here a second time, first in line 6: keep one"
    ]
    text = f"models:\n- name: m\n  combined: {A}\n- combined: x\n  kvv: 3\n"
    assert problems(config=file(text)) == [
        "g.yaml:4: models[1].combined[0].url: 'x' is not an engine address: "
        "write it as http://HOST:PORT or https://HOST:PORT",
        "g.yaml:5: models[1].kvv: no such setting; did you mean `kv`?",
    ]
    text = f"models:\n- name: m\n  combined: {A}\n- combined: {B}\n"
    assert problems(config=file(text)) == [
        "g.yaml:4: models[1].name: is missing: with several models each needs its `name`"
    ]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DEADLINE_CONNECT": "3"}, ": no such setting; did you mean `TRIPTYCH_DEADLINES__CONNECT`?"),
        ({"DEADLINES_CONNECT": "3"}, ": no such setting; did you mean `TRIPTYCH_DEADLINES__CONNECT`?"),
        ({"ENCODERS": A}, ": no such setting; did you mean `TRIPTYCH_ENCODE`?"),
        ({"ENGINE_API_KEYS": "hunter2"}, ": no such setting; did you mean `TRIPTYCH_ENGINE_API_KEY`?"),
        ({"PORT": "9000"}, ": no such setting; `TRIPTYCH_LISTEN` takes HOST:PORT"),
        ({"ZZZ": "9000"}, ": no such setting"),
        ({"API_KEYS": ""}, ": api_keys: is empty: give a value, or leave it out"),
        ({"API_KEYS": "ok,hunter2 x"}, ": api_keys[1]: holds a space or a character that no HTTP header can carry: "
         "is it quoted or cut wrongly?"),
        ({"API_KEYS": '["hunter2'}, ": api_keys: is not JSON (character 2): write it as {…} or […]"),
        ({"DEADLINES__CONNECT": "soon"}, ": deadlines.connect: must be a number (got 'soon'); the default is 2.0"),
        ({"DEADLINES": "3"}, ": deadlines: must be a group of settings (got 3)"),
        ({"DEADLINES": "{"}, ": deadlines: is not JSON (character 2): write it as {…} or […]"),
        ({"DEADLINES": '{"conect": 3}'}, ": deadlines.conect: no such setting; did you mean `connect`?"),
        ({"OPEN": "uiid"}, ": open[0]: must be one of ec_transfer_params, kv_transfer_params, uuid, embeds, "
         "data_parallel_rank, answer_handles (got 'uiid'); did you mean `uuid`?"),
        ({"EC": "mooncak"},
         ": ec: there is no dialect 'mooncak'; did you mean `mooncake`? There are: eccpu, example, mooncake"),
        ({"KV": "zzz"}, ": kv: there is no dialect 'zzz'; there are: example, nixl"),
        ({"TLS__KEY": __file__}, ": tls.certificate: is missing: give it (PEM file with the certificate chain)"),
        ({"ENCODE": '{"url": "http://e:1", "weight": 0}'}, ": encode[0].weight: must be above 0 (got 0); "
         "the default is 1.0"),
    ],
)  # fmt: skip
def test_variable_faults_name_the_variable_and_the_field(environ: dict[str, str], expected: str) -> None:
    ((name, value),) = environ.items()
    name = f"TRIPTYCH_{name}"
    assert problems(environ={"TRIPTYCH_COMBINED": A, name: value}) == [name + expected]


def test_flag_faults_name_the_flag_as_typed() -> None:
    assert problems([flag("--combined", A), flag("--limits.items", "0")]) == [
        "--limits.items: limits.items: must be above 0 (got '0'); the default is 128"
    ]
    both = [flag("--decode", A), Flag("--decode-servers-urls", ("decode",), (B,))]
    assert problems(both) == ["--decode-servers-urls: decode: is the same setting as --decode: give one of the two"]
    assert problems([flag("--combined", A), flag("--listen", "h:1")], port="2") == [
        "--port: listen: is the same setting as --listen: give one of the two"
    ]
    assert problems([flag("--combined", A)], port="http") == [
        "--port: listen: '0.0.0.0:http' is not of the form HOST:PORT"
    ]


def test_a_flag_for_one_of_several_models_is_refused(file: Write) -> None:
    config = file(f"models:\n- {{name: m, combined: {A}}}\n- {{name: n, combined: {B}}}\n")
    assert problems([flag("--encode", C)], config=config) == [
        "--encode: encode: there are several models, and this does not say which: set it inside one, in the file"
    ]


def test_no_engines_says_how_to_give_some() -> None:
    (problem,) = problems()
    assert problem.startswith("settings: models: no engines: give --combined URL")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"config": "none.yaml"}, "--config: config: there is no file none.yaml"),
        ({"environ": {"TRIPTYCH_CONFIG": "none.yaml"}}, "TRIPTYCH_CONFIG: config: there is no file none.yaml"),
        ({"environ": {"TRIPTYCH_CONFIG": ""}}, "TRIPTYCH_CONFIG: config: is empty: give a file's path, or remove it"),
    ],
)
def test_a_file_that_is_not_there_names_who_named_it(arguments: dict[str, object], expected: str) -> None:
    assert problems(**arguments) == [expected]


def test_all_faults_of_all_sources_come_at_once(file: Write) -> None:
    config = file(f"combined: {A}\nlog_level: loud\nadmin: nowhere\n")
    found = problems(
        [flag("--limits.items", "x"), flag("--ec", "example")],
        {"TRIPTYCH_HEALTH__INTERVAL": "-2", "TRIPTYCH_NONSENSE": "1"},
        config,
    )
    assert {problem.split(": ")[0] for problem in found} == {
        "g.yaml:2", "g.yaml:3", "--limits.items", "TRIPTYCH_HEALTH__INTERVAL", "TRIPTYCH_NONSENSE",
    }  # fmt: skip


def test_a_broken_file_hides_no_fault_of_the_others_and_invents_none(file: Write) -> None:
    found = problems([flag("--limits.items", "x")], {"TRIPTYCH_NONSENSE": "1"}, file("combined: [\n"))
    assert [problem.split(": ")[0] for problem in found] == ["g.yaml:2", "TRIPTYCH_NONSENSE", "--limits.items"]


# --- keys


def test_a_key_that_is_a_word_for_none_is_a_key() -> None:
    keys = load([flag("--combined", A)], {"TRIPTYCH_API_KEYS": "none,off"}).settings.api_keys
    assert [key.get_secret_value() for key in keys] == ["none", "off"]


def test_a_password_in_a_misplaced_url_is_not_shown(file: Write) -> None:
    (problem,) = problems(config=file(f"combined: {A}\nprefer: http://u:hunter2@x:1\n"))
    assert "(got 'http://***@x:1')" in problem


def test_no_message_shows_a_key(file: Write) -> None:
    text = (
        "api_keys: [hunter2 a, 'hunter2\u00fc']\nengine_api_key: [hunter2]\napi_keyz: hunter2\n"
        "models: {api_key: hunter2}\nencode: [http://u:hunter2@x:1]\ntls: hunter2\nopen: {hunter2: 1}\n"
    )
    environ = {"TRIPTYCH_API_KEY": "hunter2", "TRIPTYCH_ENGINE_API_KEY": "{hunter2", "TRIPTYCH_COMBINED": "u:hunter2@x"}
    found = problems([flag("--api-keys", "hunter2 b")], environ, file(text))
    assert len(found) > 6
    without = [problem for problem in found if "tls" not in problem.split(": ")[1]]
    assert "hunter2" not in "\n".join(without)


def test_the_effective_settings_hide_keys_and_name_origins(file: Write, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("hunter2\n")
    config = file(f"combined: [{A}, {{url: {B}, weight: 2}}]\nengine_api_key: hunter2\ndeadlines: {{encode: 3}}\n")
    loaded = load([flag("--api-keys-file", "keys"), flag("--encode", C)], {"TRIPTYCH_LIMITS__BYTES": "2GiB"}, config)
    text = effective(loaded)
    assert "hunter2" not in text
    lines = {line.split("#")[0].strip(): line.rpartition("# ")[2] for line in text.splitlines()}
    assert lines["- http://a:1"] == "g.yaml:1"
    assert lines["- {url: http://b:1, weight: 2}"] == "g.yaml:1"
    assert lines["- http://c:1"] == "--encode"
    assert lines["engine_api_key: '**********'"] == "g.yaml:2"
    assert lines["api_keys: ['**********']"] == "--api-keys-file"
    assert lines["encode: 3"] == "g.yaml:3"
    assert lines["connect: 2"] == "default"
    assert lines["bytes: 2GiB"] == "TRIPTYCH_LIMITS__BYTES"
    assert lines["body_bytes: 64MiB"] == "default"
    assert yaml.safe_load(text)["limits"]["bytes"] == "2GiB"


@pytest.mark.parametrize(
    "text",
    [
        f"combined: {A}\nadmin: off\nopen: [uuid, embeds]\nname: 'true'\n",
        f"models:\n- {{name: 'a: b', decode: [{{url: {A}, ec_zmq: 'tcp://x:1'}}], prefill: {B}, encode: {C}}}\n"
        "- {name: n, combined: http://d:1, encode_priority: true}\ntenant_header: x-t\ndeadlines: {total: 1.5}\n",
    ],
)
def test_the_effective_settings_are_a_settings_file(file: Write, text: str) -> None:
    first = load(config=file(text))
    assert load(config=file(effective(first))).settings == first.settings


def test_a_masked_key_cannot_be_taken_for_a_key(file: Write) -> None:
    shown = effective(load([flag("--combined", A), flag("--api-keys", "hunter2")]))
    (problem,) = problems(config=file(shown))
    assert "api_keys[0]: is only asterisks" in problem
