"""Engines, pools and names: health by the rules, choices within them, places given in turn."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.gateway.engines import Change, Engine, Fleet, Lease, ModelRequired, Pool, UnknownModel
from triptych.gateway.settings import EngineSettings, GatewaySettings, Health

URL = "http://10.0.0.1:8000"


def urls(count: int, first: int = 8000) -> list[str]:
    return [f"http://10.0.0.1:{first + i}" for i in range(count)]


def fleet_of(*models: dict[str, Any], **more: Any) -> Fleet:
    return Fleet(GatewaySettings.model_validate({"models": list(models), **more}), random.Random(7))


def pool_of(count: int, health: Health | None = None, **engine: Any) -> Pool:
    made = [
        Engine(EngineSettings(url=url, **engine), "combined", health or Health(failures=3, successes=2))
        for url in urls(count)
    ]
    return Pool("combined", made, random.Random(7))


def card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model"}


# -- health


def test_unknown_engine_counts_as_healthy_and_its_first_failure_ejects_it() -> None:
    engine = pool_of(1).engines[0]
    assert (engine.healthy, engine.state) == (True, "unknown")
    engine.probed("refused")
    assert (engine.healthy, engine.state, engine.why) == (False, "ejected", "refused")


@pytest.mark.parametrize("passive", [(0, 0, 0), (1, 1, 1), (0, 1, 0), (1, 0, 1)])
def test_alive_engine_is_ejected_by_failures_in_a_row_of_either_kind(passive: tuple[int, ...]) -> None:
    engine = pool_of(1).engines[0]
    engine.probed(None)
    for kind in passive[:-1]:
        (engine.failed if kind else engine.probed)("refused")
        assert engine.healthy
    (engine.failed if passive[-1] else engine.probed)("last one")
    assert not engine.healthy
    assert engine.why == "last one"


def test_connection_that_works_resets_failed_connections() -> None:
    engine = pool_of(1).engines[0]
    engine.probed(None)
    for _ in range(10):
        engine.failed("refused")
        engine.failed("refused")
        engine.connected()
    assert engine.healthy


def test_probe_that_succeeds_resets_failures_of_both_kinds() -> None:
    engine = pool_of(1).engines[0]
    engine.probed(None)
    for _ in range(10):
        engine.failed("refused")
        engine.probed("503")
        engine.probed(None)
    assert engine.healthy


def test_engine_with_a_dead_core_is_ejected_though_its_connections_work() -> None:
    engine = pool_of(1).engines[0]
    engine.probed(None)
    for _ in range(3):
        engine.connected()
        engine.probed("/health answered 503")
        engine.connected()
    assert not engine.healthy


def test_ejected_engine_is_back_after_successful_probes_in_a_row_only() -> None:
    engine = pool_of(1).engines[0]
    engine.probed("refused")
    engine.connected()  # a request that began before
    assert not engine.healthy
    engine.probed(None)
    assert not engine.healthy
    engine.probed("refused")
    engine.probed(None)
    assert not engine.healthy
    engine.probed(None)
    assert (engine.healthy, engine.state, engine.why) == (True, "alive", "")


def test_recovered_engine_has_all_its_failures_before_it_again() -> None:
    engine = pool_of(1).engines[0]
    engine.probed("refused")
    engine.failed("refused")
    engine.probed(None)
    engine.probed(None)
    engine.failed("refused")
    engine.probed("refused")
    assert engine.healthy
    engine.failed("refused")
    assert not engine.healthy


def test_held_engine_stays_out_whatever_probes_say_until_restored() -> None:
    engine = pool_of(1).engines[0]
    engine.hold()
    for _ in range(5):
        engine.probed("refused")
        for _ in range(3):
            engine.probed(None)
    assert (engine.healthy, engine.state, engine.why) == (False, "held", "by hand")
    engine.restore()
    assert (engine.healthy, engine.state) == (True, "unknown")
    engine.restore()
    assert engine.state == "unknown"


def test_each_change_of_an_engine_is_told_once() -> None:
    fleet = fleet_of({"combined": urls(2)}, health={"failures": 2, "successes": 1})
    told: list[Change] = []
    fleet.watchers.append(told.append)
    engine = fleet.deployments[0].combined.engines[0]
    engine.probed(None)
    for _ in range(4):
        engine.failed("refused")
    for _ in range(3):
        engine.probed(None)
    engine.hold()
    engine.hold()
    engine.restore()
    engine.reported([card("m")])
    engine.reported([card("m")])
    assert [c.what for c in told] == ["ejected", "recovered", "held", "restored", "names"]
    assert told[0].why == "refused"
    assert {c.engine for c in told} == {engine}


def test_pool_of_ejected_engines_has_no_choice_and_is_not_full() -> None:
    pool = pool_of(3)
    for engine in pool.engines:
        engine.probed("refused")
    assert (pool.healthy, pool.full, pool.choose()) == (False, False, None)


# -- leases


def test_lease_counts_once_however_often_it_is_released() -> None:
    engine = pool_of(1).engines[0]
    with engine.lease() as lease, engine.lease():
        assert engine.in_flight == 2
        lease.release()
        lease.release()
        assert engine.in_flight == 1
    assert engine.in_flight == 0


# -- choice


def load(engine: Engine) -> float:
    return (engine.in_flight + 1) / engine.weight


@given(data=st.data(), count=st.integers(1, 9), seed=st.integers())
def test_choice_is_in_service_below_its_limit_and_not_avoided(data: st.DataObject, count: int, seed: int) -> None:
    made = []
    for url in urls(count):
        limit = data.draw(st.sampled_from([None, 1, 2]))
        weight = data.draw(st.sampled_from([0.5, 1.0, 3.0]))
        engine = Engine(EngineSettings(url=url, max_in_flight=limit, weight=weight), "combined", Health())
        for _ in range(data.draw(st.integers(0, 3))):
            engine.lease()
        made.append(engine)
    pool = Pool("combined", made, random.Random(seed))
    for engine in data.draw(st.sets(st.sampled_from(made))):
        engine.probed("refused")
    avoid = data.draw(st.sets(st.sampled_from(made)))
    fit = [e for e in made if e.healthy and e.in_flight < e.limit and e not in avoid]
    chosen = pool.choose(avoid)
    assert (chosen is None) == (not fit)
    if chosen is not None:
        assert chosen in fit
        if count <= 4:
            assert load(chosen) == min(map(load, fit))
        elif len(fit) > 1:
            assert chosen.in_flight == 0 or load(chosen) <= max(map(load, fit))
    assert pool.full == (any(e.healthy for e in made) and all(e.in_flight >= e.limit for e in made if e.healthy))


def test_equal_engines_share_by_chance() -> None:
    pool = pool_of(3)
    seen = Counter(pool.choose() for _ in range(3000))
    assert len(seen) == 3
    assert min(seen.values()) > 850


def test_load_settles_by_weight() -> None:
    made = [Engine(EngineSettings(url=u, weight=w), "combined", Health()) for u, w in zip(urls(2), (1, 3), strict=True)]
    pool = Pool("combined", made, random.Random(1))
    for _ in range(400):
        chosen = pool.choose()
        assert chosen is not None
        chosen.lease()
    assert [e.in_flight for e in made] == [100, 300]


def test_large_pool_takes_the_better_of_two_drawn() -> None:
    pool = pool_of(10)
    loads = [9, 9, 9, 9, 9, 9, 9, 9, 9, 0]
    for engine, n in zip(pool.engines, loads, strict=True):
        for _ in range(n):
            engine.lease()
    hits = sum(pool.choose() is pool.engines[-1] for _ in range(4000))
    assert 650 < hits < 950  # it is one of the two drawn in a fifth of all draws


def test_large_pool_never_piles_up() -> None:
    pool = pool_of(32)
    for _ in range(3200):
        chosen = pool.choose()
        assert chosen is not None
        chosen.lease()
    loads = [e.in_flight for e in pool.engines]
    assert max(loads) - min(loads) < 12  # by chance alone it would be some 50


def test_large_pool_finds_its_one_free_engine() -> None:
    pool = pool_of(12, max_in_flight=1)
    free = pool.engines[5]
    for engine in pool.engines:
        if engine is not free:
            engine.lease()
    assert {pool.choose() for _ in range(50)} == {free}
    assert pool.choose(avoid=(free,)) is None
    assert not pool.full
    free.lease()
    assert pool.full


# -- waiting for a place


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_take_waits_for_a_place_and_gets_it_in_turn() -> None:
    pool = pool_of(1, max_in_flight=1)
    first = await pool.take()
    assert first is not None
    tasks = [asyncio.create_task(pool.take()) for _ in range(3)]
    await settle()
    assert pool.waiting == 3
    held = [first]
    for i, task in enumerate(tasks):
        held[-1].release()
        lease = await task
        assert lease is not None
        held.append(lease)
        assert [t.done() for t in tasks] == [True] * (i + 1) + [False] * (2 - i)
    held[-1].release()
    assert (pool.engines[0].in_flight, pool.waiting) == (0, 0)


async def test_take_does_not_overtake_those_who_wait() -> None:
    pool = pool_of(2, max_in_flight=1)
    one, two = await pool.take(), await pool.take()
    assert one is not None
    assert two is not None
    waiting = asyncio.create_task(pool.take())
    await settle()
    one.release()  # goes to the waiting one before it runs
    late = asyncio.create_task(pool.take())
    await settle()
    assert waiting.done()
    assert not late.done()
    two.release()
    assert await late is not None


async def test_take_is_none_at_once_where_no_engine_is_in_service() -> None:
    pool = pool_of(1)
    assert await pool.take(avoid=pool.engines) is None
    pool.engines[0].probed("refused")
    assert await pool.take() is None


async def test_take_that_waits_learns_that_the_last_engine_was_ejected() -> None:
    pool = pool_of(1, max_in_flight=1)
    lease = await pool.take()
    waiting = asyncio.create_task(pool.take())
    await settle()
    pool.engines[0].probed("refused")
    assert await waiting is None
    assert lease is not None
    lease.release()
    assert pool.engines[0].in_flight == 0


async def test_take_that_waits_gets_an_engine_that_comes_back() -> None:
    pool = pool_of(2, max_in_flight=1)
    a, b = pool.engines
    b.hold()
    lease = await pool.take()
    assert lease is not None
    assert lease.engine is a
    waiting = asyncio.create_task(pool.take())
    await settle()
    b.restore()
    got = await waiting
    assert got is not None
    assert got.engine is b


async def test_waiting_one_that_avoids_the_free_engine_lets_others_have_it() -> None:
    pool = pool_of(2, max_in_flight=1)
    a, b = pool.engines
    la, lb = a.lease(), b.lease()
    picky = asyncio.create_task(pool.take(avoid=(a,)))
    easy = asyncio.create_task(pool.take())
    await settle()
    la.release()
    await settle()
    assert easy.done()
    assert not picky.done()
    lb.release()
    got = await picky
    assert got is not None
    assert got.engine is b


@pytest.mark.parametrize("when", ["before it runs", "while it waits", "after its place was given"])
async def test_cancelled_take_leaves_nothing_behind(when: str) -> None:
    pool = pool_of(1, max_in_flight=1)
    lease = pool.engines[0].lease()
    task = asyncio.create_task(pool.take())
    if when != "before it runs":
        await settle()
        assert pool.waiting == 1
    if when == "after its place was given":
        lease.release()
        assert (pool.engines[0].in_flight, pool.waiting) == (1, 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.waiting == 0
    lease.release()
    assert (pool.engines[0].in_flight, pool.waiting) == (0, 0)


async def test_cancelled_one_passes_its_place_on() -> None:
    pool = pool_of(1, max_in_flight=1)
    lease = pool.engines[0].lease()
    first, second = (asyncio.create_task(pool.take()) for _ in range(2))
    await settle()
    lease.release()
    first.cancel()
    got = await second
    assert first.cancelled()
    assert got is not None
    assert pool.engines[0].in_flight == 1


class PoolMachine(RuleBasedStateMachine):
    """Takes, releases, ejections, returns and cancellations in any order: no place is lost, none is given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.pool = pool_of(3, Health(failures=1, successes=1), max_in_flight=2)
        self.tasks: list[asyncio.Task[Lease | None]] = []
        self.leases: list[Lease] = []

    def turn(self) -> None:
        self.loop.run_until_complete(settle())
        for task in [t for t in self.tasks if t.done()]:
            self.tasks.remove(task)
            if not task.cancelled():
                lease = task.result()
                if lease is not None:
                    self.leases.append(lease)

    @rule(avoid=st.sets(st.integers(0, 2), max_size=2))
    def take(self, avoid: set[int]) -> None:
        self.tasks.append(self.loop.create_task(self.pool.take(tuple(self.pool.engines[i] for i in avoid))))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        lease.release()

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.tasks)).cancel()

    @rule(i=st.integers(0, 2), ok=st.booleans())
    def probe(self, i: int, ok: bool) -> None:
        self.pool.engines[i].probed(None if ok else "refused")

    @rule()
    def run(self) -> None:
        self.turn()

    @invariant()
    def limits_hold(self) -> None:
        assert all(0 <= e.in_flight <= e.limit for e in self.pool.engines)

    def teardown(self) -> None:
        self.turn()
        held = Counter(lease.engine for lease in self.leases)
        assert {e: e.in_flight for e in self.pool.engines if e.in_flight} == dict(held)
        assert self.pool.waiting == len(self.tasks)
        for lease in self.leases:
            lease.release()
        for engine in self.pool.engines:
            engine.probed(None)
        self.leases = []
        for _ in range(50):  # whoever still waits gets a place now
            self.turn()
            for lease in self.leases:
                lease.release()
            self.leases = []
        assert not self.tasks
        assert all(e.in_flight == 0 for e in self.pool.engines)
        self.loop.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- deployments and names


