"""Three slices that each host the whole pipeline, simulated: which of them gets a request."""

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from ray import serve
from ray.serve._private.router import AsyncioRouter

from actors.observe.status_actor import StatusActor
from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import deploy, shut_down, wait_until_up
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.reliability import ReliabilitySettings
from cluster.connect import connect, leave
from cluster.emulation import ray_nodes
from cluster.gang.placement import select_off_hosts
from cluster.inventory import list_slices
from cluster.layout import Layout
from scripts.simulation import measure
from scripts.simulation.simulated import MODEL, Planned
from tests.conftest import PHOTO, STAGES
from tests.waiting import wait_for
from wan_tpu import GenerationRequest

SLICES = 3
STEPS, STEP_S = 10, 0.1
KNOWN_S = 1.0  # after which all know which shapes a replica holds; it says so ten times a second
LAYOUT = Layout.parse(
    f"""
emulate: {{devices_per_host: 1}}
pools:
  whole: {{stages: [{", ".join(STAGES)}], slice: v6e-1, replicas: {{min: {SLICES}, max: {SLICES}}}}}
""",
    "the test's layout",
)
REQUEST = GenerationRequest(prompt="A cat", image=PHOTO, height=64, width=64, frames=9, steps=STEPS)

pytestmark = pytest.mark.long  # The simulation has the same router in `make test`.


