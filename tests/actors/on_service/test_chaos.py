"""Jobs under load while processes of every kind are killed at random: none is lost, none is done twice.

Slices are simulated, so that what is tried is the service, not this machine's arithmetic: a video says whose it is.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import threading
import time

import httpx
import pytest
from ray import serve

from actors.api.deploy import deploy_service
from actors.api.processes import list_application_names
from actors.api.settings import ServiceSettings
from actors.jobs.keys import make_key
from actors.jobs.store import open_database
from actors.jobs.usage import read_usage
from actors.reliability import ReliabilitySettings
from scripts.simulation import soak
from scripts.simulation.simulated import simulated_video
from tests.actors.api.serving import bearer
from tests.actors.on_service.conftest import deploy_emulated
from tests.conftest import STAGES
from tests.waiting import wait_for
from wan_tpu.media.packets import VIDEO, open_media, read_packets
from wan_tpu.request import GenerationRequest

pytestmark = pytest.mark.soak

JOBS = int(os.environ.get("WAN_TPU_CHAOS_JOBS", "90"))  # at least: they are sent until enough has been killed
KILLS = int(os.environ.get("WAN_TPU_CHAOS_KILLS", str(min(8, JOBS // 15))))
FRAMES = 17
A_SECOND = 3.0  # jobs are sent
EVERY_S = 4.0  # something is killed
SEED = int(os.environ.get("WAN_TPU_CHAOS_SEED", time.time()))  # Of what is killed when.
# What is killed, by the titles of its processes; each comes up again by itself, but for a node and the application.
TITLES = {
    "ingress": ("Ingress",),
    "worker": ("ServiceWorker",),
    "proxy": ("HAProxyManager", "haproxy", "ProxyActor"),
    "controller": ("ServeController",),
    "replica": tuple(f"-{pool.name}:{pool.name}" for pool in soak.LAYOUT.pools),
    "host": ("HostActor",),
}
KINDS = [*TITLES, "node", "application"]


@pytest.fixture
def online(tmp_path, forks):
    spec = soak.soak_spec(tmp_path, step_s=0.05)
    limits = ReliabilitySettings(place_s=10, heartbeat_s=12, grace_s=4, lease_s=5.0, worker_attempts=1000)
    spec = dataclasses.replace(spec, settings=dataclasses.replace(spec.settings, reliability=limits))
    settings = ServiceSettings(
        database=str(tmp_path / "jobs.sqlite"),
        storage=str(tmp_path / "results"),
        model="simulated",
        concurrency=6,
        chips=dict.fromkeys(STAGES, 1),
        reliability=limits,
    )
    with deploy_emulated(settings, spec, tmp_path, forks, drain_s=5) as service:
        yield service


class Client:
    """Sends jobs and asks for them; what doesn't answer is asked again, with the same key."""

    def __init__(self, address):
        self._http = httpx.Client(base_url=address, timeout=10)
        self.again = collections.Counter()

    def ask(self, method, path, **arguments):
        give_up = time.monotonic() + 120
        while time.monotonic() < give_up:
            try:
                answer = self._http.request(method, path, **arguments)
            except httpx.TransportError as error:
                self.again[type(error).__name__] += 1
            else:
                if answer.status_code == 200:
                    return answer
                # A key may ask 1,200 times a minute. A 404 would say that the job is gone.
                assert answer.status_code == 429 or answer.status_code >= 500, answer.text
                self.again[answer.status_code] += 1
            time.sleep(0.2)
        raise AssertionError(f"{path} isn't answered: {self.again}")


def count_frames(content):
    with open_media(content) as file:
        return sum(packet.kind == VIDEO for packet in read_packets(file))


class Viewer(threading.Thread):
    """Watches a video while it is decoded; what it sees is the video or the beginning of it, whoever is killed."""

    def __init__(self, http, job, fields):
        super().__init__(daemon=True)
        self._http, self._job, self._key = http, job, fields["key"]
        self._video = simulated_video(GenerationRequest(prompt=fields["prompt"], seed=fields["seed"]))
        self.seen, self.wrong = collections.Counter(), None

    def run(self):
        try:
            while not self.seen["whole"] and self.wrong is None:
                self.watch()
                time.sleep(0.2)
        except BaseException as error:
            self.wrong = error

    def watch(self):
        received, end = b"", "cut"
        path = f"/v1/videos/{self._job}/content?stream=1"
        with contextlib.suppress(httpx.TransportError), self._http.stream("GET", path, headers=self._key) as answer:
            if answer.status_code == 200:
                for chunk in answer.iter_raw():
                    received += chunk
                end = "whole"
            else:
                end = str(answer.status_code)
        self.seen[end] += 1
        frames = count_frames(received) if end == "whole" else FRAMES
        # A worker writes the boxes of live fragments anew, without what says whose they are.
        if frames != FRAMES or (b"simulated: " in received and self._video not in received):
            self.wrong = self._job, end, frames, len(received), received[-100:]


