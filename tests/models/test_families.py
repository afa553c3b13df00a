"""Families of stage models are found, and a wrong one is named."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from unittest.mock import patch

import pytest

from triptych.models import families as module
from triptych.models.families import Family, families


def offered(place: str) -> list[EntryPoint]:
    return [EntryPoint(name="mine", value=place, group=module.GROUP)]


def test_every_folder_of_triptych_families_is_a_family() -> None:
    assert families()["omni"].architectures["TinyOmniTalker"].endswith(":TinyOmniTalker")


def test_a_package_of_somebody_else_may_add_a_family() -> None:
    with patch.object(module, "entry_points", lambda **_: offered("tests.models.test_families:MINE")):
        assert families()["mine"] is MINE


def test_two_families_of_one_name_are_refused() -> None:
    with (
        patch.object(module, "entry_points", lambda **_: offered("tests.models.test_families:TWIN")),
        pytest.raises(ValueError, match="two families of the name 'omni'"),
    ):
        families()


def test_what_is_no_family_is_named() -> None:
    with (
        patch.object(module, "entry_points", lambda **_: offered("tests.models.test_families:offered")),
        pytest.raises(ValueError, match=r"is no triptych\.models\.families\.Family"),
    ):
        families()


def test_looking_for_families_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from triptych.models.families import families; families(); "
        "print({'torch', 'vllm'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


MINE = Family("mine", "of a test")
TWIN = Family("omni", "of a test")
