"""Runs at the start of each Python process of an engine; see triptych.engine.compat."""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]

# This folder stands first on the path and so shadows a sitecustomize that the machine may have: run that one too.
_other = importlib.machinery.PathFinder.find_spec("sitecustomize", _elsewhere)
if _other is not None and _other.loader is not None:
    _other.loader.exec_module(importlib.util.module_from_spec(_other))

from triptych.engine.compat import apply_from_environment  # noqa: E402

apply_from_environment()
