"""A pipeline's pools as Serve applications: one deployment each, whose replicas lead slices."""

import contextlib
import logging
import time
from collections.abc import Callable, Set
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ServeStatus

from actors.errors import PipelineExists, PipelineStartFailed
from actors.observe.status_actor import ReplicaStatus, ReportedStatus, StatusActor, kept_spec
from actors.pipeline.claim import claimed
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.slices.leader import SliceLeader
from cluster.gang.placement import off_hosts
from cluster.layout import Layout, Pool
from cluster.ray_private import knows_deployment

# Calls a replica takes: all that come, since Serve's own queue knows no priorities. Whoever calls a driver bounds the
# requests, and the leader of a slice how many of them have arrays on its devices.
MAX_CALLS = 900  # Ray runs a thousand calls of an actor at a time: health checks are among them.
HEALTH_S = 2.0
LEAVING_S = 3600.0  # a replica that is to go may finish what it has
POLL_S = 0.25
NEWS_S = 2.0  # A status actor that is silent for so long has no news; what is waited for comes from Serve.
_TOLD_S, _HANDLES = 2.0, 10  # that a handle may take to learn of its pool, and how often it is made anew
# For the first deployment of an application that answers no HTTP: where Serve runs HAProxy, it would listen.
NO_HTTP = {"env_vars": {"RAY_SERVE_ENABLE_HA_PROXY": "0"}}

Tell = Callable[[str], object]


def deploy(spec: PipelineSpec, *, tell: Tell = lambda text: None) -> None:
    """Start all pools, and return when every one has the replicas that it must have at least.

    tell  given a line, again and again, that says what is being waited for

    Needs a Ray cluster that this process has joined. Raises `PipelineExists` when one of that name is there, or being
    brought up, `PipelineStartFailed` when a pool can't be started: nothing of it is left then.
    """
    with claimed(spec.settings.name):
        _deploy(spec, tell)


def _deploy(spec: PipelineSpec, tell: Tell) -> None:
    name, settings, pools = spec.settings.name, spec.settings, spec.layout.pools
    if running(name):
        raise PipelineExists(
            f"a pipeline {name!r} is on this cluster already; use it, take it down "
            f"(wan-tpu pipeline down --name {name}), or choose another name"
        )
    tell("starting Ray Serve")
    StatusActor.create(name, spec)
    _quiet()
    serve.start(proxy_location=ProxyLocation.Disabled)
    try:
        targets = [
            serve.RunTarget(pool_application(pool, settings), name=application(name, pool.name), route_prefix=None)
            for pool in pools
        ]
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        wait_until_up(spec, tell)
    except BaseException:
        # A replica that is starting can't be asked to leave. Nobody else's is shut down: none ran when this began, and
        # nobody else can have begun since.
        shut_down(name, drain_s=0)
        raise


def wait_until_up(spec: PipelineSpec, tell: Tell) -> None:
    """Return when every pool has the replicas that it must have at least; raises `PipelineStartFailed`.

    Serve says when that is. The status actor adds what each replica does, and what would be refused again.
    """
    status = StatusActor.find(spec.settings.name)
    applications = {pool.name: application(spec.settings.name, pool.name) for pool in spec.layout.pools}
    known: Set[str] | None = None  # Replicas that were refused in an earlier start, when the pipeline ran before.
    while True:
        news = None if status is None else status.latest(NEWS_S)
        seen = news or ReportedStatus()
        if news is not None:
            refused = _refused(news)
            if known is None:
                known = set(refused)
            if new := [replica for name, replica in refused.items() if name not in known]:
                # It would be refused again, and Serve tries three times.
                raise PipelineStartFailed(f"pool {new[0].pool}: {new[0].detail}")
        found = serve.status().applications
        if gone := [pool for pool, name in applications.items() if name not in found]:
            raise PipelineStartFailed(f"pool {', '.join(gone)}: taken down meanwhile")
        states = {pool: found[name] for pool, name in applications.items()}
        for name, state in states.items():
            if state.status == ApplicationStatus.DEPLOY_FAILED:
                raise PipelineStartFailed(f"pool {name}: {_failure(name, seen) or state.message}")
        ready = {name for name, state in states.items() if state.status == ApplicationStatus.RUNNING}
        if len(ready) == len(states):
            return
        note = "" if news is not None else " (the status actor doesn't answer)"
        tell(" · ".join(_starting(pool, seen, pool in ready) for pool in states) + note)
        time.sleep(POLL_S)


def application(pipeline: str, pool: str) -> str:
    """Return the name of the Serve application of a pool."""
    return f"{pipeline}-{pool}"


