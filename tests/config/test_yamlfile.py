from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.config.problems import SettingsError
from triptych.config.yamlfile import parse, read


def problems(text: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        parse(text, "f.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_every_value_has_its_line() -> None:
    document = parse("a: 1\nb:\n  c: x\n  d:\n    - 5\n    - {e: 6}\n", "f.yaml")
    assert document.value == {"a": 1, "b": {"c": "x", "d": [5, {"e": 6}]}}
    lines = {"a": 1, "b": 2, "c": 3, "d": 4}
    assert {loc[-1]: line for loc, line in document.lines.items() if loc and loc[-1] in lines} == lines
    assert document.lines[("b", "d", 0)] == 5
    assert document.lines[("b", "d", 1, "e")] == 6


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("yes", "yes"),
        ("12:30", "12:30"),
        ("0.0.0.0:8000", "0.0.0.0:8000"),
        (":8000", ":8000"),
        ("2026-01-01", "2026-01-01"),
        ("010", 10),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("-3", -3),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("'7'", "7"),
        ('"true"', "true"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_scalars_are_what_they_look_like(text: str, value: object) -> None:
    got = parse(f"a: {text}\n", "f.yaml").value["a"]
    assert got == value
    assert type(got) is type(value)


def test_duplicate_keys_are_all_refused_with_both_lines() -> None:
    assert problems("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n") == [
        "f.yaml:4: b.c: stands here a second time, first in line 3: keep one",
        "f.yaml:5: a: stands here a second time, first in line 1: keep one",
    ]


def test_tags_construct_nothing() -> None:
    text = "a: !!python/object/apply:os.system ['true']\nb: !x 1\nc: !!set {d}\n"
    assert [p.split(":")[1] for p in problems(text)] == ["1", "2", "3"]


def test_keys_are_names() -> None:
    assert problems("a:\n  ? [1, 2]\n  : 3\n") == ["f.yaml:2: a: has a key that is a list or a mapping: keys are names"]


def test_aliases_are_copies_and_cannot_blow_up() -> None:
    assert parse("a: &x [1]\nb: *x\n", "f.yaml").value == {"a": [1], "b": [1]}
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    assert "too large once its aliases are put in" in problems(bomb)[0]
    assert "too large" in problems("a: &a [*a]\n")[0]


def test_deep_nesting_is_a_message() -> None:
    assert "deep" in problems("a: " + "[" * 3_000)[0]


@pytest.mark.parametrize("text", ["- a\n", "just text\n"])
def test_the_top_is_settings(text: str) -> None:
    assert problems(text) == ["f.yaml:1: must be settings, one `name: value` a line"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_a_file_may_be_empty(text: str) -> None:
    assert parse(text, "f.yaml").value == {}


@pytest.mark.parametrize(
    "text", ["a: 'sk-secret\n", "a: [sk-secret\n", "a: sk-secret: x\n", "a: *sk-secret\n", "a: !sk-secret! x\n", "\x00"]
)
def test_syntax_errors_name_the_line_and_quote_nothing(text: str) -> None:
    (problem,) = problems("# one\n" + text)
    assert problem.startswith(("f.yaml:", "f.yaml: "))
    assert "secret" not in problem


@given(st.text(max_size=60))
def test_any_text_parses_or_is_a_settings_error(text: str) -> None:
    with suppress(SettingsError):
        assert isinstance(parse(text, "f.yaml").value, dict)


def test_unreadable_files_say_why(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"a: \xe4\n")
    for name, why in (("none", "No such file"), ("latin", "not UTF-8"), (".", "directory")):
        with pytest.raises(SettingsError, match=why):
            read(tmp_path / name)
