"""Settings files: YAML 1.2's plain scalars, the line of every value, and no surprises.

Differs from PyYAML's safe loader where that one bites in settings: `off`, `no` and `12:30` are strings (YAML 1.1
makes them false and 750), a key given twice is refused instead of the last one winning, tags and `<<` are nothing
special. Anchors and aliases work.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from triptych.config.problems import Loc, Problem, SettingsError, dotted

_STR = "tag:yaml.org,2002:str"
_INT = re.compile(r"[-+]?[0-9]{1,19}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,40}|[0-9]{1,40}(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,4})?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", "+.inf"), float("inf")),
    "-.inf": float("-inf"),
    ".nan": float("nan"),
}
# An alias may stand for a large subtree many times over; no settings file comes near this.
_MAX_NODES = 100_000
_MAX_DEPTH = 50


class Document(NamedTuple):
    """A file's content, and the line (from 1) of each of its values by location."""

    value: dict[str, Any]
    lines: dict[Loc, int]


class _Loader(yaml.SafeLoader):
    # No implicit types: `_scalar` decides them, so that a tag other than str/seq/map is one that the file spells out.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own shape


def read(path: Path) -> Document:
    """Reads and parses a settings file.

    Raises SettingsError with one problem for each fault; no message quotes the file's text.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SettingsError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        raise SettingsError([Problem(str(path), "", f"is not UTF-8 text (byte {error.start})")]) from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Document:
    """Parses the text of a settings file called `name`.

    Raises SettingsError with one problem for each fault; no message quotes the text.
    """
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise SettingsError([Problem(where, "", f"is not YAML: {_without_quotes(error)}")]) from None
    except yaml.YAMLError as error:
        reason = getattr(error, "reason", "it cannot be read")
        raise SettingsError([Problem(name, "", f"is not YAML: {reason}")]) from None
    except RecursionError:
        raise SettingsError([Problem(name, "", "is nested too deeply")]) from None
    if root is None or (isinstance(root, yaml.ScalarNode) and root.style is None and _scalar(root) is None):
        return Document({}, {})
    if not isinstance(root, yaml.MappingNode):
        what = "must be settings, one `name: value` a line"
        raise SettingsError([Problem(f"{name}:{root.start_mark.line + 1}", "", what)])
    builder = _Builder(name)
    value = builder.build(root, (), root.start_mark.line + 1)
    if builder.problems:
        raise SettingsError(builder.problems)
    return Document(value, builder.lines)


def _without_quotes(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's reason without the words of the file that it may quote, which could be a key."""
    problem = re.sub(r"'[^'<>]{2,}'|\"[^\"]{2,}\"", "that", error.problem or "it cannot be read")
    context = f" {error.context}" if error.context and "'" not in error.context and '"' not in error.context else ""
    return problem + context


class _Builder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Loc, int] = {}
        self.problems: list[Problem] = []
        self._nodes = 0

    def build(self, node: yaml.Node, at: Loc, line: int) -> Any:
        self._nodes += 1
        if self._nodes > _MAX_NODES or len(at) > _MAX_DEPTH:
            raise SettingsError([Problem(f"{self.name}:{line}", "", "is too large once its aliases are put in")])
        self.lines[at] = line
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.build(item, (*at, i), item.start_mark.line + 1) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag == _STR:
            return _scalar(node)
        self._problem(line, at, "has a tag (`!…`), which settings do not know: write the plain value")
        return None

    def _mapping(self, node: yaml.MappingNode, at: Loc) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(line, at, "has a key that is a list or a mapping: keys are names")
                continue
            key = key_node.value
            loc = (*at, key)
            if key in out:
                self._problem(line, loc, f"stands here a second time, first in line {self.lines[loc]}: keep one")
                continue
            out[key] = self.build(value_node, loc, line)
        return out

    def _problem(self, line: int, at: Loc, what: str) -> None:
        self.problems.append(Problem(f"{self.name}:{line}", dotted(at), what))


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    if node.style is not None:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
