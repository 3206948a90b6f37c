"""MiniMax-H3 as a whole, against diffusers' modular pipeline: latents of both parts after each step, pixels, sound."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from diffusers.models.transformers import transformer_minimax_h3
from PIL import Image
from safetensors.torch import load_file

from tests.wan_tpu import adapter_files as files
from tests.wan_tpu.minimax_h3_reference import Reference, attend_sparsely, attend_to_tiles, relative
from wan_tpu import GenerationRequest, InvalidRequest, load_pipeline
from wan_tpu.aot.programs import AbstractRuntime, programs_by_images, stage_programs
from wan_tpu.families import open_spec, published_spec
from wan_tpu.families.minimax_h3 import components, sampling
from wan_tpu.families.minimax_h3.fasth3 import FastH3
from wan_tpu.families.minimax_h3.small import make_checkpoint
from wan_tpu.families.shared.tokens import patchify

SIZE, FRAMES = {"height": 64, "width": 96}, 107
STEPS, SEED = 2, 7
LONG_PROMPT = ("the sea and the wind " * 300)[:5000]  # The small tokenizer has one token for each letter.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("h3") / "model")


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


@pytest.fixture(scope="module")
def pipe(folder):
    return load_pipeline(folder, dtype="float32")


def draw_picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 96, 3), np.uint8))


@pytest.mark.thorough
def test_requests_with_and_without_keyframes_compile_nothing_after_a_warm_up(pipe):
    """It comes first, because later tests would compile what it expects to be compiled."""
    fields = {"prompt": "A dog.", "steps": 1, **SIZE}
    usual = pipe.plan(GenerationRequest(**fields)).request
    for group in programs_by_images(pipe.runtime, usual, ("encoder", "denoise")).values():
        for _, program, arguments in group:
            program.compile(*arguments)
    compiled = pipe.runtime.compile_s
    for names in ((), ("image",), ("last_image",), ("image", "last_image")):
        plan = pipe.plan(GenerationRequest(**fields, **{name: draw_picture(2) for name in names}))
        conditioning = pipe.encode(plan)
        assert (conditioning.has_image, conditioning.has_last_image) == ("image" in names, "last_image" in names)
        pipe.denoise(plan, conditioning, pipe.initial_state(plan))
        assert pipe.runtime.compile_s == compiled, names


@pytest.mark.parametrize(
    ("prompt", "images"),
    [
        ("A cat plays the piano.", {}),
        pytest.param("", {"image": 0}, marks=pytest.mark.thorough),
        pytest.param("A cat plays the piano.", {"last_image": 1}, marks=pytest.mark.thorough),
        pytest.param("猫" + LONG_PROMPT[:1500], {}, marks=pytest.mark.thorough),
        pytest.param(LONG_PROMPT, {"image": 0, "last_image": 1}, marks=pytest.mark.thorough),
    ],
    ids=["text", "first frame alone", "last frame", "1,500 tokens", "5,000 tokens, first and last frame"],
)
def test_same_latents_pixels_and_sound_as_diffusers(prompt, images, pipe, reference):
    images = {name: draw_picture(seed) for name, seed in images.items()}
    request = GenerationRequest(prompt=prompt, frames=FRAMES, steps=STEPS, seed=SEED, **SIZE, **images)
    assert_same_video(request, pipe, reference)


@pytest.mark.thorough
@pytest.mark.parametrize("frames", [None, 362])
def test_usual_and_longest_video_are_those_of_diffusers(frames, pipe, reference):
    request = GenerationRequest(prompt="A cat plays the piano.", frames=frames, steps=2, seed=SEED, **SIZE)
    assert_same_video(request, pipe, reference)


def test_prompt_that_is_too_long_is_refused_unless_it_may_be_cut(pipe):
    """It is refused when it is planned, with its length and the longest one, before any work."""
    too_long = GenerationRequest(prompt="the sea and the wind " * 300, **SIZE)
    with pytest.raises(InvalidRequest, match=r"prompt is 6300 .* 6144") as refused:
        pipe.plan(too_long)
    assert refused.value.field == "prompt"
    with pytest.raises(InvalidRequest, match=r"\b6131\b"):  # Its keyframe's label takes 13.
        pipe.plan(dataclasses.replace(too_long, image=draw_picture(0)))
    pipe.plan(dataclasses.replace(too_long, truncate_prompt=True))


def test_longer_texts_have_programs_of_their_own(pipe, folder):
    """Their names differ, so that pools know which of them are compiled; short prompts' are what they were."""
    spec = open_spec(folder)
    names = {}
    for letters in (1, 1024, 1025, 5000):
        plan = spec.plan(GenerationRequest(prompt="x" * letters, **SIZE))
        assert plan.shapes == pipe.plan(GenerationRequest(prompt="x" * letters, **SIZE)).shapes
        names[letters] = plan.shapes
    assert names[1] == names[1024] == published_spec("minimax-h3").plan(GenerationRequest(prompt="x", **SIZE)).shapes
    for stage in ("encoder", "denoise"):
        assert len({names[letters][stage] for letters in (1, 1025, 5000)}) == 3
    assert len({names[letters]["decoder"] for letters in names}) == 1
    picture = spec.plan(GenerationRequest(prompt="x" * 1020, image=draw_picture(0), **SIZE))
    assert picture.shapes["denoise"].endswith("2048 tokens")  # With its label.


