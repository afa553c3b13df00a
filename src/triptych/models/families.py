"""Families of stage models: what a pipeline of one family consists of, each in a folder of its own.

A family is a package under `triptych.families`, or one that another distribution names in the entry point group
`triptych.families`; it has a `FAMILY`. Adding one needs no change outside its folder.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Final

from triptych.models.recipes import Recipe

GROUP: Final = "triptych.families"


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    `architectures`: for vLLM, the place of each model as "module:Class", by the name that a checkpoint's configuration
    gives it. `tiny`: makes the recipes of a tiny random-weight pipeline, one for each stage's id; None where there is
    none. Importing a family imports neither torch nor vLLM.
    """

    name: str
    summary: str
    architectures: Mapping[str, str] = field(default_factory=dict)
    tiny: Callable[[], Mapping[str, Recipe]] | None = None


def families() -> dict[str, Family]:
    """Every family by name.

    Raises:
        ValueError: what an entry point names is no family, or two have one name.
    """
    package = importlib.import_module(GROUP)
    found = [
        importlib.import_module(f"{GROUP}.{module.name}").FAMILY for module in pkgutil.iter_modules(package.__path__)
    ]
    found += [point.load() for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)]
    named: dict[str, Family] = {}
    for family in found:
        if not isinstance(family, Family):
            raise ValueError(f"{family!r} in the entry point group {GROUP!r} is no triptych.models.families.Family")
        if family.name in named:
            raise ValueError(f"there are two families of the name {family.name!r}")
        named[family.name] = family
    return named
