"""LTX-2's VAE and latent upsampler on a mesh. Run by test_ltx2_vae.py on several devices.

Arguments: a checkpoint's folder, the npz of inputs, where to write what comes out, (dp, sp, tp), which is made to fit.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from tests.wan_tpu.chunk_runs import cut, run_in_chunks
from tests.wan_tpu.meshes import fit_mesh
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.ltx2 import upsampler, vae
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh


def open_config(folder):
    """Return the configuration of a checkpoint's VAE and upsampler; the rest is empty."""
    checkpoint = Checkpoint(folder)
    others = ("transformer", "connectors", "text_encoder", "audio_vae", "vocoder", "scheduler")
    return Ltx2Config(
        vae=checkpoint.config("vae"),
        upsampler=checkpoint.config("latent_upsampler") if (folder / "latent_upsampler").exists() else None,
        **{name: {} for name in others},
    )


def load(folder, component, mesh, dtype="float32"):
    return load_component(Checkpoint(folder), component, dtype, mesh)


def make_encode(folder, mesh, dtype="float32"):
    """Return a function that encodes chunks of pixels [1, 3, T, H, W]."""
    config = open_config(folder)
    loaded = load(folder, vae.vae_half(config, "decoder"), mesh, dtype)
    chunks = vae.encoder_chunks(config, loaded.module, mesh)
    return run_in_chunks(chunks, loaded.params)


def make_decode(folder, mesh, dtype="float32"):
    """Return a function that decodes latents [1, C, T, H, W] of a whole video; their mean is moved if asked."""
    config = open_config(folder)
    loaded = load(folder, vae.vae_half(config, "encoder"), mesh, dtype)
    run = jax.jit(vae.decoder_chunks(config, loaded.module, mesh).run_first)

    def decode(latents, moved_by=0.0):
        params = loaded.params | {"latents_mean": loaded.params["latents_mean"] + moved_by}
        pixels, cache = run(params, latents)
        assert cache == ()
        return np.asarray(pixels, np.float32)

    return decode


def make_upsample(folder, mesh, dtype="float32"):
    """Return a function that doubles the size of latents [1, C, T, H, W]."""
    config = open_config(folder)
    loaded, numbers = (
        load(folder, part, mesh, dtype) for part in (upsampler.upsampler(config), vae.statistics(config))
    )
    mean, deviation = (numbers.params[name] for name in vae.STATISTICS)

    def run(params, latents, mean, deviation):
        return upsampler.upsample(loaded.module, params, mesh, latents, mean, deviation)

    program = jax.jit(run)
    return lambda latents: np.asarray(program(loaded.params, latents, mean, deviation))


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:4])
    inputs = np.load(file)
    mesh = make_mesh(fit_mesh(tuple(map(int, sys.argv[4:]))), heads=4)
    outputs = {
        "decoded": make_decode(folder, mesh)(inputs["latents"]),
        "encoded": make_encode(folder, mesh)(cut(inputs["pixels"], vae.FRAME_STRIDE)),
    }
    if (folder / "latent_upsampler").exists():
        outputs["upsampled"] = make_upsample(folder, mesh)(inputs["latents"])
    np.savez(out, **outputs)
