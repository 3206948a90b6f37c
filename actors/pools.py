"""A layout's pools as Serve applications: one deployment each, whose replicas lead slices."""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation
from ray.serve.schema import ApplicationStatus, ServeStatus

from actors.board import Board, ReplicaSeen
from actors.embedding_cache import EmbeddingCache
from actors.errors import PipelineExists, PipelineStartFailed
from actors.line import Line
from actors.replica import FAILED, REFUSED, PoolReplica
from actors.settings import About, PipelineSettings, PoolSettings
from actors.stepping import HELD_STILL
from cluster.layout import Layout, Pool
from cluster.placement import off_hosts

# Requests at a replica beside those that compute: the inputs of the next are on the devices, the results of the last
# leave. The encoder's come in three pieces.
BESIDE, ENCODER_BESIDE = 2, 7
HEALTH_S = 2.0
LEAVING_S = 3600.0  # a replica that is to go may finish what it has
POLL_S = 0.25
# For the first deployment of an application that answers no HTTP: where Serve runs HAProxy, it would listen.
NO_HTTP = {"env_vars": {"RAY_SERVE_ENABLE_HA_PROXY": "0"}}

Tell = Callable[[str], object]


def deploy(layout: Layout, settings: PipelineSettings, *, lasting: bool = True, tell: Tell = lambda text: None) -> None:
    """Start all pools of a layout, and return when every one has the replicas that it must have at least.

    lasting  whether it is meant to stay when this process ends
    tell     told in a line, again and again, what is being waited for

    Needs a Ray cluster that this process has joined. Raises `PipelineExists` when one of that name is there,
    `PipelineStartFailed` when a pool can't be started: nothing of it is left then.
    """
    if running(settings.name):
        raise PipelineExists(
            f"a pipeline {settings.name!r} is on this cluster already; use it, take it down "
            f"(wan-tpu pipeline down --name {settings.name}), or choose another name"
        )
    tell("starting Ray Serve")
    Board.create(settings.name, About(layout, settings, lasting))
    _quiet()
    serve.start(proxy_location=ProxyLocation.Disabled)
    try:
        serve.run_many(
            [
                serve.RunTarget(
                    pool_application(pool, settings), name=application(settings.name, pool.name), route_prefix=None
                )
                for pool in layout.pools
            ],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        wait_until_up(layout, settings.name, tell)
    except BaseException:
        shut_down(settings.name, drain_s=0)  # a replica that is starting can't be asked to leave
        raise


def wait_until_up(layout: Layout, pipeline: str, tell: Tell = lambda text: None) -> None:
    """Return when every pool has the replicas that it must have at least; raises `PipelineStartFailed`."""
    board = Board.connect(pipeline)
    while True:
        seen = board.seen().replicas
        refused = next((replica for replica in seen.values() if replica.doing.startswith(REFUSED)), None)
        if refused is not None:  # what would be refused again: Serve tries three times
            raise PipelineStartFailed(f"pool {refused.pool}: {refused.doing.removeprefix(REFUSED)}")
        found = serve.status().applications
        gone = [pool.name for pool in layout.pools if application(pipeline, pool.name) not in found]
        if gone:
            raise PipelineStartFailed(f"pool {', '.join(gone)}: taken down meanwhile")
        states = {pool.name: found[application(pipeline, pool.name)] for pool in layout.pools}
        for name, state in states.items():
            if state.status == ApplicationStatus.DEPLOY_FAILED:
                raise PipelineStartFailed(f"pool {name}: {_failure(name, list(seen.values())) or state.message}")
        if all(state.status == ApplicationStatus.RUNNING for state in states.values()):
            return
        ready = {name for name, state in states.items() if state.status == ApplicationStatus.RUNNING}
        tell(" · ".join(_starting(pool.name, list(seen.values()), pool.name in ready) for pool in layout.pools))
        time.sleep(POLL_S)


def line(pool: Pool) -> Line:
    """Return the line of requests for the steps of an expert's pool.

    Serve's own queue knows no priorities, so what the slices can't take waits here, and a place at each is kept for
    what is more urgent. A pool that is smaller than it may become has Serve's queue besides, from which it grows.
    """
    slices = pool.replicas.maximum
    return Line(slices * (pool.batch + BESIDE), slices * HELD_STILL)


def application(pipeline: str, pool: str) -> str:
    """Return the name of the Serve application of a pool."""
    return f"{pipeline}-{pool}"


def handle(pipeline: str, pool: str) -> Any:
    """Return the handle of a running pool."""
    _quiet()
    return serve.get_deployment_handle(pool, application(pipeline, pool))


def about(pipeline: str) -> About | None:
    """Return what is known of a pipeline that is on this cluster, None when there is none of that name."""
    board = Board.find(pipeline) if running(pipeline) else None
    return None if board is None else board.about()


def running(pipeline: str) -> list[str]:
    """Return the applications of a pipeline that run."""
    status: ServeStatus = serve.status()
    return sorted(
        name
        for name, found in status.applications.items()
        if any(name == application(pipeline, pool) for pool in found.deployments)
    )


def living(pipeline: str, layout: Layout) -> set[str]:
    """Return the names, as the board has them, of replicas whose process lives."""
    pools = {f"SERVE_REPLICA::{application(pipeline, pool.name)}#{pool.name}#": pool.name for pool in layout.pools}
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return {
        f"{pool}/{name.removeprefix(start)}"
        for name in names
        for start, pool in pools.items()
        if name.startswith(start)
    }


def shut_down(pipeline: str, *, drain_s: float = LEAVING_S) -> None:
    """End all pools of a pipeline, and what they share.

    drain_s  how long they may finish what they have; after that their replicas are killed
    """
    _quiet()
    found = running(pipeline)
    for name in found:
        serve.delete(name, _blocking=False)
    until = time.monotonic() + drain_s
    while set(found) & set(serve.status().applications):
        if time.monotonic() > until:
            _kill_replicas(found)
        time.sleep(POLL_S)
    board = Board.find(pipeline)
    if board is not None:
        board.close()
    EmbeddingCache.connect(f"{pipeline}-embeddings").close()


def _quiet() -> None:
    """Keep Serve's notes on its own doings off a person's screen."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def _kill_replicas(applications: list[str]) -> None:
    """End replicas at once; their slices end with them."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if any(actor["name"].startswith(f"SERVE_REPLICA::{name}#") for name in applications):
            with contextlib.suppress(ValueError):  # gone already
                ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))