def test_decode_engines_without_prefill_are_combined_engines() -> None:
    deployment = fleet_of({"decode": urls(2), "combined": urls(1, 9000)}).deployments[0]
    assert [e.role for e in deployment.combined.engines] == ["combined"] * 3
    assert not deployment.decode
    assert deployment.decode.choose() is None
    assert not deployment.decode.healthy


def test_pools_of_a_deployment_are_as_configured_with_prefill() -> None:
    deployment = fleet_of({"encode": urls(1), "prefill": urls(2, 8100), "decode": urls(3, 8200)}).deployments[0]
    assert [len(p) for p in deployment.pools.values()] == [1, 2, 3, 0]
    assert [e.url for e in deployment.answering] == urls(3, 8200)


def test_encoders_have_the_limit_of_encode_legs_beside_their_own() -> None:
    encode = [{"url": urls(1)[0], "max_in_flight": 3}, {"url": urls(2)[1], "max_in_flight": 300}, urls(3)[2]]
    deployment = fleet_of(
        {"encode": encode, "combined": urls(1, 9000)}, limits={"encode_legs_per_engine": 32}
    ).deployments[0]
    assert [e.limit for e in deployment.encode.engines] == [3, 32, 32]
    assert not deployment.combined.engines[0].limited


def test_single_deployment_takes_no_name_and_an_empty_one() -> None:
    fleet = fleet_of({"name": "a", "combined": urls(1)})
    assert fleet.resolve(None) is fleet.resolve("") is fleet.resolve("a") is fleet.deployments[0]


