"""A request with a prompt only is made with the settings of the model's authors' program; `diffusers` has its own."""

import inspect
import math

import diffusers
import pytest
from diffusers.modular_pipelines.minimax_h3 import before_denoise
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam

from wan_tpu import GenerationRequest
from wan_tpu.families import list_published, published_spec

# Steps, guidance of both experts, shift, solver, the negative prompt's beginning, size, frames, frames a second. From
# wan/configs and generate.py of Wan-Video/Wan2.1 (9737cba9) and Wan2.2 (42bf4cfa), inference/cli_demo.py of
# THUDM/CogVideo (e519eced), PIPELINE_CONFIGS of Tencent-Hunyuan/HunyuanVideo-1.5 (60783e70), infer_helios.py of
# PKU-YuanGroup/Helios (2276f8fe), constants.py of ltx-pipelines 1.0.0 and of Lightricks/LTX-2 (400fd310) for LTX-2.5,
# README.md of MiniMax-AI/MiniMax-H3 (1bc8e18e) and SGLang's configs/sample/minimax_h3.py (03d03aa7; 50 points),
# fastvideo_inference.json of FastVideo's checkpoints, wan2.2_i2v_infer.py of thu-ml/TurboDiffusion (35074d4b).
AUTHORS = {
    "wan2.1-t2v-1.3b": (50, 5, 5, 5, "unipc", "色调艳丽", "832x480", 81, 16),
    "wan2.1-t2v-14b": (50, 5, 5, 5, "unipc", "色调艳丽", "1280x720", 81, 16),
    "wan2.1-i2v-14b-480p": (40, 5, 5, 3, "unipc", "镜头晃动，色调艳丽", "832x480", 81, 16),
    "wan2.1-i2v-14b-720p": (40, 5, 5, 5, "unipc", "镜头晃动，色调艳丽", "1280x720", 81, 16),
    "wan2.1-flf2v-14b-720p": (50, 5, 5, 16, "unipc", "镜头切换，镜头晃动，色调艳丽", "1280x720", 81, 16),
    "wan2.2-t2v-a14b": (40, 4, 3, 12, "unipc", "色调艳丽", "1280x720", 81, 16),
    "wan2.2-i2v-a14b": (40, 3.5, 3.5, 5, "unipc", "色调艳丽", "1280x720", 81, 16),
    "wan2.2-ti2v-5b": (50, 5, 5, 5, "unipc", "色调艳丽", "1280x704", 121, 24),
    "cogvideox-2b": (50, 6, 6, 1, "dpm", "", "720x480", 49, 8),
    "cogvideox-5b-i2v": (50, 6, 6, 1, "dpm", "", "720x480", 49, 8),
    "cogvideox1.5-5b": (50, 6, 6, 1, "dpm", "", "1360x768", 81, 16),
    "hunyuanvideo1.5-480p-t2v": (50, 6, 6, 5, "euler", "", "848x480", 121, 24),
    "hunyuanvideo1.5-720p-t2v": (50, 6, 6, 9, "euler", "", "1280x720", 121, 24),
    "hunyuanvideo1.5-720p-i2v": (50, 6, 6, 7, "euler", "", "1280x720", 121, 24),
    "hunyuanvideo1.5-480p-i2v-step-distilled": (12, 1, 1, 7, "euler", "", "848x480", 121, 24),
    "helios-base": (50, 5, 5, 1, "unipc", "Bright tones", "640x384", 99, 24),
    "helios-mid": (60, 5, 5, 1, "unipc", "Bright tones", "640x384", 99, 24),
    "helios-distilled": (6, 1, 1, 1, "dmd", "", "640x384", 99, 24),
    "ltx-2": (40, 3, 3, 1, "euler", "blurry", "768x512", 121, 24),
    "ltx-2-distilled": (11, 1, 1, 1, "euler", "", "1536x1024", 121, 24),
    "ltx-2.3": (30, 3, 3, 1, "euler", "blurry", "768x512", 121, 24),
    "ltx-2.3-distilled": (11, 1, 1, 1, "euler", "", "1536x1024", 121, 24),
    "ltx-2.5": (30, 3, 3, 1, "euler", "has_subtitles", "768x512", 121, 24),
    "ltx-2.5-distilled": (11, 1, 1, 1, "euler-ancestral", "", "1536x1024", 121, 24),
    "minimax-h3": (49, 1, 1, 12, "euler", "", "1344x768", 124, 24),
    "fasth3-v1": (4, 1, 1, 12, "euler", "", "1344x768", 124, 24),
    "fasth3-v2": (8, 1, 1, 10, "euler", "", "1344x768", 124, 24),
    "turbowan2.2-i2v-a14b": (4, 1, 1, 3, "rcm", "", "1280x720", 81, 16),
}


