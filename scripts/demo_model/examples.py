"""Write requests that the model has not seen: pictures and a manifest for `make demo` and `wan-tpu batch`."""

import json
from pathlib import Path

from PIL import Image

from . import sizes
from .captions import caption
from .gate import held_out_scenes
from .scenes import FPS, FRAMES, HEIGHT, Scene, first_frame, opposite

_CHOSEN = {"ball": 2, "triangle": 31}  # of the gate's scenes, of one width: each size is compiled for
_OPPOSITE = ("ball",)  # asked for with the opposite sentence too


def write_examples(folder: Path) -> Path:
    """Write pictures and `scenes.jsonl` into `folder`; return the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    scenes = held_out_scenes(max(_CHOSEN.values()) + 1)
    lines = []
    for name, index in _CHOSEN.items():
        scene = scenes[index]
        Image.fromarray(first_frame(scene)).save(folder / f"{name}.png")
        lines.append(_request(f"{name}-1", f"{name}.png", scene))
        if name in _OPPOSITE:
            lines.append(_request(f"{name}-2", f"{name}.png", opposite(scene)))
    manifest = folder / "scenes.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return manifest


def _request(name: str, image: str, scene: Scene) -> dict[str, object]:
    return {
        "id": name,
        "prompt": caption(scene),
        "image": image,
        "height": HEIGHT,
        "width": scene.width,
        "frames": FRAMES,
        "fps": FPS,
        "steps": sizes.STEPS,
        "guidance_scale": sizes.GUIDANCE,
        "seed": 0,
    }