class Killer(threading.Thread):
    """Kills something every few seconds, kinds in a random order, until told to end."""

    def __init__(self, online, seed):
        super().__init__(daemon=True)
        self._online, self._random, self._ended = online, random.Random(seed), threading.Event()
        self.killed = collections.Counter()
        self.failure = None

    def run(self):
        try:
            kinds = []
            while not self._ended.wait(EVERY_S):
                kinds = kinds or self._random.sample(KINDS, len(KINDS))
                kind = kinds.pop()
                self.kill(kind)
                self.killed[kind] += 1
                print(f"killed {kind}", flush=True)
        except BaseException as error:
            self.failure = error

    def kill(self, kind):
        online = self._online
        if kind == "application":
            for name in list_application_names(online.spec.settings.name):
                serve.delete(name)
            deploy_service(online.settings, online.spec, host="127.0.0.1", port=online.port)
        elif kind == "node":
            slice_ = self._random.choice(online.cluster.slices)
            online.cluster.kill_host(slice_.name, 0)
            online.cluster.add_host(slice_.name, 0)
        elif victims := online.processes(*TITLES[kind]):
            os.kill(self._random.choice(victims).pid, signal.SIGKILL)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        """Kills nothing more, also where a test fails, so that its cluster can shut down."""
        self._ended.set()
        self.join(120)

    def check(self):
        assert self.failure is None, self.failure


def test_nothing_is_lost_and_nothing_done_twice(online):
    client = Client(online.address)
    database = open_database(online.settings.database)
    keys = [bearer(make_key(database, name)) for name in ("ann", "bob", "cleo")]
    wait_for(lambda: httpx.get(f"{online.address}/v1/models", timeout=60).status_code == 401)
    print(f"WAN_TPU_CHAOS_SEED={SEED}")
    # One client for all, since each reads the certificates of its own.
    http = httpx.Client(base_url=online.address, timeout=600, limits=httpx.Limits(max_connections=None))
    start, jobs, viewers = time.monotonic(), {}, []
    with Killer(online, SEED) as killer:
        for i in itertools.takewhile(lambda i: i < JOBS or killer.killed.total() < KILLS, itertools.count()):
            killer.check()
            fields = {
                "prompt": f"{i % 20}",
                "size": "256x256",
                "num_frames": FRAMES,
                "num_inference_steps": 4,
                "seed": i,
            }
            video = client.ask(
                "POST", "/v1/videos", json=fields, headers=keys[i % 3] | {"Idempotency-Key": f"job {i}"}
            ).json()
            jobs[video["id"]] = fields | {"key": keys[i % 3]}
            if i % 5 == 0:
                viewers.append(Viewer(http, video["id"], jobs[video["id"]]))
                viewers[-1].start()
            time.sleep(max(0.0, start + (i + 1) / A_SECOND - time.monotonic()))
    killer.check()
    took = time.monotonic() - start
    print(f"{len(jobs)} sent in {took:.0f} s; killed {dict(killer.killed)}; again {dict(client.again)}")

    def is_queue_empty():
        counts = online.counts()
        return counts["queued"] + counts["in_progress"] == 0

    wait_for(is_queue_empty, "the last job")
    print(f"all ended after {time.monotonic() - start:.0f} s: {online.counts()}")
    assert online.counts() == {"queued": 0, "in_progress": 0, "completed": len(jobs), "failed": 0}
    for job, fields in jobs.items():
        content = client.ask("GET", f"/v1/videos/{job}/content", headers=fields["key"]).content
        request = GenerationRequest(prompt=fields["prompt"], seed=fields["seed"])
        assert content.endswith(simulated_video(request))
    for viewer in viewers:
        viewer.join(60)
        assert (viewer.wrong, viewer.seen["whole"]) == (None, 1), viewer.seen
    print(f"{len(viewers)} watched: {dict(sum((viewer.seen for viewer in viewers), collections.Counter()))}")
    used = read_usage(database)
    assert sorted(usage.videos for usage in used.values()) == sorted(len(range(of, len(jobs), 3)) for of in range(3))
    done = collections.Counter(event["job"] for event in online.read_events() if event["event"] == "completed")
    assert set(done) <= set(jobs) and max(done.values()) == 1
