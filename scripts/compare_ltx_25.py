#!/usr/bin/env python3
"""Compare LTX-2.5 with Lightricks' own program, for small checkpoints, in float32.

    python scripts/compare_ltx_25.py FOLDER [--python PYTHON]

FOLDER has their sources, because version 1.2.0, the first one with LTX-2.5, isn't on PyPI: `git clone
https://github.com/Lightricks/LTX-2`, at 400fd310. They are installed into a temporary environment with their own
versions of torch and transformers: several GB of disk. `--python` names an interpreter that has them already. Each line
states the largest differences from what their program makes, relative to the largest value: of the prompts' text, the
latents of video and sound, pixels, samples, and the seconds that the duration head chooses. It also names the settings
that differ from their command line's. The last line compares the frames for many such numbers of seconds.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from compare_ltx import IMAGE, LIMIT, ROOT, STEPS, install, make_request, measure
from published.ltx_rules import make_adapter

from wan_tpu.families import open_spec
from wan_tpu.families.ltx2.published import SECOND_STAGE_SIGMAS
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.media.image import load_image
from wan_tpu.pipeline import load_pipeline
from wan_tpu.plan import SECONDS
from wan_tpu.request import GenerationRequest, ResolvedRequest

PACKAGES = ("packages/ltx-core", "packages/ltx-pipelines")
GUIDED, DISTILLED = "ltx-2.5", "ltx-2.5-distilled"
# With the smallest windows of the diffusion decoder, in both stages.
REQUEST: dict[str, Any] = {"prompt": "A cat in the rain.", "seed": 5, "height": 128, "width": 192, "frames": 17}
# Sizes that are constants in their code: registers, bins of sound, and the factors of channels in their encoder.
SMALL: dict[str, Any] = {
    "connectors": {"audio_connector_num_learnable_registers": 128},
    "transformer": {"audio_in_channels": 128, "audio_out_channels": 128},
    "vae": {"block_out_channels": [32, 64, 128, 128]},
    "audio_vae": {"mel_bins": 64, "base_channels": 128},
    "vocoder": {"in_channels": 128, "bwe_in_channels": 128, "num_mel_channels": 64}
    | {key: [[1, 3, 5]] * 2 for key in ("resnet_dilations", "bwe_resnet_dilations")},
}
LENGTHS: dict[str, Any] = {
    "fps": [8, 24, 29.97, 50],
    "most": [2, 2.5, 7.5, 20],
    "seconds": np.geomspace(0.01, 1000, 200).tolist(),
}
PARTS = ("text", "video", "sound", "pixels", "samples", "seconds")


def main() -> int:
    """Print the differences; return 1 if one is larger than `LIMIT`, or if a default or a length differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Lightricks' sources")
    parser.add_argument("--python", type=Path, help="an interpreter with what they need, and with them")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = make_cases(folder)
        python = given.python or install(folder, *(str(given.folder.absolute() / package) for package in PACKAGES))
        theirs, fails = run_lightricks(python, cases, folder), False
        print(f"{'':32}" + "".join(f"{part:>9}" for part in PARTS))
        for name, case in cases.items():
            made, defaults = make_ours(case)
            settings = json.loads(str(theirs[f"{name} settings"]))
            differing = [field for field, value in settings.items() if getattr(defaults, field) != value]
            errors = [
                max(measure(ours, theirs[f"{name} {key}"]) for key, ours in made.items() if key.startswith(part))
                for part in PARTS
            ]
            print(f"{name:32}" + "".join(f"{error:9.1e}" for error in errors), *differing, flush=True)
            fails |= bool(differing) or max(errors) > LIMIT
        ours = measure_lengths(Path(cases[DISTILLED + ", text"]["folder"]))
        differ = int((ours != theirs["lengths"]).sum())
        print(f"frames: {differ} of {len(ours)} differ")
    return int(fails or differ > 0)


