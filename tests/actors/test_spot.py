"""Slices on spot machines that come and go, told by a signal: no video is lost or another, and no step is done twice.

For `WAN_TPU_SPOT_S` seconds, 16 unless it is set; what ten minutes made is in docs/benchmarks.md.
"""

import os
import random
import time
from collections import Counter

import pytest

from actors.observe.status_actor import StatusActor
from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import deploy, shut_down
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.reliability import ReliabilitySettings
from cluster.connect import connect, leave
from cluster.emulation.cluster import EmulatedCluster, EmulatedSlice
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec
from tests.actors.on_slices.running import Running
from tests.actors.spot_machines import SpotSlice
from tests.conftest import PHOTO
from wan_tpu import GenerationRequest
from wan_tpu.families import open_spec

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("WAN_TPU_SPOT_S", "16"))
AT_ONCE = 3  # requests
STEPS = 1000 if SECONDS > 60 else 150  # of a request
EVERY_S = (10, 25) if SECONDS > 60 else (5, 12)  # between two notices
AWAY_S = (1, 15 if SECONDS > 60 else 4)  # until there is a slice in place of one that is gone
NONE_S = 20.0 if SECONDS > 60 else 4.0  # for which, half-way, there is no slice at all, and until all pools say so
LATE_S = 300.0  # that may pass until all have ended
LAYOUT = """
emulate: {devices_per_host: 1}
pools:
  encoder-decoder: {stages: [encoder, decoder], slice: v6e-1}
  high: {stages: [denoise_high], slice: v6e-1}
  low: {stages: [denoise_low], slice: v5p-16}
"""
REQUEST = GenerationRequest(
    prompt="A cat looks into the camera", image=PHOTO, height=128, width=128, frames=9, steps=STEPS
)


@pytest.fixture
def spec(checkpoint, tmp_path):
    settings = PipelineSettings(
        str(checkpoint("wan2.2-i2v-a14b")),
        str(tmp_path / "snapshots"),
        dtype="float32",
        snapshot_every=REQUEST.steps,  # never: what goes on does so from where a notice came
        reliability=ReliabilitySettings(heartbeat_s=12, grace_s=4, stage_attempts=2),
    )
    return PipelineSpec(Layout.parse(LAYOUT, "tests"), settings, open_spec(settings.checkpoint), lasting=True)


@pytest.fixture
def cluster(tmp_path, forks):
    with EmulatedCluster.start((), folder=tmp_path / "cluster", forks=forks) as running:
        connect(running.address)
        yield running
        leave()


def visits(making):
    """Return which steps were done where, in the order of their beginning: slice, first and last."""
    ranges = []
    for span in making.spans:
        if span.step is None:
            continue
        if ranges and ranges[-1][0] == span.slice and ranges[-1][2] + 1 == span.step:
            ranges[-1][2] = span.step
        else:
            ranges.append([span.slice, span.step, span.step])
    return ranges


def count_computations(making):
    """Return how often each stage has computed something for a request, steps aside."""
    return Counter(span.stage for span in making.spans if span.kind == "compute" and span.step is None)


class Cloud:
    """Lends slices of a kind each, and takes them away: one now and then, and all at once half-way."""

    def __init__(self, slices, seconds):
        self.slices, self.notices = slices, 0
        self._chance, start = random.Random(1), time.monotonic()
        self._next, self._end = start, start + seconds
        self._back = {}  # when a slice that is gone comes back
        self._dark_from, self._dark_until = start + seconds / 2, None
        self.noticed = False  # whether all pools have said that there is nothing

    @property
    def over(self):
        return time.monotonic() >= self._end

    @property
    def dark(self):
        """Whether there is nothing, or soon will be."""
        now = time.monotonic()
        return self._dark_from <= now and (self._dark_until is None or now < self._dark_until or not self.noticed)

    def look(self):
        """Do what is due."""
        now = time.monotonic()
        present = [slice_ for slice_ in self.slices if slice_.there]
        if present and (self.dark or (now >= self._next and not self.over)):
            for slice_ in present if self.dark else [self._chance.choice(present)]:
                slice_.notice()
                self.notices += 1
            self._next = now + self._chance.uniform(*EVERY_S)
        lost = [slice_ for slice_ in self.slices if slice_.look()]
        if self.dark and self._dark_until is None and len(lost) == len(self.slices):
            self._dark_until = now + NONE_S
        for slice_ in lost:
            if not self.dark and now >= self._back.setdefault(slice_, now + self._chance.uniform(*AWAY_S)):
                del self._back[slice_]
                slice_.boot()


def test_hosts_come_and_go_and_no_step_is_done_twice(cluster, spec):
    small, large = (EmulatedSlice(name, SliceSpec(kind)) for name, kind in (("small", "v6e-1"), ("large", "v5p-16")))
    slices = [SpotSlice(cluster, kind) for kind in (small, small, small, large)]  # a spare one, of the small
    for slice_ in slices:
        slice_.boot()
    deploy(spec)
    running = Running(cluster, spec.layout, PipelineDriver(spec))
    undisturbed = running.start("undisturbed", REQUEST)
    expected = undisturbed.video()

    cloud, requests, waiting_pools = Cloud(slices, SECONDS), [], set()
    late = time.monotonic() + SECONDS + LATE_S
    while not cloud.over or not all(request.future.done() for request in requests):
        assert time.monotonic() < late, f"requests don't end; waiting: {waiting_pools}"
        if not cloud.over and sum(not request.future.done() for request in requests) < AT_ONCE:
            requests.append(running.start(f"video-{len(requests)}", REQUEST))
        cloud.look()
        if cloud.dark:
            replicas = StatusActor.connect(spec.settings.name).read().replicas.values()
            waiting_pools.update(replica.pool for replica in replicas if "waits for a free" in replica.detail)
            cloud.noticed = waiting_pools == {pool.name for pool in spec.layout.pools}
        time.sleep(0.2)

    moved, again = 0, Counter()
    for request in requests:
        assert request.video() == expected
        ranges = [range(first, last + 1) for _, first, last in visits(request)]
        assert [step for steps in ranges for step in steps] == list(range(1, REQUEST.steps + 1)), visits(request)
        moved += len({span.slice for span in request.spans if span.step is not None}) - 2
        again += count_computations(request) - count_computations(undisturbed)
    assert cloud.noticed
    print(f"{cloud.notices} notices, {len(requests)} videos, {moved} moved under way, computed again: {dict(again)}")
    running.close()
    shut_down(spec.settings.name)