def plan(name, picture=None, **fields):
    spec = published_spec(name)
    image, last = "t2v" not in spec.tasks or picture is not None, spec.last_images == "required"
    request = GenerationRequest(prompt="a cat", **fields)
    return spec.plan(request, image=image, last=last, picture=picture)


@pytest.mark.parametrize("name", AUTHORS)
def test_prompt_alone_is_made_as_the_authors_program_makes_it(name):
    steps, scale, scale_2, shift, solver, negative, size, frames, fps = AUTHORS[name]
    made = plan(name)
    request = made.request
    assert (f"{request.width}x{request.height}", request.frames, request.fps) == (size, frames, fps)
    assert (request.steps, request.shift, request.solver) == (steps, shift, solver)
    assert (request.guidance_scale, request.guidance_scale_2) == (scale, scale_2)
    assert request.negative_prompt.startswith(negative) and bool(request.negative_prompt) == bool(negative)
    reads_later = published_spec(name).reads_images and made.images
    assert reads_later or made.prompts == ("a cat", request.negative_prompt)[: 1 + (scale > 1)]
    assert plan(name, preset="original") == made  # The same job, the same name of snapshots.


def find_pipeline(name):
    """Return diffusers' pipeline for a published model."""
    if name.startswith("helios"):
        return diffusers.HeliosPipeline if name == "helios-base" else diffusers.HeliosPyramidPipeline
    family = next(start for start in ("wan", "cogvideox", "hunyuan", "ltx") if name.startswith(start))
    of_text, of_image = {
        "wan": (diffusers.WanPipeline, diffusers.WanImageToVideoPipeline),
        "cogvideox": (diffusers.CogVideoXPipeline, diffusers.CogVideoXImageToVideoPipeline),
        "hunyuan": (diffusers.HunyuanVideo15Pipeline, diffusers.HunyuanVideo15ImageToVideoPipeline),
        "ltx": (diffusers.LTX2Pipeline, diffusers.LTX2ImageToVideoPipeline),
    }[family]
    return of_text if "t2v" in published_spec(name).tasks else of_image


# TurboWan and FastH3 aren't in diffusers. Its pipeline for LTX-2 has guided models' defaults alone.
NOT_AS_SIGNED = ("turbowan", "fasth3", "minimax", "ltx-2-distilled", "ltx-2.3-distilled", "ltx-2.5-distilled")


@pytest.mark.parametrize("name", [name for name in list_published() if not name.startswith(NOT_AS_SIGNED)])
def test_preset_diffusers_has_the_defaults_of_its_pipeline(name):
    spec, made = published_spec(name), plan(name, preset="diffusers")
    signature = inspect.signature(find_pipeline(name).__call__)
    theirs = {key: value.default for key, value in signature.parameters.items()}
    names = {"height": "height", "width": "width", "frames": "num_frames", "steps": "num_inference_steps"}
    names |= {"fps": "frame_rate"}
    if name != "helios-distilled":  # diffusers warns that it ignores the scale, and applies it all the same.
        names |= {"guidance_scale": "guidance_scale"}
    expected = {ours: theirs.get(key) for ours, key in names.items()}
    if "pyramid_num_inference_steps_list" in theirs:
        expected["steps"] = sum(theirs["pyramid_num_inference_steps_list"])
        assert not theirs["is_amplify_first_chunk"] and made.chunk_stops[0] == expected["steps"]
    expected = {ours: value for ours, value in expected.items() if value is not None}  # None: the checkpoint's own.
    assert "steps" in expected and {ours: getattr(made.request, ours) for ours in expected} == expected
    assert made.request.guidance_scale_2 == made.request.guidance_scale and theirs["negative_prompt"] is None
    assert made.request.negative_prompt == ""
    if "ltx" in name:
        assert theirs["use_cross_timestep"]
        stg = [] if name == "ltx-2" else ["stg"]  # diffusers perturbs no layer of LTX-2.0.
        rows = [
            [
                theirs[f"{part}guidance_scale"] - 1,
                *(theirs[f"{part}{key}_scale"] for key in stg),
                theirs[f"{part}modality_scale"] - 1,
                theirs[f"{part}guidance_rescale"],
            ]
            for part in ("", "audio_")
        ]
        assert spec.schedule(made.request).guidance[0].tolist() == rows


