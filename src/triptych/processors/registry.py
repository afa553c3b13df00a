"""From a stage input processor's name to the function.

A name is a place in a module, "package.module:function" or "package.module.function", or the name of an entry point in
the group `triptych.processors`, under which a package may offer its own:

    [project.entry-points."triptych.processors"]
    my_talker = "my_package.talker:to_codec"
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Final

GROUP: Final = "triptych.processors"

Processor = Callable[..., Any]
"""Called with `transfer_manager`, `multimodal_output`, `request` and `is_finished` (all by keyword), and with
`new_token_ids` where it takes it. Returns a `StagePayload`, or None where there is nothing to send."""


def find(name: str) -> Processor:
    """The function of that name.

    Raises:
        ValueError: there is none, or it cannot be imported or called; the text says what was looked for and where.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name in points:
        return _callable(name, _load(name, points[name].value))
    if ":" in name or "." in name:
        return _callable(name, _load(name, name))
    offered = f"installed packages offer {', '.join(sorted(points))}" if points else "no installed package offers any"
    raise ValueError(
        f"there is no stage input processor {name!r}: give it as 'package.module:function', or the name of an entry "
        f"point in the group {GROUP!r} ({offered})"
    )


def _load(name: str, place: str) -> Any:
    colon = ":" in place
    module, _, attribute = place.partition(":") if colon else place.rpartition(".")
    if any(not part.isidentifier() for part in f"{module}.{attribute}".split(".")):
        raise ValueError(f"the stage input processor {name!r} is not of the form 'package.module:function'")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"the stage input processor {name!r}: {module} cannot be imported: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            there = sorted(key for key, value in vars(found).items() if callable(value) and not key.startswith("_"))
            raise ValueError(
                f"the stage input processor {name!r}: {module} has no {attribute!r}; "
                f"what can be called there: {', '.join(there) or 'nothing'}"
            )
        found = getattr(found, part)
    return found


def _callable(name: str, found: Any) -> Processor:
    if not callable(found):
        raise ValueError(f"the stage input processor {name!r} is a {type(found).__name__}, which cannot be called")
    function: Processor = found
    return function
