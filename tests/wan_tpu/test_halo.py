"""A VAE whose pictures are cut into strips, one for each device, gives what one device gives uncut."""

import numpy as np
import pytest

from tests.children import run_on_devices

UNCUT = "1x1x1"
# 13 columns are padded to 14 on two devices.
# TI2V has shortcuts and pixel patches; 6 columns divide: no padding.
CASES = {"padded": [("wan2.1-t2v-1.3b", "13", f"{UNCUT},1x1x2")], "whole": [("wan2.2-ti2v-5b", "6", f"{UNCUT},1x2x1")]}


@pytest.mark.meshes
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["padded", "whole"])
def test_strips_give_the_pixels_and_latents_of_an_uncut_picture(name, checkpoint, tmp_path):
    out, cases = tmp_path / "results.npz", CASES[name]
    arguments = [str(argument) for kind, *rest in cases for argument in (checkpoint(kind), *rest)]
    run_on_devices("tests.wan_tpu.vae_worker", out, *arguments, count=2)
    results = np.load(out)
    assert len(results.files) == 2 * sum(len(cuts.split(",")) for _, _, cuts in cases)
    for entry in results.files:
        expected = results[entry.rpartition("|")[0] + f"|{UNCUT}"]
        assert expected.std() > 0.01, entry  # a flat picture would pass any comparison
        # float32 sums in another order: 1e-6 was seen
        assert np.abs(results[entry] - expected).max() <= 1e-5 * max(1, np.abs(expected).max()), entry
