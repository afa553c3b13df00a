"""Tiny models as files. That vLLM serves them, and that answers depend on the image, is tested in tests/engine."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner

from triptych.cli.models import models
from triptych.models import tiny
from triptych.models.recipes import recipes
from triptych.models.tokenizer import WORDS, byte_symbols
from triptych.models.weights import Tensor, write_safetensors


def snapshot(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}


def header(path: Path) -> dict[str, dict[str, object]]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    parsed: dict[str, dict[str, object]] = json.loads(data[8 : 8 + length])
    assert max(entry["data_offsets"][1] for entry in parsed.values() if "dtype" in entry) == len(data) - 8 - length  # type: ignore[index]
    return parsed


@pytest.mark.parametrize("kind", list(recipes()))
def test_every_kind_has_all_files_and_the_tensors_of_its_recipe(kind: str, tmp_path: Path) -> None:
    directory = tiny.write_tiny(kind, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    assert config["text_config"]["vocab_size"] == len(vocabulary) == max(vocabulary.values()) + 1
    stored = {
        name: entry["shape"] for name, entry in header(directory / "model.safetensors").items() if "dtype" in entry
    }
    assert stored == {tensor.name: list(tensor.shape) for tensor in recipes()[kind].tensors}
    assert (directory / "chat_template.jinja").read_text().count("<|im_start|>") == 2


def test_the_same_kind_gives_the_same_bytes_and_another_kind_other_weights(tmp_path: Path) -> None:
    one, two = (tiny.write_tiny("image", tmp_path / name) for name in ("one", "two"))
    assert {n: b for n, (b, _) in snapshot(one).items()} == {n: b for n, (b, _) in snapshot(two).items()}
    other = tiny.write_tiny("audio", tmp_path / "other")
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_writing_again_touches_no_file(tmp_path: Path) -> None:
    directory = tiny.write_tiny("image", tmp_path / "model")
    before = snapshot(directory)
    assert tiny.write_tiny("image", directory) == directory
    assert snapshot(directory) == before


def test_another_kind_replaces_a_tiny_model_whole(tmp_path: Path) -> None:
    directory = tiny.write_tiny("image-raw", tmp_path / "model")
    tiny.write_tiny("audio", directory)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen2_audio"
    assert not (directory / "processor_config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_with_anything_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not a tiny model"):
        tiny.write_tiny("image", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert (tiny.write_tiny("image", tmp_path / "model") / "config.json").is_file()


def test_an_interrupted_write_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "write_safetensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tiny.write_tiny("image", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def _write_in_child(directory: str) -> None:
    tiny.write_tiny("image", directory)


def test_writers_at_the_same_time_end_with_one_whole_model(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.map(_write_in_child, [str(tmp_path / "model")] * 8)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert snapshot(tmp_path / "model").keys() == snapshot(tiny.write_tiny("image", tmp_path / "twin")).keys()


def test_only_words_can_win_a_greedy_choice(tmp_path: Path) -> None:
    directory = tiny.write_tiny("image", tmp_path / "model")
    path = directory / "model.safetensors"
    entry = header(path)["lm_head.weight"]
    data = path.read_bytes()
    start, end = entry["data_offsets"]  # type: ignore[misc]
    base = 8 + struct.unpack("<Q", data[:8])[0]
    values = struct.unpack(f"<{(end - start) // 4}f", data[base + start : base + end])
    rows = [values[index : index + 64] for index in range(0, len(values), 64)]
    assert [any(row) for row in rows] == [False] * (len(rows) - len(WORDS)) + [True] * len(WORDS)


def test_weights_have_the_scale_that_the_recipe_asks_for(tmp_path: Path) -> None:
    with (tmp_path / "w").open("wb") as file:
        write_safetensors(file, [Tensor("t", (100, 100), std=2.0)], "seed")
    data = (tmp_path / "w").read_bytes()
    values = struct.unpack("<10000f", data[-40000:])
    deviation = (sum(value * value for value in values) / len(values)) ** 0.5
    assert deviation == pytest.approx(2.0, rel=0.05)
    assert abs(sum(values) / len(values)) < 0.1


def test_each_byte_has_a_symbol_of_its_own() -> None:
    symbols = byte_symbols()
    assert len(set(symbols)) == 256
    assert symbols[ord("A")] == "A"
    assert not any(symbol.isspace() for symbol in symbols)
    assert len(set(WORDS)) == len(WORDS)


def test_an_unknown_kind_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are: image, audio, image-raw"):
        tiny.write_tiny("video", tmp_path / "model")


def test_command_writes_and_prints_where(tmp_path: Path) -> None:
    result = CliRunner().invoke(models, ["tiny", "image", str(tmp_path / "model")])
    assert result.exit_code == 0
    assert result.output.strip() == str(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()


def test_command_lists_the_kinds() -> None:
    result = CliRunner().invoke(models, ["tiny", "--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == ["image", "audio", "image-raw", "omni"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny"], "KIND and DIR are wanted"),
        (["tiny", "image"], "KIND and DIR are wanted"),
        (["tiny", "video", "x"], "there are: image, audio, image-raw"),
        (["tiny", "image", os.path.dirname(__file__)], "is not a tiny model"),
    ],
)
def test_command_says_what_is_wrong(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(models, arguments)
    assert result.exit_code != 0
    assert message in result.output


def test_a_family_has_a_model_for_each_stage_and_is_replaced_whole(tmp_path: Path) -> None:
    directory = tiny.write_tiny("omni", tmp_path / "model")
    assert {path.name for path in directory.iterdir() if path.is_dir()} == {"thinker", "talker", "codec"}
    for stage in ("thinker", "talker", "codec"):
        header(directory / stage / "model.safetensors")
        assert json.loads((directory / stage / "config.json").read_text())["architectures"]
    before = (directory / "talker" / "model.safetensors").stat().st_mtime_ns
    tiny.write_tiny("omni", directory)
    assert (directory / "talker" / "model.safetensors").stat().st_mtime_ns == before
    tiny.write_tiny("image", directory)
    assert not (directory / "talker").exists()
