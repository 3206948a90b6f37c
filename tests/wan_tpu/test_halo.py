"""A VAE whose width is split over devices gives what one device gives, whatever the width."""

import os
import subprocess
import sys

import numpy as np

from tests.conftest import ROOT

CASES = [
    ("wan2.1-t2v-1.3b", "13", "1x1x1,1x1x2,2x1x2,2x2x2"),  # divides by none: padded to 14, 16 and 16
    ("wan2.1-t2v-1.3b", "3", "1x1x1,2x2x2"),  # five devices hold nothing but padding
    ("wan2.2-ti2v-5b", "6", "1x1x1,1x2x1,1x2x2"),  # shortcuts and pixel patches; divides by 2, not by 4
]
# Compiling takes most of the time, and unoptimised code computes the same.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


def test_split_columns_give_the_pixels_and_latents_of_one_device(checkpoint, tmp_path):
    out = tmp_path / "results.npz"
    arguments = [str(argument) for kind, *rest in CASES for argument in (checkpoint(kind), *rest)]
    subprocess.run(
        [sys.executable, "-m", "tests.wan_tpu.vae_worker", out, *arguments],
        env=os.environ | {"XLA_FLAGS": FLAGS},
        cwd=ROOT,
        check=True,
    )
    results = np.load(out)
    assert len(results.files) == 2 * sum(len(meshes.split(",")) for _, _, meshes in CASES)
    for name in results.files:
        expected = results[name.rpartition("/")[0] + "/1"]
        assert expected.std() > 0.01, name  # a flat picture would pass any comparison
        # float32 sums in another order: 1e-6 was seen
        assert np.abs(results[name] - expected).max() <= 1e-5 * max(1, np.abs(expected).max()), name
