"""The body of a JSON request, parsed once at its top level; nothing of it is copied or altered."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from triptych.body.edit import Buffer, Splice, apply, object_splices
from triptych.body.plain import Plain, Proof
from triptych.body.scan import STRIPPED, BodyError, Hint, Member, Rules, Scanner, string, validate_object

HANDLES: Final = frozenset({"ec_transfer_params", "kv_transfer_params"})
"""Hand-over parameters: engines trust them, so a client's own are removed."""

OWNED: Final = frozenset(
    {
        "model", "messages", "input", "prompt", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens",
        "max_output_tokens", "min_tokens", "mm_processor_kwargs", "media_io_kwargs", "session_id", "priority",
        "vllm_xargs",
    }
)  # fmt: skip
"""Fields that the gateway reads or sets: refused when given twice, since parsers differ in which copy counts."""

# Spellings that pydantic takes for a bool in its lax mode, which vLLM's protocol classes use.
_TRUE: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
_PLAIN: Final = frozenset({b"true", b"false", b"null"})
_NOTHING: Final[Mapping[str, bytes]] = {}


class Policy(NamedTuple):
    """What is done with top-level fields; made once per configuration by `Policy.of`."""

    owned: frozenset[str]
    rules: Rules
    proof: Proof

    @classmethod
    def of(cls, owned: Iterable[str] = (), strip: Iterable[str] = HANDLES) -> Policy:
        """`owned`: fields of the KV dialect in force besides `OWNED`. `strip`: what a client may not send."""
        every, gone = OWNED.union(owned), frozenset(strip)
        return cls(every, Rules.of(gone), Proof(every, gone))


DEFAULT_POLICY: Final = Policy.of()


