"""A VAE whose pictures are cut into strips, one for each device, gives what one device gives uncut."""

import os
import subprocess
import sys

import numpy as np

from tests.conftest import ROOT

UNCUT = "1x1x1"
CASES = [
    # 13 columns divide by none: padded to 14 on two devices, to 16 on four
    ("wan2.1-t2v-1.3b", "13", f"{UNCUT},1x1x2,2x1x2"),
    ("wan2.1-t2v-1.3b", "3", f"{UNCUT},2x2x2"),  # most devices hold nothing but padding
    ("wan2.2-ti2v-5b", "6", f"{UNCUT},1x2x1"),  # shortcuts and pixel patches; divides: no padding
]
# Compiling takes most of the time, and unoptimised code computes the same.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


def test_strips_give_the_pixels_and_latents_of_an_uncut_picture(checkpoint, tmp_path):
    out = tmp_path / "results.npz"
    arguments = [str(argument) for kind, *rest in CASES for argument in (checkpoint(kind), *rest)]
    subprocess.run(
        [sys.executable, "-m", "tests.wan_tpu.vae_worker", out, *arguments],
        env=os.environ | {"XLA_FLAGS": FLAGS},
        cwd=ROOT,
        check=True,
    )
    results = np.load(out)
    assert len(results.files) == 2 * sum(len(cuts.split(",")) for _, _, cuts in CASES)
    for name in results.files:
        expected = results[name.rpartition("|")[0] + f"|{UNCUT}"]
        assert expected.std() > 0.01, name  # a flat picture would pass any comparison
        # float32 sums in another order: 1e-6 was seen
        assert np.abs(results[name] - expected).max() <= 1e-5 * max(1, np.abs(expected).max()), name
