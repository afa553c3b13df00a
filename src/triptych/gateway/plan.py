"""Which legs a request needs: decided before the first call, from facts of the request and of the pools.

Everything here is pure. `route` picks the stages (the contract's table "Plans"); `choose` picks the engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import msgspec

from triptych.gateway.engines import Deployment, Engine, Fleet, Pool
from triptych.gateway.errors import ApiError
from triptych.gateway.settings import ModelSettings, Role

PlanName = Literal["plain", "e_pd", "p_d", "e_p_d"]


class Shape(NamedTuple):
    """What planning needs to know of a request.

    items: media items that an encoder could take. generates: whether the endpoint generates at all.
    no_hop: why KV hand-over would corrupt this request. unplanned: why media of it cannot go to encoders.
    """

    items: int = 0
    generates: bool = True
    no_hop: str | None = None
    unplanned: tuple[str, ...] = ()


class PoolState(Protocol):
    """The two facts of a pool that routing looks at."""

    @property
    def engines(self) -> tuple[Engine, ...]: ...

    @property
    def healthy(self) -> bool: ...


class Route(msgspec.Struct, frozen=True):
    """The stages of a plan. degraded: reasons, each counted, why it is less than the deployment could do."""

    encode: bool
    prefill: bool
    final: Role
    degraded: tuple[str, ...] = ()

    @property
    def name(self) -> PlanName:
        if self.encode:
            return "e_p_d" if self.prefill else "e_pd"
        return "p_d" if self.prefill else "plain"


class Plan(msgspec.Struct, frozen=True):
    """The legs of one request: engines chosen, nothing called yet.

    items: how many encode legs, one per distinct item; each takes its encoder when its turn comes, since no other leg
    needs to know which.
    """

    route: Route
    items: int
    prefill: Engine | None
    final: Engine


def route(shape: Shape, pools: Mapping[str, PoolState], settings: ModelSettings) -> Route:
    """The stages that this request takes through these pools.

    Raises ApiError 503 where no stages could answer it.
    """
    degraded: list[str] = []
    final, prefill = _answering(shape, pools, settings, degraded)
    encode = _encoding(shape, pools, settings, final if not prefill else "prefill", degraded)
    return Route(encode, prefill, final, tuple(degraded))


def _answering(
    shape: Shape, pools: Mapping[str, PoolState], settings: ModelSettings, degraded: list[str]
) -> tuple[Role, bool]:
    """The role that answers, and whether a prefill leg goes before it."""
    combined, prefill, decode = pools["combined"], pools["prefill"], pools["decode"]
    split = bool(prefill.engines and decode.engines)
    if not split:
        return _need("combined", pools), False
    if not shape.generates or shape.no_hop is not None:
        if shape.no_hop is not None:
            degraded.append(shape.no_hop)
        return _need("combined" if combined.healthy else "decode", pools), False
    if settings.prefer == "combined" and combined.engines:
        if combined.healthy:
            return "combined", False
        degraded.append("no_combined")
    if prefill.healthy and decode.healthy:
        return "decode", True
    if settings.prefer == "disaggregated" and combined.healthy:
        degraded.append("no_prefill" if decode.healthy else "no_decode")
        return "combined", False
    if not prefill.healthy and decode.healthy and settings.no_prefill == "decode":
        degraded.append("no_prefill")
        return "decode", False
    _need("decode", pools)
    _need("prefill", pools)
    raise AssertionError("both pools are healthy")


def _encoding(
    shape: Shape, pools: Mapping[str, PoolState], settings: ModelSettings, consumer: Role, degraded: list[str]
) -> bool:
    """Whether encode legs go before the consumer."""
    encoders = pools["encode"]
    if not encoders.engines:
        return False
    degraded += shape.unplanned
    if not shape.items:
        return False
    if consumer == "decode" and pools["prefill"].engines and not settings.decode_ec_consumer:
        # A decode engine that stands in for prefill takes encoder output only where its pool says so.
        degraded.append("decode_takes_no_ec")
        return False
    if not encoders.healthy:
        if settings.encode_failure == "strict":
            _need("encode", pools)
        degraded.append("no_encoder")
        return False
    return True


def _need(role: Role, pools: Mapping[str, PoolState]) -> Role:
    if not pools[role].healthy:
        raise ApiError(503, f"no healthy {role} engine", retry_after=2, reason=f"no_{role}")
    return role


def can_answer(deployment: Deployment) -> bool:
    """Whether a plain text request could be answered now."""
    try:
        route(Shape(), deployment.pools, deployment.settings)
    except ApiError:
        return False
    return True


def ready(fleet: Fleet) -> bool:
    """Whether something is known of every engine, and every model can be answered."""
    return fleet.probed and all(can_answer(d) for d in fleet.deployments)


def choose(stages: Route, deployment: Deployment, items: int) -> Plan:
    """The engines of a route's legs, the least loaded first.

    Raises ApiError 429 where every healthy engine of a pool is at its limit.
    """
    final = pick(deployment.pools[stages.final])
    prefill = pick(deployment.prefill) if stages.prefill else None
    return Plan(stages, items if stages.encode else 0, prefill, final)


def pick(pool: Pool) -> Engine:
    """An engine of the pool.

    Raises ApiError 503 if none is healthy, 429 if all healthy ones are at their limit.
    """
    engine = pool.choose()
    if engine is not None:
        return engine
    if pool.healthy:
        raise ApiError(429, f"every {pool.role} engine is at its limit of requests", retry_after=1, reason="full")
    raise ApiError(503, f"no healthy {pool.role} engine", retry_after=2, reason=f"no_{pool.role}")
