"""Bad input is refused in one line that says what works; odd but good input is taken."""

import dataclasses
import math
import re
from concurrent.futures import ThreadPoolExecutor

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from tests.actors.small_spec import MOTION_SPEC, SOUND_SPEC
from tests.conftest import record_steps
from tests.wan_tpu.test_parity import LATENT_TOLERANCE
from wan_tpu import GenerationRequest, InvalidInput, InvalidRequest, load_pipeline
from wan_tpu.commands.sizes import read_size_with_frames
from wan_tpu.families import published_spec
from wan_tpu.fields import describe, type_of
from wan_tpu.media.image import load_image
from wan_tpu.reference import Reference
from wan_tpu.request import FIELDS, LIMITS, ResolvedRequest, parse_size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"height": 719}, r"height.*\b719\b.*\b16\b.*\b720\b"),
        ({"width": 8}, r"width.*\b8\b.*\b16\b.*8192.*\b16\b"),
        ({"height": 480.0}, "height.*480.0"),
        ({"frames": 0}, r"frames.*\b0\b.*\b1\b"),
        ({"steps": -3}, r"steps.*-3\b.*\b1\b.*1000.*\b1\b"),
        ({"steps": True}, "steps.*True"),
        ({"guidance_scale": math.nan}, "guidance_scale.*nan"),
        ({"guidance_scale_2": math.inf}, "guidance_scale_2.*inf"),
        ({"guidance_scale": -1}, r"guidance_scale.*-1\b.*\b0\b.*\b100\b.*\b0\b"),
        ({"shift": 0}, r"shift.*\b0\b.*0\.01.*\b100\b"),
        ({"fps": "16"}, "fps.*'16'"),
        ({"seed": -1}, r"seed.*-1\b"),
        ({"solver": 1}, "solver.*int.*string"),
        ({"prompt": None}, "prompt.*NoneType.*string"),
        ({"image": 7}, "image.*int"),
        ({"generate_audio": 1}, r"generate_audio.*\b1\b.*true.*false"),
        ({"generate_audio": "yes"}, "generate_audio.*'yes'.*true.*false"),
    ],
)
def test_bad_fields_are_refused_with_the_remedy(fields, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        GenerationRequest(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("wan2.1-t2v-14b", {"frames": 80}, r"frames.*\b80\b.*4n \+ 1\b.*\b81\b"),
        ("wan2.1-t2v-14b", {"solver": "ddim"}, "solver 'ddim'.*unipc.*euler"),
        ("wan2.1-t2v-14b", {"generate_audio": True}, "wan2.1-t2v-14b.*sound.*ltx-2"),
        ("cogvideox1.5-5b", {"frames": 85}, r"frames.*\b85\b.*8n \+ 1\b.*\b81\b"),
        ("cogvideox1.5-5b", {"height": 2416}, "height.*2416.*cogvideox1.5-5b.*2400"),
        ("cogvideox-5b-i2v", {"height": 512}, r"height.*\b512\b.*cogvideox-5b-i2v.*\b480\b"),
        ("cogvideox-5b-i2v", {"frames": 25}, r"frames.*\b25\b.*cogvideox-5b-i2v.*\b49\b"),
        ("cogvideox-2b", {"shift": 3.0}, r"shift.*\b3\b.*cogvideox-2b"),
        ("cogvideox-2b", {"solver": "unipc"}, "'unipc'.* dpm.*ddim"),
        ("hunyuanvideo1.5-480p-t2v", {"frames": 120}, r"frames.*\b120\b.*4n \+ 1\b.*\b121\b"),
        ("hunyuanvideo1.5-480p-t2v", {"solver": "unipc"}, "solver 'unipc'.*euler"),
        ("hunyuanvideo1.5-480p-t2v", {"guidance_scale_2": 3.0}, r"guidance_scale_2.*\b3\b.*hunyuanvideo1.5-480p-t2v"),
    ],
)
def test_what_a_model_does_not_make_is_refused_with_what_it_does(model, fields, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        published_spec(model).plan(GenerationRequest(**fields), image=model.endswith("i2v"))
    assert caught.value.field in fields


@pytest.mark.parametrize(
    ("frames", "nearest", "latent_frames"), [(1, 5, 1), (6, 5, 1), (13, 5, 1), (14, 22, 5), (22, 22, 5), (121, 124, 30)]
)
def test_model_says_how_many_frames_it_makes(frames, nearest, latent_frames):
    """With MiniMax-H3's grid, 17n + 5, here over a VAE that compresses time by four."""
    assert SOUND_SPEC.nearest_frames(frames) == nearest
    assert SOUND_SPEC.latent_frames(nearest) == latent_frames
    if frames == nearest:
        assert SOUND_SPEC.plan(GenerationRequest(frames=frames)).request.frames == frames
        return
    with pytest.raises(InvalidRequest, match=rf"frames is {frames}\b.* 17n \+ 5.*{nearest}"):
        SOUND_SPEC.plan(GenerationRequest(frames=frames))


def test_video_has_sound_if_the_model_makes_it_unless_a_request_says_no():
    def resolve(spec, **fields):
        return spec.plan(GenerationRequest(**fields)).request

    assert [resolve(SOUND_SPEC, generate_audio=choice).generate_audio for choice in (None, True, False)] == [
        True,
        True,
        False,
    ]
    silent = published_spec("wan2.1-t2v-14b")
    # Neither records nor digests of models without sound say anything about it.
    for fields in ({}, {"generate_audio": False}):
        assert "generate_audio" not in resolve(silent, **fields).to_json()
    assert "generate_audio" not in GenerationRequest().to_json()
    for choice in (True, False):
        assert resolve(SOUND_SPEC, generate_audio=choice).to_json()["generate_audio"] is choice


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        ("ltx-2.3", Reference("tail", None, 512, 768, 25)),
        ("minimax-h3", Reference("soundtrack", None, samples=9, sample_rate=9)),
    ],
)
def test_an_image_beside_references_is_advised_to_be_one_where_the_model_takes_one(model, reference):
    spec = published_spec(model)
    with pytest.raises(InvalidRequest) as raised:
        spec.plan(GenerationRequest(prompt="a cat", references=[reference]), image=True)
    assert ("references" in str(raised.value).partition(";")[2]) == ("image" in spec.reference_counts)


