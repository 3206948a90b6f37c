"""The Python interface, as people write it in a notebook."""

import base64
import re

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from wan_tpu import GenerationRequest, InvalidRequest, Video, load_pipeline

FIELDS = {"height": 32, "width": 32, "frames": 1, "steps": 1, "seed": 3}


def test_prompt_and_fields_are_a_request(checkpoint):
    pipe = load_pipeline(checkpoint("wan2.1-t2v-1.3b"), torch.float32, (1, 1, 1))
    video = pipe.generate("a cat", **FIELDS)
    same = pipe.generate(GenerationRequest(prompt="a cat", **FIELDS))
    assert np.array_equal(video.pixels, same.pixels)
    assert pipe.runtime.dtype == "float32"
    with pytest.raises(TypeError, match="frames"):  # What diffusers' num_frames is called here.
        pipe.generate("a cat", num_frames=5)
    with pytest.raises(TypeError):
        pipe.generate(GenerationRequest(prompt="a cat", **FIELDS), seed=4)
    with pytest.raises(InvalidRequest):
        pipe.generate(7)


def test_video_is_shown_in_a_line_and_in_a_notebook_as_a_player():
    video = Video(np.full((5, 32, 64, 3), 0.5, np.float32), 8.0)
    assert len(repr(video)) < 80 and all(word in repr(video) for word in ("5", "64x32", "8"))
    mp4 = base64.b64decode(re.search('base64,([^"]+)', video._repr_html_())[1])
    assert iio.imread(mp4, plugin="FFMPEG", extension=".mp4").shape == (5, 32, 64, 3)


def test_array_is_an_image():
    array = np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)
    assert np.array_equal(np.asarray(GenerationRequest(image=array).image), array)
    for wrong in (array.astype(np.float32), array[..., 0], array[None], array[:0]):
        with pytest.raises(InvalidRequest):
            GenerationRequest(image=wrong)
