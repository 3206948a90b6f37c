"""A layout's pools as Serve applications: one deployment each, whose replicas lead slices."""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation
from ray.serve.schema import DeploymentStatus, ServeStatus

from actors.board import Board
from actors.embedding_cache import EmbeddingCache
from actors.errors import PipelineStartFailed
from actors.replica import PoolReplica
from actors.settings import PipelineSettings, PoolSettings
from cluster.layout import Layout, Pool
from cluster.placement import off_hosts

# Requests at a replica: one computes, the inputs of the next are on the devices, the results of the last leave. The
# encoder's come in three pieces.
ONGOING, ENCODER_ONGOING = 3, 8
HEALTH_S = 2.0
LEAVING_S = 3600.0  # a replica that is to go may finish what it has


def deploy(layout: Layout, settings: PipelineSettings) -> None:
    """Start all pools of a layout, and return when every one has the replicas that it must have at least.

    Needs a Ray cluster that this process has joined. Raises `PipelineStartFailed` when a pool can't be started; the
    others are ended then.
    """
    serve.start(proxy_location=ProxyLocation.Disabled)
    targets = [
        serve.RunTarget(_application(pool, settings), name=application(settings.name, pool.name), route_prefix=None)
        for pool in layout.pools
    ]
    try:
        serve.run_many(targets)
    except RuntimeError as error:
        reasons = _reasons(settings.name) or str(error)
        shut_down(settings.name)
        raise PipelineStartFailed(reasons) from None


def application(pipeline: str, pool: str) -> str:
    """Return the name of the Serve application of a pool."""
    return f"{pipeline}-{pool}"


def handle(pipeline: str, pool: str) -> Any:
    """Return the handle of a running pool."""
    return serve.get_app_handle(application(pipeline, pool))


def running(pipeline: str) -> list[str]:
    """Return the applications of a pipeline that run."""
    status: ServeStatus = serve.status()
    return sorted(name for name in status.applications if name.startswith(f"{pipeline}-"))


def _reasons(pipeline: str) -> str:
    """Return what Serve says of the pools that didn't start: the ends of their replicas' errors."""
    found = []
    for name in running(pipeline):
        for pool, state in serve.status().applications[name].deployments.items():
            if state.status != DeploymentStatus.HEALTHY:
                found.append(f"{pool}: {state.message.strip()[-2000:]}")
    return "\n".join(found)


def shut_down(pipeline: str) -> None:
    """End all pools of a pipeline, and what they share."""
    for name in running(pipeline):
        serve.delete(name)
    board = Board.find(pipeline)
    if board is not None:
        board.close()
    EmbeddingCache.connect(f"{pipeline}-embeddings").close()


def _application(pool: Pool, settings: PipelineSettings) -> Any:
    told = PoolSettings(pool.name, pool.slice.name, pool.stages, pool.mesh, settings)
    ongoing = ENCODER_ONGOING if "encoder" in pool.stages else ONGOING
    options: dict[str, Any] = {
        "name": pool.name,
        "max_ongoing_requests": ongoing,
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
    return serve.deployment(**options)(PoolReplica).bind(told)
