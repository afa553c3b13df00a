"""What is wrong with settings, said so that a person can mend it: where it was set, which field, what, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from triptych.config.values import shown_url

Loc = tuple[str | int, ...]


class Origin(NamedTuple):
    """Who set a value: `source` is a file's line, a variable or a flag; `field` its name as written there."""

    source: str
    field: str


class Problem(NamedTuple):
    """One fault; `field` is dotted, or empty where the whole source is at fault."""

    source: str
    field: str
    what: str

    def __str__(self) -> str:
        return ": ".join(part for part in self if part)


class SettingsError(Exception):
    """Settings that cannot be used, with every fault found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


def dotted(loc: Iterable[str | int]) -> str:
    """`("encode", 1, "url")` as `encode[1].url`."""
    out = ""
    for part in loc:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The settings model inside an annotation (`X`, `X | None`, `tuple[X, ...]`), if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for arg in get_args(annotation) if (model := inner_model(arg))), None)


def is_list(annotation: Any) -> bool:
    """Whether a setting of this annotation takes several values."""
    return get_origin(_bare(annotation)) in (tuple, frozenset, list)


def is_optional(annotation: Any) -> bool:
    """Whether a setting of this annotation can be none."""
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


def is_secret(annotation: Any) -> bool:
    """Whether a setting of this annotation must never be shown."""
    return annotation is SecretStr or any(is_secret(arg) for arg in get_args(annotation))


def _bare(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if is_optional(annotation):
        return _bare(next(arg for arg in get_args(annotation) if arg is not NoneType))
    return annotation


def field_at(model: type[BaseModel], loc: Loc) -> FieldInfo | None:
    """The declaration of the setting at a location, or None where the model knows none."""
    field = None
    inner: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, str):
            if inner is None or part not in inner.model_fields:
                return None
            field = inner.model_fields[part]
            inner = inner_model(field.annotation)
    return field


def names(model: type[BaseModel], at: str = "") -> Iterator[str]:
    """Dotted names of all settings below a model, lists left out."""
    for name, field in model.model_fields.items():
        yield at + name
        if (inner := inner_model(field.annotation)) and not is_list(field.annotation):
            yield from names(inner, f"{at}{name}.")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean ‘x’?` for the nearest choice, or nothing."""
    plain = {choice.lower().replace("-", "_"): choice for choice in choices}
    word = word.lower().replace("-", "_")
    if word in plain:
        return f"; did you mean `{plain[word]}`?"
    leaves = [choice for name, choice in plain.items() if name.rpartition(".")[2] == word.rpartition(".")[2]]
    if leaves:
        return f"; did you mean {' or '.join(f'`{leaf}`' for leaf in leaves[:3])}?"
    near = difflib.get_close_matches(word, plain, n=1, cutoff=0.7)
    return f"; did you mean `{plain[near[0]]}`?" if near else ""


def from_pydantic(
    error: ValidationError,
    model: type[BaseModel],
    origins: Mapping[Loc, Origin],
    *,
    nowhere: str,
    known: Iterable[str] = (),
) -> list[Problem]:
    """Each fault of a validation with who set the value.

    `origins` names who set what, by location in what was validated; a fault takes the nearest one above it, and
    `nowhere` where nobody set anything. `known` are the dotted names to suggest for an unknown one.
    """
    known = tuple(known) or tuple(names(model))
    problems = []
    for detail in error.errors(include_url=False):
        loc = detail["loc"]
        source, field = origin_of(loc, origins, nowhere)
        problems.append(Problem(source, field, _what(detail, model, loc, known)))
    return problems


def origin_of(loc: Loc, origins: Mapping[Loc, Origin], nowhere: str) -> Origin:
    """Who set the value at a location, or the nearest above it; the field is the whole location."""
    for length in range(len(loc), -1, -1):
        if found := origins.get(loc[:length]):
            rest = dotted(loc[length:])
            joint = "." if rest and not rest.startswith("[") and found.field else ""
            return Origin(found.source, f"{found.field}{joint}{rest}")
    return Origin(nowhere, dotted(loc))


_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
_KINDS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "string": "a text",
    "path": "a path",
    "tuple": "a list",
    "frozen": "a list",
    "model": "a group of settings",
    "dict": "a group of settings",
    "finite": "a finite number",
}


def _what(detail: ErrorDetails, model: type[BaseModel], loc: Loc, known: Iterable[str]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    field = field_at(model, loc)
    if kind == "extra_forbidden":
        return f"no such setting{_suggestion(model, loc, known)}"
    if kind == "missing":
        return f"is missing: give it{f' ({field.description})' if field and field.description else ''}"
    if kind in ("setting", "value_error"):
        return detail["msg"].removeprefix("Value error, ")
    got = _got(detail["input"], field)
    if kind == "literal_error":
        choices = [c.strip("'") for c in context["expected"].replace(" or ", ", ").split(", ")]
        hint = did_you_mean(detail["input"], choices) if got and isinstance(detail["input"], str) else ""
        return f"must be one of {', '.join(choices)}{got}{hint}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {context[key]:g}{got}{_default(field)}"
    if kind == "string_pattern_mismatch":
        return f"is not of the form {context['pattern']}{got}{_default(field)}"
    what = _KINDS.get(kind.partition("_")[0])
    if what is None:
        return detail["msg"].replace("Input should be", "must be") + got
    quote = ": put it in quotes" if what == "a text" and isinstance(detail["input"], bool | int | float) else ""
    return f"must be {what}{got}{quote}{_default(field)}"


def _suggestion(model: type[BaseModel], loc: Loc, known: Iterable[str]) -> str:
    word = str(loc[-1])
    if len(loc) > 1:
        above = field_at(model, loc[:-1])
        inner = inner_model(above.annotation) if above else None
        if inner is not None:
            near = did_you_mean(word, inner.model_fields)
            return near or did_you_mean(word, known) or f"; here are: {', '.join(inner.model_fields)}"
    return did_you_mean(word, known)


def _got(value: Any, field: FieldInfo | None) -> str:
    if field is None or is_secret(field.annotation) or not isinstance(value, str | int | float | bool):
        return ""
    shown = repr(shown_url(value) if isinstance(value, str) else value)
    return f" (got {shown})" if len(shown) <= 80 else ""


def _default(field: FieldInfo | None) -> str:
    if field is None or not isinstance(field.default, str | int | float | bool):
        return ""
    return f"; the default is {str(field.default).lower() if isinstance(field.default, bool) else field.default}"
