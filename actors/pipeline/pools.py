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
from actors.observe.status_actor import ReportedStatus, StatusActor, read_spec
from actors.pipeline.claim import claim_start
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.reliability import ReliabilitySettings, build_environment
from actors.slices.leader import SliceLeader
from cluster.footprints import LEADER
from cluster.gang.placement import select_off_hosts
from cluster.layout import Layout, Pool
from cluster.ray_private import knows_deployment

# A replica accepts every call at once, because Serve's own queue has no priorities. The number of requests is limited
# by a driver's callers, and the leader of a slice limits how many of them have arrays on its devices. This must stay
# below the thousand calls that Ray runs of an actor at a time, which include health checks.
MAX_CALLS = 900
POLL_S = 0.25
NEWS_S = 2.0  # If the status actor doesn't answer within this time, progress messages rely on Serve alone.
_HANDLE_S = 2.0  # If a handle hasn't learned of its pool's replicas after this time, another is opened.
# Turns HAProxy off for the first deployment of an application that answers no HTTP. Where Serve runs HAProxy, the
# deployment would otherwise listen.
NO_HTTP = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}

OnStatus = Callable[[str], object]


def deploy(spec: PipelineSpec, *, on_status: OnStatus = lambda text: None) -> None:
    """Start all pools, and return when every one has at least its minimum of replicas.

    This process must have joined a Ray cluster.

    Args:
        on_status: Called repeatedly with a line that says what is being waited for.

    Raises:
        PipelineExists: A pipeline of that name exists already, or is being brought up.
        PipelineStartFailed: A pool can't be started. All pools have been shut down again.
    """
    with claim_start(spec.settings.name):
        _deploy(spec, on_status)


def _deploy(spec: PipelineSpec, on_status: OnStatus) -> None:
    name, settings, pools = spec.settings.name, spec.settings, spec.layout.pools
    if list_applications(name):
        raise PipelineExists(
            f"a pipeline {name!r} runs on this cluster already; use it, take it down "
            f"(wan-tpu pipeline down --name {name}), or choose another name"
        )
    on_status("starting Ray Serve")
    StatusActor.create(name, spec)
    _quieten_serve()
    serve.start(proxy_location=ProxyLocation.Disabled)
    try:
        targets = [
            serve.RunTarget(
                build_application(pool, settings), name=name_application(name, pool.name), route_prefix=None
            )
            for pool in pools
        ]
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        wait_until_up(spec, on_status)
    except BaseException:
        # Replicas are killed, because one that is still starting can't be asked to end. All of them belong to this
        # command: none existed before, and the claim on the name has kept other commands from starting any.
        shut_down(name, drain_s=0)
        raise


def wait_until_up(spec: PipelineSpec, on_status: OnStatus) -> None:
    """Return when every pool has at least its minimum of replicas; raise `PipelineStartFailed`.

    Serve knows when that is so. The status actor adds what each replica is doing, and which failures are final.
    """
    status = StatusActor.find(spec.settings.name)
    applications = {pool.name: name_application(spec.settings.name, pool.name) for pool in spec.layout.pools}
    earlier: Set[str] | None = None  # Replicas that were refused in an earlier start, when the pipeline ran before.
    while True:
        news = None if status is None else status.read_or_none(NEWS_S)
        reported = news or ReportedStatus()
        if news is not None:
            refusals = {name: replica for name, replica in news.replicas.items() if replica.activity == "refused"}
            if earlier is None:
                earlier = set(refusals)
            if new := [replica for name, replica in refusals.items() if name not in earlier]:
                # Serve would try three times, although every try would be refused.
                raise PipelineStartFailed(f"pool {new[0].pool}: {new[0].detail}")
        present = serve.status().applications
        if missing := [pool for pool, name in applications.items() if name not in present]:
            raise PipelineStartFailed(f"pool {', '.join(missing)}: it was taken down before it was ready")
        states = {pool: present[name] for pool, name in applications.items()}
        for name, state in states.items():
            if state.status == ApplicationStatus.DEPLOY_FAILED:
                raise PipelineStartFailed(f"pool {name}: {_find_failure(name, reported) or state.message}")
        ready = {name for name, state in states.items() if state.status == ApplicationStatus.RUNNING}
        if len(ready) == len(states):
            return
        note = "" if news is not None else " (the status actor doesn't answer)"
        on_status(" · ".join(_describe_start(pool, reported, pool in ready) for pool in states) + note)
        time.sleep(POLL_S)


def name_application(pipeline: str, pool: str) -> str:
    return f"{pipeline}-{pool}"


def open_handle(pipeline: str, pool: str, attempts: int = ReliabilitySettings.handle_attempts) -> Any:
    """Return a handle to a running pool that no other caller uses.

    Serve shares one handle within a process. If one driver shut that down, it would stop reporting the load of the
    other drivers to the pool.

    Args:
        attempts: The most handles to open, one after the other, until one learns which replicas the pool has.

    Raises:
        PipelineStartFailed: No handle learned which replicas the pool has.
    """
    _quieten_serve()
    shared = serve.get_deployment_handle(pool, name_application(pipeline, pool))  # Raises where there is no such pool.
    for _ in range(attempts):
        handle: Any = DeploymentHandle(shared.deployment_name, shared.app_name)
        if _learns_of_pool(handle):
            return handle
        handle.shutdown()
    raise PipelineStartFailed(f"pool {pool}: Ray Serve doesn't report its replicas; it may still be starting")