def test_a_kind_of_reference_that_the_model_does_not_take_is_refused():
    for kind in ("video", "imagine"):
        with pytest.raises(InvalidRequest) as refused:
            MOTION_SPEC.plan(GenerationRequest(prompt="a", references=[Reference(kind, None, 64, 96, 48)]))
        assert refused.value.field == "references"


def test_every_field_is_described_and_every_number_has_limits():
    assert all(describe(field) for field in FIELDS.values())
    assert LIMITS.keys() == {name for name, field in FIELDS.items() if type_of(field) in (int, float)}


def test_what_the_program_itself_does_wrong_is_no_invalid_request():
    with pytest.raises(TypeError, match="'num_frames'"):
        GenerationRequest(num_frames=5)
    with pytest.raises(TypeError, match="height, width"):
        ResolvedRequest(prompt="a cat")


@pytest.mark.parametrize("text", ["720", "720x", "axb", "1280x720x3", "-720x1280", "720X1280", "720*1280"])
def test_bad_size(text):
    with pytest.raises(InvalidRequest, match=r"WIDTHxHEIGHT"):
        parse_size(text)


def test_sizes_whose_sides_can_be_mistaken_are_refused_with_both_readings():
    """Wan's own program reads WIDTH*HEIGHT, others HEIGHT*WIDTH."""
    with pytest.raises(InvalidInput) as raised:
        parse_size("1280*720")
    assert all(size in str(raised.value) for size in ("1280x720", "720x1280"))
    assert read_size_with_frames("--largest", "1280x720x81") == (720, 1280, 81)
    for text in ("1280x720", "1280*720", "1280*720*81", "1280x720x", "1280x720xmany", "x", ""):
        with pytest.raises(InvalidInput, match="--largest"):
            read_size_with_frames("--largest", text)