def test_preset_diffusers_has_the_defaults_of_its_blocks_for_minimax_h3():
    request = plan("minimax-h3", preset="diffusers").request
    inputs = {value.name: value.default for value in before_denoise.MiniMaxH3PrepareLayoutStep().inputs}
    assert request.frames == inputs["num_frames"]
    assert request.steps + 1 == InputParam.template("num_inference_steps").default  # The last point is the video.


def test_size_of_preset_diffusers_takes_an_images_shape():
    for name in ("wan2.2-i2v-a14b", "wan2.2-ti2v-5b"):
        made = plan(name, (1280, 720), preset="diffusers").request
        assert made.height > made.width and abs(made.height * made.width / (480 * 832) - 1) < 0.1


def test_negative_prompt_is_filled_in_only_where_it_is_used():
    assert plan("wan2.2-t2v-a14b", guidance_scale=1).request.negative_prompt == ""
    assert plan("wan2.2-t2v-a14b", negative_prompt="").request.negative_prompt == ""
    assert plan("wan2.2-t2v-a14b", preset="lightning").request.negative_prompt == ""


@pytest.mark.parametrize("name", ["wan2.1-i2v-14b-480p", "wan2.1-i2v-14b-720p"])
def test_shift_of_wan_21_from_an_image_follows_the_size(name):
    """In generate.py it is 3 for 832*480 and 480*832, and 5 otherwise; diffusers has 3 in the checkpoint."""
    for height, width, shift in ((480, 832, 3), (832, 480, 3), (720, 1280, 5), (1280, 720, 5)):
        assert plan(name, height=height, width=width).request.shift == shift
        assert plan(name, height=height, width=width, preset="diffusers").request.shift == 3
        assert plan(name, height=height, width=width, shift=4).request.shift == 4


def best_output_size(width, height, multiple, area):
    """wan/utils/utils.py of Wan2.2, by its description: both candidates as floats, the closer ratio wins."""
    ratio = width / height
    float_width = (area * ratio) ** 0.5
    width_1 = int(float_width // multiple * multiple)
    height_1 = int(area / width_1 // multiple * multiple)
    height_2 = int(area / float_width // multiple * multiple)
    width_2 = int(area / height_2 // multiple * multiple)
    distances = [max(ratio / (w / h), (w / h) / ratio) for w, h in ((width_1, height_1), (width_2, height_2))]
    return (height_1, width_1) if distances[0] < distances[1] else (height_2, width_2)


def test_sizes_of_images_are_those_of_wans_program():
    turned = 0
    for width, height in ((1280, 720), (1000, 1000), (3000, 2000), (2000, 3000), (1920, 1080), (777, 1234), (640, 480)):
        made = plan("wan2.2-ti2v-5b", (height, width)).request
        assert (made.height, made.width) == best_output_size(width, height, 32, 704 * 1280)
        diffusers = plan("wan2.2-ti2v-5b", (height, width), preset="diffusers").request
        turned += (made.height, made.width) != (diffusers.height, diffusers.width)
        made = plan("wan2.2-i2v-a14b", (height, width)).request
        sides = (math.sqrt(720 * 1280 * side) // 16 * 16 for side in (height / width, width / height))
        assert (made.height, made.width) == tuple(map(int, sides))
    assert turned
    # There, the root of a float64 below 480² makes it 464 rows.
    assert plan("wan2.1-i2v-14b-480p", (480, 832)).request.height == 480