def test_single_deployment_takes_any_name_until_one_is_known() -> None:
    fleet = fleet_of({"combined": urls(2)})
    assert fleet.resolve("whatever") is fleet.deployments[0]
    fleet.deployments[0].combined.engines[0].reported([card("m"), card("lora")])
    assert fleet.resolve("lora") is fleet.deployments[0]
    with pytest.raises(UnknownModel) as caught:
        fleet.resolve("whatever")
    assert (caught.value.name, caught.value.known) == ("whatever", ("lora", "m"))


def test_configured_name_alone_is_known_before_any_poll() -> None:
    fleet = fleet_of({"name": "a", "combined": urls(1)})
    with pytest.raises(UnknownModel):
        fleet.resolve("b")
    fleet.deployments[0].combined.engines[0].reported([card("a"), card("b")])
    assert fleet.resolve("b") is fleet.deployments[0]


def test_several_deployments_need_a_name_and_keep_theirs_apart() -> None:
    fleet = fleet_of({"name": "a", "combined": urls(1)}, {"name": "b", "combined": urls(1, 9000)})
    a, b = fleet.deployments
    with pytest.raises(ModelRequired) as caught:
        fleet.resolve(None)
    assert caught.value.known == ("a", "b")
    b.combined.engines[0].reported([card("a"), card("b"), card("alias")])
    a.combined.engines[0].reported([card("b"), card("alias")])
    assert fleet.resolve("a") is a  # configured beats reported
    assert fleet.resolve("b") is b
    assert fleet.resolve("alias") is a  # the first of equals
    with pytest.raises(UnknownModel):
        fleet.resolve("c")