def test_broken_images_are_refused(tmp_path):
    text, cut, huge = tmp_path / "text.png", tmp_path / "cut.png", tmp_path / "huge.png"
    text.write_text("no picture")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    noise.save(cut)
    cut.write_bytes(cut.read_bytes()[:2000])
    Image.new("1", (20_000, 20_000)).save(huge)
    for path, message in [
        (tmp_path / "none.png", r"none\.png"),
        (text, r"text\.png.*PNG, JPEG, WebP, AVIF, GIF, BMP or TIFF"),
        (cut, "damaged"),
        (huge, "64 megapixels"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            GenerationRequest(image=path)


def test_medium_bomb_is_refused_by_our_limit():
    with pytest.raises(InvalidRequest, match=r"9000x9000.* 64 "):
        load_image(Image.new("1", (9000, 9000)))


def test_any_mode_and_rotation_becomes_upright_rgb(tmp_path):
    ramp = np.tile(np.arange(64, dtype=np.uint8) * 4, (32, 1))
    for mode in ("L", "P", "RGBA", "CMYK", "1", "LA"):
        assert load_image(Image.fromarray(ramp).convert("RGB").convert(mode)).mode == "RGB"
    for name, pixels in (("a.png", "<u2"), ("little.tiff", "<u2"), ("big.tiff", ">u2")):
        Image.fromarray((ramp.astype(np.uint16) * 257).astype(pixels)).save(tmp_path / name)
        assert np.array_equal(np.asarray(load_image(tmp_path / name))[..., 0], ramp)
    rotated = tmp_path / "rotated.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # shown a quarter turn clockwise
    Image.fromarray(ramp).save(rotated, exif=exif)
    upright = load_image(rotated)
    assert upright.size == (32, 64)
    assert np.asarray(upright)[0].mean() < np.asarray(upright)[-1].mean()


def test_requests_that_the_model_cannot_make(checkpoint):
    image = Image.new("RGB", (64, 64))
    for kind, fields, message in [
        ("wan2.2-i2v-a14b", {}, "image"),
        ("wan2.1-t2v-1.3b", {"image": image}, "image"),
        ("wan2.1-t2v-1.3b", {"last_image": image}, "last_image"),
        ("wan2.2-i2v-a14b", {"last_image": image}, "minimax-h3"),
        ("wan2.2-ti2v-5b", {"height": 48, "width": 64}, r"\b32\b.*\b64\b"),
    ]:
        pipe = load_pipeline(checkpoint(kind), mesh=(1, 1, 1))
        with pytest.raises(InvalidRequest, match=message):
            pipe.generate(GenerationRequest(**fields))
        assert not pipe.runtime._components  # refused before any weight was read


def test_numpy_numbers_are_numbers():
    request = GenerationRequest(height=np.int64(32), guidance_scale=np.float32(2))
    assert request.to_json()["height"] == 32
    assert type(request.height) is int
    assert type(request.guidance_scale) is float


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_unknown_range_are_refused(mode):
    with pytest.raises(InvalidRequest, match="PNG"):
        load_image(Image.new(mode, (8, 8)))
    with pytest.raises(InvalidRequest, match="0x0"):
        load_image(Image.new("RGB", (0, 0)))


@pytest.mark.long
def test_two_threads_may_share_a_new_pipeline(checkpoint):
    pipe = load_pipeline(checkpoint("wan2.1-t2v-1.3b"), dtype="float32", mesh=(1, 1, 1))
    requests = [
        GenerationRequest(prompt="a cat", height=32, width=32, frames=1, steps=1, guidance_scale=1.0, seed=seed)
        for seed in (0, 1)
    ]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(pipe.generate, requests))
    for request, video in zip(requests, together, strict=True):
        assert np.array_equal(pipe.generate(request).pixels, video.pixels)


def test_unknown_dtype(checkpoint):
    with pytest.raises(InvalidInput, match="float32, bfloat16"):
        load_pipeline(checkpoint("wan2.1-t2v-1.3b"), dtype="float16")


def test_noise_of_another_shape(pipeline):
    request = GenerationRequest(height=32, width=32, frames=1, steps=1)
    for noise, message in [
        (np.zeros((1, 16, 1, 2, 2)), r"\(1, 16, 1, 4, 4\)"),
        (np.full((1, 16, 1, 4, 4), np.nan), "finite"),
        ("noise", "real numbers"),
        (np.zeros((1, 16, 1, 4, 4), complex), "real numbers"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            pipeline("wan2.1-t2v-1.3b").generate(request, noise=noise)


def test_long_prompt_is_cut_with_a_warning_that_says_where(pipeline):
    pipe = pipeline("wan2.1-t2v-1.3b")
    request = GenerationRequest(
        prompt="a cat and a dog " * 300, height=32, width=32, frames=1, steps=1, guidance_scale=1.0
    )
    with pytest.warns(UserWarning, match="the model reads 512") as caught:
        pipe.generate(request)
    cut = [re.search("cut after «… (.+)»", str(w.message)) for w in caught if "512" in str(w.message)]
    assert len(cut) == 1
    assert len(cut[0][1]) > 3
    assert cut[0][1] in request.prompt


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_text_that_is_too_long_is_named_by_its_field_and_refused_if_it_may_not_be_cut(field, pipeline):
    pipe = pipeline("wan2.1-t2v-1.3b")
    request = GenerationRequest(height=32, width=32, frames=1, steps=1, **{field: "a cat and a dog " * 300})
    warnings = []
    pipe.encode(pipe.plan(request), warn=warnings.append)
    assert [warning.partition(" is ")[0] for warning in warnings] == [field]
    with pytest.raises(InvalidRequest, match=r"\b512\b") as refused:
        pipe.encode(pipe.plan(dataclasses.replace(request, truncate_prompt=False)))
    assert refused.value.field == field


SCALES = [(1.0, 3.0), (3.0, 0.5), (3.0, 1.0)]


@pytest.fixture(scope="module")
def theirs(checkpoint):
    reference = diffusers.WanImageToVideoPipeline.from_pretrained(checkpoint("wan2.2-i2v-a14b"))
    reference.set_progress_bar_config(disable=True)
    return reference


@pytest.mark.parametrize(("high", "low"), SCALES)
def test_guidance_of_two_experts_is_that_of_diffusers(high, low, pipeline, theirs):
    """There the first scale alone decides whether there is any; the second may be below 1 where there is."""
    pipe, image = pipeline("wan2.2-i2v-a14b"), Image.new("RGB", (48, 32), "red")
    request = GenerationRequest(
        prompt="a cat", negative_prompt="a dog", image=image, height=32, width=48, frames=1, steps=2,
        guidance_scale=high, guidance_scale_2=low,
    )  # fmt: skip
    noise = np.random.default_rng(0).standard_normal((1, 16, 1, 4, 6)).astype(np.float32)
    expected = theirs(
        image=image, prompt="a cat", negative_prompt="a dog", height=32, width=48, num_frames=1,
        num_inference_steps=2, guidance_scale=high, guidance_scale_2=low, latents=torch.from_numpy(noise),
        output_type="latent",
    ).frames.numpy()  # fmt: skip
    assert [(expert.start, expert.stop) for expert in pipe.plan(request).experts] == [(0, 1), (1, 2)]
    ours = record_steps(pipe, request, noise)[-1].latents
    assert np.abs(ours - expected).max() <= LATENT_TOLERANCE * np.abs(expected).max()
