"""A model with sparse-linear attention and its four steps, against diffusers with the paper's attention put into it."""

import dataclasses
import functools
import json
import math
import re
import shutil
import zipfile

import diffusers
import numpy as np
import pytest
import safetensors.torch
import torch
from diffusers.models.transformers import transformer_wan

from actors.cli import main
from tests.children import run_on_devices
from tests.conftest import PHOTO, record_steps
from tests.wan_tpu.diffusers_steps import keep_latents
from wan_tpu import CheckpointError, GenerationRequest, InvalidRequest, load_pipeline
from wan_tpu.families import open_spec, published_spec
from wan_tpu.families.wan.components import ORIGINALS
from wan_tpu.families.wan.distilled import WithExperts
from wan_tpu.tiny import make_checkpoint
from wan_tpu_kernels.two_blocks import KEYS, QUERIES

KIND = "turbowan2.2-i2v-a14b"
TOLERANCE = 1e-4  # relative to the largest latent
REQUEST = GenerationRequest(
    prompt="A cat looks into the camera", image=PHOTO, height=128, width=192, frames=17, seed=3, preset="turbo"
)  # 480 tokens: four blocks of queries, eight of keys, the last of each not full


def paper_attention(query, key, value, share, linear):
    """arXiv 2509.24006 in torch: [B, L, N, D], as diffusers has them."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    tokens, blocks = q.shape[2], math.ceil(k.shape[2] / KEYS)

    def means(x, size):
        return torch.stack([part.mean(2) for part in x.split(size, dim=2)], dim=2)

    scores = means(q, QUERIES) @ means(k - k.mean(2, keepdim=True), KEYS).mT
    best = scores.topk(int(share * blocks), dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    mask = chosen.repeat_interleave(QUERIES, 2)[:, :, :tokens].repeat_interleave(KEYS, 3)[..., :tokens]
    sparse = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    phi_q, phi_k = q.softmax(-1), k.softmax(-1)
    below = 1e-5 + (phi_q * phi_k.sum(2, keepdim=True)).sum(-1, keepdim=True)
    return (sparse + linear(phi_q @ (phi_k.mT @ v) / below)).transpose(1, 2)


class PaperProcessor(transformer_wan.WanAttnProcessor):
    """diffusers' self-attention, with the paper's in place of attention to all keys."""

    def __init__(self, share, linear, monkeypatch):
        super().__init__()
        self.share, self.linear, self.monkeypatch = share, linear, monkeypatch

    def __call__(self, *args, **more):
        def attend(query, key, value, **_):
            return paper_attention(query, key, value, self.share, self.linear)

        with self.monkeypatch.context() as patch:
            patch.setattr(transformer_wan, "dispatch_attention_fn", attend)
            return super().__call__(*args, **more)


def run_diffusers(folder, monkeypatch):
    """Return the latents after each step, by diffusers' pipeline and its scheduler's stochastic sampling."""
    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    for name in ("transformer", "transformer_2"):
        share = json.loads((folder / name / "config.json").read_text())["kept_blocks"]
        [file] = (folder / name).glob("*.safetensors")
        stored = safetensors.torch.load_file(file)
        for index, block in enumerate(getattr(pipe, name).blocks):
            linear = torch.nn.Linear(
                block.attn1.inner_dim // block.attn1.heads, block.attn1.inner_dim // block.attn1.heads
            )
            weights = {part: stored[f"blocks.{index}.attn1.proj_l.{part}"] for part in ("weight", "bias")}
            linear.load_state_dict(weights)
            block.attn1.set_processor(PaperProcessor(share, linear, monkeypatch))
    # TurboDiffusion's numbers: its script has them as angles.
    angles = np.array([math.atan(200), 1.5, 1.4, 1.0])
    sigmas = np.sin(angles) / (np.sin(angles) + np.cos(angles))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0, stochastic_sampling=True)
    generator = torch.Generator().manual_seed(REQUEST.seed)
    start = torch.randn(1, 16, 5, 16, 24, generator=generator)
    plan = scheduler.set_timesteps
    scheduler.set_timesteps = lambda steps, device=None: plan(sigmas=sigmas.tolist(), device=device)
    scheduler.step = functools.partial(scheduler.step, generator=generator)
    pipe.scheduler, latents = scheduler, []

    pipe(
        image=REQUEST.image, prompt=REQUEST.prompt, height=REQUEST.height, width=REQUEST.width,
        num_frames=REQUEST.frames, num_inference_steps=4, guidance_scale=1.0, latents=float(sigmas[0]) * start,
        callback_on_step_end=keep_latents(latents), output_type="latent",
    )  # fmt: skip
    return latents


def test_latents_are_those_of_diffusers_with_the_papers_attention(checkpoint, pipeline, monkeypatch):
    steps = record_steps(pipeline(KIND), REQUEST)
    latents = run_diffusers(checkpoint(KIND), monkeypatch)
    assert [step.stage for step in steps] == ["denoise_high"] * 2 + ["denoise_low"] * 2
    for step, reference in zip(steps, latents, strict=True):
        assert np.abs(step.latents - reference).max() <= TOLERANCE * np.abs(reference).max()
    assert steps[-1].latents.std() > 0.05


@pytest.mark.meshes
@pytest.mark.long
def test_meshes_give_the_latents_of_one_device(checkpoint, tmp_path):
    """400 tokens lie on four devices in blocks of 128, of which the last one has 16 and padding."""
    arguments = (checkpoint(KIND), tmp_path / "latents.npz", PHOTO)
    run_on_devices("tests.wan_tpu.turbo_worker", *arguments, count=4)
    by_mesh = np.load(tmp_path / "latents.npz")
    expected = by_mesh["1x1x1"]
    assert len(by_mesh) > 1
    for latents in by_mesh.values():
        assert np.abs(latents - expected).max() <= TOLERANCE * np.abs(expected).max()


# ---- TurboDiffusion's files


def save_as_published(folder, name, path):
    """Write an expert as TurboDiffusion does: Wan's own names, a matrix for the patches, torch.save."""
    [file] = (folder / name).glob("*.safetensors")
    tensors = {}
    for key, value in safetensors.torch.load_file(file).items():
        for pattern, replacement in ORIGINALS:
            key = re.sub(pattern, replacement, key)
        tensors[key] = value.flatten(1) if key == "patch_embedding.weight" else value
    assert "blocks.1.self_attn.attn_op.local_attn.proj_l.weight" in tensors
    torch.save(tensors, path)
    return path


