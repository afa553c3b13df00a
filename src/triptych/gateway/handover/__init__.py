"""Hand-over between legs: the dialects in which engines tell each other where encoder output and KV are.

A dialect is a value with pure methods; the registries below are the only place that knows them all, and third parties
add theirs by an entry point (groups `triptych.ec_dialects` and `triptych.kv_dialects`, each naming a dialect object).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from triptych.gateway.handover.ec import EC_DIALECTS, EcContext, EcDialect
from triptych.gateway.handover.kv import KV_DIALECTS, KvContext, KvDialect

__all__ = ["EcContext", "EcDialect", "KvContext", "KvDialect", "ec_dialects", "kv_dialects"]


def ec_dialects() -> Mapping[str, EcDialect]:
    """Every EC dialect by name, built-in ones and those that installed packages add."""
    return {d.name: d for d in EC_DIALECTS} | {p.name: p.load() for p in entry_points(group="triptych.ec_dialects")}


def kv_dialects() -> Mapping[str, KvDialect]:
    """Every KV dialect by name, built-in ones and those that installed packages add."""
    return {d.name: d for d in KV_DIALECTS} | {p.name: p.load() for p in entry_points(group="triptych.kv_dialects")}
