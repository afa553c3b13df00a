"""What each tiny model consists of: configuration, chat template, tensors. Data only; `tiny.py` writes it.

All three have a two-layer text model of width 64. vLLM on a CPU wants attention heads of at least 32, hence two heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.models.tokenizer import first_word, vocabulary_size
from triptych.models.weights import Tensor, linear, ones, zeros

WIDTH = 64
_HEADS = 2
_KV_WIDTH = 32
_FFN = 128
_LAYERS = 2
#: Longest context, in tokens.
CONTEXT = 2048

# How strongly a layer's attention speaks into the residual stream. Image rows are averaged over the prompt, so without
# this a text-heavy prompt would drown them.
_ATTENTION_GAIN = 4.0
_SHARPNESS = 2.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """One tiny model.

    `files` are further JSON files of the checkpoint by name; `media` says what it takes; `metadata` whether its encoder
    publishes placeholder metadata (the gateway's `media_to_consumer: metadata` needs that).
    """

    kind: str
    summary: str
    specials: tuple[str, ...]
    chat_template: str
    config: dict[str, Any]
    tensors: tuple[Tensor, ...]
    tokenizer_class: str
    processor_class: str
    tokenizer_extra: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    metadata: bool = True


def text_config(specials: Sequence[str], bos: str, eos: str, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "intermediate_size": _FFN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "vocab_size": vocabulary_size(specials),
        "bos_token_id": specials.index(bos),
        "eos_token_id": specials.index(eos),
        "tie_word_embeddings": False,
        **more,
    }


def text_tensors(body: str, head: str, specials: Sequence[str], *, biases: bool) -> Iterator[Tensor]:
    """The text model under the prefix `body`, its output layer under `head`.

    Only words can win a greedy choice: rows of special tokens and bytes are zero in the output layer, so that an answer
    is readable and always as long as asked for.
    """
    vocabulary = vocabulary_size(specials)
    yield Tensor(f"{body}embed_tokens.weight", (vocabulary, WIDTH), std=1.0)
    for index in range(_LAYERS):
        at = f"{body}layers.{index}."
        yield linear(f"{at}self_attn.q_proj.weight", WIDTH, WIDTH, gain=_SHARPNESS)
        yield linear(f"{at}self_attn.k_proj.weight", _KV_WIDTH, WIDTH, gain=_SHARPNESS)
        yield linear(f"{at}self_attn.v_proj.weight", _KV_WIDTH, WIDTH)
        yield linear(f"{at}self_attn.o_proj.weight", WIDTH, WIDTH, gain=_ATTENTION_GAIN)
        if biases:
            yield zeros(f"{at}self_attn.q_proj.bias", WIDTH)
            yield zeros(f"{at}self_attn.k_proj.bias", _KV_WIDTH)
            yield zeros(f"{at}self_attn.v_proj.bias", _KV_WIDTH)
        yield linear(f"{at}mlp.gate_proj.weight", _FFN, WIDTH, gain=1.5)
        yield linear(f"{at}mlp.up_proj.weight", _FFN, WIDTH, gain=1.5)
        yield linear(f"{at}mlp.down_proj.weight", WIDTH, _FFN, gain=1.5)
        yield ones(f"{at}input_layernorm.weight", WIDTH)
        yield ones(f"{at}post_attention_layernorm.weight", WIDTH)
    yield ones(f"{body}norm.weight", WIDTH)
    yield Tensor(head, (vocabulary, WIDTH), std=0.5, silent=first_word(specials))


def _norm(name: str) -> Iterator[Tensor]:
    yield ones(f"{name}.weight", WIDTH)
    yield zeros(f"{name}.bias", WIDTH)


def _dense(name: str, rows: int, columns: int, *, gain: float = 1.0) -> Iterator[Tensor]:
    yield linear(f"{name}.weight", rows, columns, gain=gain)
    yield zeros(f"{name}.bias", rows)


_CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for c in message['content'] %}{% if IS_MEDIA %}PLACEHOLDER{% elif 'text' in c %}{{ c['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chat_template(is_media: str, placeholder: str) -> str:
    """ChatML over OpenAI content parts; `is_media` is a Jinja condition on the part `c`."""
    return _CHAT_TEMPLATE.replace("IS_MEDIA", is_media).replace("PLACEHOLDER", placeholder)


def _image() -> Recipe:
    specials = (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    patch, frames, merge, depth = 14, 2, 2, 2

    def tensors() -> Iterator[Tensor]:
        pixels = 3 * frames * patch * patch
        yield Tensor("visual.patch_embed.proj.weight", (WIDTH, 3, frames, patch, patch), std=4.0 / pixels**0.5)
        for index in range(depth):
            at = f"visual.blocks.{index}."
            yield from _norm(f"{at}norm1")
            yield from _norm(f"{at}norm2")
            yield from _dense(f"{at}attn.qkv", 3 * WIDTH, WIDTH)
            yield from _dense(f"{at}attn.proj", WIDTH, WIDTH)
            yield from _dense(f"{at}mlp.fc1", _FFN, WIDTH)
            yield from _dense(f"{at}mlp.fc2", WIDTH, _FFN)
        wide = WIDTH * merge * merge
        yield from _norm("visual.merger.ln_q")
        yield from _dense("visual.merger.mlp.0", wide, wide)
        yield from _dense("visual.merger.mlp.2", WIDTH, wide, gain=3.0)
        yield from text_tensors("model.", "lm_head.weight", specials, biases=True)

    return Recipe(
        kind="image",
        summary="Qwen2-VL shape: images, publishes placeholder metadata (image_grid_thw)",
        specials=specials,
        chat_template=chat_template(
            "c['type'] == 'image' or 'image' in c or 'image_url' in c",
            "<|vision_start|><|image_pad|><|vision_end|>",
        ),
        config={
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "dtype": "float32",
            "image_token_id": specials.index("<|image_pad|>"),
            "video_token_id": specials.index("<|video_pad|>"),
            "vision_start_token_id": specials.index("<|vision_start|>"),
            "vision_end_token_id": specials.index("<|vision_end|>"),
            "tie_word_embeddings": False,
            "text_config": text_config(
                specials,
                "<|im_start|>",
                "<|im_end|>",
                model_type="qwen2_vl_text",
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            ),
            "vision_config": {
                "model_type": "qwen2_vl_vision",
                "depth": depth,
                "embed_dim": WIDTH,
                "hidden_size": WIDTH,
                "hidden_act": "quick_gelu",
                "mlp_ratio": _FFN // WIDTH,
                "num_heads": _HEADS,
                "in_channels": 3,
                "patch_size": patch,
                "spatial_merge_size": merge,
                "temporal_patch_size": frames,
            },
        },
        tensors=tuple(tensors()),
        tokenizer_class="Qwen2TokenizerFast",
        processor_class="Qwen2VLProcessor",
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessor",
                "processor_class": "Qwen2VLProcessor",
                "do_convert_rgb": True,
                "do_normalize": True,
                "do_rescale": True,
                "do_resize": True,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "rescale_factor": 1 / 255,
                "resample": 3,
                "patch_size": patch,
                "merge_size": merge,
                "temporal_patch_size": frames,
                # 4 to 64 rows of encoder output per image.
                "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28},
            }
        },
    )


def _audio() -> Recipe:
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
    mels, positions = 128, 1500

    def tensors() -> Iterator[Tensor]:
        tower = "audio_tower."
        yield Tensor(f"{tower}conv1.weight", (WIDTH, mels, 3), std=2.0 / (3 * mels) ** 0.5)
        yield zeros(f"{tower}conv1.bias", WIDTH)
        yield Tensor(f"{tower}conv2.weight", (WIDTH, WIDTH, 3), std=2.0 / (3 * WIDTH) ** 0.5)
        yield zeros(f"{tower}conv2.bias", WIDTH)
        yield Tensor(f"{tower}embed_positions.weight", (positions, WIDTH), std=0.1)
        for index in range(2):
            at = f"{tower}layers.{index}."
            yield linear(f"{at}self_attn.k_proj.weight", WIDTH, WIDTH)
            for projection in ("q_proj", "v_proj", "out_proj"):
                yield from _dense(f"{at}self_attn.{projection}", WIDTH, WIDTH)
            yield from _norm(f"{at}self_attn_layer_norm")
            yield from _dense(f"{at}fc1", _FFN, WIDTH)
            yield from _dense(f"{at}fc2", WIDTH, _FFN)
            yield from _norm(f"{at}final_layer_norm")
        yield from _norm(f"{tower}layer_norm")
        yield from _dense("multi_modal_projector.linear", WIDTH, WIDTH, gain=2.0)
        yield from text_tensors("language_model.model.", "language_model.lm_head.weight", specials, biases=True)

    return Recipe(
        kind="audio",
        summary="Qwen2-Audio shape: audio clips, publishes placeholder metadata (audio_num_tokens)",
        specials=specials,
        chat_template=chat_template("'audio' in c['type']", "<|audio_bos|><|AUDIO|><|audio_eos|>\n"),
        config={
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "model_type": "qwen2_audio",
            "dtype": "float32",
            "audio_token_index": specials.index("<|AUDIO|>"),
            "text_config": text_config(
                specials,
                "<|im_start|>",
                "<|im_end|>",
                model_type="qwen2",
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "activation_function": "gelu",
                "d_model": WIDTH,
                "encoder_attention_heads": _HEADS,
                "encoder_ffn_dim": _FFN,
                "encoder_layers": 2,
                "max_source_positions": positions,
                "num_mel_bins": mels,
                "scale_embedding": False,
            },
        },
        tensors=tuple(tensors()),
        tokenizer_class="Qwen2TokenizerFast",
        processor_class="Qwen2AudioProcessor",
        files={
            "preprocessor_config.json": {
                "feature_extractor_type": "WhisperFeatureExtractor",
                "processor_class": "Qwen2AudioProcessor",
                "feature_size": mels,
                "sampling_rate": 16000,
                "hop_length": 160,
                "chunk_length": 30,
                "n_fft": 400,
                "n_samples": 480000,
                "nb_max_frames": 3000,
                "dither": 0.0,
                "padding_side": "right",
                "padding_value": 0.0,
                "return_attention_mask": False,
            }
        },
    )


def _image_raw() -> Recipe:
    specials = (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<fake_token_around_image>",
        "<image>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    )
    patch, side, scale = 14, 56, 2

    def tensors() -> Iterator[Tensor]:
        tower = "model.vision_model."
        pixels = 3 * patch * patch
        yield Tensor(f"{tower}embeddings.patch_embedding.weight", (WIDTH, 3, patch, patch), std=4.0 / pixels**0.5)
        yield zeros(f"{tower}embeddings.patch_embedding.bias", WIDTH)
        yield Tensor(f"{tower}embeddings.position_embedding.weight", ((side // patch) ** 2, WIDTH), std=0.1)
        for index in range(2):
            at = f"{tower}encoder.layers.{index}."
            for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from _dense(f"{at}self_attn.{projection}", WIDTH, WIDTH)
            yield from _norm(f"{at}layer_norm1")
            yield from _norm(f"{at}layer_norm2")
            yield from _dense(f"{at}mlp.fc1", _FFN, WIDTH)
            yield from _dense(f"{at}mlp.fc2", WIDTH, _FFN)
        yield from _norm(f"{tower}post_layernorm")
        yield linear("model.connector.modality_projection.proj.weight", WIDTH, WIDTH * scale * scale, gain=1.5)
        yield from text_tensors("model.text_model.", "lm_head.weight", specials, biases=False)

    return Recipe(
        kind="image-raw",
        summary="Idefics3 shape: images, publishes no metadata (the consumer always gets the raw media)",
        specials=specials,
        chat_template=chat_template("c['type'] == 'image'", "<image>"),
        config={
            "architectures": ["Idefics3ForConditionalGeneration"],
            "model_type": "idefics3",
            "dtype": "float32",
            "image_token_id": specials.index("<image>"),
            "pad_token_id": specials.index("<|endoftext|>"),
            "scale_factor": scale,
            "tie_word_embeddings": False,
            "text_config": text_config(
                specials,
                "<|im_start|>",
                "<|im_end|>",
                model_type="llama",
                head_dim=WIDTH // _HEADS,
                pad_token_id=specials.index("<|endoftext|>"),
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            "vision_config": {
                "model_type": "idefics3_vision",
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": WIDTH,
                "image_size": side,
                "intermediate_size": _FFN,
                "layer_norm_eps": 1e-6,
                "num_attention_heads": _HEADS,
                "num_channels": 3,
                "num_hidden_layers": 2,
                "patch_size": patch,
            },
        },
        tensors=tuple(tensors()),
        tokenizer_class="PreTrainedTokenizerFast",
        processor_class="Idefics3Processor",
        tokenizer_extra={
            "bos_token": "<|im_start|>",
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<|im_end|>",
        },
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Idefics3ImageProcessor",
                "processor_class": "Idefics3Processor",
                "do_convert_rgb": True,
                "do_image_splitting": True,
                "do_normalize": True,
                "do_pad": True,
                "do_rescale": True,
                "do_resize": True,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "rescale_factor": 1 / 255,
                "resample": 1,
                "size": {"longest_edge": 2 * side},
                "max_image_size": {"longest_edge": side},
            },
            "processor_config.json": {
                "image_seq_len": (side // patch // scale) ** 2,
                "processor_class": "Idefics3Processor",
            },
        },
        metadata=False,
    )


def recipes() -> dict[str, Recipe]:
    """Every kind of tiny model, by name; the first is the demo's."""
    return {recipe.kind: recipe for recipe in (_image(), _audio(), _image_raw())}
