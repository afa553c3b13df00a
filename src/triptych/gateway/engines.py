"""The models that are served, each with its pools of engines, and which of them a name means. No I/O.

`Fleet` is what the rest of the gateway holds; its `watchers` are told of every change of an engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from triptych.gateway.pool import Change, Engine, Lease, Pool
from triptych.gateway.settings import ROLES, EngineSettings, GatewaySettings, Health, Limits, ModelSettings, Role

__all__ = ["Change", "Deployment", "Engine", "Fleet", "Lease", "ModelRequired", "Pool", "UnknownModel"]


class Deployment:
    """One model's pools. Decode engines without a prefill pool are combined engines."""

    def __init__(
        self, settings: ModelSettings, health: Health, limits: Limits, rng: random.Random | None = None
    ) -> None:
        self.settings = settings
        self._label = settings.name or ""
        listed: dict[Role, tuple[EngineSettings, ...]] = {role: getattr(settings, role) for role in ROLES}
        if not settings.prefill:
            listed["combined"] += listed["decode"]
            listed["decode"] = ()

        def pool(role: str, engines: Iterable[EngineSettings]) -> Pool:
            limit = limits.encode_legs_per_engine if role == "encode" else None
            return Pool(role, [Engine(e, role, health, limit) for e in engines], rng)

        self.encode = pool("encode", listed["encode"])
        self.prefill = pool("prefill", listed["prefill"])
        self.decode = pool("decode", listed["decode"])
        self.combined = pool("combined", listed["combined"])
        self.stages = tuple(pool(stage.id, stage.engines) for stage in settings.stages)
        every = (self.encode, self.prefill, self.decode, self.combined, *self.stages)
        self.pools: dict[str, Pool] = {p.role: p for p in every}

    @property
    def answering(self) -> tuple[Engine, ...]:
        """The engines whose answer the client gets, and whose models are the deployment's."""
        return self.decode.engines + self.combined.engines

    @property
    def names(self) -> frozenset[str]:
        """The configured name and what the answering engines report."""
        own = frozenset(filter(None, (self.settings.name,)))
        return own.union(*(e.names for e in self.answering if e.names is not None))

    def cards(self) -> list[Mapping[str, Any]]:
        """The entries of `/v1/models`: what the answering engines report, of equal names the first one's."""
        found: dict[str, Mapping[str, Any]] = {}
        for engine in self.answering:
            for card in engine.cards:
                found.setdefault(card["id"], card)
        if self.settings.name:
            found.setdefault(self.settings.name, {"id": self.settings.name, "object": "model", "owned_by": "triptych"})
        return list(found.values())

    @property
    def label(self) -> str:
        """One word for metrics and logs: the configured name, else the first one ever reported; it stays."""
        if not self._label:
            self._label = next((str(e.cards[0]["id"]) for e in self.answering if e.cards), "")
        return self._label or "default"

    def engines(self) -> Iterator[Engine]:
        for pool in self.pools.values():
            yield from pool.engines

    def __repr__(self) -> str:
        return f"<Deployment {self.label}: {', '.join(repr(p) for p in self.pools.values() if p)}>"


class ModelRequired(LookupError):
    """The request names no model and there are several: `known` are their names, sorted."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = tuple(sorted(known))
        super().__init__(f"`model` is required here: one of {', '.join(self.known)}")


class UnknownModel(LookupError):
    """No deployment has that model: `name` as the client gave it, `known` the names that there are, sorted."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(sorted(known))
        super().__init__(f"The model `{name}` does not exist.")


class Fleet:
    """All deployments, and which of them a model name means."""

    def __init__(self, settings: GatewaySettings, rng: random.Random | None = None) -> None:
        self.deployments = tuple(Deployment(m, settings.health, settings.limits, rng) for m in settings.models)
        self.watchers: list[Callable[[Change], None]] = []
        self._index: dict[str, Deployment] = {}
        self._reindex()
        for deployment in self.deployments:
            for pool in deployment.pools.values():
                pool.watcher = self._changed

    def resolve(self, model: str | None) -> Deployment:
        """The deployment that a request's `model` means; none (or an empty one) means the only one there is.

        Until anything is known of its names, a single deployment takes any: the engine is the judge.
        Raises ModelRequired, UnknownModel.
        """
        if not model:
            if len(self.deployments) == 1:
                return self.deployments[0]
            raise ModelRequired(self._index)
        deployment = self._index.get(model)
        if deployment is None:
            if self._index:
                raise UnknownModel(model, self._index)
            deployment = self.deployments[0]
        return deployment

    def engines(self) -> Iterator[Engine]:
        for deployment in self.deployments:
            yield from deployment.engines()

    def find(self, url: str) -> list[Engine]:
        """The engines at this address (several where several models share one)."""
        return [e for e in self.engines() if e.url == url.rstrip("/")]

    @property
    def names(self) -> tuple[str, ...]:
        """All model names, in the order of the deployments."""
        return tuple(self._index)

    @property
    def probed(self) -> bool:
        """Whether something is known of every engine's health."""
        return all(e.state != "unknown" for e in self.engines())

    def _changed(self, change: Change) -> None:
        if change.what == "names":
            self._reindex()
        for watch in self.watchers:
            watch(change)

    def _reindex(self) -> None:
        """A configured name beats a reported one; among equals the first deployment has it."""
        index: dict[str, Deployment] = {}
        for deployment in self.deployments:
            if deployment.settings.name:
                index.setdefault(deployment.settings.name, deployment)
        for deployment in self.deployments:
            for name in sorted(deployment.names):
                index.setdefault(name, deployment)
        self._index = index

    def __repr__(self) -> str:
        return f"<Fleet [{' | '.join(map(repr, self.deployments))}]>"
