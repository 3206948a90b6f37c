"""VAE halves that run on chunks of a video, for the workers whose results are compared with those of diffusers."""

import jax
import numpy as np


def run_in_chunks(causal, params):
    """Return a function that passes chunks [1, C, T, H, W] through a half and returns its results as one array."""
    first, later = jax.jit(causal.run_first), jax.jit(causal.run_next)

    def run(chunks):
        out, cache = first(params, chunks[0])
        outputs = [out]
        for chunk in chunks[1:]:
            out, cache = later(params, chunk, cache)
            outputs.append(out)
        return np.concatenate([np.asarray(out, np.float32) for out in outputs], axis=2)

    return run


def cut(x, frames):
    """Cut x [1, C, T, H, W] into a first chunk of one frame and others of `frames`."""
    return np.split(x, range(1, x.shape[2], frames), axis=2)
