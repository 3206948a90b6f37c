"""MiniMax-H3's sound: our decoder, always in float32; whole runs compare it with diffusers'."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wan_tpu import CheckpointError
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.minimax_h3 import audio
from wan_tpu.families.minimax_h3.config import read_config
from wan_tpu.families.minimax_h3.published import PUBLISHED
from wan_tpu.runtime.components import abstract_component, load_component
from wan_tpu.runtime.mesh import make_mesh

# torch's older weight norm, which diffusers uses.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")

MODEL = PUBLISHED["minimax-h3"]


def load(folder, dtype="float32"):
    """Return the sound's decoder and its jitted function of weights and latents."""
    component = audio.audio_decoder(read_config(Checkpoint(folder)))
    loaded = load_component(Checkpoint(folder), component, dtype, make_mesh((1, 1, 1), heads=2))
    return loaded, jax.jit(functools.partial(audio.decode, loaded.module))


@pytest.fixture
def folder(checkpoint):
    return checkpoint("minimax-h3")


@pytest.fixture
def ours(folder):
    return load(folder)


def test_request_in_bfloat16_has_its_sound_in_float32(folder, ours):
    params = load(folder, "bfloat16")[0].params
    assert {value.dtype.name for value in params.values()} == {"float32"}
    assert all(np.array_equal(value, ours[0].params[name]) for name, value in params.items())


def test_infinite_samples_are_not_clipped_before_they_are_checked(ours):
    loaded, decode = ours
    name = "decoder.conv_post.weight_g"
    louder = loaded.params | {name: jax.device_put(loaded.params[name] * 1e38 * 1e3, loaded.params[name].sharding)}
    rows = np.random.default_rng(3).standard_normal((1, 10, 16), np.float32)
    assert not np.isfinite(decode(louder, rows)).any()


def test_published_sound_has_800_samples_a_latent():
    """207 latents of each channel for 124 frames: 5.175 s at 32 kHz."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's weight norm warns where it is built otherwise.
        loaded = abstract_component(audio.audio_decoder(MODEL), "bfloat16", make_mesh((1, 1, 1), heads=2))
    latents = jax.ShapeDtypeStruct((1, 2 * 207, 32), jnp.float32)
    samples = jax.eval_shape(functools.partial(audio.decode, loaded.module), loaded.params, latents)
    assert samples.shape == (2, 207 * 800)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"decoder_kernel_sizes": [9, 8, 4, 4, 4, 4, 4]}, "an upsampling by 5 with 8 taps; supported: as many"),
        ({"resblock_dilation_sizes": [[1], [1, 3], [1, 3]]}, "resblock_dilation_sizes .*; supported: the same number"),
        ({"resblock_kernel_sizes": [3, 7, 8]}, r"resblock_kernel_sizes \[3, 7, 8\]; .* odd kernel sizes"),
        ({"latents_mean": None}, "latents_mean None; it needs a number for each of the 32 latent channels"),
    ],
)
def test_decoder_that_would_be_computed_otherwise_is_refused(changed, message):
    config = dataclasses.replace(MODEL, audio_vae=MODEL.audio_vae | changed)
    with pytest.raises(CheckpointError, match=message):
        audio.audio_decoder(config)
