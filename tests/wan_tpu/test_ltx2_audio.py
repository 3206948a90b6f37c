"""LTX-2's sound: our decoders against diffusers', for both vocoders, whatever the dtype of a request."""

import dataclasses
import functools

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from wan_tpu import CheckpointError
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.ltx2 import audio
from wan_tpu.families.ltx2.config import read_config
from wan_tpu.families.ltx2.published import PUBLISHED
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.families.shared.vocoder import Window
from wan_tpu.runtime.components import abstract_component, load_component
from wan_tpu.runtime.mesh import make_mesh

LATENTS = 4
# Vocoders of two stages, which raise rates as little as their extension allows: compiling them costs most.
VOCODERS = {
    "ltx-2": {"upsample_kernel_sizes": [16, 15], "upsample_factors": [6, 5]},
    "ltx-2.3": {
        "upsample_kernel_sizes": [11, 8],
        "upsample_factors": [5, 4],
        "hop_length": 10,
        "filter_length": 48,
        "window_length": 48,
        "bwe_upsample_kernel_sizes": [12, 11],
        "bwe_upsample_factors": [6, 5],
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("ltx2")
    return {kind: make_checkpoint(parent / kind, kind, vocoder=vocoder) for kind, vocoder in VOCODERS.items()}


@pytest.fixture(scope="module", params=VOCODERS)
def folder(request, folders):
    return folders[request.param]


@pytest.fixture(scope="module")
def pipeline(folder):
    return diffusers.LTX2Pipeline.from_pretrained(folder)


@pytest.fixture(scope="module")
def latents():
    return torch.randn(1, LATENTS, 32, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def theirs(pipeline, latents):
    """Returns diffusers' spectrogram and samples, computed as its pipeline does."""
    vae = pipeline.audio_vae
    unpacked = pipeline._unpack_audio_latents(
        pipeline._denormalize_audio_latents(latents, vae.latents_mean, vae.latents_std), LATENTS, num_mel_bins=4
    )
    with torch.no_grad():
        mel = vae.decode(unpacked, return_dict=False)[0]
        return mel.numpy(), pipeline.vocoder(mel)[0].numpy()


def load(folder, component, dtype="float32"):
    checkpoint = Checkpoint(folder)
    mesh = make_mesh((1, 1, 1), heads=4)
    return load_component(checkpoint, component(read_config(checkpoint)), dtype, mesh)


COMPONENTS = functools.partial(audio.audio_half, dropped="encoder"), audio.vocoder


@pytest.fixture(scope="module")
def decoders(folder):
    """Returns the two components in float32, each with its jitted function of weights and an input."""
    parts = zip(COMPONENTS, (audio.decode_mel, audio.vocode), strict=True)
    loaded = [(load(folder, component), function) for component, function in parts]
    return [(part.params, jax.jit(functools.partial(function, part.module))) for part, function in loaded]


def relative(ours, reference):
    return np.sqrt(np.mean(np.square(ours - reference))) / np.std(reference)


def test_request_in_bfloat16_has_its_sound_in_float32(folder, decoders):
    for component, (params, _) in zip(COMPONENTS, decoders, strict=True):
        weights = load(folder, component, "bfloat16").params
        assert {value.dtype.name for value in weights.values()} == {"float32"}
        assert not [name for name in weights if name.startswith("encoder.")]
        assert all(np.array_equal(weight, params[name]) for name, weight in weights.items())


def test_infinite_samples_are_not_limited_before_they_are_checked(decoders, theirs):
    _, (params, vocode) = decoders
    last = max(
        name for name in params if (name.endswith("conv_out.weight") and "bwe" in name) or name == "conv_out.weight"
    )
    louder = jax.device_put(np.sign(params[last]) * np.float32(3e38), params[last].sharding)
    assert not np.isfinite(vocode(params | {last: louder}, theirs[0])).all()


def test_parts_of_a_spectrogram_give_parts_of_the_samples(folder, theirs):
    """Also the first and the last part, and one that is mostly after the end."""
    mel, whole = theirs[0][0], theirs[1].T
    loaded = load(folder, audio.vocoder)
    reach, frames, own = audio._reach(loaded.module), mel.shape[1], 6
    rows = mel.transpose(1, 0, 2).reshape(frames, -1)
    padded = np.pad(rows, ((reach, 3 * own - frames + reach), (0, 0)), constant_values=7)

    @jax.jit
    def vocode_part(params, part, first):
        return audio._vocode_part(loaded.module, params, part, Window(first, frames))

    per_frame = len(whole) // frames
    parts = [vocode_part(loaded.params, padded[i : i + own + 2 * reach], i - reach) for i in range(0, 3 * own, own)]
    joined = np.concatenate([part[reach * per_frame : (reach + own) * per_frame] for part in parts])
    assert relative(joined[: len(whole)], whole) < 1e-4


@pytest.mark.parametrize(
    ("kind", "per_frame"), [pytest.param("ltx-2", 240, marks=pytest.mark.thorough), ("ltx-2.3", 480)]
)
def test_published_sound_lasts_as_long_as_its_latents(kind, per_frame):
    """126 latents, of 121 frames a second at 24: 501 mel frames of 480 samples at 48 kHz, or 240 at 24 kHz."""
    mesh = make_mesh((1, 1, 1), heads=4)
    loaded = abstract_component(audio.vocoder(PUBLISHED[kind]), "float32", mesh)
    mel = jax.ShapeDtypeStruct((1, 2, 501, 64), jnp.float32)
    samples = jax.eval_shape(functools.partial(audio.vocode, loaded.module), loaded.params, mel)
    assert samples.shape == (2, 501 * per_frame)


@pytest.mark.parametrize(
    ("kind", "operations"), [pytest.param("ltx-2", 1.004e12, marks=pytest.mark.thorough), ("ltx-2.3", 1.437e12)]
)
def test_operations_are_counted(kind, operations):
    """Within a hundredth of the sum that diffusers' modules have: 0.31 and 1.13 TFLOP for five seconds."""
    assert audio.count_flops(PUBLISHED[kind], 126) == pytest.approx(operations, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("ltx-2.3", {"act_fn": "snake"}, "act_fn 'snake'.*True.*'snakebeta'"),
        ("ltx-2", {"upsample_kernel_sizes": [16, 15, 8, 4, 5]}, r"\b2\b.*\b5\b"),
        ("ltx-2.3", {"antialias_ratio": 3}, r"antialias_ratio 3\b.*\b2\b"),
        ("ltx-2.3", {"window_length": 400}, r"filter_length 512\b.*window_length 400\b"),
        ("ltx-2.3", {"hop_length": 96}, r"hop_length 96\b.*16000.*48000"),
        ("ltx-2.3", {"resnet_dilations": [[1], [1, 3], [1, 3]]}, "resnet_dilations"),
        ("ltx-2", {"final_act_fn": "sine"}, "final_act_fn 'sine'.*tanh.*clamp.*null"),
    ],
)
def test_vocoder_that_would_be_computed_otherwise_is_refused(kind, changed, message):
    config = dataclasses.replace(PUBLISHED[kind], vocoder=PUBLISHED[kind].vocoder | changed)
    with pytest.raises(CheckpointError, match=message):
        audio.vocoder(config)
