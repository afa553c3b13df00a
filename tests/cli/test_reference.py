"""What scripts/settings_reference.py writes is what the settings model says today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("settings_reference", ROOT / "scripts" / "settings_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_settings_page_is_up_to_date(reference: ModuleType) -> None:
    assert reference.DOC.read_text("utf-8") == reference.document(), "run `make generate`"


def test_the_table_of_flags_is_up_to_date(reference: ModuleType) -> None:
    assert reference.TABLE.read_text("utf-8") == reference.table(), "run `make generate`"


def test_every_setting_says_what_it_is(reference: ModuleType) -> None:
    assert all(row.text and row.default and row.metavar for row in reference.rows())


def test_check_tells_what_is_stale(
    reference: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reference.main(["--check"]) == 0
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "DOC", tmp_path / "settings.md")
    assert reference.main(["--check"]) == 1
    assert "settings.md is out of date" in capsys.readouterr().err
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