def handle(pipeline: str, pool: str) -> Any:
    """Return a handle of a running pool, the caller's own.

    Serve keeps one for the whole process: shut down by one driver, it would tell the pool of no load any more.
    """
    _quiet()
    shared = serve.get_deployment_handle(pool, application(pipeline, pool))  # raises where there is none
    for _ in range(_HANDLES):
        made: Any = DeploymentHandle(shared.deployment_name, shared.app_name)
        if _told(made):
            return made
        made.shutdown()
    raise PipelineStartFailed(f"pool {pool}: Ray Serve doesn't say which replicas it has; it may be starting")


def _told(made: Any) -> bool:
    """Whether a handle has learnt of its deployment, which takes milliseconds.

    Serve may leave it without for ever, and every call waiting: the first news that the process's common listener has
    stop the handle's own, also news of the replicas alone, and of the deployment there is none to come.
    """
    made.options()  # makes its router
    until = time.monotonic() + _TOLD_S
    while not (told := knows_deployment(made)) and time.monotonic() < until:
        time.sleep(0.005)
    return told


def find_spec(pipeline: str) -> PipelineSpec | None:
    """Return what is known of a pipeline that is on this cluster, None when there is none of that name."""
    return kept_spec(pipeline) if running(pipeline) else None


def running(pipeline: str) -> list[str]:
    """Return the applications of a pipeline that run."""
    status: ServeStatus = serve.status()
    return sorted(
        name
        for name, found in status.applications.items()
        if any(name == application(pipeline, pool) for pool in found.deployments)
    )


def live_replicas(pipeline: str, layout: Layout) -> set[str]:
    """Return the names, as the status has them, of replicas whose process lives."""
    pools = {f"SERVE_REPLICA::{application(pipeline, pool.name)}#{pool.name}#": pool.name for pool in layout.pools}
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return {
        f"{pool}/{name.removeprefix(start)}"
        for name in names
        for start, pool in pools.items()
        if name.startswith(start)
    }


def shut_down(pipeline: str, *, drain_s: float = LEAVING_S) -> None:
    """End all pools of a pipeline, and its status actor.

    drain_s  how long they may finish what they have; after that their replicas are killed
    """
    _quiet()
    found, status = running(pipeline), StatusActor.find(pipeline)
    for name in found:
        serve.delete(name, _blocking=False)
    until = time.monotonic() + drain_s
    while set(found) & set(serve.status().applications):
        if time.monotonic() > until:
            _kill_replicas(found)
        time.sleep(POLL_S)
    if status is not None:
        status.close()  # this one: somebody may bring up another pipeline of that name by now


def pool_application(pool: Pool, settings: PipelineSettings) -> Any:
    """Return the Serve application of a pool."""
    options: dict[str, Any] = {
        "name": pool.name,
        "max_ongoing_requests": MAX_CALLS,
        "request_router_config": {"request_router_class": "actors.slices.router:LeastLoadedRouter"},
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
            policy=AutoscalingPolicy(policy_function="actors.slices.autoscaling:replicas_needed"),
        )
    never = AutoscalingConfig(min_replicas=0, initial_replicas=0, max_replicas=1)
    first = serve.deployment(name=f"first-of-{pool.name}", autoscaling_config=never, ray_actor_options={"num_cpus": 0})
    return first(_First).bind(serve.deployment(**options)(SliceLeader).bind(pool, settings))


class _First:
    """The first deployment of a pool's application: nobody calls it, and it never has a replica.

    The first one is what HTTP comes to, and where Serve runs HAProxy it may have no router of its own (Ray 2.60).
    """

    def __init__(self, pool: Any) -> None:
        """pool: the deployment that is called."""


def _quiet() -> None:
    """Keep Serve's notes on its own doings off a person's screen."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def _kill_replicas(applications: list[str]) -> None:
    """End replicas at once; their slices end with them."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if any(actor["name"].startswith(f"SERVE_REPLICA::{name}#") for name in applications):
            with contextlib.suppress(ValueError):  # gone already
                ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))


def _refused(seen: ReportedStatus) -> dict[str, ReplicaStatus]:
    return {name: replica for name, replica in seen.replicas.items() if replica.activity == "refused"}


def _failure(pool: str, seen: ReportedStatus) -> str | None:
    """Return why a replica of the pool has failed, the latest one."""
    failed = [one for one in seen.replicas.values() if one.pool == pool and one.activity in ("failed", "refused")]
    return max(failed, key=lambda one: one.since).detail if failed else None


def _starting(pool: str, seen: ReportedStatus, ready: bool) -> str:
    mine = [one for one in seen.replicas.values() if one.pool == pool and one.activity != "failed"]
    shown = dict.fromkeys("started" if one.activity == "idle" else str(one) for one in mine)
    return f"{pool}: {'ready' if ready else ', '.join(shown) or 'starting'}"
