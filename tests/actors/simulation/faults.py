"""The faults of a simulated run, one function each. A fault does nothing if there is nothing to break."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.actors.simulation.serve import PoolOfReplicas, Replica

if TYPE_CHECKING:
    from tests.actors.simulation.scenario import Run


def break_something(run: "Run") -> None:
    """Cause one random fault, either in a random replica or in something that all processes share."""
    chance = run.world.random
    pool = run.pools[chance.choice(sorted(run.pools))]
    replica = chance.choice(pool.replicas)
    chance.choice(_FAULTS)(run, pool, replica)


def drain(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    if replica.slice_name not in pool.deadlines:
        run.was_drained = True
        pool.drain(replica, run.world.random.choice((2.0, 8.0, 12.0, 30.0, 90.0)))


def let_replica_go(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    pool.let_go(replica)


def kill_leader(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    replica.kill("somebody kills it")


def kill_hosts(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    if replica.slice is not None:
        run.world.tell(f"hosts of {replica.slice_name} are killed")
        pool.lose(replica, "its hosts were killed")


def fail_devices(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    if replica.slice is not None:
        replica.slice.next_fault = "device"


def hang_devices(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    if replica.slice is not None:
        replica.slice.next_fault = "hang"


def fill_disk(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    if replica.slice is not None:
        run.world.tell(f"the disk of {replica.slice_name} is full")
        replica.slice.is_sick = True


def stop_bucket(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    _set_bucket(run, "is_down", True, False, "down")


def fill_bucket(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    _set_bucket(run, "is_full", True, False, "full")


def slow_bucket(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    _set_bucket(run, "seconds", run.world.random.choice((2.0, 20.0)), 0.02, "slow")


def silence_ref_store(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    driver, lasts_s = run.world.random.choice(run.drivers), _lasts_s(run)
    run.world.tell(f"the reference store of {driver.process.name} is silent for {lasts_s:.0f} s")
    driver.handle.silent_until_s = run.world.loop.now + lasts_s


def kill_driver(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    run.kill_driver(run.world.random.randrange(len(run.drivers)))


def set_wall_clock(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    run.world.loop.wall_offset_s += run.world.random.choice((-3600.0, -5.0, 5.0, 3600.0))
    run.world.tell("the clock on the wall is set")


def silence_ray(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    lasts_s = _lasts_s(run)
    run.world.tell(f"Ray's control store is silent for {lasts_s:.0f} s")
    run.world.ray_is_silent_until_s = run.world.loop.now + lasts_s


def evict_payloads(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    scopes = [scope for driver in run.drivers for scope in driver.ref_store._scopes.items()]
    if scopes:
        number, refs = run.world.random.choice(scopes)
        run.world.tell(f"payloads of scope {number} are evicted")
        for ref in refs.values():
            ref.is_evicted = True
        run.excuse_all("payloads were evicted")


def stop_hub(run: "Run", pool: PoolOfReplicas, replica: Replica) -> None:
    run.world.hub_is_down = True
    run.world.later(_lasts_s(run), functools.partial(setattr, run.world, "hub_is_down", False))


def _set_bucket(run: "Run", attribute: str, value: float, afterwards: float, state: str) -> None:
    lasts_s = _lasts_s(run)
    run.world.tell(f"the bucket is {state} for {lasts_s:.0f} s")
    setattr(run.bucket, attribute, value)
    run.bucket.was_ill = True
    run.world.later(lasts_s, functools.partial(setattr, run.bucket, attribute, afterwards))


def _lasts_s(run: "Run") -> float:
    return run.world.random.uniform(1, 30)


_FAULTS: tuple[Callable[["Run", PoolOfReplicas, Replica], None], ...] = (
    drain,
    drain,
    drain,
    let_replica_go,
    kill_leader,
    kill_hosts,
    fail_devices,
    hang_devices,
    fill_disk,
    stop_bucket,
    slow_bucket,
    fill_bucket,
    silence_ref_store,
    kill_driver,
    set_wall_clock,
    set_wall_clock,
    silence_ray,
    evict_payloads,
    stop_hub,
)
