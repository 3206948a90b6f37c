"""Write requests that the model has not seen: pictures and a manifest for `make demo` and `wan-tpu batch`."""

import json
from pathlib import Path

from PIL import Image

from . import sizes
from .captions import caption
from .gate import SEED, held_out_scenes
from .scenes import FPS, FRAMES, HEIGHT, Scene, first_frame, opposite
from .zigzag import draw_zigzag, zigzag_caption

_CHOSEN = {"ball": 2, "triangle": 31}  # of the gate's scenes, of one width: each size is compiled for
_OPPOSITE = ("ball",)  # asked for with the opposite sentence too
_ZIGZAG = 4  # of the gate's zigzags: asked for with its adapter, and without
_ADAPTER = "small-wan2.2-i2v/adapters/zigzag.{side}.safetensors@{side}"


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
    zigzag = draw_zigzag(SEED, _ZIGZAG, held_out=True, width=64)
    Image.fromarray(first_frame(zigzag)).save(folder / "zigzag.png")
    first = {**_request("zigzag", "zigzag.png", zigzag), "prompt": zigzag_caption(zigzag)}
    lines.append({**first, "loras": [_ADAPTER.format(side=side) for side in ("high", "low")]})
    lines.append({**first, "id": "zigzag-without-adapter"})
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