def test_names_are_those_of_answering_engines_and_go_when_unloaded() -> None:
    fleet = fleet_of({"encode": urls(1), "prefill": urls(1, 8100), "decode": urls(2, 8200)})
    deployment = fleet.deployments[0]
    deployment.encode.engines[0].reported([card("encoder-only")])
    deployment.decode.engines[0].reported([card("m"), card("lora")])
    assert deployment.names == {"m", "lora"}
    assert deployment.label == "m"
    deployment.decode.engines[0].reported([card("other")])
    assert deployment.names == {"other"}
    assert deployment.label == "m", "series of a metric must not change their name"
    with pytest.raises(UnknownModel):
        fleet.resolve("lora")


def test_cards_are_the_engines_own_once_per_name_and_the_configured_one() -> None:
    fleet = fleet_of({"name": "a", "combined": urls(2)})
    one, two = fleet.deployments[0].combined.engines
    one.reported([{"id": "m", "max_model_len": 10}])
    two.reported([{"id": "m", "max_model_len": 20}, card("lora")])
    cards = {c["id"]: c for c in fleet.deployments[0].cards()}
    assert list(cards) == ["m", "lora", "a"]
    assert cards["m"]["max_model_len"] == 10


def test_find_gives_every_engine_at_an_address() -> None:
    fleet = fleet_of({"name": "a", "combined": [URL]}, {"name": "b", "combined": [URL]})
    assert len(fleet.find(URL + "/")) == 2
    assert fleet.find("http://nowhere:1") == []


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://h", ("http", "h", 80)),
        ("https://h", ("https", "h", 443)),
        ("http://H:8000", ("http", "h", 8000)),
        ("https://[::1]:8443", ("https", "::1", 8443)),
    ],
)
def test_origin_of_an_address(url: str, origin: tuple[str, str, int]) -> None:
    engine = Engine(EngineSettings(url=url), "combined", Health())
    assert (engine.origin.scheme, engine.origin.host, engine.origin.port) == origin


def test_repr_tells_people_what_matters() -> None:
    fleet = fleet_of({"name": "a", "encode": urls(1, 9000), "combined": [{"url": URL, "max_in_flight": 4}]})
    engine = fleet.deployments[0].combined.engines[0]
    engine.lease()
    assert repr(engine) == "<Engine combined http://10.0.0.1:8000: unknown, 1 of 4 in flight>"
    engine.probed("refused")
    assert repr(engine) == "<Engine combined http://10.0.0.1:8000: ejected (refused), 1 of 4 in flight>"
    assert repr(fleet) == (
        "<Fleet [<Deployment a: <Pool encode: 1 of 1 in service, 0 in flight>, "
        "<Pool combined: 0 of 1 in service, 1 in flight>>]>"
    )