def make_cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Write both checkpoints, and return what is made of them.

    A case names its checkpoint's `folder` and `kind`, the numbers of `layers` and `channels` of latents, `decoder`,
    the prompt, the `image` or None, the seed, the size and the `steps` with guidance, and the `adapter` of the second
    stage after guidance, or None for one stage.
    """
    common = REQUEST | {"steps": STEPS, "image": None, "adapter": None, "decoder": "vae", "layers": 3, "channels": 16}
    guided, distilled = (
        common | {"kind": kind, "folder": str(make_checkpoint(folder / kind, kind, **SMALL))}
        for kind in (GUIDED, DISTILLED)
    )
    diffusion = Path(shutil.copytree(distilled["folder"], folder / "diffusion"))
    (diffusion / "wan_tpu.json").write_text(json.dumps({"decoder": "diffusion"}))
    adapter = make_adapter(Path(guided["folder"]), folder / "adapter.safetensors")
    return {
        f"{GUIDED}, image": guided | {"image": str(IMAGE)},
        f"{GUIDED}, two stages, text": guided | {"adapter": str(adapter)},
        f"{DISTILLED}, text": distilled,
        f"{DISTILLED}, image": distilled | {"image": str(IMAGE)},
        f"{DISTILLED}, diffusion decoder": distilled | {"folder": str(diffusion), "decoder": "diffusion"},
    }


def run_lightricks(python: Path, cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, np.ndarray]:
    """Return what Lightricks' program makes."""
    given, made = folder / "given.json", folder / "made.npz"
    given.write_text(json.dumps({"cases": cases, "lengths": LENGTHS}))
    script = ROOT / "scripts" / "published" / "ltx_25.py"
    subprocess.run([python, script, given, made], check=True)
    return dict(np.load(made))


def make_ours(case: dict[str, Any]) -> tuple[dict[str, np.ndarray], ResolvedRequest]:
    """Return the same of wan-tpu, and a request with this project's defaults."""
    pipe = load_pipeline(case["folder"], "float32", mesh=(1, 1, 1))
    image = load_image(case["image"]) if case["image"] else None
    steps: dict[str, Any] = {} if case["kind"] == DISTILLED else {"steps": STEPS}
    if case["adapter"]:
        steps["steps"] += len(SECOND_STAGE_SIGMAS)
    plan = pipe.plan(make_request(case, image=image, **REQUEST, **steps))
    conditioning = pipe.encode(plan, warn=lambda _: None)
    state = pipe.denoise(plan, conditioning, pipe.initial_state(plan))
    samples, _ = pipe.decode_sound(state, plan.request)
    made = {
        "video": np.asarray(state.latents),
        "sound": _spread(np.asarray(state.audio)),
        "pixels": np.concatenate(list(pipe.decode(state.latents, plan.request))),
        "samples": samples,
        "seconds": np.asarray(conditioning.prompt[SECONDS])[:1],
    }
    for name in ("text", "audio_text"):
        made |= {f"text {name} {i}": text[None] for i, text in enumerate(np.asarray(conditioning.prompt[name]))}
    return made, pipe.plan(make_request(case)).request


def _spread(audio: np.ndarray) -> np.ndarray:
    """Turn latents [1, A, C x B] of a sound with B bins into Lightricks' [1, C, A, B]."""
    channels = 8
    return audio.reshape(1, audio.shape[1], channels, -1).transpose(0, 2, 1, 3)


def measure_lengths(folder: Path) -> np.ndarray:
    """Return the frames for each rate, longest length and number of seconds of `LENGTHS`."""
    spec, frames = open_spec(folder), []
    for fps, most in itertools.product(LENGTHS["fps"], LENGTHS["most"]):
        plan = spec.plan(GenerationRequest(fps=fps, max_seconds=most))
        frames += [spec.set_length(plan, seconds).request.frames for seconds in LENGTHS["seconds"]]
    return np.array(frames)


if __name__ == "__main__":
    sys.exit(main())