def _failure(pool: str, replicas: list[ReplicaSeen]) -> str | None:
    """Return why a replica of the pool has failed, the latest one."""
    failed = [seen for seen in replicas if seen.pool == pool and seen.doing.startswith(FAILED)]
    return max(failed, key=lambda seen: seen.since).doing.removeprefix(FAILED) if failed else None


def _starting(pool: str, replicas: list[ReplicaSeen], ready: bool) -> str:
    mine = [seen for seen in replicas if seen.pool == pool and not seen.doing.startswith(FAILED)]
    doing = "ready" if ready else ", ".join(dict.fromkeys(seen.doing for seen in mine)) or "starting"
    return f"{pool}: {'started' if doing == 'idle' else doing}"


def pool_application(pool: Pool, settings: PipelineSettings) -> Any:
    """Return the Serve application of a pool."""
    told = PoolSettings(pool.name, pool.slice.name, pool.stages, pool.mesh, settings, pool.batch)
    ongoing = pool.batch + HELD_STILL + (ENCODER_BESIDE if "encoder" in pool.stages else BESIDE)
    options: dict[str, Any] = {
        "name": pool.name,
        "max_ongoing_requests": ongoing,
        "request_router_config": {"request_router_class": "actors.routing:FewestCalls"},
        "max_queued_requests": settings.in_flight * 4,  # a request is at most at three calls at a time
        "health_check_period_s": HEALTH_S,
        "health_check_timeout_s": 2 * settings.timeouts.heartbeat_s,
        "graceful_shutdown_timeout_s": LEAVING_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "ray_actor_options": {"num_cpus": 0.1, "label_selector": off_hosts()},
    }
    if pool.replicas.minimum == pool.replicas.maximum:
        options["num_replicas"] = pool.replicas.minimum
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=pool.replicas.minimum,
            max_replicas=pool.replicas.maximum,
            initial_replicas=pool.replicas.minimum,
            target_ongoing_requests=1,
            upscale_delay_s=settings.scale_up_s,
            downscale_delay_s=settings.scale_down_s,
            look_back_period_s=settings.scale_look_s,
            metrics_interval_s=settings.scale_look_s / 3,
            policy=AutoscalingPolicy(policy_function="actors.scaling:replicas_needed"),
        )
    never = AutoscalingConfig(min_replicas=0, initial_replicas=0, max_replicas=1)
    first = serve.deployment(name=f"first-of-{pool.name}", autoscaling_config=never, ray_actor_options={"num_cpus": 0})
    return first(_First).bind(serve.deployment(**options)(PoolReplica).bind(told))


class _First:
    """The first deployment of a pool's application: nobody calls it, and it never has a replica.

    The first one is what HTTP comes to, and where Serve runs HAProxy it may have no router of its own (Ray 2.60).
    """

    def __init__(self, pool: Any) -> None:
        """pool: the deployment that is called."""