class RequestBody:
    """One JSON object as it came. Values are looked at only when asked for; a wrong type is the engine's to refuse.

    Attributes: `raw` the bytes as sent; `plain` what is known of a plain text request without a look at its members;
    `at`, `end` offsets of its braces (`end` behind the closing one); `top` all
    top-level members in order, runs of stripped ones as one Member with the key `STRIPPED`; `stripped` whether there
    is anything to strip, also inside `vllm_xargs`.
    """

    __slots__ = ("_found", "_strips", "_xargs", "at", "end", "hint", "plain", "policy", "raw", "scanner", "top")

    hint: Hint
    scanner: Scanner
    at: int
    top: list[Member]
    end: int

    def __init__(self, raw: bytes, policy: Policy = DEFAULT_POLICY) -> None:
        """Parse.

        Raises:
            BodyError: not one JSON object, a field of `policy.owned` twice, or too much to look at.
        """
        self.raw = raw
        self.policy = policy
        self._strips = False
        self._xargs: tuple[Splice, ...] = ()
        self._found: dict[str, Member] | None = None
        self.plain: Plain | None = policy.proof.of(raw)
        if self.plain is None:
            self._scan()

    def _scan(self) -> dict[str, Member]:
        """Find the members; of a plain request only when somebody asks for them."""
        raw = self.raw
        self.hint = validate_object(raw)
        self.scanner = Scanner(raw)
        self.at = raw.index(b"{")
        self.top, self.end = self.scanner.members(self.at, self.policy.rules, self.hint)
        top = self.top
        index = {member.key: member for member in top}
        if len(index) != len(top) or STRIPPED in index:
            index = self._without_duplicates()
        self._found = index
        xargs = index.get("vllm_xargs")
        if xargs is not None and raw[xargs.value] == 0x7B:
            inner, _ = self.scanner.members(xargs.value, self.policy.rules)
            self._xargs = tuple(object_splices(raw, (xargs.value, xargs.end), inner))
        return index

    @property
    def _index(self) -> dict[str, Member]:
        found = self._found
        return self._scan() if found is None else found

    def _without_duplicates(self) -> dict[str, Member]:
        """The index without runs of stripped members. Raises BodyError for a second copy of an owned key."""
        index: dict[str, Member] = {}
        for member in self.top:
            key = member.key
            if key is STRIPPED:
                self._strips = True
            elif key in index and key in self.policy.owned:
                raise BodyError(f'duplicate top-level key "{key}" in request body', param=key)
            else:
                index[key] = member
        return index

    def __repr__(self) -> str:
        found = [] if self._found is None else self.top[:12]
        keys = ", ".join("…" if m.key is STRIPPED else m.key for m in found) or "plain text"
        return f"<RequestBody {len(self.raw)} B: {keys}>"

    def __contains__(self, key: str) -> bool:
        return key in self._index

    @property
    def keys(self) -> Collection[str]:
        """Top-level keys, each once, without stripped ones."""
        return self._index.keys()

    @property
    def stripped(self) -> bool:
        """Whether the client sent something that is stripped."""
        return self._strips or bool(self._xargs)

    def member(self, key: str) -> Member | None:
        """The top-level member of that key (its last copy: the one that counts), or None."""
        return self._index.get(key)

    def value(self, key: str) -> bytes | None:
        """The value's bytes as sent, or None if the field is absent."""
        member = self._index.get(key)
        return None if member is None else self.raw[member.value : member.end]

    def get(self, key: str) -> Any:
        """The decoded value, None if absent, its bytes if Python cannot hold it. Decoded anew at each call."""
        value = self.value(key)
        try:
            return None if value is None else json.loads(value)
        except (ValueError, RecursionError):  # an integer of too many digits; nesting that just passed the validation
            return value

    def text(self, key: str) -> str | None:
        """The value if it is a string, else None."""
        member = self._index.get(key)
        if member is None or self.raw[member.value] != 0x22:
            return None
        return string(self.raw, member.value, member.end)

    def truth(self, key: str) -> bool:
        """Whether the engine takes the value for true (`"true"`, `1`, `"yes"` as well: pydantic's lax bool)."""
        member = self._index.get(key)
        # The longest spelling of "false" has 32 bytes; do not decode what cannot be one.
        if member is None or member.end - member.value > 32:
            return False
        raw = self.raw[member.value : member.end]
        if raw in _PLAIN:
            return raw == b"true"
        value = self.get(key)
        return value == 1 if not isinstance(value, str) else value.lower() in _TRUE

    @property
    def model(self) -> str | None:
        """The model named by the client; None if absent, null or not a string."""
        return self.text("model") if self.plain is None else self.plain.model

    @property
    def stream(self) -> bool:
        """Whether the client asks for a stream."""
        return self.truth("stream")

    def single_prompt(self) -> bool:
        """Whether `prompt` and `prompt_embeds` name at most one prompt (a list of integers is one)."""
        return self._prompts("prompt") + self._prompts("prompt_embeds") <= 1

    def _prompts(self, key: str) -> int:
        """0, 1 or 2 (more than one) prompts."""
        member = self._index.get(key)
        if member is None or self.raw[member.value] != 0x5B:
            return int(member is not None and self.raw[member.value] != 0x6E)
        raw = self.raw
        scan = Scanner(raw)
        first = scan.first_element(member.value)
        if first is None:
            return 0
        if raw[first] not in b'"[{':
            return 1
        return 2 if scan.has_next(scan.value_end(first)) else 1

    def hop_hazard(self, api: str) -> str | None:
        """Why this request must not take a prefill hop, or None.

        KV hand-over carries the parameters of one sequence of one prompt. A field of a wrong type counts as a
        hazard: the engine that gets the request alone refuses it by itself.
        """
        if self.plain is not None:
            return None
        index = self._index
        if "n" in index and self.get("n") not in (None, 1, "1"):
            return "n"
        if "best_of" in index and self.get("best_of") not in (None, 1, "1"):
            return "best_of"
        if "use_beam_search" in index and self.get("use_beam_search") not in (None, False, 0):
            return "beam_search"
        if api == "completions" and not self.single_prompt():
            return "prompts"
        # vLLM: echo makes prompt logprobs of `top_logprobs` (chat, 0 by default) or of `logprobs` (completions):
        # ChatCompletionRequest.to_sampling_params, CompletionRequest.to_sampling_params.
        if (
            "echo" in index
            and self.get("echo") not in (None, False, 0)
            and (api == "chat" or self.get("prompt_logprobs") is not None or self.get("logprobs") is not None)
        ):
            return "echo"
        return None

    def path(self, offset: int) -> str:
        """Where an offset is, as `messages[0].content[1]`: for messages to the client, not for speed."""
        raw, scan, path, at = self.raw, Scanner(self.raw), "", self.at
        while True:
            if raw[at] == 0x7B:
                step = [(f".{m.key}", m.value) for m in scan.members(at)[0] if m.value <= offset < m.end]
            elif raw[at] == 0x5B:
                step = [(f"[{i}]", s) for i, (s, end) in enumerate(scan.elements(at)) if s <= offset < end]
            else:
                step = []
            if not step:
                return path.removeprefix(".")
            path += step[0][0]
            at = step[0][1]
            if at == offset:
                return path.removeprefix(".")

    def rewrite(
        self,
        put: Mapping[str, bytes] = _NOTHING,
        remove: Collection[str] = (),
        inner: Iterable[Splice] = (),
    ) -> list[Buffer]:
        """The body with what is stripped gone, `remove` gone, `put` set, and the splices `inner` (media parts) made.

        Each key of `put` is there exactly once afterwards. With nothing to do the result is `[raw]`, the same object.
        """
        if not (put or remove or inner or self._strips or self._xargs):
            return [self.raw]
        splices = [] if not inner else list(inner)
        if put or remove or self._strips:
            if self._found is None:
                self._scan()
            splices += object_splices(self.raw, (self.at, self.end), self.top, remove, put)
        if self._xargs and "vllm_xargs" not in put and "vllm_xargs" not in remove:
            splices += self._xargs
        return apply(self.raw, splices)
