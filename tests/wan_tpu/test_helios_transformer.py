"""Helios' transformer, against diffusers' module."""

import diffusers
import numpy as np
import pytest
import torch

from tests.children import run_on_devices
from tests.wan_tpu import helios_worker
from wan_tpu.families.helios.chunks import LONG, MID, SHORT, make_history, stage_shapes
from wan_tpu.families.helios.small import make_checkpoint

SHAPE = (1, 16, 9, 8, 24)
TIME = 640.0
RNG = np.random.default_rng(0)


def draw_normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


TEXT = draw_normal(2, 20, 32)
CHUNKS = [draw_normal(*SHAPE) for _ in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("helios"), "helios-distilled", transformer={"is_amplify_history": True}
    )


@pytest.fixture(scope="module")
def theirs(folder):
    model = diffusers.HeliosTransformer3DModel.from_pretrained(folder / "transformer").eval().requires_grad_(False)

    def predict(latents, history):
        frames = torch.arange(29)[None]
        return model(
            torch.from_numpy(np.repeat(latents, 2, 0)),
            torch.full((2,), int(TIME)),
            torch.from_numpy(TEXT),
            indices_hidden_states=frames[:, 20:].expand(2, -1),
            indices_latents_history_short=frames[:, [0, 19]].expand(2, -1),
            indices_latents_history_mid=frames[:, 17:19].expand(2, -1),
            indices_latents_history_long=frames[:, 1:17].expand(2, -1),
            **{f"latents_{name}": torch.from_numpy(np.repeat(history[name], 2, 0)) for name in (LONG, MID, SHORT)},
            return_dict=False,
        )[0].numpy()

    return predict


def test_several_devices_compute_the_same(folder, theirs, tmp_path):
    """Of one branch, whose tokens lie on all devices: the last ones only have some of the history."""
    latents, history = draw_normal(*stage_shapes(SHAPE, 3)[1]), make_history(SHAPE, CHUNKS)
    np.savez(tmp_path / "in.npz", latents=latents, time=TIME, text=TEXT[:1], **history)
    run_on_devices(helios_worker.__name__, folder, tmp_path / "in.npz", tmp_path / "out.npy", count=8)
    expected, velocities = theirs(latents, history)[:1], np.load(tmp_path / "out.npy")
    assert np.abs(velocities - expected).max() <= 1e-5 * np.abs(expected).max()