def _learns_of_pool(handle: Any) -> bool:
    """Wait until a handle knows its deployment, which takes milliseconds; return whether it does.

    Serve may never tell it, and then every call waits forever. All handles of a process share one listener, and its
    first update stops the handle's own listener. If that update is about the replicas alone, the handle never hears
    about the deployment.
    """
    handle.options()  # Creates its router.
    until = time.monotonic() + _HANDLE_S
    while not (knows := knows_deployment(handle)) and time.monotonic() < until:
        time.sleep(0.005)
    return knows


def find_spec(pipeline: str) -> PipelineSpec | None:
    """Return the specification of a pipeline on this cluster, or None when there is none of that name."""
    return read_spec(pipeline) if list_applications(pipeline) else None


def list_applications(pipeline: str) -> list[str]:
    status: ServeStatus = serve.status()
    return sorted(
        name
        for name, application in status.applications.items()
        if any(name == name_application(pipeline, pool) for pool in application.deployments)
    )


def list_live_replicas(pipeline: str, layout: Layout) -> set[str]:
    """Return the names of replicas whose processes are alive, in the form that the status uses."""
    pools = {f"SERVE_REPLICA::{name_application(pipeline, pool.name)}#{pool.name}#": pool.name for pool in layout.pools}
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return {
        f"{pool}/{name.removeprefix(start)}"
        for name in names
        for start, pool in pools.items()
        if name.startswith(start)
    }


def shut_down(pipeline: str, *, drain_s: float = ReliabilitySettings.finish_s) -> None:
    """End a pipeline's pools, and its status actor. Replicas that have requests after `drain_s` are killed."""
    _quieten_serve()
    applications, status = list_applications(pipeline), StatusActor.find(pipeline)
    for name in applications:
        serve.delete(name, _blocking=False)
    until = time.monotonic() + drain_s
    while set(applications) & set(serve.status().applications):
        if time.monotonic() > until:
            _kill_replicas(applications)
        time.sleep(POLL_S)
    if status is not None:
        status.close()  # Not looked up by name again: another pipeline may have taken the name by now.


def build_application(pool: Pool, settings: PipelineSettings) -> Any:
    reliability = settings.reliability
    options: dict[str, Any] = {
        "name": pool.name,
        "max_ongoing_requests": MAX_CALLS,
        "request_router_config": {"request_router_class": "actors.slices.router:LeastLoadedRouter"},
        "health_check_period_s": reliability.health_s,
        "health_check_timeout_s": 2 * reliability.heartbeat_s,
        "graceful_shutdown_timeout_s": reliability.finish_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "ray_actor_options": LEADER.build_ray_options() | {"label_selector": select_off_hosts()},
    }
    if variables := build_environment(reliability):
        options["ray_actor_options"]["runtime_env"] = {"env_vars": variables}  # The leader's hosts inherit these.
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
            policy=AutoscalingPolicy(policy_function="actors.slices.autoscaling:count_replicas_needed"),
        )
    never = AutoscalingConfig(min_replicas=0, initial_replicas=0, max_replicas=1)
    first = serve.deployment(name=f"first-of-{pool.name}", autoscaling_config=never, ray_actor_options={"num_cpus": 0})
    return first(_Unused).bind(serve.deployment(**options)(SliceLeader).bind(pool, settings))


class _Unused:
    """The first deployment of a pool's application. It is never called and never has a replica.

    HTTP requests go to the first deployment, and where Serve runs HAProxy it may have no router of its own (Ray 2.60).
    """

    def __init__(self, pool: Any) -> None:
        """Take the pool's deployment as an argument, which is how Serve adds it to the application."""


def _quieten_serve() -> None:
    """Keep Serve's log of its own work off the user's screen."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def _kill_replicas(applications: list[str]) -> None:
    """End replicas at once; their slices end with them."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if any(actor["name"].startswith(f"SERVE_REPLICA::{name}#") for name in applications):
            with contextlib.suppress(ValueError):  # The replica has ended already.
                ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))


def _find_failure(pool: str, reported: ReportedStatus) -> str | None:
    """Return why the latest failed replica of a pool has failed, or None."""
    replicas = [replica for replica in reported.replicas.values() if replica.pool == pool]
    failed = [replica for replica in replicas if replica.activity in ("failed", "refused")]
    return max(failed, key=lambda replica: replica.since).detail if failed else None


def _describe_start(pool: str, reported: ReportedStatus, ready: bool) -> str:
    replicas = [replica for replica in reported.replicas.values() if replica.pool == pool]
    lines = dict.fromkeys(
        "started" if replica.activity == "idle" else str(replica)
        for replica in replicas
        if replica.activity != "failed"
    )
    return f"{pool}: {'ready' if ready else ', '.join(lines) or 'starting'}"
