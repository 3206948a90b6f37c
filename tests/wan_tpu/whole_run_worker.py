"""Makes a video, with sound or without, on one device and on all. test_sound_on_meshes.py runs it on eight devices.

Arguments: a checkpoint's folder, the fields of a request as JSON, and where to write the videos.
"""

import json
import sys

import numpy as np

from tests.wan_tpu.meshes import fit_meshes
from wan_tpu import GenerationRequest, load_pipeline

if __name__ == "__main__":
    folder, fields, out = sys.argv[1:]
    parts = {}
    for shape in fit_meshes((1, 1, 1), (2, 2, 2)):
        pipe, states = load_pipeline(folder, dtype="float32", mesh=shape), []
        request = GenerationRequest(**json.loads(fields))
        video = pipe.generate(request, on_step=lambda event, states=states: states.append(event.state))
        arrays = {"pixels": video.pixels, "samples": video.audio}
        for state in states:
            arrays |= {f"latents {state.step}": state.latents, f"sound {state.step}": state.audio}
        name = "x".join(map(str, shape))
        parts |= {f"{name} {part}": np.asarray(value) for part, value in arrays.items() if value is not None}
    np.savez(out, **parts)
