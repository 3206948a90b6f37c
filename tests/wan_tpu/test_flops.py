"""The work of a stage, against closed formulas and against counting every frame."""

import diffusers
import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.wan_tpu.minimax_h3_reference import Reference
from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.commands.record import Recorder
from wan_tpu.families import published_spec
from wan_tpu.families.model import open_model, published_model
from wan_tpu.families.shared import flop_count as flops
from wan_tpu.families.wan.model import WanModel
from wan_tpu.stage_machine import EncodeImage


def test_a_step_of_the_14b_model():
    """Projections, attention and feed-forward of 40 blocks, by hand; embeddings and the output add under 1 %."""
    model = WanModel(published_spec("wan2.2-i2v-a14b"))
    request = GenerationRequest(image=Image.new("RGB", (8, 8))).resolve(model.spec.defaults)
    shape = model.spec.latent_shape(request)
    tokens, width, hidden, text = model.spec.tokens(shape), 5120, 13824, 512
    assert tokens == 75_600
    projections = 2 * tokens * width * (4 * width + 2 * width + 2 * hidden) + 2 * text * width * 2 * width
    attention = 4 * tokens * width * (tokens + text)
    assert model.flops.step(shape, branches=2) == pytest.approx(2 * 40 * (projections + attention), rel=0.01)


@pytest.mark.parametrize("kind", [pytest.param("wan2.2-i2v-a14b", marks=pytest.mark.thorough), "wan2.2-ti2v-5b"])
def test_frames_counted_by_chunks_equal_all_frames(kind, checkpoint):
    model = load_pipeline(checkpoint(kind), dtype="float32", mesh=(1, 1, 1)).runtime.model
    request = GenerationRequest(image=Image.new("RGB", (8, 8)), height=64, width=96, frames=9).resolve(
        model.spec.defaults
    )

    def vae():
        return diffusers.AutoencoderKLWan.from_config(model.config.vae)

    shape = model.spec.latent_shape(request)
    latents = torch.empty(shape, device="meta")
    assert model.flops.decoder(shape) == flops.count(vae, lambda module: module.decode(latents))
    frames = 1 if model.config.expand_timesteps else 9
    pixels = torch.empty(1, 3, frames, 64, 96, device="meta")
    text = model.flops.encoder(GenerationRequest().resolve(model.spec.defaults), prompts=1)
    assert model.flops.encoder(request, prompts=1) - text == flops.count(vae, lambda module: module.encode(pixels))


def test_the_pieces_of_hunyuan_s_transformer_are_its_forward(checkpoint):
    """What is counted on meta tensors, piece by piece, against a run of the whole with values."""
    model = load_pipeline(checkpoint("hunyuanvideo1.5-480p-i2v"), dtype="float32", mesh=(1, 1, 1)).runtime.model
    shape, text, glyphs = (1, 4, 3, 4, 6), model.prompt_shapes["text"][0], model.prompt_shapes["glyphs"][0]
    module = diffusers.HunyuanVideo15Transformer3DModel.from_config(model.config.transformer).eval()
    # torch counts no operations of its fused attention on CPU.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(
            torch.ones(1, 2 * 4 + 1, *shape[2:]), torch.tensor([5.0]), torch.ones(1, *text), torch.ones(1, text[0]),
            None, torch.ones(1, *glyphs), torch.ones(1, glyphs[0]), torch.ones(*model.image_features_shape),
        )  # fmt: skip
    assert model.flops.step(shape, branches=2) == 2 * counter.get_total_flops() > 0


def test_quotes_and_an_image_are_work_for_hunyuan_s_encoders(checkpoint):
    model = load_pipeline(checkpoint("hunyuanvideo1.5-480p-i2v"), dtype="float32", mesh=(1, 1, 1)).runtime.model
    image = Image.new("RGB", (8, 8))
    requests = [GenerationRequest(), GenerationRequest(prompt='a sign says "open"'), GenerationRequest(image=image)]
    plain, quoted, pictured = (
        model.flops.encoder(request.resolve(model.spec.defaults), prompts=1) for request in requests
    )
    assert plain < quoted and plain < pictured
    assert model.flops.encoder(requests[0].resolve(model.spec.defaults), prompts=2) == 2 * plain


