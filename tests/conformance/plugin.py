"""A pytest plugin for runs that import vLLM in pytest's own process: what an engine process gets at its start."""

from triptych.engine.compat import apply, detect

apply(detect())
