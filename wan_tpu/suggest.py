"""Suggest which flag, field, model or preset an unknown name was probably meant to be."""

import difflib
from collections.abc import Iterable

# Names in diffusers, Wan's own program and other front ends, and the names of the same settings here.
OTHER_NAMES = {
    "num_frames": "frames",
    "frame_num": "frames",
    "video_length": "frames",
    "num_inference_steps": "steps",
    "sample_steps": "steps",
    "sample_shift": "shift",
    "flow_shift": "shift",
    "sample_solver": "solver",
    "scheduler": "solver",
    "sampler": "solver",
    "sample_guide_scale": "guidance_scale",
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "base_seed": "seed",
    "generator": "seed",
    "n_prompt": "negative_prompt",
    "neg_prompt": "negative_prompt",
    "height": "size",
    "width": "size",
    "resolution": "size",
    "first_frame": "image",
    "last_frame": "last_image",
    "ckpt_dir": "model",
    "checkpoint": "model",
    "model_path": "model",
    "pretrained_model_name_or_path": "model",
    "torch_dtype": "precision",
    "save_file": "output",
    "output_path": "output",
    "lora_path": "lora",
    "duration": "seconds",
    "length": "seconds",
    "p": "prompt",
    "i": "image",
    "m": "model",
}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a word, or None; case, dashes and underscores don't count."""
    names = {_plain(name): name for name in known}
    plain = _plain(word)
    for exact in (plain, OTHER_NAMES.get(plain)):
        if exact in names:
            return names[exact]
    close = difflib.get_close_matches(plain, names, n=1)
    return names[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" for a message, or "" where no known name is like the word."""
    name = nearest(word, known)
    return "" if name is None else f" (did you mean {name}?)"


def _plain(name: str) -> str:
    return name.strip("-").lower().replace("-", "_")
