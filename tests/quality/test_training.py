"""Training goes on exactly where it stopped, and what it writes is a checkpoint of this project."""

import dataclasses
import json

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from scripts.demo_model import experts, sizes, vae
from scripts.demo_model.experts import LARGEST_MB, embed, export
from scripts.demo_model.scenes import caption, draw_scene
from scripts.demo_model.training import Descent, Run
from scripts.demo_model.vae import WholeClips
from wan_tpu import load_pipeline

SHORT = sizes.Schedule(steps=4, batch=1, warm_up=2, sheet_every=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run after a step of each stage."""
    run = Run(tmp_path_factory.mktemp("run"), torch.device("cpu"), 0, 3600)
    assert vae.train_vae(run, dataclasses.replace(SHORT, steps=1))
    vae.encode_clips(run, 4, chunk=1)
    assert experts.train_experts(run, dataclasses.replace(SHORT, steps=2))
    return run


@pytest.mark.thorough
def test_a_stopped_run_gives_the_bits_of_one_that_wasn_t(tmp_path):
    states = []
    for name, stops in (("whole", [4]), ("stopped", [2, 4])):
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, torch.device("cpu"), 0, 3600)
        schedule = dataclasses.replace(SHORT, warm_up=100)  # the rate of a step mustn't depend on the length here
        for steps in stops:
            vae.train_vae(run, dataclasses.replace(schedule, steps=steps))
        states.append(torch.load(run.folder / "vae.pt", weights_only=True))
    for part in ("trained", "averaged"):
        for key, value in states[0][part].items():
            assert torch.equal(value, states[1][part][key]), key


@pytest.mark.thorough
@torch.no_grad()
def test_a_clip_at_once_is_what_diffusers_makes_in_chunks():
    model = vae.new_vae()["vae"]
    pixels = torch.rand(1, 3, 17, 64, 96) * 2 - 1
    in_chunks = model.encode(pixels).latent_dist
    latents = in_chunks.mean
    rebuilt = model.decode(latents).sample
    whole = WholeClips(model)
    posterior = whole.encode(pixels)
    assert (posterior.mean - in_chunks.mean).abs().max() < 1e-5 * latents.std()
    assert (posterior.logvar - in_chunks.logvar).abs().max() < 1e-4
    assert (whole.decode(latents).clamp(-1, 1) - rebuilt).abs().max() < 1e-5 * rebuilt.std() * 10
    assert (rebuilt - pixels).abs().max() > 0.1
    assert (rebuilt[:, :, 1:] - rebuilt[:, :, :-1]).abs().max() > 0.01


@pytest.mark.long
def test_every_parameter_is_moved_by_one_optimiser():
    modules = torch.nn.ModuleDict({"linear": torch.nn.Linear(6, 4), "conv": torch.nn.Conv3d(2, 3, (3, 1, 1))})
    modules["embedding"] = torch.nn.Embedding(5, 6)
    modules["conv"].weight.data = modules["conv"].weight.data.contiguous(memory_format=torch.channels_last_3d)
    before = {name: value.detach().clone() for name, value in modules.named_parameters()}
    seen = modules["linear"](modules["embedding"](torch.arange(5))).square().mean()
    seen = seen + modules["conv"](torch.randn(1, 2, 4, 2, 2)).square().mean()
    Descent(modules).step(seen, adam_rate=1e-3, muon_rate=0.02)
    for name, value in modules.named_parameters():
        assert (value.detach() - before[name]).abs().max() > 1e-4, name


@pytest.mark.thorough
@torch.no_grad()
def test_few_tokens_of_text_stand_for_512(run):
    model = experts.new_model(run)
    expert = model.modules["transformer"].eval()
    text = embed(model.modules["text_encoder"].eval(), model.tokenizer, ["a red ball rolls to the right", ""])
    padded = torch.nn.functional.pad(text, (0, 0, 0, sizes.TEXT_TOKENS - text.shape[1]))
    inputs = torch.randn(2, 2 * sizes.Z + 4, 5, 4, 4), torch.tensor([950.0, 910.0])
    exact, got = (expert(*inputs, each, return_dict=False)[0] for each in (padded, text))
    assert (exact - got).abs().max() < 1e-5 * exact.std() * 10  # float32
    for block in expert.blocks:
        block.attn2.set_processor(WanAttnProcessor())
    without = expert(*inputs, text, return_dict=False)[0]
    assert (exact - without).abs().max() > 0.01


@pytest.mark.thorough
def test_the_export_is_a_checkpoint_with_its_own_statistics(run, tmp_path):
    assert export(run, tmp_path / "checkpoint") < LARGEST_MB
    config = json.loads((tmp_path / "checkpoint" / "vae" / "config.json").read_text())
    latents, mean, _ = experts.read_latents(run)
    assert config["latents_mean"] == pytest.approx(mean, abs=1e-4)
    normalised = torch.cat([group.clips.movedim(2, 0).flatten(1) for group in latents], dim=1)
    assert normalised.mean(1).abs().max() < 1e-2
    assert (normalised.std(1) - 1).abs().max() < 1e-2
    pipeline = load_pipeline(tmp_path / "checkpoint", dtype="float32", mesh=(1, 1, 1))
    pipeline.check_components()
    assert pipeline.runtime.model.spec.tasks == ("i2v",)
    sentence = caption(draw_scene(0, 0, held_out=True))
    tokens, warnings = pipeline.runtime.model.tokenize(sentence)
    ids, mask = tokens["text_encoder"]
    theirs = diffusers.WanImageToVideoPipeline.from_pretrained(tmp_path / "checkpoint").tokenizer(sentence).input_ids
    assert ids[0, : mask.sum()].tolist() == theirs
    assert 2 not in theirs  # no unknown word
    assert not warnings
