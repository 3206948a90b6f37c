"""Real kills under real work: each request ends with the video that it would have had; spans say what ran again."""

import asyncio
import json
import os
import pickle
import signal
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from actors.engine import Fragment
from actors.pipeline.driver import PipelineDriver
from actors.slices.snapshots import Snapshots
from tests.actors.on_slices.conftest import REQUEST, SHORT
from tests.actors.on_slices.running import kill, title
from tests.children import start_module
from tests.conftest import PHOTO
from tests.waiting import SECONDS, wait_for

pytestmark = pytest.mark.soak

HIGH, ALL = 72, 200  # steps
EVERY = 20  # steps from snapshot to snapshot
LONG = replace(REQUEST, height=128, width=128, steps=1000)  # 360 of them with the high expert


def check(making, video, *, again=0):
    """Check that the video is right, that no step is left out, and that at most so many ran again."""
    assert making.video() == video
    ran = Counter(making.steps("denoise_high") + making.steps("denoise_low"))
    assert set(ran) == set(range(1, ALL + 1))
    assert sum(times - 1 for times in ran.values()) <= again


def slices_of(making, stage):
    return {span.slice for span in making.spans if span.stage == stage}


def test_request_survives_a_killed_host_and_then_a_hung_one(running, undisturbed_video):
    """Two losses under one request are too many for its two attempts, but for the progress made in between."""
    victim = running.host("low", 1)  # to find one takes as long as many steps
    making = running.start("hosts", REQUEST)
    first = making.wait_for("denoise_low", 80).slice
    kill(victim)
    beside = running.start("beside", REQUEST)  # which may not get on between the two, and has two attempts as well
    wait_for(lambda: len(slices_of(making, "denoise_low")) == 2, "another slice goes on")
    stopped = running.host("low", 0)
    done = max(span.step for span in making.spans if span.slice == first and span.step is not None)
    making.wait_for("denoise_low", done + 1)  # which is progress
    os.kill(stopped.pid, signal.SIGSTOP)
    back = threading.Timer(SECONDS, lambda: stopped.is_running() and stopped.send_signal(signal.SIGCONT))
    back.daemon = True
    back.start()
    check(making, undisturbed_video, again=4 * EVERY)
    check(beside, undisturbed_video)
    assert back.is_alive()  # Long before the host would have gone on.
    back.cancel()
    wait_for(lambda: not stopped.is_running(), "its end")  # Ray kills it beside the work of its successor.
    assert Counter(making.steps("denoise_high")).total() == HIGH
    assert len(slices_of(making, "denoise_low")) == 3


def test_request_waits_for_a_node_that_was_killed(running, undisturbed_video):
    [slice_] = running.slices("low")
    making = running.start("node", REQUEST)
    making.wait_for("denoise_low", 90)  # half-way between two snapshots
    running.cluster.kill_host(slice_.name, 0)
    time.sleep(7)  # longer than a leader looks for a slice: one has given up, and the request waits all the same
    assert not making.future.done()
    running.cluster.add_host(slice_.name, 0)
    check(making, undisturbed_video, again=2 * EVERY)
    assert len(slices_of(making, "denoise_low")) == 2


def test_a_killed_decoder_costs_no_step(running, undisturbed_video):
    [leader] = running.leaders("decoder")
    making = running.start("decoder", REQUEST, fragments=True)
    making.wait_for("denoise_low", ALL - 10)
    kill(leader)
    check(making, undisturbed_video)
    runs = {fragment.run for fragment in making.fragments}
    assert making.fragments == [Fragment(run, 0, making.fragments[0].content) for run in range(len(runs))]


def test_decoder_lost_in_the_middle_sends_its_fragments_again(running):
    request = replace(REQUEST, height=256, width=256, frames=81, steps=2)
    expected = running.start("whole", request, fragments=True)
    video, victim = expected.video(), running.host("decoder")
    making = running.start("cut", request, fragments=True)
    wait_for(lambda: len(making.fragments) > 1, "its second fragment")
    kill(victim)
    assert making.video() == video
    again = [replace(fragment, run=0) for fragment in making.fragments if fragment.run == 1]
    assert again == expected.fragments
    before = [fragment for fragment in making.fragments if fragment.run == 0]
    assert 1 < len(before) < len(again) and before == again[: len(before)]


def test_lost_objects_are_encoded_again(running, undisturbed_video):
    """What one stage has made for the next dies with the encoder's leader and with the store of references."""
    [leader] = running.leaders("encoder")
    stores = [process for process in running.processes() if "_RefStoreActor" in title(process)]
    making = running.start("objects", REQUEST)
    making.wait_for("denoise_high")
    for process in (leader, *stores):
        kill(process)
    check(making, undisturbed_video, again=EVERY)
    assert sum(span.stage == "encoder" and span.kind == "compute" for span in making.spans) > 3  # prompts and image


def test_a_pool_grows_under_load_and_shrinks_after(running, spec):
    """Also for a driver that follows one of the same process: an error makes the service's worker take a new one."""

    async def connect():
        return PipelineDriver(spec)

    before = asyncio.run_coroutine_threadsafe(connect(), running.loop).result(SECONDS)
    running.start("before", replace(SHORT, steps=4), before).video()
    before.close()
    making = [running.start(f"many{i}", LONG) for i in range(16)]
    wait_for(lambda: len(running.slices("high")) == 2, "a second slice")
    wait_for(lambda: len(set().union(*(slices_of(each, "denoise_high") for each in making))) == 2, "it works")
    for each in making:
        each.cancel()
    wait_for(lambda: not running.ask("high", "list_host_keys"), "nothing of them is left there")
    wait_for(lambda: len(running.slices("high")) == 1, "it is given back")
    with pytest.raises(BaseException):  # noqa: B017, PT011
        making[-1].video()


def start_driver(running, spec, folder, id, size, steps):
    """Start a batch in a process of its own; `folder / "log"` gets what it prints."""
    (folder / "spec.pickle").write_bytes(pickle.dumps(spec))
    size = {"height": size, "width": size, "frames": 9}
    line = {"id": id, "prompt": REQUEST.prompt, "negative_prompt": "", "steps": steps, "shift": 5, **size}
    (folder / "manifest.jsonl").write_text(json.dumps(line | {"image": str(PHOTO)}))
    files = [folder / name for name in ("spec.pickle", "manifest.jsonl", "out")]
    worker = "tests.actors.on_slices.batch_driver"
    return start_module(worker, running.cluster.address, *files, output=folder / "log")


def test_a_killed_driver_s_slices_are_soon_free(running, spec, tmp_path):
    snapshots = Snapshots(spec.settings.snapshots)
    driver = start_driver(running, spec, tmp_path, "long", 256, 5 * ALL)  # long after its driver is seen to be gone
    wait_for(lambda: snapshots.list_names("long"), "a snapshot")
    driver.kill()
    wait_for(lambda: not running.ask("high", "list_host_keys"), "the slice is free")
    reached = max(int(name.split(".")[-2]) for name in snapshots.list_names("long"))
    assert reached < 5 * HIGH  # it wasn't free because all was done
    snapshots.delete_all_of("long")
