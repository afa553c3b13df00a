"""A byte-level tokenizer that is nothing but data: special tokens, the 256 bytes, and the words a tiny model speaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_VOCABULARY = """
amber anchor apple arrow autumn badge bamboo basil beacon berry birch bishop blossom blue bottle branch
brass bread bridge bronze brook button cabin cactus candle canoe canyon carpet castle cedar cello cherry
cinder circle clay cliff clock clover cloud coast cobalt comet compass copper coral cotton crane crimson
crystal cube daisy dawn delta desert diamond dragon drum dusk eagle ember emerald fable falcon feather fern
field finch flame flint flute forest fossil fountain fox frost garden ginger glacier glass gold granite
grape green harbor hazel heron hill honey horizon indigo iron island ivory ivy jade jasmine jungle kettle
kite lagoon lantern lark lemon lily linen lion lotus lunar maple marble meadow melon mint mirror mist moon
mosaic moss mountain nectar night north oak oasis ocean olive onyx opal orange orbit orchid otter owl oyster
paper peach pearl pebble pepper pine planet plum pond poppy prism quartz quill rain raven red reef ribbon
ridge river robin rose ruby saffron sage sail salt sand scarlet shadow shell silver sky slate snow sparrow
spice spring square star steel stone storm stream summer sun swan teal thistle thunder tiger timber topaz
tower tulip valley velvet violet walnut water wave wheat willow wind winter wolf wood yellow zebra
"""

#: What a tiny model answers with. Text is read byte by byte; only answers are made of these.
WORDS: tuple[str, ...] = tuple(_VOCABULARY.split())


def byte_symbols() -> list[str]:
    """The character that stands for each byte value, 0 to 255, in a byte-level BPE vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def first_word(specials: Sequence[str]) -> int:
    """Id of the first word token: special tokens come first, then the bytes, then the words."""
    return len(specials) + 256


def vocabulary_size(specials: Sequence[str]) -> int:
    """Number of token ids."""
    return first_word(specials) + len(WORDS)


def tokenizer_json(specials: Sequence[str]) -> dict[str, Any]:
    """Content of `tokenizer.json`. Ids: the special tokens from 0 in their order, bytes, words with a leading space."""
    symbols = byte_symbols()
    space = symbols[ord(" ")]
    entries = [*specials, *symbols, *(space + word for word in WORDS)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": text, **flags} for index, text in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(entries)},
            "merges": [],
        },
    }