@pytest.fixture(scope="module")
def running(three_slices, tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    plan = Planned(0.0, 0.0, STEP_S, 0.0, text=(1, 8, 4), mp4_bytes=1000).save(folder / "plan.json")
    host_class = "tests.actors.slices.sick_host:SickHost"
    settings = PipelineSettings(
        str(plan),
        str(folder / "snapshots"),
        chips="simulated",
        host_class=host_class,
        reliability=ReliabilitySettings(hung_s=4, storage_s=300),
    )
    spec = PipelineSpec(LAYOUT, settings, MODEL, lasting=True)
    connect(three_slices.address)
    try:
        deploy(spec)
        yield spec, three_slices
        shut_down(settings.name)
    finally:
        leave()


@contextlib.contextmanager
def driven(spec):
    """Give a function that makes videos at once, and returns the spans of them all."""

    async def make_all(requests):
        async with asyncio.timeout(120):
            numbered = {str(i): request for i, request in enumerate(requests)}
            load, _ = await measure.run(pipeline, numbered, in_flight=len(requests))
        return load

    def spans_of(*requests):
        return runner.run(make_all(requests)).spans

    with asyncio.Runner() as runner, contextlib.closing(PipelineDriver(spec)) as pipeline:
        yield spans_of


@pytest.fixture(scope="module")
def spans_of(running):
    with driven(running[0]) as spans_of:
        yield spans_of


@pytest.fixture(scope="module")
def slices_of(spans_of):
    """A function that makes videos at once, and returns the slice that has denoised each."""

    def find_slices(*requests):
        slices = {span.request: span.slice for span in spans_of(*requests) if span.step is not None}
        return [slices[str(i)] for i in range(len(requests))]

    return find_slices


def test_hosts_follow_the_time_out_of_storage(running):
    replicas = StatusActor.connect(running[0].settings.name).read().replicas.values()
    assert [replica.software for replica in replicas] == [{"outage_s": "300"}] * SLICES


def test_an_idle_slice_is_taken_before_a_busy_one_that_holds_the_shape(slices_of):
    slices_of(REQUEST)
    time.sleep(KNOWN_S)
    assert len(set(slices_of(*[REQUEST] * SLICES))) == SLICES


def test_of_idle_slices_one_that_holds_the_shape_is_taken(slices_of):
    shapes = [dataclasses.replace(REQUEST, width=64 + 32 * i) for i in range(1, 1 + SLICES)]
    slices = slices_of(*shapes)
    assert len(set(slices)) == SLICES
    time.sleep(KNOWN_S)
    assert [slices_of(shape)[0] for shape in shapes] == slices


def test_first_span_of_a_call_says_why_its_slice_was_chosen(spans_of, slices_of, caplog):
    slices_of(REQUEST)
    time.sleep(KNOWN_S)
    caplog.set_level(logging.INFO, "actors.slices.router")

    def find_spans():
        """Return a request's spans by stage, if all replicas answered in time when it was routed."""
        by_stage = {}
        for span in sorted(spans_of(REQUEST), key=lambda span: span.start_s):
            by_stage.setdefault(span.stage, []).append(span)
        return None if any("that answered" in spans[0].chosen for spans in by_stage.values()) else by_stage

    by_stage = wait_for(find_spans)
    for stage in ("denoise_high", "decoder"):
        first, *rest = by_stage[stage]
        assert first.chosen == "0 calls, others 0; holds the program"
        assert not any(span.chosen for span in rest)
    logged = [record.fields for record in caplog.records if record.message == "goes to"]
    chosen = {"job": "0", "slice": by_stage["decoder"][0].slice, "why": "0 calls, others 0; holds the program"}
    assert chosen in logged


@pytest.mark.thorough
def test_many_at_once_are_spread_evenly(running):
    """They come within milliseconds: the replicas themselves don't know yet what each is about to get."""

    @serve.deployment(
        num_replicas=SLICES,
        max_ongoing_requests=9,
        request_router_config={"request_router_class": "actors.slices.router:LeastLoadedRouter"},
        ray_actor_options={"num_cpus": 0.1, "label_selector": select_off_hosts()},
    )
    class Sleeper:
        async def __call__(self):
            await asyncio.sleep(3)  # until all have come, on a busy machine too
            return serve.get_replica_context().replica_id.unique_id

    sleepers = serve.run(Sleeper.bind(), name="sleepers", route_prefix=None)
    calls = [sleepers.remote() for _ in range(3 * SLICES)]
    assert set(Counter(call.result(timeout_s=60) for call in calls).values()) == {3}
    serve.delete("sleepers")


def test_a_handle_that_never_learns_of_its_pool_is_made_anew(running, monkeypatch):
    """As happened when the replicas changed in the milliseconds in which a driver began: all its requests hung."""
    update, deaf = AsyncioRouter.update_deployment_config, []

    def lose_first(router, config):
        if not deaf and not router._request_router_initialized.is_set():
            deaf.append(router)
        if router not in deaf:
            update(router, config)

    monkeypatch.setattr(AsyncioRouter, "update_deployment_config", lose_first)
    with driven(running[0]) as spans_of:
        assert {span.request for span in spans_of(REQUEST)} == {"0"}
    assert not deaf[0]._request_router_initialized.is_set()


def host_of(cluster, slice_name):
    """Return the host's process of the slice that a replica has."""
    [slice_] = [slice_ for slice_ in list_slices() if slice_.holder == slice_name]
    folder = cluster.temp / cluster._host(slice_.name, 0).name
    [process] = [process for process in ray_nodes.processes(folder) if "HostActor" in process.name()]
    return process


def test_a_request_that_a_slice_has_failed_goes_to_another(running, slices_of):
    """Which all those do that come one by one: none of them makes the slice a busy one."""
    spec, cluster = running
    [first] = slices_of(REQUEST)
    mark = Path(spec.settings.checkpoint).with_name(f"sick-{host_of(cluster, first).pid}")
    mark.touch()
    try:
        [other] = slices_of(dataclasses.replace(REQUEST, seed=1))
    finally:
        mark.unlink()
    assert other != first
    slices_of(*[REQUEST] * SLICES)  # it was one request: the slice is there, and well


@pytest.mark.parametrize(
    ("how", "cache"),
    [
        pytest.param("sick", None, marks=pytest.mark.thorough),
        pytest.param("hung", None, marks=pytest.mark.soak),
        ("hung", "magcache"),
    ],
)
def test_a_slice_that_fails_everybody_or_hangs_is_replaced_and_costs_no_request(running, slices_of, how, cache):
    """One that fails does it in milliseconds: it always has the fewest calls, and would be given every request.

    One that hangs answers heartbeats for ever, as hosts do that wait for each other in a collective.
    """
    spec, cluster = running
    request = dataclasses.replace(REQUEST, cache=cache, shift=5.0)
    slices_of(*[request] * SLICES)  # how long a step takes is known
    ill = random.choice([p for p in ray_nodes.processes(cluster.temp) if "HostActor" in p.name()])
    mark = Path(spec.settings.checkpoint).with_name(f"{how}-{ill.pid}")
    mark.touch()
    try:
        slices_of(*[dataclasses.replace(request, seed=seed) for seed in range(3 * SLICES)])  # all are made
        wait_for(lambda: not ill.is_running(), "the end of its host")
    finally:
        mark.unlink()
    wait_until_up(spec, print)
