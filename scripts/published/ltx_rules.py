"""The rules of Lightricks' pipelines (ltx-core and ltx-pipelines 1.0.0) in plain torch, around diffusers' networks.

`scripts/compare_ltx.py` shows that they make the latents that Lightricks' own pipelines make; tests compare ours with
theirs. Those of LTX-2.5 are of version 1.2.0, which isn't on PyPI (github.com/Lightricks/LTX-2 at 400fd310);
`scripts/compare_ltx_25.py` compares ours with that version itself.

Shapes: L tokens of the video, A of the sound, C channels, H W latent height and width.
"""

import copy
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf
from PIL import Image
from safetensors.torch import load_file, save_file

FIRST = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
SECOND = (0.909375, 0.725, 0.421875, 0.0)
VIDEO_SCALE, AUDIO_SCALE, PERTURBED, ISOLATED, RESCALE = 3.0, 7.0, 1.0, 3.0, 0.7
FPS = 24.0
# The layers that an adapter of `make_adapter` changes; diffusers and Lightricks have the same names for these.
ADAPTED = re.compile(r"\.(to_[qkv]|to_out\.0|net\.0\.proj|net\.2)$")
PREFIX, ENDING = "diffusion_model.", ".lora_A.weight"


class Lightricks:
    """Makes the latents of one small checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read the checkpoint in a folder."""
        # LTX-2.0's configuration switches off what perturbs layers.
        transformer = diffusers.LTX2VideoTransformer3DModel.from_pretrained(folder / "transformer", perturbed_attn=True)
        self._pipe: Any = diffusers.LTX2Pipeline.from_pretrained(folder, transformer=transformer.eval())
        self._folder = folder
        self._is_25 = not transformer.config.ff_bias
        if self._is_25:
            # In 1.2.0, tokens attend to the other stream by their own timesteps, and take from it by its noise level.
            for gate in ("video_a2v", "audio_v2a"):
                transformer.get_submodule(f"av_cross_attn_{gate}_gate").register_forward_pre_hook(
                    lambda module, times, gate=gate: (self._gate_times[gate],)
                )

    @torch.no_grad()
    def make_in_one_stage(
        self,
        prompt: str,
        negative_prompt: str,
        steps: int,
        seed: int,
        size: tuple[int, int, int],
        image: Image.Image | None = None,
        sound: torch.Tensor | None = None,
    ) -> list[np.ndarray]:
        """Return the latents [1, C, T, H, W] and [1, A, C] of a guided model.

        Args:
            size: Height, width, frames.
            sound: Latents [1, A, C] of a given sound, which stay as they are.
        """
        generator = torch.Generator().manual_seed(seed)
        texts = [self._read(text) for text in (prompt, negative_prompt)]
        frame = None if image is None else self._encode(image, *size[:2])
        shape = self._shape(*size)
        video, audio = self._noise(shape, generator)
        return self._denoise(video, audio, shape, noise_levels(steps), texts, frame, sound=sound)

    @torch.no_grad()
    def make_in_two_stages(
        self,
        prompt: str,
        seed: int,
        size: tuple[int, int, int],
        image: Image.Image | None = None,
        sound: torch.Tensor | None = None,
    ) -> list[list[np.ndarray]]:
        """Return the latents of both stages of a distilled model; a given sound stays as it is."""
        generator, texts = torch.Generator().manual_seed(seed), [self._read(prompt)]
        fresh = torch.Generator().manual_seed(seed + 10_000) if self._is_25 else None
        first = self._make_first(generator, torch.tensor(FIRST), size, texts, image, fresh, sound)
        return [first, self._refine(first, generator, size, texts, image, sound)]

    @torch.no_grad()
    def make_and_refine(
        self,
        prompt: str,
        negative_prompt: str,
        steps: int,
        seed: int,
        size: tuple[int, int, int],
        adapter: Path,
        image: Image.Image | None = None,
        sound: torch.Tensor | None = None,
    ) -> list[list[np.ndarray]]:
        """Return the latents of both stages of a guided model, whose second one has an adapter and no guidance.

        Args:
            steps: Those of the first stage.
            adapter: A file as `make_adapter` writes it.
            sound: As for `make_in_one_stage`.
        """
        generator = torch.Generator().manual_seed(seed)
        texts = [self._read(text) for text in (prompt, negative_prompt)]
        first = self._make_first(generator, noise_levels(steps), size, texts, image, sound=sound)
        plain, self._pipe.transformer = self._pipe.transformer, merge(self._pipe.transformer, adapter)
        second = self._refine(first, generator, size, texts[:1], image, sound)
        self._pipe.transformer = plain
        if self._is_25:
            second[1] = first[1]  # The second stage refines the video alone.
        return [first, second]

    @torch.no_grad()
    def encode_sound(self, spectrogram: torch.Tensor) -> torch.Tensor:
        """Return the mean latents [1, A, C] of the logarithm of a mel spectrogram [1, 2, frames, bins]."""
        pipe = self._pipe
        mean = pipe._pack_audio_latents(pipe.audio_vae.encode(spectrogram).latent_dist.mode())
        return pipe._normalize_audio_latents(mean, pipe.audio_vae.latents_mean, pipe.audio_vae.latents_std)

    def _make_first(
        self,
        generator: torch.Generator,
        sigmas: torch.Tensor,
        size: tuple[int, int, int],
        texts: Sequence[Any],
        image: Image.Image | None,
        fresh: torch.Generator | None = None,
        sound: torch.Tensor | None = None,
    ) -> list[np.ndarray]:
        """Return the latents of the first of two stages, at half the size."""
        height, width, frames = size[0] // 2, size[1] // 2, size[2]
        shape = self._shape(height, width, frames)
        frame = None if image is None else self._encode(image, height, width)
        return self._denoise(*self._noise(shape, generator), shape, sigmas, texts, frame, fresh, sound)

    def _refine(
        self,
        first: Sequence[np.ndarray],
        generator: torch.Generator,
        size: tuple[int, int, int],
        texts: Sequence[Any],
        image: Image.Image | None,
        sound: torch.Tensor | None = None,
    ) -> list[np.ndarray]:
        """Return the latents of the second stage, from those of the first one."""
        shape = self._shape(*size)
        frame = None if image is None else self._encode(image, *size[:2])
        before, heard = (torch.from_numpy(part) for part in first)
        clean = to_tokens(self._enlarge(before)), heard
        video, audio = (
            SECOND[0] * noise + (1 - SECOND[0]) * part
            for noise, part in zip(self._noise(shape, generator), clean, strict=True)
        )
        return self._denoise(video, audio, shape, torch.tensor(SECOND), texts, frame, sound=sound)

    def _shape(self, height: int, width: int, frames: int) -> tuple[int, int, int, int]:
        return (frames - 1) // 8 + 1, height // 32, width // 32, round(frames / FPS * 25)

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the video's tokens, then the sound's."""
        *grid, count = shape
        config = self._pipe.transformer.config
        return (
            torch.randn(1, math.prod(grid), config.in_channels, generator=generator),
            torch.randn(1, count, config.audio_in_channels, generator=generator),
        )

    def _read(self, text: str) -> tuple[torch.Tensor, torch.Tensor]:
        tokenizer = self._pipe.tokenizer
        if self._is_25 and tokenizer(text).input_ids[:1] != [tokenizer.bos_token_id]:
            text = f"{tokenizer.bos_token}{text.strip()}"
        states, mask, *_ = self._pipe.encode_prompt(text, do_classifier_free_guidance=False)
        video, audio, _ = self._pipe.connectors(states, mask, padding_side="left")
        return video, audio

    def _encode(self, image: Image.Image, height: int, width: int) -> torch.Tensor:
        """Compress an image, resize its middle between neighbouring pixels, and return its mean latents."""
        pixels = (
            torch.from_numpy(apply_image_conditioning_crf(np.array(image), 18 if self._is_25 else 33))
            .float()
            .permute(2, 0, 1)[None]
        )
        scale = max(height / pixels.shape[2], width / pixels.shape[3])
        sides = [math.ceil(side * scale) for side in pixels.shape[2:]]
        pixels = torch.nn.functional.interpolate(pixels, sides, mode="bilinear", align_corners=False)
        top, left = (sides[0] - height) // 2, (sides[1] - width) // 2
        pixels = pixels[:, :, top : top + height, left : left + width] / 127.5 - 1
        mean, deviation = self._statistics()
        return (self._pipe.vae.encode(pixels[:, :, None]).latent_dist.mode() - mean) / deviation

    def _enlarge(self, latents: torch.Tensor) -> torch.Tensor:
        upsampler = LTX2LatentUpsamplerModel.from_pretrained(self._folder / "latent_upsampler").eval()
        mean, deviation = self._statistics()
        return (upsampler(latents * deviation + mean) - mean) / deviation

    def _statistics(self) -> Iterator[torch.Tensor]:
        return (getattr(self._pipe.vae, f"latents_{name}").view(1, -1, 1, 1, 1) for name in ("mean", "std"))

    def _denoise(
        self,
        video: torch.Tensor,
        audio: torch.Tensor,
        shape: tuple[int, ...],
        sigmas: torch.Tensor,
        texts: Sequence[Any],
        frame: torch.Tensor | None,
        fresh: torch.Generator | None = None,
        sound: torch.Tensor | None = None,
    ) -> list[np.ndarray]:
        """Take Euler steps over estimates of the clean latents, ancestral ones if there is a generator.

        A given sound has no noise in any step, as in `a2vid_two_stage.py`.
        """
        *grid, _ = shape
        mask = torch.ones(1, video.shape[1], 1)
        if frame is not None:
            first = to_tokens(frame)
            mask[:, : first.shape[1]] = 0
            clean = torch.cat([first, torch.zeros_like(video[:, first.shape[1] :])], dim=1)
            video = mask * video + (1 - mask) * clean
        for sigma, following in itertools.pairwise(sigmas):
            audio = audio if sound is None else sound
            estimates = self._estimate(video, audio, shape, float(sigma), mask, texts, is_given=sound is not None)
            if frame is not None:
                estimates[0] = mask * estimates[0] + (1 - mask) * clean
            if fresh is None:
                video, audio = (
                    x + (x - estimate) / sigma * (following - sigma)
                    for x, estimate in zip((video, audio), estimates, strict=True)
                )
            elif following == 0:
                video, audio = estimates
            else:
                down = following * (1 + (following / sigma - 1))
                signal = (1 - following) / (1 - down)
                noise = (following**2 - down**2 * signal**2).sqrt()
                video, audio = (
                    signal * (down / sigma * x + (1 - down / sigma) * estimate)
                    + noise * torch.randn(x.shape, generator=fresh)
                    for x, estimate in zip((video, audio), estimates, strict=True)
                )
                if frame is not None:
                    video = mask * video + (1 - mask) * clean
        channels = video.shape[2]
        return [video[0].T.reshape(1, channels, *grid).numpy(), (audio if sound is None else sound).numpy()]

    def _estimate(
        self,
        video: torch.Tensor,
        audio: torch.Tensor,
        shape: tuple[int, ...],
        sigma: float,
        mask: torch.Tensor,
        texts: Sequence[Any],
        *,
        is_given: bool,
    ) -> list[torch.Tensor]:
        """Return the clean estimates of video and sound, which may be given, guided if there is a negative prompt."""
        audio_sigma, config = 0 if is_given else sigma, self._pipe.transformer.config
        scale = 1000 * config.cross_attn_timestep_scale_multiplier / config.timestep_scale_multiplier
        self._gate_times = {
            "video_a2v": torch.tensor([scale * audio_sigma]),
            "audio_v2a": torch.tensor([scale * sigma]),
        }
        marked = torch.zeros_like(mask)
        marked[:, : shape[1] * shape[2]] = 1

        def run(text: Any, **options: Any) -> list[torch.Tensor]:
            velocities = self._pipe.transformer(
                hidden_states=video,
                audio_hidden_states=audio,
                encoder_hidden_states=text[0],
                audio_encoder_hidden_states=text[1],
                timestep=1000 * sigma * mask[:, :, 0],
                audio_timestep=torch.tensor([1000.0 * audio_sigma]),
                sigma=torch.tensor([1000 * sigma]),
                audio_sigma=torch.tensor([1000.0 * audio_sigma]),
                num_frames=shape[0],
                height=shape[1],
                width=shape[2],
                fps=FPS,
                audio_num_frames=shape[3],
                use_cross_timestep=not self._is_25,
                video_keyframes_mask=marked,
                return_dict=False,
                **options,
            )
            noises = sigma * mask, audio_sigma
            return [x - noise * v for x, v, noise in zip((video, audio), velocities, noises, strict=True)]

        plain = run(texts[0])
        if len(texts) == 1:
            return plain
        layers = self._pipe.transformer.config.num_layers
        layer = (28 if self._pipe.transformer.config.cross_attn_mod else 29) * layers // 48
        others = (
            run(texts[1]),
            run(texts[0], spatio_temporal_guidance_blocks=[layer]),
            run(texts[0], isolate_modalities=True),
        )
        results = []
        for part, scale in enumerate((VIDEO_SCALE, AUDIO_SCALE)):
            pushes = zip((scale - 1, PERTURBED, ISOLATED - 1), others, strict=True)
            guided = plain[part] + sum(push * (plain[part] - other[part]) for push, other in pushes)
            results.append(guided * (RESCALE * plain[part].std() / guided.std() + 1 - RESCALE))
        return results


def make_adapter(folder: Path, file: Path, rank: int = 4, seed: int = 0) -> Path:
    """Write an adapter with small random changes of a checkpoint's transformer, named as Lightricks names them."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    transformer = diffusers.LTX2VideoTransformer3DModel.from_pretrained(folder / "transformer")
    for name, layer in transformer.transformer_blocks.named_modules():
        if isinstance(layer, torch.nn.Linear) and ADAPTED.search(name):
            outputs, inputs = layer.weight.shape
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.randn(shape, generator=generator) * 0.3 / shape[1] ** 0.5
                tensors[f"{PREFIX}transformer_blocks.{name}.lora_{part}.weight"] = values
    save_file(tensors, file)
    return file


def merge(transformer: torch.nn.Module, adapter: Path) -> torch.nn.Module:
    """Return a transformer with an adapter's products added to its weights."""
    changed, tensors = copy.deepcopy(transformer), load_file(adapter)
    for name in (name for name in tensors if name.endswith(ENDING)):
        layer: Any = changed.get_submodule(name.removeprefix(PREFIX).removesuffix(ENDING))
        layer.weight.data += tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    return changed


def to_tokens(latents: torch.Tensor) -> torch.Tensor:
    """Turn latents [1, C, T, H, W] into tokens [1, L, C]."""
    return latents.flatten(2).transpose(1, 2)


def noise_levels(steps: int) -> torch.Tensor:
    """Return the noise levels of a guided model, shifted as for 4,096 tokens; the last but one becomes 0.1."""
    levels, shift = torch.linspace(1, 0, steps + 1)[:-1], math.exp(2.05)
    rest = 1 - shift / (shift + (1 / levels - 1))
    return torch.cat([1 - rest / (rest[-1] / 0.9), torch.zeros(1)])
