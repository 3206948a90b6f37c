"""MiniMax-H3's sound: our decoder against diffusers' block, always in float32."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3Audio
from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3AudioDecodeStep

from wan_tpu import CheckpointError
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.minimax_h3 import audio
from wan_tpu.families.minimax_h3.config import MiniMaxH3Config
from wan_tpu.families.minimax_h3.published import PUBLISHED
from wan_tpu.families.shared.values import set_own_values
from wan_tpu.runtime.components import abstract_component, load_component
from wan_tpu.runtime.mesh import make_mesh

# torch's older weight norm, which diffusers uses.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")

CHANNELS, LATENTS = 4, 5
MODEL = PUBLISHED["minimax-h3"]


def open_config(folder):
    """Return the configuration of a checkpoint's sound; the rest is empty."""
    empty = {field.name: {} for field in dataclasses.fields(MiniMaxH3Config)}
    return MiniMaxH3Config(**empty | {"audio_vae": Checkpoint(folder).config("audio_vae"), "text_layer": 1})


def load(folder, dtype="float32"):
    """Return the sound's decoder and its jitted function of weights and latents."""
    mesh = make_mesh((1, 1, 1), heads=2)
    loaded = load_component(Checkpoint(folder), audio.audio_decoder(open_config(folder)), dtype, mesh)
    return loaded, jax.jit(functools.partial(audio.decode, loaded.module))


@pytest.fixture(scope="module")
def theirs():
    draw = np.random.default_rng(1)
    torch.manual_seed(0)
    module = AutoencoderKLMiniMaxH3Audio(
        encoder_dim=2,
        encoder_rates=(3, 2),
        latent_dim=16,
        latent_channels=CHANNELS,
        num_attention_heads=2,
        decoder_dim=8,
        decoder_rates=(3, 2),
        decoder_kernel_sizes=(5, 4),
        resblock_kernel_sizes=(3, 5),
        resblock_dilation_sizes=((1, 3), (1, 3)),
        latents_mean=draw.standard_normal(CHANNELS).tolist(),
        latents_std=draw.uniform(0.5, 1.5, CHANNELS).tolist(),
    )
    # A new module passes on a tenth of its latents' variance; a louder one would be clipped.
    for name, gain in module.named_parameters():
        if name.endswith("weight_g"):
            gain.data *= 0.3 if "conv_post" in name else 1.5
    return set_own_values(module.eval(), 2)


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("minimax_h3")
    theirs.save_pretrained(folder / "audio_vae")
    (folder / "model_index.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return load(folder)


@pytest.fixture(scope="module")
def decode_theirs(theirs):
    """Returns a function that decodes rows [1, 2A, C] with the last block of diffusers' pipeline."""
    pipeline = MiniMaxH3AudioDecodeStep().init_pipeline()
    pipeline.update_components(audio_vae=theirs)

    def decode(rows):
        latents = torch.from_numpy(rows).reshape(2, -1, CHANNELS).permute(0, 2, 1)
        return pipeline(audio_latents=latents, output="audio")[0].numpy()

    return decode


def draw_rows(latents=LATENTS, seed=3):
    return np.random.default_rng(seed).standard_normal((1, 2 * latents, CHANNELS), np.float32)


def relative(ours, reference):
    assert ours.shape == reference.shape
    return np.sqrt(np.mean(np.square(ours - reference))) / np.std(reference)


def test_sound_is_that_of_diffusers(ours, decode_theirs):
    loaded, decode = ours
    samples, reference = decode(loaded.params, draw_rows()), decode_theirs(draw_rows())
    assert samples.dtype == jnp.float32
    assert samples.shape == (2, LATENTS * 6)
    assert np.mean(np.abs(reference) == 1) < 0.05  # Clipped samples would agree whatever they were.
    # Sines of sums: a rounding error grows from layer to layer.
    assert relative(samples, reference) < 1e-5


def test_request_in_bfloat16_has_its_sound_in_float32(folder, ours):
    params = load(folder, "bfloat16")[0].params
    assert {value.dtype.name for value in params.values()} == {"float32"}
    assert all(np.array_equal(value, ours[0].params[name]) for name, value in params.items())


def test_infinite_samples_are_not_clipped_before_they_are_checked(ours):
    loaded, decode = ours
    name = "decoder.conv_post.weight_g"
    louder = loaded.params | {name: jax.device_put(loaded.params[name] * 1e38 * 1e3, loaded.params[name].sharding)}
    assert not np.isfinite(decode(louder, draw_rows())).any()


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
