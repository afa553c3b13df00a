"""What a simulated engine is: role, connectors, names, costs. One frozen value, validated once."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from triptych.sim.store import MemoryStore

Role = Literal["encode", "prefill", "decode", "combined"]
EcDialect = Literal["none", "example", "eccpu", "mooncake"]
EcRole = Literal["producer", "consumer", "both", "none"]
KvDialect = Literal["none", "nixl", "example"]
DeathMode = Literal["exit", "500"]
StaleKv = Literal["fail", "corrupt"]
Unannounced = Literal["encode", "wait"]

ROLES: tuple[Role, ...] = get_args(Role)
EC_DIALECTS: tuple[EcDialect, ...] = get_args(EcDialect)
EC_ROLES: tuple[EcRole, ...] = get_args(EcRole)
KV_DIALECTS: tuple[KvDialect, ...] = get_args(KvDialect)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds a request takes, all zero by default. They add up; items of one request are encoded in turn."""

    request: float = 0.0
    """once per request, before anything else"""
    item: float = 0.0
    """per media item that this engine runs its encoder on"""
    prompt_token: float = 0.0
    """per prompt token that this engine computes itself (not for tokens that came as KV)"""
    token: float = 0.0
    """per output token; in a stream, the gap before each event"""
    mb: float = 0.0
    """per 10^6 bytes of request body"""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Everything about one simulated engine. Raises `ValueError` that names the field."""

    role: Role = "combined"
    model: str = "sim"
    """served model name; also what media hashes are namespaced by, as vLLM does with its --model"""
    aliases: tuple[str, ...] = ()
    """further served names of the same model"""
    loras: tuple[str, ...] = ()
    """adapter names in /v1/models, each answers differently from the base model"""
    api_key: str | None = None
    max_model_len: int = 32768
    ec: EcDialect = "none"
    ec_role: EcRole | None = None
    """None: producer for `encode`, none for `decode`, else consumer"""
    ec_dir: str | Path | MemoryStore | None = None
    """EC `example`: the folder that engines share, or a `MemoryStore` shared by engines of one process"""
    kv: KvDialect | None = None
    """None: nixl for `prefill` and `decode`, else none"""
    kv_dir: str | Path | MemoryStore | None = None
    """KV `example`: as `ec_dir`"""
    kv_lease: float = 30.0
    """seconds that a prefill keeps blocks for a decoder"""
    kv_block_size: int = 32
    stale_kv: StaleKv = "fail"
    """blocks read twice or after their lease: `fail` answers 500, `corrupt` answers 200 with other tokens,
    which is what a real engine may do"""
    metadata: bool = True
    """encoders return placeholder metadata (as Qwen2-VL does) rather than {} (as Llava does)"""
    push_wait: float = 60.0
    """EC `mooncake`: seconds that a consumer waits for an announced push before it fails the request"""
    unannounced: Unannounced = "encode"
    """EC `mooncake`: what a consumer does about an item that `ec_items` does not name"""
    known_consumers: tuple[str, ...] | None = None
    """EC `mooncake`: the only addresses that an encoder pushes to; None: any"""
    dp_size: int = 1
    """EC `mooncake`: data-parallel ranks of a consumer, each with its own push address"""
    hidden_size: int = 64
    trust_mm_kwargs: bool = False
    enable_mm_embeds: bool = False
    enable_prompt_embeds: bool = False
    priority_scheduling: bool = False
    encoder_cache_items: int = 0
    """encoder outputs kept by identifier between requests (0: each request stands alone)"""
    processor_cache_items: int = 1024
    """media remembered by identifier for uuid-only parts"""
    output_tokens: int | None = None
    """length of every answer when the request sets no lower limit; None: 12 to 31, by content"""
    costs: Costs = field(default_factory=Costs)
    death: DeathMode = "exit"
    """what an engine that dies does: `exit` stops listening (a process exits), `500` answers 500 and
    an unhealthy /health from then on"""
    keep_alive: float = 5.0
    """seconds after which an idle connection is closed without a word, as vLLM's server does"""
    max_body: int = 1 << 30
    keep_bodies: int = 0
    """keep the last N request bodies and headers for `seen`"""
    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    side_port: int = 0
    """port of the side channel that `peer_port`, `remote_port` and `consumer_zmq` name"""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("role", self.role, ROLES),
            ("ec", self.ec, EC_DIALECTS),
            ("ec_role", self.ec_role, (*EC_ROLES, None)),
            ("kv", self.kv, (*KV_DIALECTS, None)),
            ("death", self.death, get_args(DeathMode)),
            ("stale_kv", self.stale_kv, get_args(StaleKv)),
            ("unannounced", self.unannounced, get_args(Unannounced)),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(str(a) for a in allowed)}")
        if not self.model:
            raise ValueError("model: must not be empty")
        if self.dp_size < 1:
            raise ValueError("dp_size: must be at least 1")
        if self.role == "encode" and self.ec == "none":
            raise ValueError("ec: an encode engine needs a dialect (example, eccpu or mooncake)")
        if self.ec == "example" and self.ec_dir is None:
            raise ValueError("ec_dir: EC example needs the folder that the engines share")
        if self.kv == "example" and self.kv_dir is None:
            raise ValueError("kv_dir: KV example needs the folder that the engines share")

    @property
    def ec_part(self) -> EcRole:
        """The EC role in force."""
        if self.ec == "none":
            return "none"
        if self.ec_role is not None:
            return self.ec_role
        by_role: dict[Role, EcRole] = {"encode": "producer", "decode": "none"}
        return by_role.get(self.role, "consumer")

    @property
    def kv_dialect(self) -> KvDialect:
        """The KV dialect in force."""
        if self.kv is not None:
            return self.kv
        return "nixl" if self.role in ("prefill", "decode") else "none"

    @property
    def encode_only(self) -> bool:
        """A pure EC producer has no language model: it answers empty texts."""
        return self.ec_part == "producer"

    @property
    def embeds_allowed(self) -> bool:
        """vLLM turns --enable-mm-embeds on by itself for EC consumers and for KV consumers."""
        return (
            self.enable_mm_embeds
            or self.ec_part in ("consumer", "both")
            or (self.role == "decode" and self.kv_dialect != "none")
        )

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model, *self.aliases, *self.loras)
