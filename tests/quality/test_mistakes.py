"""Each mistake damages what it says, in a copy, and nothing else."""

import json

import pytest
import safetensors.torch
import torch

from scripts.demo_model import sizes
from scripts.demo_model.variants import MISTAKES
from wan_tpu.families.wan.published import VAE_21

MASK = slice(sizes.Z, sizes.Z + 4)


@pytest.fixture
def checkpoint(tmp_path):
    """The files that mistakes touch: small, all different."""
    for i, name in enumerate(("transformer", "transformer_2")):
        (tmp_path / name).mkdir()
        weights = {"patch_embedding.weight": torch.full((3, 2 * sizes.Z + 4, 1, 2, 2), i + 1.0), "other": torch.ones(2)}
        safetensors.torch.save_file(weights, tmp_path / name / "diffusion_pytorch_model.safetensors")
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"latents_mean": [0.5] * 16, "latents_std": [2.0] * 16}))
    return tmp_path


def experts(checkpoint):
    files = (checkpoint / name / "diffusion_pytorch_model.safetensors" for name in ("transformer", "transformer_2"))
    return [safetensors.torch.load_file(file) for file in files]


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("experts swapped", [2.0, 1.0]),
        ("the high-noise expert throughout", [1.0, 1.0]),
        ("the low-noise expert throughout", [2.0, 2.0]),
    ],
)
def test_which_expert_is_where(checkpoint, name, seen):
    MISTAKES[name].damage(checkpoint)
    assert [weights["patch_embedding.weight"].unique().tolist() for weights in experts(checkpoint)] == [
        [value] for value in seen
    ]
    assert len(list(checkpoint.rglob("*.*"))) == 3


def test_only_the_mask_is_not_seen(checkpoint):
    MISTAKES["mask channels zeroed"].damage(checkpoint)
    for i, weights in enumerate(experts(checkpoint)):
        kernel = weights["patch_embedding.weight"]
        assert not kernel[:, MASK].any()
        assert (kernel.sum((0, 2, 3, 4)) != 0).sum() == 2 * sizes.Z
        assert kernel.max() == i + 1
        assert weights["other"].all()


def test_the_statistics_are_another_model_s(checkpoint):
    MISTAKES["latent statistics of Wan 2.1's VAE"].damage(checkpoint)
    config = json.loads((checkpoint / "vae" / "config.json").read_text())
    assert config["latents_mean"] == list(VAE_21["latents_mean"])
    assert config["latents_std"] != [2.0] * 16
