"""What the three tiny checkpoints consist of."""

from __future__ import annotations

from triptych.models.recipes import WIDTH, Recipe, chat_template, text_config, text_tensors
from triptych.models.weights import ones

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def stages() -> dict[str, Recipe]:
    """The recipes by stage. The thinker is a stock Qwen2, the talker one with hooks; the codec has no weights that
    matter, and a vocabulary only because vLLM wants one."""
    return {
        "thinker": _text("thinker", "Qwen2ForCausalLM"),
        "talker": _text("talker", "TinyOmniTalker"),
        "codec": _codec(),
    }


def _text(kind: str, architecture: str) -> Recipe:
    return Recipe(
        kind=f"omni/{kind}",
        summary=f"the {kind} of a tiny speaking model",
        specials=SPECIALS,
        chat_template=chat_template("false", ""),
        config=_config(architecture),
        tensors=tuple(text_tensors("model.", "lm_head.weight", SPECIALS, biases=True)),
        tokenizer_class="Qwen2TokenizerFast",
        processor_class="",
        # The likeliest token unless a request says otherwise: one that is drawn may be the end.
        files={"generation_config.json": {"eos_token_id": SPECIALS.index("<|im_end|>"), "temperature": 0.0}},
    )


def _codec() -> Recipe:
    return Recipe(
        kind="omni/codec",
        summary="the codec of a tiny speaking model",
        specials=SPECIALS,
        chat_template=chat_template("false", ""),
        config=_config("TinyOmniCodec") | {"num_hidden_layers": 1},
        tensors=(ones("scale", WIDTH),),
        tokenizer_class="Qwen2TokenizerFast",
        processor_class="",
    )


def _config(architecture: str) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "model_type": "qwen2",
        "dtype": "float32",
        **text_config(SPECIALS, "<|im_start|>", "<|im_end|>"),
    }
