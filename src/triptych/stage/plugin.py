"""vLLM's plugin (entry point group `vllm.general_plugins`): the models of all families, in every vLLM process."""

from __future__ import annotations

from triptych.models.families import families


def register() -> None:
    """Tell vLLM of each model's name and place; none is imported before it is used."""
    from vllm import ModelRegistry  # noqa: PLC0415 - this module is imported by name only where vLLM runs

    known = ModelRegistry.get_supported_archs()
    for family in families().values():
        for architecture, place in family.architectures.items():
            if architecture not in known:
                ModelRegistry.register_model(architecture, place)