@pytest.mark.thorough
def test_programs_are_compiled_ahead_for_the_length_that_is_asked_for(pipe):
    request = pipe.plan(GenerationRequest(prompt="x", steps=1, **SIZE)).request
    usual = stage_programs(AbstractRuntime(pipe.runtime.model, pipe.runtime.mesh, "float32"), request)
    model = pipe.runtime.model.for_text(2048)
    longer = stage_programs(AbstractRuntime(model, pipe.runtime.mesh, "float32"), request, images=0)
    assert [x.shape for x in longer["text_encoder"][1][1:]] == [(1, 2048), (1, 1)]
    assert longer["text keys"][1][1]["text"].shape[1] == 2048
    keys, _ = longer["denoise step"][1][3]
    assert keys["text"].shape[0] == 2048 and len(keys["places"]) > 2048
    assert usual["decoder first"][1][1].shape == longer["decoder first"][1][1].shape
    longest = stage_programs(AbstractRuntime(model, pipe.runtime.mesh, "float32"), request, images=2)
    vision = len(longest["denoise step"][1][3][0]["text"]) - 2048
    assert longest["text_encoder"][1][1].shape == (1, 2048 + vision) and vision > 0


def assert_same_video(request, pipe, reference):
    """Compare a request's video, and its latents after each step, with those of diffusers' pipeline."""
    states = []
    video = pipe.generate(request, on_step=lambda event: states.append(event.state))
    images = {name: image for name in ("image", "last_image") if (image := getattr(request, name))}
    inputs = {"prompt": request.prompt, "seed": request.seed, "num_frames": request.frames or 124, **SIZE, **images}
    pixels, sound, latents = reference(steps=len(states), **inputs)
    assert len(states) == pipe.plan(request).request.steps
    for state, rows, audio in zip(states, latents["video"], latents["sound"], strict=True):
        assert relative(patchify(np.asarray(state.latents), (1, 2, 2)), rows) < 1e-4
        assert relative(np.asarray(state.audio)[0], audio) < 1e-4
    assert video.pixels.std() > 0.02 and video.audio.std() > 1e-3
    assert np.abs(video.pixels - pixels).max() < 2e-3
    assert relative(video.audio, sound) < 2e-3
    assert video.audio_rate == 32000


def test_empty_prompt_without_an_image_is_refused_before_any_work(pipe):
    with pytest.raises(InvalidRequest, match=r"prompt.*image"):
        pipe.generate(GenerationRequest(**SIZE))
    assert pipe.plan(GenerationRequest(last_image=draw_picture(0), **SIZE)).images == 1


def request_preset(name, adapter):
    """Return a request with the settings of a published preset, which a small checkpoint hasn't, and an adapter."""
    settings = dict(published_spec("minimax-h3").presets[name].settings) | {"loras": [adapter]}
    return GenerationRequest(prompt="A cat plays the piano.", frames=FRAMES, seed=SEED, **SIZE, **settings)


@pytest.mark.long
@pytest.mark.parametrize("preset", [pytest.param("turbo-4", marks=pytest.mark.thorough), "turbo-4-sla"])
def test_turbo_is_that_of_diffusers_with_the_same_file(preset, pipe, reference, tmp_path, monkeypatch):
    """LightX2V's files are raw dumps of peft, of matrices of both kinds of blocks; the header has the alpha."""
    if preset == "turbo-4-sla":
        density = sampling.DENSITIES[preset]
        monkeypatch.setitem(sampling.DENSITIES, "", density)  # A small checkpoint has no such preset.
        monkeypatch.setattr(transformer_minimax_h3, "dispatch_attention_fn", attend_sparsely(density, 1e-6))
    transformer = reference.pipeline.transformer
    names = [
        name
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and re.search(r"blocks\.\d+\.(attn|ff)\.", name)
    ]
    assert len(names) == 6 * (3 + 2)
    pairs = files.factors(transformer, names, rank=16, scale=2)
    tensors = files.name_tensors(pairs, dict(zip(names, names, strict=True)), "", "lora_A.default", "lora_B.default")
    path = files.save(tensors, tmp_path / "turbo.safetensors", metadata={"alpha": "8"})
    reference.set_schedules(video=(6.0, None))
    reference.pipeline.load_lora_weights(path)
    assert sum("lora_A" in name for name, _ in transformer.named_parameters()) == len(names)
    try:
        assert_same_video(request_preset(preset, path), pipe, reference)
    finally:
        reference.pipeline.unload_lora_weights()
        reference.set_schedules(video=(12.0, None))


