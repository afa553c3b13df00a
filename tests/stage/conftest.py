"""These tests import vLLM into pytest's own process."""

from __future__ import annotations

from tests.vllm_process import prepare

collect_ignore_glob = prepare()
