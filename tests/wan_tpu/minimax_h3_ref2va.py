"""Diffusers' Ref2VA blocks of MiniMax-H3 on a small checkpoint's folder, and files to give them and us."""

import json
import wave
from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from PIL import Image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from tests.wan_tpu.minimax_h3_reference import Processor, Reference
from wan_tpu.data import Video
from wan_tpu.families.minimax_h3 import classes
from wan_tpu.media.reading import open_video, read_sound
from wan_tpu.reference import Reference as OurReference

RATE = 32000  # Of all sounds: diffusers would need torchaudio for another one.


class ProcessorOfVideos(Processor):
    """The same with videos, whose processor transformers can't make without torchvision, either."""

    def __init__(self, folder, config) -> None:
        super().__init__(folder, config)
        self.video_processor, self._video = VideoProcessor(), config.video_token_id

    def create_mm_token_type_ids(self, ids):
        """Return 1 for tokens of images, 2 for those of videos, and 0 for all others."""
        kinds = {self._image: 1, self._video: 2}
        return [[kinds.get(number, 0) for number in row] for row in ids]


class VideoProcessor:
    """Qwen3VLVideoProcessor for videos that need no other size: its normalisation and its own `patchify`."""

    temporal_patch_size = 2

    def __call__(self, videos, *, do_sample_frames, return_tensors):
        """Return patches and grids, as transformers does."""
        patches, grids = [], []
        for video in videos:
            pixels = (torch.from_numpy(video).permute(0, 3, 1, 2)[None] / 255 - 0.5) / 0.5
            cut = Qwen3VLVideoProcessor.patchify(self, pixels, 16, 2, self.temporal_patch_size)
            patches.append(cut[0].reshape(-1, cut[0].shape[-1]))
            grids.append([-(-len(video) // 2), video.shape[1] // 16, video.shape[2] // 16])
        return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}


class ReferencePipeline(Reference):
    """The pipeline with the transformer for references, up to the last latents: others compare what is decoded."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, decodes=False)
        transformer = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(folder / "transformer_ref")
        processor = ProcessorOfVideos(folder / "processor", self.pipeline.text_encoder.config)
        index = json.loads((folder / "modular_model_index.json").read_text())
        canvas = {name: index[name] for name in classes.CANVAS}
        self.pipeline.update_components(transformer_ref=transformer.eval(), processor=processor, **canvas)

    def run(self, *, steps: int, seed: int, references, **inputs):
        """Return the pipeline's state at the end; `self.steps` has the latents of each step."""
        for rows in self.steps.values():
            rows.clear()
        return self.pipeline(
            num_inference_steps=steps + 1,
            generator=torch.Generator().manual_seed(seed),
            references=[to_theirs(reference) for reference in references],
            **inputs,
        )


def to_theirs(reference: OurReference):
    """Return diffusers' reference with the pixels and samples of ours, at the rates of its file."""
    if reference.kind == "image":
        return MiniMaxH3ImageReference(reference.source)
    sound = {}
    if reference.samples:
        samples, rate = read_sound(reference.source, 60)
        sound = {"audio": torch.tensor(samples), "sample_rate": rate}
    if reference.kind == "audio":
        return MiniMaxH3AudioReference(**sound)
    with open_video(reference.source) as shown:
        frames, fps = shown.read_pictures(), float(shown.rate)
    return MiniMaxH3VideoReference(np.stack([np.asarray(frame) for frame in frames]), fps, **sound)


def draw_image(seed: int, height: int, width: int) -> Image.Image:
    """Return a smooth picture of random colours."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def write_video(path: Path, frames: int, *, height=64, width=96, fps=24.0, sound=True) -> Path:
    """Write a video of a moving pattern, with a tone that rises."""
    picture = np.asarray(draw_image(frames, height, 2 * width), np.float32) / 255
    pixels = np.stack([picture[:, (3 * i) % width :][:, :width] for i in range(frames)])
    samples = None
    if sound:
        times = np.arange(int(frames / fps * RATE)) / RATE
        samples = np.stack([np.sin(900 * times * (1 + times)), np.cos(500 * times)]).astype(np.float32) / 2
    return Video(pixels, fps, samples, RATE if sound else None).save(path)


def write_sound(path: Path, seconds: float, *, rate=RATE) -> Path:
    """Write a tone in one channel."""
    times = np.arange(int(seconds * rate)) / rate
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.sin(1500 * times) * 20000).astype("<i2").tobytes())
    return path
