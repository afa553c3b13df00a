"""Writes a tiny random-weight model that stock vLLM serves, in a fraction of a second and without torch."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.models.families import families
from triptych.models.recipes import CONTEXT, Recipe, recipes
from triptych.models.tokenizer import tokenizer_json
from triptych.models.weights import write_safetensors

#: The kind that the demo serves.
DEFAULT_KIND = "image"
_SEED = "triptych tiny model"
_STAMP = "triptych-tiny.json"


def kinds() -> dict[str, str]:
    """Each kind of tiny model with one line about it."""
    spoken = {name: family.summary for name, family in families().items() if family.tiny is not None}
    return {kind: recipe.summary for kind, recipe in recipes().items()} | spoken


def write_tiny(kind: str, directory: Path | str) -> Path:
    """Write the tiny model `kind` to `directory` and return its absolute path; of a family, each stage's model to a
    directory below it that has the stage's name.

    Does nothing where the same model is there already and replaces one of another kind or recipe. A directory with
    other content raises FileExistsError. The directory appears whole or not at all, so an interrupted run leaves
    nothing that looks like a model. Raises ValueError for an unknown kind.
    """
    parts = _parts(kind)
    target = Path(directory).absolute()
    stamp = {"kind": kind, "recipe": _fingerprint(parts)}
    if _stamp_of(target) == stamp:
        return target
    if target.exists() and _stamp_of(target) is None and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there and is not a tiny model: choose another directory")

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    scratch.mkdir()
    try:
        for part, recipe in parts.items():
            (scratch / part).mkdir(exist_ok=True)
            _write_files(recipe, scratch / part)
        (scratch / _STAMP).write_text(json.dumps(stamp, indent=1), encoding="utf-8")
        _swap_in(scratch, target, stamp)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _parts(kind: str) -> Mapping[str, Recipe]:
    """The recipes of a kind by directory. Raises ValueError for an unknown kind."""
    recipe = recipes().get(kind)
    if recipe is not None:
        return {"": recipe}
    family = families().get(kind)
    if family is None or family.tiny is None:
        raise ValueError(f"unknown kind of tiny model {kind!r}, there are: {', '.join(kinds())}")
    return family.tiny()


def _swap_in(scratch: Path, target: Path, stamp: dict[str, str]) -> None:
    """Rename `scratch` to `target`, over an older tiny model if there is one. A twin that was quicker wins."""
    old = scratch.with_name(scratch.name + ".old")
    try:
        if target.exists():
            target.rename(old)
        scratch.rename(target)
    except OSError:
        if _stamp_of(target) != stamp:
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _stamp_of(directory: Path) -> Any:
    try:
        return json.loads((directory / _STAMP).read_bytes())
    except (OSError, ValueError):
        return None


def _documents(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Every JSON file of the checkpoint, by name."""
    end, pad = "<|im_end|>", "<|endoftext|>"
    return {
        "config.json": recipe.config,
        "generation_config.json": {"eos_token_id": recipe.specials.index(end)},
        "tokenizer.json": tokenizer_json(recipe.specials),
        "tokenizer_config.json": {
            "tokenizer_class": recipe.tokenizer_class,
            **({"processor_class": recipe.processor_class} if recipe.processor_class else {}),
            "eos_token": end,
            "pad_token": pad,
            "extra_special_tokens": list(recipe.specials),
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            **recipe.tokenizer_extra,
        },
        **recipe.files,
    }


def _fingerprint(parts: Mapping[str, Recipe]) -> str:
    """Changes whenever anything that would be written changes."""
    content: list[Any] = [_SEED]
    for part, recipe in parts.items():
        tensors = [(t.name, t.shape, t.std, t.fill, t.silent) for t in recipe.tensors]
        content += [part, _documents(recipe), recipe.chat_template, tensors]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_files(recipe: Recipe, directory: Path) -> None:
    for name, document in _documents(recipe).items():
        (directory / name).write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(recipe.chat_template, encoding="utf-8")
    with (directory / "model.safetensors").open("wb") as file:
        write_safetensors(file, recipe.tensors, f"{_SEED}/{recipe.kind}")
