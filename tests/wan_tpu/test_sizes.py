"""The size of a video that has an image, and what becomes of an image of another shape."""

import functools
import math

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image, ImageDraw

from wan_tpu import GenerationRequest, InvalidRequest
from wan_tpu.families import published_spec
from wan_tpu.families.minimax_h3.vision.pictures import cover
from wan_tpu.families.model import published_model
from wan_tpu.lengths import count_frames, describe_length
from wan_tpu.media.image import fit_image, has_shape
from wan_tpu.media.video import VideoWriter
from wan_tpu.stages.encode import fit_warnings

PICTURES = [(720, 1280), (1280, 720), (4032, 3024), (3024, 4032), (300, 451), (1000, 1000), (2400, 1080), (777, 333)]


def size_for(model, picture, **fields):
    spec = published_spec(model)
    last = spec.last_images == "required"
    planned = spec.plan(GenerationRequest(**fields), image=True, last=last, picture=picture).request
    return planned.height, planned.width


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize(
    ("model", "area", "multiple"),
    [
        ("wan2.1-i2v-14b-480p", 480 * 832, 16),
        ("wan2.1-i2v-14b-720p", 480 * 832, 16),
        ("wan2.1-flf2v-14b-720p", 480 * 832, 16),
        ("wan2.2-i2v-a14b", 480 * 832, 16),
        ("wan2.2-ti2v-5b", 480 * 832, 32),
        ("ltx-2.3", 512 * 768, 32),
        ("ltx-2.3-distilled", 1024 * 1536, 64),
    ],
)
def test_video_of_wan_or_ltx_has_the_shape_of_its_image(model, area, multiple, picture):
    size, shape = size_for(model, picture, preset="diffusers"), picture[0] / picture[1]
    # The example of diffusers' WanImageToVideoPipeline.
    height = round(np.sqrt(area * shape)) // multiple * multiple
    width = round(np.sqrt(area / shape)) // multiple * multiple
    assert size == (height, width)
    if "ltx" in model:
        return
    # Wan's own image2video.py, which doesn't round before it cuts down to a multiple.
    own = [int(math.sqrt(side) // multiple * multiple) for side in (area * shape, area / shape)]
    assert all(0 <= ours - theirs <= multiple for ours, theirs in zip(size, own, strict=True))


@pytest.mark.parametrize(
    ("picture", "size"),
    [
        ((768, 1360), (768, 1360)),
        ((4032, 3024), (1024, 768)),
        ((1080, 1920), (768, 1360)),
        ((1000, 1000), (768, 768)),
        ((3000, 100), (1360, 768)),
    ],
)
def test_cogvideox_video_has_the_shape_of_its_image_within_what_its_card_says(picture, size):
    assert size_for("cogvideox1.5-5b-i2v", picture) == size
    assert size_for("cogvideox-5b-i2v", picture) == (480, 720)  # which has learned positions of that size alone


def test_size_that_is_said_is_kept_and_one_side_leads_to_the_other():
    assert size_for("wan2.2-i2v-a14b", (4032, 3024), height=480, width=832) == (480, 832)
    assert size_for("wan2.2-i2v-a14b", (4032, 3024), height=640) == (640, 480)
    assert size_for("wan2.2-ti2v-5b", (4032, 3024), width=480) == (640, 480)
    assert size_for("wan2.2-i2v-a14b", None) == (720, 1280)
    assert size_for("wan2.2-i2v-a14b", (10, 9000)) == (480, 1920)  # no longer than four to one


def test_video_that_begins_with_another_has_its_shape(tmp_path):
    with VideoWriter(tmp_path / "phone.mp4", fps=8) as writer:
        writer.write(np.zeros((5, 128, 72, 3), np.uint8))
    cut = "the input video is 72x128 but the video is 832x480; it is cropped to the video's aspect ratio"
    stretched = "the input video is 72x128 but the video is 352x640; it is stretched or cropped by 2.3%"
    for fields, size, warnings in (
        ({}, (1280, 720), []),
        ({"height": 640}, (640, 352), [stretched]),
        ({"height": 480, "width": 832}, (480, 832), [cut]),
    ):
        request = GenerationRequest(video=tmp_path / "phone.mp4", **fields)
        model = published_model("wan2.1-t2v-14b")
        planned = model.spec.plan(request).request
        assert (planned.height, planned.width) == size
        assert list(fit_warnings(model, planned)) == warnings
    (tmp_path / "phone.mp4").write_text("no video")
    with pytest.raises(InvalidRequest, match=r"phone\.mp4"):
        published_spec("wan2.1-t2v-14b").plan(GenerationRequest(video=tmp_path / "phone.mp4"))


@pytest.mark.parametrize(
    ("picture", "warned"), [((480, 832), 0), ((490, 832), 1), ((489, 832), 0), ((480, 849), 1), ((480, 848), 0)]
)
def test_image_is_stretched_by_two_percent_at_most_without_a_warning(picture, warned):
    """Within 16 pixels of a side it is stretched as in diffusers, here by up to 2.1 %."""
    spec, (height, width) = published_spec("wan2.2-i2v-a14b"), (480, 832)
    assert has_shape(Image.new("L", picture[::-1]), height, width, spec.shape_slack)
    request = spec.plan(GenerationRequest(height=height, width=width), image=True).request
    assert len(spec.describe_fit(request, "image", picture)) == warned


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("model", ["wan2.2-i2v-a14b", "wan2.2-ti2v-5b", "wan2.1-i2v-14b-480p"])
def test_image_that_a_video_follows_is_resized_as_diffusers_does(model, picture):
    height, width = size_for(model, picture, preset="diffusers")
    assert has_shape(Image.new("L", picture[::-1]), height, width, published_spec(model).shape_slack)


@pytest.mark.parametrize(
    ("size", "slack", "mode"),
    [
        ((480, 832), 16, "crop"),
        ((832, 480), 16, "crop"),
        ((416, 624), 16, "default"),
        ((400, 608), 16, "default"),
        ((400, 608), 0, "crop"),
    ],
)
def test_image_is_fitted_as_diffusers_does(size, slack, mode):
    image = Image.effect_noise((451, 300), 50).convert("RGB")
    theirs = VaeImageProcessor(vae_scale_factor=8).resize(image, *size, resize_mode=mode)
    assert fit_image(image, *size, slack=slack).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("fit", [functools.partial(fit_image, slack=0), cover], ids=["fitted", "covering"])
@pytest.mark.parametrize("turned", [False, True])
def test_long_and_narrow_image_takes_no_more_memory_than_what_is_seen_of_it(fit, turned):
    """Resized as a whole it would have 96x960000 pixels here, and gigabytes in a video of 1344x768."""
    image = Image.effect_noise((1, 10_000), 50).convert("RGB")
    middle = image.crop((0, 4900, 1, 5100))
    if turned:
        image, middle = (picture.transpose(Image.Transpose.ROTATE_90) for picture in (image, middle))
    expected, result = (np.asarray(fit(picture, 64, 64), np.int32) for picture in (middle, image))
    assert result.shape == (64, 64, 3) and np.abs(result - expected).max() <= 1


@pytest.mark.parametrize(
    "name", ["wan2.1-flf2v-14b-720p", "wan2.2-ti2v-5b", "cogvideox1.5-5b-i2v", "hunyuanvideo1.5-480p-i2v", "ltx-2.3"]
)
def test_circle_stays_a_circle_where_another_shape_is_asked_for(name):
    photo, model = Image.new("RGB", (600, 800)), published_model(name)
    ImageDraw.Draw(photo).ellipse((200, 300, 400, 500), fill="white")
    images = {"image": photo} | ({"last_image": photo} if model.spec.last_images == "required" else {})
    request = model.spec.plan(GenerationRequest(**images, height=448, width=832, frames=9)).request
    assert [str(text).split(" is 600x800 but the video is 832x448; ")[0] for text in fit_warnings(model, request)] == [
        *images
    ]
    chunks = model.video_condition(request)
    for pixels in (chunks[0][0, 0, 0], chunks[-1][0, 0, -1]):
        rows, columns = np.nonzero(pixels > 0)
        assert abs(np.ptp(rows) - np.ptp(columns)) <= 1 and np.ptp(rows) > 200


@pytest.mark.parametrize("fields", [{}, {"height": 1088}, {"width": 960}])
@pytest.mark.parametrize("picture", PICTURES)
def test_half_of_a_size_that_follows_an_image_can_be_made_where_there_are_two_stages(picture, fields):
    spec = published_spec("ltx-2.3-distilled")
    request = spec.plan(GenerationRequest(**fields), image=True, picture=picture).request
    assert [request.height % 64, request.width % 64] == [0, 0] and request.steps == 11
    assert all(height % 64 == width % 64 == 0 for height, width in spec.usual_sizes)
    assert {(1088, 1920), (704, 1280), (1280, 704), (512, 768)} <= {*spec.usual_sizes}


@pytest.mark.parametrize(("seconds", "frames", "warned"), [("4", 107, True), ("5", 124, False), ("15.5", 362, True)])
def test_a_length_that_the_model_cant_make_is_answered_with_the_nearest_and_a_warning(seconds, frames, warned):
    spec = published_spec("minimax-h3")
    assert count_frames(seconds, 24, spec) == frames
    request = spec.plan(GenerationRequest(frames=frames)).request
    assert [str(frames) in warning for warning in describe_length(seconds, request, spec)] == [True] * warned