@pytest.mark.thorough
@pytest.mark.long
def test_work_of_ltx2_is_what_a_run_of_diffusers_counts(checkpoint):
    folder = checkpoint("ltx-2.3-distilled")
    model = load_pipeline(folder, dtype="float32", mesh=(1, 1, 1)).runtime.model
    request = GenerationRequest(prompt="A cat", height=64, width=96, frames=9, steps=8).resolve(model.spec.defaults)
    pipe = diffusers.LTX2Pipeline.from_pretrained(folder)
    scales = {f"{prefix}{name}_scale": 1.0 for prefix in ("", "audio_") for name in ("guidance", "modality")}
    scales |= {"stg_scale": 0.0, "audio_stg_scale": 0.0}
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        pipe(
            request.prompt, height=64, width=96, num_frames=9, frame_rate=24.0, num_inference_steps=8,
            use_cross_timestep=True, output_type="np", **scales,
        )  # fmt: skip
    shape = model.spec.latent_shape(request)
    parts = model.flops.encoder(request, prompts=1), 8 * model.flops.step(shape, branches=1), model.flops.decoder(shape)
    # diffusers also has Gemma predict the next word at each of 1024 tokens, which nothing reads.
    words = pipe.text_encoder.lm_head.weight.numel()
    assert sum(parts) == counter.get_total_flops() - 2 * 1024 * words


@pytest.mark.thorough
def test_a_helios_step_of_any_size_has_the_history_s_tokens():
    """Of the published model by hand; the text is for the chunk's own tokens only. Embeddings add 2 % at most."""
    model = published_model("helios-distilled")
    request = GenerationRequest().resolve(model.spec.defaults)
    width, hidden, text, history = 5120, 13824, 512, 1920 + 240 + 240
    smallest, _, largest = model.spec.experts(request)[:3]
    for expert, tokens in ((smallest, 540), (largest, 8640)):
        length = tokens + history
        linear = 2 * width * (length * (4 * width + 2 * hidden) + tokens * 2 * width + text * 2 * width)
        attention = 4 * width * (length**2 + tokens * text)
        counted = model.count_step(request, expert, images=0)
        assert counted == pytest.approx(40 * (linear + attention), rel=0.02)


@pytest.mark.thorough
def test_keyframes_are_rows_of_minimax_h3_s_sequence():
    """Of the published model at its own size, by hand: linear layers and attention of 50 blocks; the rest is 2 %."""
    model = published_model("minimax-h3")
    request = GenerationRequest().resolve(model.spec.defaults)
    shape, width, inner, hidden = model.spec.latent_shape(request), 5376, 7168, 14336
    rows = model.spec.tokens(shape) + model.spec.audio_tokens(request.frames) + 1024
    linear = 2 * width * (4 * inner + 3 * hidden)
    for images in (0, 2):
        # Of a keyframe of 1344x768 there are 1008 tokens, and in the text as many with two marks.
        length = rows + images * (1008 + 1010)
        expected = 50 * (length * linear + 4 * length**2 * inner)
        assert model.flops.step(shape, branches=1, images=images) == pytest.approx(expected, rel=0.02)


@pytest.mark.thorough
@pytest.mark.long
def test_work_of_minimax_h3_is_what_a_run_of_diffusers_counts(checkpoint):
    """With a prompt of as many tokens as there are rows for the text; in the first step both parts' times are one."""
    folder = checkpoint("minimax-h3")
    model, reference = open_model(Checkpoint(folder)), Reference(folder)
    request = GenerationRequest(prompt="a" * 1024, height=64, width=96, steps=1).resolve(model.spec.defaults)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        reference(steps=1, prompt=request.prompt, num_frames=request.frames, height=64, width=96)
    shape = model.spec.latent_shape(request)
    # diffusers also runs Qwen's fifth layer, whose output nothing reads.
    encoder = model.flops.encoder(request, prompts=1) * 5 // 4
    step = counter.get_total_flops() - encoder - model.flops.decoder(shape)
    assert model.flops.step(shape, branches=1) == pytest.approx(step, rel=1e-4)


def test_record_counts_an_encoder_that_reads_images_with_the_prompt(checkpoint):
    pipe = load_pipeline(checkpoint("minimax-h3"), dtype="float32", mesh=(1, 1, 1))
    image = Image.new("RGB", (96, 64))
    plan = pipe.plan(GenerationRequest(prompt="A cat", image=image, height=64, width=96))
    recorder = Recorder(pipe.runtime, plan)
    with recorder.operation(EncodeImage()):
        pass
    [stage] = recorder.stages.values()
    assert stage.flops == pipe.runtime.model.flops.encoder(plan.request, prompts=0) > 0