@pytest.mark.thorough
@pytest.mark.long
def test_fasth3_is_diffusers_with_its_changes_at_its_noise_levels(pipe, reference, tmp_path):
    """FastVideo's file has pairs without alpha, and whole differences, which diffusers' loader doesn't take."""
    transformer = reference.pipeline.transformer
    state = {name: value.clone() for name, value in transformer.state_dict().items()}
    names = [f"transformer_blocks.{layer}.attn.{name}" for layer in range(3) for name in ("to_q", "to_out.0")]
    pairs = files.factors(transformer, [*names, "transformer_blocks.1.adaln_proj.linear"])
    changed, tensors = files.by_hand(state, pairs, 1.0), {}
    tensors = files.name_tensors(pairs, {name: name for name in pairs}, "", "lora_A", "lora_B")
    draw = torch.Generator().manual_seed(1)
    for name in ("norm_out.norm.weight", "proj_in.weight", "audio_proj_in.bias", "proj_out.weight"):
        difference = state[name].std() * torch.randn(state[name].shape, generator=draw) / 4
        changed[name] = state[name] + difference
        tensors[name.replace(".weight", ".diff").replace(".bias", ".diff_b")] = difference
    path = files.save(tensors, tmp_path / "fasth3.safetensors")
    levels = [0.999, 0.749, 0.5, 0.25, 0.0]
    reference.set_schedules(video=(12.0, levels), sound=(3.0, levels))
    transformer.load_state_dict(changed)
    try:
        assert_same_video(request_preset("fasth3", path), pipe, reference)
    finally:
        transformer.load_state_dict(state)
        reference.set_schedules(video=(12.0, None), sound=(3.0, None))


@pytest.mark.thorough
@pytest.mark.long
@pytest.mark.parametrize("source", ["checkpoint", pytest.param("adapter", marks=pytest.mark.thorough)])
def test_fasth3_with_video_sparse_attention_is_fastvideos(source, pipe, reference, tmp_path, monkeypatch):
    """Its gates are in a checkpoint, or in an adapter for the base model (`set_weight`)."""
    contract = FastH3(0.6, (0.999, 0.749, 0.25))
    folder = make_checkpoint(tmp_path / "fasth3", fasth3=contract)
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    request = GenerationRequest(prompt="A cat plays the piano.", frames=FRAMES, seed=SEED, **SIZE)
    if source == "checkpoint":
        reference, pipe = Reference(folder), load_pipeline(folder, dtype="float32")
        with pytest.raises(InvalidRequest, match="image"):
            pipe.plan(dataclasses.replace(request, image=draw_picture(0)))
        assert pipe.plan(dataclasses.replace(request, image=draw_picture(0), preset="images")).request.steps == 3
    else:
        monkeypatch.setitem(sampling.SPARSITIES, "", contract.sparsity)  # A small checkpoint has no such preset.
        gates = {name: value for name, value in weights.items() if "to_gate_compress" in name}
        tensors = {name.replace(".weight", ".set_weight"): value for name, value in gates.items()}
        metadata = {"format": "fastvideo-lora-v2", "set_weight_tensors": "3", "diff_tensors": "0"}
        path = files.save(tensors, tmp_path / "fasth3.safetensors", metadata=metadata)
        sigmas = sampling.shift_levels(contract.levels, 10.0)
        request = dataclasses.replace(request, loras=[path], sigmas=sigmas, shift=10.0)
        reference.pipeline.transformer.requires_grad_(False)
    transformer = reference.pipeline.transformer
    state = {name: value.clone() for name, value in transformer.state_dict().items()}
    components.add_gates(transformer)
    transformer.load_state_dict(state | {name: value for name, value in weights.items() if "gate_compress" in name})
    levels = [*contract.levels, 0.0]
    reference.set_schedules(video=(10.0, levels), sound=(3.0, levels))
    try:
        with attend_to_tiles(transformer, contract.sparsity, (32, 2, 3), keyframes=0, sound=2 * 178):
            assert_same_video(request, pipe, reference)
    finally:
        for block in transformer.transformer_blocks:
            del block.attn.to_gate_compress
        reference.set_schedules(video=(12.0, None), sound=(3.0, None))


@pytest.mark.thorough
def test_bfloat16_stays_within_its_bound(folder, pipe):
    """The bound of test_parity.py without guidance, for three layers and the two that the text passes before."""
    states = []
    for each in (pipe, load_pipeline(folder, dtype="bfloat16")):
        plan = each.plan(GenerationRequest(prompt="A cat plays the piano.", steps=STEPS, seed=SEED, **SIZE))
        states.append(each.denoise(plan, each.encode(plan), each.initial_state(plan)))
    for part in ("latents", "audio"):
        exact, rounded = (getattr(state, part) for state in states)
        error = np.sqrt(((rounded - exact) ** 2).mean() / (exact**2).mean())
        assert 1e-4 < error < np.sqrt(3 * (3 + 2) + 6) * 2**-8