@pytest.fixture(scope="module")
def published_files(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return [
        save_as_published(checkpoint(KIND), name, folder / f"{name}.pth") for name in ("transformer", "transformer_2")
    ]


@pytest.fixture(scope="module")
def dense(checkpoint, tmp_path_factory):
    """What the experts are put into: the same model but for its own, which attend to all keys, in several files."""
    folder = shutil.copytree(checkpoint(KIND), tmp_path_factory.mktemp("dense") / "model")
    other = make_checkpoint(tmp_path_factory.mktemp("other"), "wan2.2-i2v-a14b", seed=1)
    for name in ("transformer", "transformer_2"):
        shutil.copytree(other / name, folder / name, dirs_exist_ok=True)
        index = {"weight_map": {"proj_out.weight": "diffusion_pytorch_model-00001-of-00002.safetensors"}}
        (folder / name / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.long
def test_published_files_are_converted(published_files, dense, pipeline, tmp_path):
    (dense / "wan_tpu.json").write_text('{"defaults": {"steps": 40}}')  # of the dense model
    args = ["weights", "convert", str(dense), str(tmp_path / "turbo"), "--dtype", "float32", "--kept_blocks", "0.3"]
    assert main(args) == 2, "of nothing"
    assert main([*args, "--experts", *map(str, published_files)]) == 0
    spec = open_spec(str(tmp_path / "turbo"))
    assert "turbo" in spec.presets and spec.defaults.steps == 4
    config = json.loads((tmp_path / "turbo" / "transformer_2" / "config.json").read_text())
    assert (config["attention"], config["kept_blocks"]) == ("sla", 0.3)
    converted = load_pipeline(tmp_path / "turbo", dtype="float32", mesh=(1, 1, 1))
    converted.check_components()
    for name in ("denoise_high", "denoise_low"):
        ours, expected = (pipe.runtime.component(name).params for pipe in (converted, pipeline(KIND)))
        assert ours.keys() == expected.keys()
        for key, array in ours.items():
            np.testing.assert_array_equal(array, expected[key], err_msg=key)


def test_files_that_are_no_experts_are_refused(published_files, dense, tmp_path):
    high, low = published_files
    with pytest.raises(CheckpointError, match=r"\b2 experts.*\b1 files"):
        WithExperts(dense, [high], 0.1)
    with pytest.raises(CheckpointError, match=r"low\.safetensors"):
        WithExperts(dense, [high, tmp_path / "low.safetensors"], 0.1)
    with pytest.raises(CheckpointError, match="kept_blocks is 0"):
        WithExperts(dense, [high, low], 0)
    cut = tmp_path / "cut.pth"
    cut.write_bytes(high.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"cut\.pth"):
        WithExperts(dense, [cut, low], 0.1)
    with zipfile.ZipFile(high) as whole, zipfile.ZipFile(cut, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    with pytest.raises(CheckpointError, match=r"torch\.save"):
        WithExperts(dense, [cut, low], 0.1)
    torch.save({"blocks.0.ffn.0.weight": torch.zeros(2)}, cut)
    with pytest.raises(CheckpointError, match="attends to all keys"):
        WithExperts(dense, [cut, low], 0.1)
    video = shutil.copytree(dense, tmp_path / "t2v")
    index = json.loads((video / "model_index.json").read_text()) | {"_class_name": "WanPipeline"}
    (video / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="supported only for image to video"):
        WithExperts(video, [high, low])
    for content, message in (
        ({"blocks.0.ffn.0.int8_weight": torch.zeros(2)}, "without -quant"),
        ({"blocks.0.ffn.0.weight": torch.zeros(4, 2).T}, "has a non-contiguous tensor"),
        ([torch.zeros(2)], "no dictionary of tensors"),
        ({"a": REQUEST}, "can't be read without running code"),
    ):
        torch.save(content, cut)
        with pytest.raises(CheckpointError, match=message):
            WithExperts(dense, [cut, low], 0.1)


# ---- what it is asked for


def test_more_steps_need_noise_levels_of_their_own(checkpoint):
    spec = open_spec(str(checkpoint(KIND)))
    plan = spec.plan(GenerationRequest(image=PHOTO))
    assert (plan.request.steps, plan.request.solver, plan.request.guidance_scale) == (4, "rcm", 1.0)
    assert spec.plan(GenerationRequest(image=PHOTO, preset="turbo")).request.sigmas == pytest.approx(
        spec.schedule(plan.request).sigmas
    )
    with pytest.raises(InvalidRequest, match=r"rcm.* 1 to 4, .*4"):
        spec.plan(GenerationRequest(image=PHOTO, steps=5))
    spec.plan(GenerationRequest(image=PHOTO, steps=8, solver="unipc"))


def test_a_model_keeps_its_name_however_many_blocks_it_keeps():
    spec = published_spec(KIND)
    more = dataclasses.replace(spec.config, transformer=spec.config.transformer | {"kept_blocks": 0.15})
    assert dataclasses.replace(spec, config=more).name == KIND == spec.name


def test_a_configuration_that_says_another_attention_is_refused(checkpoint, tmp_path):
    for change, message in (({"attention": "radial"}, "supported: 'sla'"), ({"kept_blocks": 2}, "kept_blocks 2")):
        folder = make_checkpoint(tmp_path / message, KIND)
        for name in ("transformer", "transformer_2"):
            path = folder / name / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(CheckpointError, match=message):
            open_spec(str(folder))
