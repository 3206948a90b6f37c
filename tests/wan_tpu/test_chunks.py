"""A video that is denoised chunk after chunk: whole, in stages, resumed at any step, and with stored programs."""

import dataclasses

import numpy as np
import pytest

from tests.wan_tpu import chunked_toy
from wan_tpu import GenerationRequest, InvalidRequest, load_pipeline
from wan_tpu.aot.precompile import precompile
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.cli import run
from wan_tpu.commands.generate import generate
from wan_tpu.commands.staged import decode, denoise, encode
from wan_tpu.data import DenoiseState, dump_value, parse_value
from wan_tpu.errors import InvalidInput
from wan_tpu.families import FAMILIES
from wan_tpu.families.model import open_model
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.stage_machine import Decode, EncodeText, Finish, Step
from wan_tpu.stages import device_state
from wan_tpu.tiny import make_checkpoint

REQUEST = GenerationRequest(prompt="A red ball rolls.", seed=3)
STEPS = 12  # Four for each chunk.


@pytest.fixture(autouse=True)
def registered_family(monkeypatch):
    monkeypatch.setitem(FAMILIES, chunked_toy.FAMILY.transformer, chunked_toy.FAMILY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    FAMILIES[chunked_toy.FAMILY.transformer] = chunked_toy.FAMILY
    yield make_checkpoint(tmp_path_factory.mktemp("chunks") / "toy", "toy-in-chunks")
    del FAMILIES[chunked_toy.FAMILY.transformer]


@pytest.fixture(scope="module")
def whole(folder):
    """A pipeline, its plan, and all operations with their results."""
    pipe = load_pipeline(folder, dtype="float32", mesh=(1, 1, 1))
    plan = pipe.plan(REQUEST)
    executor = pipe.make_executor(plan)
    results = list(executor.work())
    return pipe, plan, executor.conditioning, results


def frames_of(results):
    return [np.asarray(result[1]) for operation, result in results if isinstance(operation, Decode)]


def test_every_chunk_is_torchs(folder, whole):
    pipe, plan, conditioning, results = whole
    text = conditioning.prompt["moved"][:, None]
    expected = chunked_toy.chunks(folder, text, plan.request)
    latents = [np.asarray(r.state.latents) for o, r in results if isinstance(o, Step) and r.step % 4 == 0]
    finished = next(result for operation, result in results if isinstance(operation, Finish))
    assert len(latents) == 3 and np.array_equal(finished.latents, np.concatenate(latents, axis=2))
    pixels = [pipe.runtime.model.pixels(np.asarray(r[0])) for o, r in results if isinstance(o, Decode)]
    for i, (chunk, colours) in enumerate(expected):
        assert np.abs(latents[i] - chunk).max() / np.abs(chunk).max() < 1e-5
        colours = np.clip(colours, -1, 1).repeat(8, axis=1).repeat(8, axis=2) / 2 + 0.5
        # Each chunk is decoded as a video of its own: one frame, then four.
        assert np.abs(pixels[2 * i] - colours[:1]).max() < 1e-4
        assert np.abs(pixels[2 * i + 1] - colours[1:].repeat(4, axis=0)).max() < 1e-4


def test_a_chunk_is_decoded_before_the_next_one_is_denoised(whole):
    operations = [operation for operation, _ in whole[3] if not isinstance(operation, EncodeText)]
    kinds = "".join(type(operation).__name__[0] for operation in operations)
    assert kinds == "SSSSDD" "SSSSDD" "SSSSFDD"  # fmt: skip


def test_a_run_resumes_bit_for_bit_at_every_step(folder, whole):
    _, plan, conditioning, results = whole
    states = [result.state for operation, result in results if isinstance(operation, Step)]
    other = load_pipeline(folder, dtype="float32", mesh=(1, 1, 1))
    for state in (other.initial_state(plan), *states[:-1]):
        saved, _ = parse_value(DenoiseState, dump_value(state), "a snapshot")
        assert len(saved.chunks) == max(0, state.step - 1) // 4
        resumed = list(other.make_executor(plan, conditioning=conditioning, state=saved).work())
        assert [o.index for o, _ in resumed if isinstance(o, Step)] == [*range(state.step, STEPS)]
        for ours, theirs in zip(frames_of(resumed), frames_of(results), strict=True):
            assert np.array_equal(ours, theirs)


def test_a_state_without_its_chunks_is_refused(whole):
    pipe, plan, _, results = whole
    state = next(result.state for operation, result in results if isinstance(operation, Step) and result.step == 6)
    for chunks in ((), state.chunks * 2):
        with pytest.raises(InvalidInput, match="1 chunks"):
            device_state(pipe.runtime, plan, dataclasses.replace(state, chunks=chunks))


def test_noise_of_ones_own_is_refused(whole):
    pipe, plan, *_ = whole
    noise = np.zeros(pipe.runtime.model.spec.latent_shapes(plan.request, 0)["video"], np.float32)
    with pytest.raises(InvalidRequest, match="noise"):
        pipe.initial_state(plan, noise)


def test_stages_and_stored_programs_make_the_same_video(folder, tmp_path):
    argv = ["--model_id", str(folder), "--prompt", REQUEST.prompt, "--seed", "3", "--dtype", "float32"]
    video, stages = tmp_path / "video.mp4", tmp_path / "stages"
    model = open_model(Checkpoint(folder))
    request = REQUEST.resolve(model.spec.defaults)
    programs = list(precompile(model, request, make_mesh((1, 1, 1), heads=1), "float32", tmp_path / "programs"))
    assert len(programs) == 7  # Text, keys, a step at each size, growth, and two of the decoder.
    device = ["--dp", "1", "--sp", "1", "--tp", "1", "--executables", str(tmp_path / "programs")]
    assert run(generate, [*argv, *device, "--output", str(video)]) == 0
    assert '"compile_s": 0.0' in video.with_suffix(".json").read_text()
    assert run(encode, [*argv, *device, "--output_dir", str(stages)]) == 0
    assert run(denoise, ["--input_dir", str(stages), "--stop_after_high", *device]) == 0
    assert run(decode, ["--input_dir", str(stages), *device]) != 0
    assert run(denoise, ["--input_dir", str(stages), "--resume", *device]) == 0
    assert run(decode, ["--input_dir", str(stages), *device]) == 0
    assert (stages / "video.mp4").read_bytes() == video.read_bytes()
