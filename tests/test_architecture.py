"""The rules of docs/architecture.md and docs/decisions.md that a machine can check."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "triptych"
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
MODULES = sorted(SOURCE.rglob("*.py"))

MAY_IMPORT: dict[str, set[str]] = {
    "http": set(),
    "body": set(),
    "config": set(),
    "gateway": {"http", "body", "config", "transfer"},
    "engine": set(),
    "transfer": set(),
    "scheduling": {"transfer", "processors", "engine"},
    "stage": {"engine", "models", "scheduling"},
    "families": {"models", "processors", "stage", "transfer"},
    "processors": {"transfer"},
    "launch": {"config", "gateway", "engine", "models", "transfer"},
    "sim": {"http"},
    "models": set(),
    "demo": {"launch", "models"},
    "cli": {"config", "gateway", "launch", "sim", "models", "demo", "transfer"},
}
# What the launcher may know of them: settings to check, and facts that need no engine.
ONLY = {"gateway": {"settings"}, "engine": {"check", "light"}, "transfer": {"connectors", "errors"}}

# What runs inside vLLM's processes, and nowhere else.
IN_ENGINES = (
    "engine/",
    "scheduling/",
    "processors/",
    "stage/",
    "families/",
    "transfer/adapter/",
    "transfer/tensors.py",
)
ENGINE_ONLY = {"torch", "vllm", "transformers", "safetensors", "tokenizers", "torchvision", "nixl"}
EXTRAS = {"openai": "demo", "av": "speech"}
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "prometheus_client": "prometheus-client",
    "python_multipart": "python-multipart",
    "pydantic_core": "pydantic",
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "triptych":
                yield from (f"triptych.{alias.name}" for alias in node.names)


def in_engines(path: Path) -> bool:
    return path.relative_to(SOURCE).as_posix().startswith(IN_ENGINES)


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def pyproject() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def distribution_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower() for requirement in requirements}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_the_layers_below_it(package: str) -> None:
    for path in (SOURCE / package).rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "triptych" or len(parts) == 1 or parts[1] not in PACKAGES or parts[1] == package:
                continue
            assert parts[1] in MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {name}"
            if package == "launch" and parts[1] in ONLY:
                assert parts[2] in ONLY[parts[1]], f"{path.relative_to(ROOT)} imports {name}"


def test_only_what_runs_in_engines_imports_vllm_or_torch() -> None:
    for path in MODULES:
        if not in_engines(path):
            found = {name.partition(".")[0] for name in imports(path)} & ENGINE_ONLY
            assert not found, f"{path.relative_to(ROOT)} imports {found}"


def test_every_import_of_the_core_is_a_declared_dependency() -> None:
    declared = {extra: distribution_names(requirements) for extra, requirements in pyproject().items()}
    for path in MODULES:
        for name in imports(path):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top == "triptych" or (in_engines(path) and top in ENGINE_ONLY):
                continue
            assert DISTRIBUTIONS.get(top, top) in declared[EXTRAS.get(top, "")], f"{path.relative_to(ROOT)}: {name}"


def test_every_dependency_of_the_core_is_used_and_has_its_reason() -> None:
    used = {DISTRIBUTIONS.get(top, top) for path in MODULES for top in (n.partition(".")[0] for n in imports(path))}
    reasons = (ROOT / "docs" / "decisions.md").read_text("utf-8").lower()
    for name in distribution_names(pyproject()[""]):
        assert name in used, f"{name} is declared and not imported"
        assert re.search(rf"^\*\*[^*]*\b{name}\b", reasons, re.M), f"{name} has no entry in docs/decisions.md"


def test_the_architecture_page_lists_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert {match[1] for match in re.finditer(r"^\| `(\w+)` \|", page, re.M)} == set(PACKAGES) == set(MAY_IMPORT)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), f"{page} links to {target}"


def test_no_module_is_longer_than_500_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in MODULES if (n := len(p.read_text("utf-8").splitlines())) > 500}
    assert not long


def test_no_pattern_repeats_a_group_possessively() -> None:
    """Before 3.11.5 Python matches `(?:a|b)*+` wrongly (gh-106052): on Debian's 3.11.2 every request with an image was
    an error. `(?>(?:a|b)*)` says the same and is right everywhere."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
                assert not re.search(r"\)(?:[*+?]|\{\d*,?\d*\})\+", text) or "`(" in text, f"{path}:{node.lineno}"


def test_nothing_is_raised_in_an_except_star() -> None:
    """Before 3.11.4 Python makes a group of what is raised there, and nobody catches that."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.TryStar):
                assert not any(isinstance(each, ast.Raise) for each in ast.walk(node)), f"{path}:{node.lineno}"
