"""Whatever stands in a source, the answer is settings or a SettingsError whose every problem names its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from triptych.cli.gateway_flags import FLAGS
from triptych.config.problems import Problem, SettingsError
from triptych.gateway.effective import effective
from triptych.gateway.settings import EngineSettings, GatewaySettings, ModelSettings
from triptych.gateway.sources import Flag, known_settings, load, variable

LOCS = sorted(known_settings())
WORDS = [
    "none",
    "off",
    "",
    " ",
    "http://a:1",
    "http://a:1,http://b:2",
    "tcp://a:1",
    "true",
    "3",
    "-1",
    "64MiB",
    "example",
    "x",
]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(WORDS), st.text(max_size=8))
KEYS = sorted(
    {*GatewaySettings.model_fields, *ModelSettings.model_fields, *EngineSettings.model_fields, "connect", "zzz"}
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
FILES = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5)
TEXTS = SCALARS.map(str) | VALUES.map(json.dumps) | st.text(max_size=12)
RELAXED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)


def outcome(sources: tuple[str, ...], **arguments: Any) -> None:
    problems: tuple[Problem, ...] = ()
    try:
        loaded = load(**arguments)
    except SettingsError as error:
        problems = error.problems
    event("refused" if problems else "valid")
    if not problems:
        assert load_again(effective(loaded)) == without_keys(loaded.settings)
    for problem in problems:
        assert problem.source.startswith((*sources, "settings"))
        assert problem.what


def load_again(text: str) -> GatewaySettings:
    kept = "\n".join(line for line in text.splitlines() if "'**********'" not in line)
    with Path("effective.yaml").open("w", encoding="utf-8") as file:
        file.write(kept)
    return without_keys(load(config="effective.yaml").settings)


def without_keys(value: GatewaySettings) -> GatewaySettings:
    models = tuple(m.model_copy(update={"engine_api_key": None, "engine_api_key_file": None}) for m in value.models)
    return value.model_copy(update={"api_keys": (), "api_keys_file": None, "models": models})


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@RELAXED
@given(FILES, st.booleans())
def test_any_file_gives_settings_or_problems(content: dict[str, Any], served: bool) -> None:
    if served:
        content = {"combined": "http://c:1", **content}
    with Path("g.yaml").open("w", encoding="utf-8") as file:
        json.dump(content, file)
    outcome(("g.yaml:", "g.yaml"), config="g.yaml")


GOOD = {
    "SECONDS": st.floats(0.001, 1e6).map(str),
    "N": st.integers(1, 10**6).map(str),
    "SIZE": st.tuples(st.integers(1, 10**6), st.sampled_from(["", "KiB", " MiB", "GB"])).map(lambda p: f"{p[0]}{p[1]}"),
    "HOST:PORT": st.sampled_from(["127.0.0.1:9000", ":9001", "[::1]:0"]),
    "KEY,…": st.sampled_from(["sk-1", "sk-1,sk-2"]),
    "KEY": st.just("sk-1"),
    "NAME,…": st.lists(st.sampled_from(["uuid", "embeds"]), min_size=1).map(",".join),
    "TEXT": st.sampled_from(["example", "/x", "null", "a: b", "#x", "ä 'q' \"", "12", "1e3", "- x", "[", "@"]),
}


@settings(RELAXED, max_examples=50)
@given(st.data())
def test_settings_that_are_valid_survive_being_shown(data: st.DataObject) -> None:
    environ = {"TRIPTYCH_COMBINED": "http://c:1,http://d:1"}
    for _, loc, kind, metavar, _, _ in FLAGS:
        texts = st.booleans().map(str) if kind == "bool" else GOOD.get(metavar)
        if "|" in metavar:
            texts = st.sampled_from(metavar.split("|"))
        if texts is not None and loc[0] != "tenant_header" and data.draw(st.integers(0, 3)) == 0:
            environ[variable(loc)] = data.draw(texts)
    outcome(("TRIPTYCH_",), environ=environ)


@RELAXED
@given(st.dictionaries(st.sampled_from(LOCS), TEXTS, max_size=5))
def test_any_variables_give_settings_or_problems(values: dict[Any, str]) -> None:
    environ = {"TRIPTYCH_COMBINED": "http://c:1"} | {variable(loc): text for loc, text in values.items()}
    outcome(("TRIPTYCH_",), environ=environ)


@RELAXED
@given(st.dictionaries(st.sampled_from(LOCS), st.lists(TEXTS, min_size=1, max_size=2), max_size=4), FILES)
def test_any_flags_over_any_file_give_settings_or_problems(
    values: dict[Any, list[str]], content: dict[str, Any]
) -> None:
    with Path("g.yaml").open("w", encoding="utf-8") as file:
        json.dump({"combined": "http://c:1", **content}, file)
    flags = [Flag("--" + ".".join(loc), loc, tuple(texts)) for loc, texts in values.items()]
    outcome(("--", "g.yaml"), flags=flags, config="g.yaml")
