"""Media parts of a request: classified by key in vLLM's order, checked as strictly as vLLM does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from triptych.sim.content import digest
from triptych.sim.errors import EngineError, invalid

Modality = Literal["image", "audio", "video"]

# The order in which vLLM looks for a media key, with what the key holds. `input_image` is not in it: a part
# of that type keeps its url under `image_url`.
KEYS: Final[tuple[tuple[str, str], ...]] = (
    ("image_url", "image"),
    ("image_embeds", "image_embeds"),
    ("audio_embeds", "audio_embeds"),
    ("video_embeds", "video_embeds"),
    ("prompt_embeds", "prompt_embeds"),
    ("audio_url", "audio"),
    ("input_audio", "audio"),
    ("video_url", "video"),
)
TYPES: Final = dict(KEYS) | {"input_image": "image"}
TEXT_TYPES: Final = ("text", "input_text", "output_text", "refusal", "thinking")
METADATA_FIELDS: Final[dict[str, frozenset[str]]] = {
    "image": frozenset({"image_grid_thw"}),
    "audio": frozenset({"audio_num_tokens"}),
    "video": frozenset({"video_grid_thw"}),
}
SIDES: Final = (4, 8, 12, 16)


@dataclass(slots=True)
class Item:
    """One media item of a request, at its place.

    `identifier` is vLLM's mm_hash; `content` the digest of the media, or None where only metadata came.
    `rows` is the number of placeholder tokens, at `offset` in the prompt.
    """

    modality: Modality
    identifier: str
    content: str | None
    rows: int
    size: int = 0
    offset: int = 0
    passthrough: bool = False
    """the part carries embeddings themselves"""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Encoded:
    """The output of an encoder for one item, as it travels between engines."""

    content: str
    modality: Modality
    rows: int
    metadata: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "content": self.content,
            "modality": self.modality,
            "rows": self.rows,
            "metadata": self.metadata,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Encoded:
        """Raises KeyError where a field is missing."""
        return cls(value["content"], value["modality"], value["rows"], value["metadata"])


def encode(content: str, modality: Modality) -> Encoded:
    """Run the tower: rows and placeholder metadata follow from the content."""
    seed = bytes.fromhex(content[:8])
    if modality == "audio":
        rows = 10 + seed[0] % 40
        return Encoded(content, modality, rows, {"audio_num_tokens": [rows]})
    frames = 1 if modality == "image" else 2 + seed[2] % 3
    grid = [frames, SIDES[seed[0] % 4], SIDES[seed[1] % 4]]
    key = "image_grid_thw" if modality == "image" else "video_grid_thw"
    return Encoded(content, modality, rows_of(modality, {key: grid}), {key: grid})


def rows_of(modality: str, metadata: dict[str, Any]) -> int:
    """Placeholder tokens that metadata announces. Raises `EngineError` where it is not usable."""
    (key,) = METADATA_FIELDS[modality]
    values = metadata.get(key)
    if values is None:
        raise invalid(f"Missing metadata field for {modality} embeddings: {key}", f"{modality}_embeds")
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    ):
        raise invalid(f"Metadata {key} must be a finite numeric array.")
    if modality == "audio":
        return int(values[0])
    if len(values) != 3:
        raise invalid(f"Invalid metadata array: {key}")
    return max(1, int(values[0] * values[1] * values[2]) // 4)


@dataclass(slots=True)
class PartReader:
    """Reads the parts of one request in order.

    `model` namespaces hashes; `kwargs` is the JSON of mm_processor_kwargs and media_io_kwargs, "" without;
    `known` maps uuid → content of media that this engine has processed before.
    """

    model: str
    kwargs: str
    embeds_allowed: bool
    prompt_embeds_allowed: bool
    known: dict[str, str]
    items: list[Item] = field(default_factory=list)
    remembered: list[tuple[str, str]] = field(default_factory=list)
    prompt_embeds: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    def read(self, part: Any) -> str:
        """The text of a part: its own, or a marker of the modality. Raises `EngineError` (400)."""
        if isinstance(part, str):
            return part
        if not isinstance(part, dict):
            raise invalid("Invalid content part.", "messages")
        kind, value = self._classify(part)
        if kind == "text":
            return value if isinstance(value, str) else ""
        if kind == "prompt_embeds":
            return self._prompt_embeds(value)
        uuid = part.get("uuid")
        self._add(kind, value, None if uuid is None else str(uuid))
        return f"<|{kind.removesuffix('_embeds')}|>"

    def _classify(self, part: dict[str, Any]) -> tuple[str, Any]:
        kind = part.get("type")
        uuid = part.get("uuid")
        if isinstance(kind, str) and uuid is None:
            if kind in TEXT_TYPES:
                return "text", part.get("thinking" if kind == "thinking" else "text", part.get("refusal"))
            if kind == "tool_reference":
                return "text", part.get("name")
            if kind == "prompt_embeds":
                return kind, part.get("data")
            if kind == "input_image":
                return "image", part.get("image_url")
            if kind in TYPES:
                value = part.get(kind)
                if kind.endswith("_url"):
                    if not isinstance(value, dict):
                        raise malformed_part(kind, value)
                    value = value.get("url")
                return TYPES[kind], value
        if kind is None or uuid is not None:
            for key, what in KEYS:
                if key in part:
                    value = part.get("data") if key == "prompt_embeds" else part[key]
                    if key.endswith("_url") and isinstance(value, dict):
                        value = value.get("url")
                    return what, value
            if "tool_reference" in part:
                return "text", part.get("name")
            raise invalid("Missing 'type' field in multimodal part.", "type")
        if not isinstance(kind, str):
            raise invalid("Invalid 'type' field in multimodal part.", "type")
        supported = ", ".join(sorted({*TYPES, *TEXT_TYPES, "tool_reference", "image_pil"}))
        raise invalid(f"Unsupported chat content part type: {kind!r}. Supported types: {supported}.", "type", kind)

    def _prompt_embeds(self, value: Any) -> str:
        if not value or not isinstance(value, str):
            raise invalid("prompt_embeds content part requires a non-empty `data` field", "prompt_embeds")
        if not self.prompt_embeds_allowed:
            raise invalid("You must set `--enable-prompt-embeds` to input `prompt_embeds`", "prompt_embeds")
        self.prompt_embeds.append(digest(value.encode("utf-8", "surrogatepass")))
        return "<prompt_embeds>"

    def _add(self, kind: str, value: Any, uuid: str | None) -> None:
        modality: Modality = kind.removesuffix("_embeds")  # type: ignore[assignment]
        if kind.endswith("_embeds") and not self.embeds_allowed:
            raise invalid(f"You must set `--enable-mm-embeds` to input `{kind}`", kind)
        self.kinds.add(kind)
        if modality in self.kinds and f"{modality}_embeds" in self.kinds:
            raise invalid("Mixing raw image and embedding inputs is not allowed".replace("image", modality),
                          f"{modality}_embeds")  # fmt: skip
        if value is None or value == "" or (isinstance(value, dict) and not value.get("data", True)):
            self.items.append(self._remembered(modality, uuid))
        elif kind.endswith("_embeds"):
            self.items.append(self._embeds(modality, value, uuid))
        else:
            self.items.append(self._raw(modality, value, uuid))

    def _identifier(self, name: str, uuid: str | None) -> str:
        if uuid is not None and not self.kwargs:
            return uuid
        seed = f"{self.model}\0{name if uuid is None else uuid}\0{self.kwargs}"
        return digest(seed.encode("utf-8", "surrogatepass")) + digest(name.encode())

    def _raw(self, modality: Modality, value: Any, uuid: str | None) -> Item:
        if isinstance(value, dict):  # input_audio
            value = value.get("data")
        if not isinstance(value, str):
            raise malformed_part(modality, value)
        # A data URL is its payload, however the media type is spelled; a web address stands for what it names.
        whole = value.encode("utf-8", "surrogatepass")
        raw = memoryview(whole)[whole.find(b",") + 1 if value.startswith("data:") else 0 :]
        content = digest(raw)
        identifier = self._identifier(content, uuid)
        self.remembered.append((identifier, content))
        return Item(modality, identifier, content, encode(content, modality).rows, size=len(raw))

    def _remembered(self, modality: Modality, uuid: str | None) -> Item:
        content = self.known.get(uuid) if uuid is not None else None
        if content is None or uuid is None:
            index = sum(item.modality == modality for item in self.items)
            raise EngineError(
                400,
                "BadRequestError",
                f"Cache miss for {modality} at index {index} but data is not provided.",
            )
        return Item(modality, uuid, content, encode(content, modality).rows)

    def _embeds(self, modality: Modality, value: Any, uuid: str | None) -> Item:
        if isinstance(value, str):
            value = {f"{modality}_embeds": value}
        if not isinstance(value, dict):
            raise malformed_part(f"{modality}_embeds", value)
        metadata: dict[str, Any] = {}
        tensors = []
        for key, field_value in value.items():
            if isinstance(field_value, list):
                if key not in METADATA_FIELDS[modality]:
                    raise invalid(f"JSON arrays are only supported for metadata: {key}")
                metadata[key] = field_value
            elif isinstance(field_value, str):
                tensors.append(field_value)
        rows = rows_of(modality, metadata) if metadata or not tensors else 1
        name = digest(msgspec.json.encode(value))
        return Item(
            modality,
            self._identifier(name, uuid),
            digest("".join(tensors).encode()) if tensors else None,
            rows,
            passthrough=bool(tensors),
            metadata=metadata,
        )


def malformed_part(kind: str, value: Any) -> EngineError:
    """A part whose value has the wrong type: 400."""
    return invalid(f"Invalid value for content part {kind!r}: {type(value).__name__}", "messages")
