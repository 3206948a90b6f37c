"""Make held-out clips with wan_tpu's pipeline, and measure with intervals how good they are.

The same held-out scenes are the example requests of `make demo` and `wan-tpu batch`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import diffusers
import numpy as np
import torch
from PIL import Image

from wan_tpu import GenerationRequest

from . import intervals, sizes
from .intervals import Estimate
from .scenes import FPS, FRAMES, HEIGHT, Scene, caption, draw_scene, first_frame, opposite, render
from .score import SUB_SCORES, Score, psnr, save_rows, score
from .vae import reconstruct
from .zigzag import draw_zigzag, zigzag_caption

SEED = 1_000_003  # The seed of the gate's scenes, which no training uses.
DECIBELS = ("first_frame_db", "likeness_db")
_ON_A_SHEET = 8

Generate = Callable[[GenerationRequest], np.ndarray]
"""A function that makes a request's video, float32 [T, H, W, 3] in [0, 1]."""

Figures = dict[str, Estimate]
"""Every figure of the gate by its name: shares in [0, 1], and decibels."""


@dataclass(frozen=True)
class Sampling:
    """How requests are sampled. Fields are those of a request; None leaves a field to the checkpoint or the preset."""

    steps: int | None = sizes.STEPS
    guidance: float | None = sizes.GUIDANCE
    shift: float | None = None
    preset: str | None = None
    loras: tuple[str, ...] | None = None
    cache: str | None = None
    sigmas: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ScoredClip:
    """One clip, float32 [T, H, W, 3], and its score."""

    scene: Scene
    clip: np.ndarray
    score: Score


def request_of(scene: Scene, seed: int, sampling: Sampling) -> GenerationRequest:
    """Return the request for a scene: its picture, its sentence, its size."""
    return GenerationRequest(
        prompt=caption(scene),
        image=Image.fromarray(first_frame(scene)),
        height=HEIGHT,
        width=scene.width,
        frames=FRAMES,
        fps=FPS,
        steps=sampling.steps,
        guidance_scale=sampling.guidance,
        shift=sampling.shift,
        seed=seed,
        preset=sampling.preset,
        loras=sampling.loras,
        cache=sampling.cache,
        sigmas=sampling.sigmas,
    )


def held_out_scenes(count: int, *, width: int | None = None) -> list[Scene]:
    """Return the gate's scenes; the first n are the same for every count."""
    return [draw_scene(SEED, i, held_out=True, width=width) for i in range(count)]


def make_clips(
    generate: Generate, scenes: Sequence[Scene], sampling: Sampling, tell: Callable[[str], object] = print
) -> list[ScoredClip]:
    """Make and score one clip for each scene."""
    clips = []
    for i, scene in enumerate(scenes):
        clip = generate(request_of(scene, i, sampling))
        clips.append(ScoredClip(scene, clip, score(clip, scene)))
        if (i + 1) % 10 == 0 or i + 1 == len(scenes):
            whole = np.mean([each.score.whole for each in clips])
            tell(f"{i + 1} of {len(scenes)} clips, {100 * whole:.0f} % of sub-scores right")
    return clips


def compute_figures(clips: Sequence[ScoredClip], opposite_clips: Sequence[ScoredClip] = ()) -> Figures:
    """Return every figure of clips.

    Args:
        clips: The clips.
        opposite_clips: Clips of the same scenes with the opposite sentences, in the same order.
    """
    estimates = {"score": intervals.mean([each.score.whole for each in clips])}
    for name in SUB_SCORES:
        estimates[name] = intervals.share([getattr(each.score, name) for each in clips])
    for name in DECIBELS:
        estimates[name] = intervals.mean([getattr(each.score, name) for each in clips])
    if opposite_clips:
        pairs = zip(clips, opposite_clips, strict=True)
        estimates["sentence"] = intervals.share(
            [straight.score.direction and other.score.direction for straight, other in pairs]
        )
    return estimates


def measure_reconstruction(checkpoint: Path, scenes: Sequence[Scene]) -> Estimate:
    """Return how well the checkpoint's VAE rebuilds clips, in dB."""
    vae = diffusers.AutoencoderKLWan.from_pretrained(checkpoint / "vae", torch_dtype=torch.float32).eval()
    clips = [render(scene) for scene in scenes]
    return intervals.mean([psnr(reconstruct(vae, clip), clip / 255) for clip in clips])


def make_opposites(scenes: Sequence[Scene]) -> list[Scene]:
    """Return the scenes with the same pictures and the opposite sentences."""
    return [opposite(scene) for scene in scenes]


def write(folder: Path, clips: Sequence[ScoredClip], figures: Figures) -> None:
    """Write figures.json, clips.jsonl and contact sheets of the best and the worst clips."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {name: asdict(estimate) for name, estimate in figures.items()} | {"requests": len(clips)}
    (folder / "figures.json").write_text(json.dumps(content, indent=2) + "\n")
    with (folder / "clips.jsonl").open("w") as file:
        for each in clips:
            file.write(json.dumps({"caption": caption(each.scene), **asdict(each.score)}) + "\n")
    # Sorted by sub-scores, then by how close the motion came to the requested one.
    ordered = sorted(clips, key=lambda each: (each.score.whole, -abs(each.score.amplitude - 1)))
    for name, chosen in (("worst", ordered[:_ON_A_SHEET]), ("best", ordered[::-1][:_ON_A_SHEET])):
        save_rows(folder / f"{name}.png", [each.clip for each in chosen], [_title(each) for each in chosen])


def format_table(figures: Figures) -> str:
    """Return the figures as a table for docs/quality.md."""
    lines = ["| figure | value (95 % interval) |", "|---|---|"]
    for name, estimate in figures.items():
        lines.append(f"| {_spell(name)} | {format_estimate(name, estimate)} |")
    return "\n".join(lines)


def format_estimate(name: str, estimate: Estimate) -> str:
    """Return a figure with its interval and unit."""
    return estimate.text(1, 1) + " dB" if name.endswith("_db") else estimate.text() + " %"


def _spell(name: str) -> str:
    return name.removesuffix("_db").replace("_", " ") + (", PSNR" if name.endswith("_db") else "")


def _title(clip: ScoredClip) -> str:
    wrong = [name.replace("_", " ") for name in SUB_SCORES if not getattr(clip.score, name)]
    return caption(clip.scene) + (f"  [wrong: {', '.join(wrong)}]" if wrong else "")


# Numbers of the gate's scenes. They have one width, because every size takes a compilation.
_CHOSEN = {"ball": 2, "triangle": 31}
_OPPOSITE = ("ball",)  # These are also requested with the opposite sentence.
_ZIGZAG = 4  # The number of the zigzag that is requested with its adapter, and without it.
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
