"""A slice of two hosts, as two real processes, computes what one process does."""

import dataclasses
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from actors.host import StageHost
from actors.host_values import HostSettings
from actors.payloads import TextEmbedding, pack, unpack
from tests.conftest import PHOTO, ROOT
from wan_tpu import GenerationRequest, InvalidInput, InvalidRequest, UnhealthyResult
from wan_tpu.data import DenoiseState, ImageCondition

KIND = "wan2.2-i2v-a14b"
SECONDS = 300  # both runs take 50 s on two idle cores


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """Results of 2 processes with 2 devices each, and of 1 process with 4."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = {hosts: tmp_path_factory.mktemp(f"hosts{hosts}") for hosts in (1, 2)}
    # XLA takes as many threads as there are cores, but no fewer than devices, and some sums of a convolution are cut by
    # their number: NPROC makes it the same in both, and with it every bit.
    environment = os.environ | {"NPROC": "4"}
    workers = []
    try:
        for rank, hosts in ((0, 2), (1, 2), (0, 1)):
            command = [sys.executable, "-m", "tests.actors.host_worker", *map(str, (rank, hosts, port))]
            flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // hosts}"}
            with (folders[hosts] / f"{rank}.log").open("w") as log:
                command += [str(checkpoint(KIND)), str(PHOTO), str(folders[hosts])]
                workers.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment | flags, stdout=log, stderr=log, text=True)
                )
        for worker in workers:
            worker.wait(SECONDS)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for folder in folders.values():
        for log in folder.glob("*.log"):
            print(f"---- {log}\n{log.read_text()[-3000:]}")  # shown when a test fails
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    return {(hosts, rank): np.load(folders[hosts] / f"{rank}.npz") for hosts, rank in ((2, 0), (2, 1), (1, 0))}


@pytest.mark.parametrize("what", ["latents", "pixels", "mp4"])
def test_two_hosts_make_the_video_of_one_bit_for_bit(runs, what):
    expected = runs[1, 0][what]
    for rank in (0, 1):
        assert np.array_equal(runs[2, rank][what], expected), rank


def test_two_hosts_make_the_video_of_one_device(runs, pipeline):
    request = GenerationRequest(
        prompt="A cat looks into the camera",
        negative_prompt="ugly",
        image=PHOTO,
        height=64,
        width=96,
        frames=9,
        steps=4,
        guidance_scale=3.5,
        guidance_scale_2=2.5,
        shift=5.0,
    )
    events = []
    video = pipeline(KIND).generate(request, on_step=events.append)
    # 1e-4: float32 sums in another order, over four steps and two experts
    latents = events[-1].latents
    assert np.abs(runs[2, 0]["latents"] - latents).max() <= 1e-4 * np.abs(latents).max()
    assert np.abs(runs[2, 0]["pixels"] - video.pixels).max() <= 1e-4
    assert video.pixels.std() > 0.05


@pytest.mark.parametrize(
    ("kind", "stages", "message"),
    [
        ("wan2.1-t2v-1.3b", ("denoise_low",), "denoise_low .* this model has encoder, denoise_high, decoder"),
        (KIND, ("denoise",), "stages denoise of"),
        (KIND, (), "can't be hosted"),
    ],
)
def test_stages_that_the_model_does_not_have_are_refused(kind, stages, message, checkpoint):
    with pytest.raises(InvalidInput, match=message):
        StageHost(HostSettings(str(checkpoint(kind)), stages, (1, 1, 1)))


def test_a_pool_does_its_own_stages_only(checkpoint):
    host = StageHost(HostSettings(str(checkpoint("wan2.1-t2v-1.3b")), ("denoise_high",), (1, 1, 1), "float32"))
    host.load()
    assert list(host._runtime._components) == ["denoise_high"]
    plan = host.plan(GenerationRequest(prompt="a cat", height=32, width=32, frames=1, steps=2, guidance_scale=1.0))
    assert plan.prompts == ("a cat",)
    assert [(e.stage, e.start, e.stop) for e in plan.experts] == [("denoise_high", 0, 2)]
    assert plan.shapes["denoise_high"] == "denoise_high 32x32x1 t2v 1 unipc"
    with pytest.raises(InvalidRequest, match="encoder is not hosted here"):
        host.encode_text("a cat")
    with pytest.raises(InvalidRequest, match="request a has no image"):
        host.prepare_encode("a", plan.request)
    with pytest.raises(InvalidRequest, match="request a is not ready for this; call prepare_denoise first"):
        host.begin("a")
    with pytest.raises(InvalidRequest, match="without its prompt's embeddings"):
        host.prepare_denoise("a", plan.request, None)
    with pytest.raises(InvalidRequest, match="does t2v only"):
        host.plan(GenerationRequest(image=PHOTO, height=32, width=32, frames=1))


def test_requests_are_stepped_together_and_a_poison_one_fails_alone(checkpoint):
    host = StageHost(HostSettings(str(checkpoint("wan2.1-t2v-1.3b")), ("denoise_high",), (1, 1, 1), "float32", batch=3))
    asked = GenerationRequest(prompt="a cat", height=32, width=48, frames=5, steps=4, guidance_scale=3.0)
    host.warm_up(asked)
    program = host._runtime.programs["denoise step"]
    assert len(program._compiled) == 3  # for one, two and three at once
    rng = np.random.default_rng(0)
    texts = [pack(TextEmbedding(rng.standard_normal((1, 512, 32)).astype(np.float32))) for _ in range(4)]

    def begin(key, number, state=None):
        request = host.plan(dataclasses.replace(asked, seed=number)).request
        host.prepare_denoise(key, request, *texts[2 * number : 2 * number + 2], None, state)
        host.begin(key)

    def latents(key):
        return unpack(host.collect(key).payload).latents

    for key, number in (("a", 0), ("b", 1)):  # alone
        begin(key, number)
        for _ in range(4):
            host.step([key])
    alone = [latents(key) for key in ("a", "b")]

    begin("a", 0)
    host.step(["a"])
    poison = unpack(host.snapshot("a").payload)
    begin("nan", 0, pack(dataclasses.replace(poison, latents=poison.latents * np.nan)))
    begin("b", 1)
    first, unhealthy, second = host.step(["a", "nan", "b"])
    assert [(done.stage, done.step, done.steps) for done in (first, second)] == [
        ("denoise_high", 2, 4),
        ("denoise_high", 1, 4),
    ]
    assert isinstance(unhealthy, UnhealthyResult)
    assert "denoise_high, step 2 of 4" in str(unhealthy)
    host.drop("nan")
    for _ in range(2):
        host.step(["b", "a"])
    with pytest.raises(InvalidRequest, match="request a has no step to run here"):
        host.step(["b", "a"])
    [last] = host.step(["b"])
    assert last.step == 4
    assert len(program._compiled) == 3
    for key, expected in zip(("a", "b"), alone, strict=True):
        # 1e-5: the same float32 sums, in programs that may fuse them otherwise
        assert np.abs(latents(key) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_experts_are_given_the_prompts_they_use(checkpoint):
    """Without weights: inputs need none."""
    host = StageHost(HostSettings(str(checkpoint(KIND)), ("denoise_high", "denoise_low"), (1, 1, 1), "bfloat16"))
    size = {"image": PHOTO, "height": 32, "width": 48, "frames": 5, "steps": 4}
    plan = host.plan(GenerationRequest(prompt="a cat", guidance_scale=3.0, guidance_scale_2=1.0, **size))
    rng = np.random.default_rng(0)
    prompt, negative = (pack(TextEmbedding(rng.standard_normal((1, 512, 32)).astype(np.float32))) for _ in range(2))
    image = pack(ImageCondition(None, np.zeros((1, 20, 2, 4, 6), np.float32)))
    with pytest.raises(InvalidRequest, match="guidance needs the negative prompt's embeddings"):
        host.prepare_denoise("a", plan.without_image, prompt, None, image)
    host.prepare_denoise("a", plan.without_image, prompt, negative, image)
    inputs = host._work["a"].inputs
    assert {stage: (given.text.shape[0], given.text.dtype) for stage, given in inputs.items()} == {
        "denoise_high": (2, "bfloat16"),
        "denoise_low": (1, "bfloat16"),
    }
    # The state before the first step is drawn on every host; it can be handed on as it is.
    first = host.snapshot("a")
    assert (first.value, len(unpack(first.payload).history)) == (0, 3)
    wrong = pack(DenoiseState(np.zeros((1, 16, 2, 4, 4), np.float32), (), 1))
    with pytest.raises(InvalidRequest, match=r"this request needs .* and 3"):
        host.prepare_denoise("b", plan.without_image, prompt, negative, image, wrong)
    host.drop("a")
    host.drop("a")
    assert host.keys() == []
    low = StageHost(HostSettings(str(checkpoint(KIND)), ("denoise_low",), (1, 1, 1), "bfloat16"))
    one_step = low.plan(GenerationRequest(prompt="a cat", **(size | {"steps": 1}))).without_image
    with pytest.raises(InvalidRequest, match="request a has no step on denoise_low; leave this pool out"):
        low.prepare_denoise("a", one_step, prompt, negative, image)
