"""JSON texts in every spelling, and what `json.loads` makes of them, for property tests."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from triptych.body.edit import Buffer

#: For every property test: a busy machine is no failure.
steady = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Keys that mean something to the gateway, beside any others.
KEYS = [
    "ec_transfer_params", "kv_transfer_params", "vllm_xargs", "model", "messages", "stream", "max_tokens", "n", "x",
    "content", "", "é", "\ud800", 'q"', "back\\slash", "a/b", "<stripped>", "\x7f",
]  # fmt: skip


class Pairs(list[tuple[str, Any]]):
    """The members of an object as `json.loads` meets them: in order, with duplicates."""


class Number(str):
    """A number as spelled."""


def loads(text: bytes) -> Any:
    """`json.loads` that keeps the order, the duplicates and the spelling of numbers."""
    return json.loads(text, object_pairs_hook=Pairs, parse_float=Number, parse_int=Number)


NUMBERS = st.one_of(
    st.integers().map(str),
    st.sampled_from(["0", "-0", "1e5", "1E+05", "-1.50", "0.1e-7", "123456789012345678901234567890", "1.0", "2e-400"]),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)
TEXT = st.one_of(
    st.text(st.characters(codec=None, exclude_categories=()), max_size=12),
    st.sampled_from(
        ["data:image/png;base64,AAAA", "\\", '"', '\\"', "\\\\", "{", "}", "[,]", '{"a":1}', "\ud83d", "x" * 700]
    ),
    st.lists(st.sampled_from(["\\", '"', "a", "/", "\n"]), max_size=30).map("".join),
)
SCALARS = st.one_of(NUMBERS.map(Number), TEXT, st.sampled_from([None, True, False]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(st.tuples(st.one_of(st.sampled_from(KEYS), TEXT), inner), max_size=5).map(Pairs),
    ),
    max_leaves=25,
)
OBJECTS = st.lists(st.tuples(st.one_of(st.sampled_from(KEYS), TEXT), VALUES), max_size=9).map(Pairs)
SPELLING = st.integers(0, 2**32)


def space(rng: Random) -> str:
    return rng.choice(["", "", "", "", " ", "\n", "\t ", "\r\n  "])


def spell(text: str, rng: Random) -> str:
    """A string literal: escapes where they must be, and here and there where they need not be."""
    out = []
    rare = rng.random() < 0.6
    for char in text:
        code = ord(char)
        if char in '"\\':
            out.append(rng.choice(["\\" + char, f"\\u{code:04x}"]))
        elif code < 0x20:
            short = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
            out.append(short.get(code) if code in short and rng.random() < 0.5 else f"\\u{code:04X}")
        elif char == "/" and rng.random() < 0.5:
            out.append("\\/")
        elif code < 0x10000 and not rare and rng.random() < 0.3:
            out.append(rng.choice([f"\\u{code:04x}", f"\\u{code:04X}"]))
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


def render(value: Any, rng: Random) -> str:
    """A text of the value, with white space and escapes at random."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, str):
        return spell(value, rng)
    if isinstance(value, Pairs):
        members = [
            f"{space(rng)}{spell(key, rng)}{space(rng)}:{space(rng)}{render(inner, rng)}{space(rng)}"
            for key, inner in value
        ]
        return "{" + (",".join(members) or space(rng)) + "}"
    if isinstance(value, list):
        return "[" + (",".join(f"{space(rng)}{render(inner, rng)}{space(rng)}" for inner in value) or space(rng)) + "]"
    return json.dumps(value)


def text_of(value: Any, seed: int) -> bytes:
    """The text as bytes: UTF-8, lone surrogates encoded as `json.loads` reads them."""
    rng = Random(seed)
    return f"{space(rng)}{render(value, rng)}{space(rng)}".encode("utf-8", "surrogatepass")


def joined(segments: list[Buffer]) -> bytes:
    return b"".join(segments)
