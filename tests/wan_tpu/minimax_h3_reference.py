"""Diffusers' modular pipeline of MiniMax-H3, on a checkpoint's folder, with the latents of every step."""

import contextlib
import functools
import itertools
import math
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers
from diffusers.models.transformers import transformer_minimax_h3
from diffusers.modular_pipelines import MiniMaxH3Blocks, MiniMaxH3ModularPipeline

from tests.wan_tpu.vsa_reference import cut_into_tiles, video_sparse_attention


class Processor:
    """The parts of Qwen3VLProcessor that the pipeline uses; transformers can't make one without torchvision."""

    def __init__(self, folder: Path, config: transformers.Qwen3VLConfig) -> None:
        self.image_processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._image = config.image_token_id

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        """Return 1 for tokens of images, and 0 for all others."""
        return [[int(number == self._image) for number in row] for row in ids]


class SmallPipeline(MiniMaxH3ModularPipeline):
    """The pipeline, which reads the last layer but one of a small text encoder in place of the fiftieth.

    It makes the lengths that MiniMax names, 4 s and 15 s, rounded up as the VAE needs them.
    """

    min_duration, max_duration = 4.0, 362 / 24

    @property
    def text_encoder_layer(self) -> int:
        """The layer of the text encoder whose output the transformer takes."""
        return self.text_encoder.config.text_config.num_hidden_layers - 1


class Reference:
    """The pipeline of one checkpoint.

    Attributes:
        pipeline: Diffusers' pipeline.
        steps: After a call, the latents of video and sound after each step, as rows of its sequence.
    """

    def __init__(self, folder: Path, *, decodes: bool = True) -> None:
        blocks = MiniMaxH3Blocks()
        if not decodes:
            del blocks.sub_blocks["decode"]
        self.pipeline, self.steps = SmallPipeline(blocks), {"video": [], "sound": []}
        encoder = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder")
        parts = {
            "transformer": diffusers.MiniMaxH3Transformer3DModel.from_pretrained(folder / "transformer"),
            "text_encoder": encoder,
            "vae": diffusers.AutoencoderKLMiniMaxH3.from_pretrained(folder / "vae"),
            "audio_vae": diffusers.AutoencoderKLMiniMaxH3Audio.from_pretrained(folder / "audio_vae"),
            "scheduler": diffusers.MiniMaxH3Scheduler.from_pretrained(folder / "scheduler"),
            "audio_scheduler": diffusers.MiniMaxH3Scheduler.from_pretrained(folder / "audio_scheduler"),
            "tokenizer": transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"),
            "processor": Processor(folder / "processor", encoder.config),
        }
        for part in parts.values():
            if isinstance(part, torch.nn.Module):
                part.eval().requires_grad_(False)
        self.pipeline.update_components(**parts)
        self._schedulers = {"video": parts["scheduler"], "sound": parts["audio_scheduler"]}
        for name, scheduler in self._schedulers.items():
            self._record(name, scheduler)

    def _record(self, name: str, scheduler: diffusers.MiniMaxH3Scheduler) -> None:
        step = scheduler.step

        def step_and_record(*args, **kwargs):
            result = step(*args, **kwargs)
            self.steps[name].append(result[0].numpy().copy())
            return result

        scheduler.step = step_and_record

    def set_schedules(self, **schedules: tuple[float, list[float] | None]) -> None:
        """Set the shifts of "video" and "sound", and their noise levels before it (None: the usual)."""
        for name, (shift, levels) in schedules.items():
            scheduler = self._schedulers[name]
            scheduler.set_shift(shift)
            sigmas = None if levels is None else [shift * level / (1 + (shift - 1) * level) for level in levels]
            scheduler.set_timesteps = functools.partial(type(scheduler).set_timesteps, scheduler, sigmas=sigmas)

    def __call__(self, *, steps: int, seed: int = 0, **inputs):
        """Return pixels [T, H, W, 3], sound [2, samples], and the latents of each step by "video" and "sound".

        Args:
            steps: Evaluations of the transformer.
            seed: Of the request's generator.
            **inputs: As the pipeline takes them.
        """
        for rows in self.steps.values():
            rows.clear()
        state = self.pipeline(
            num_inference_steps=steps + 1, generator=torch.Generator().manual_seed(seed), output_type="np", **inputs
        )
        pixels, sound = state.get("videos"), state.get("audio")
        return np.asarray(pixels)[0], sound[0].numpy(), {name: list(rows) for name, rows in self.steps.items()}


def relative(actual, expected):
    """Return the largest difference relative to the largest value."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return np.abs(actual - expected).max() / np.abs(expected).max()


def pairs(ours, theirs):
    """Return both side by side, which must be equally long."""
    return itertools.zip_longest(ours, theirs)


def choose_sparsely(query, key, density, least_gap=1e-5):
    """Return the blocks of 64 keys that LightX2V's "dynamic_sparse_attn" keeps for each block of 128 queries.

    These are a share of the blocks: those whose mean, less the mean of all keys, has the largest product with the mean
    of the queries. All is rounded to the dtype of query and key.

    Args:
        query, key: [N, L, D]; the last blocks may be partial.
        density: The share of the blocks.
        least_gap: Where two blocks are nearly as large, rounding would decide: the least difference that is accepted
            between the last one kept and the first one left out, as a share of the largest score.

    Returns:
        [N, blocks of queries, n], in rising order.
    """
    sizes = (query, 128), (key - key.mean(dim=1, keepdim=True), 64)
    queries, keys = (torch.stack([block.mean(dim=1) for block in x.split(size, dim=1)], dim=1) for x, size in sizes)
    scores = queries @ keys.mT
    blocks = scores.shape[2]
    count = max(1, min(blocks, int(density * blocks)))
    best = scores.sort(dim=2, descending=True)
    if count < blocks:
        gaps = (best.values[..., count - 1] - best.values[..., count]) / scores.abs().amax(dim=2)
        assert gaps.min() > least_gap, gaps.min()
    return best.indices[..., :count].sort(dim=2).values


def attend_sparsely(density, least_gap=1e-5, record=None):
    """Return attention as LightX2V's "dynamic_sparse_attn", of [1, L, N, D].

    Args:
        density, least_gap: As for `choose_sparsely`.
        record: Is called with the number of rows and the lists of each call.
    """

    def attend(query, key, value, **_):
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        lists = choose_sparsely(query, key, density, least_gap)
        if record is not None:
            record(key.shape[1], lists)
        blocks = torch.arange(key.shape[1]).split(64)
        output = torch.empty_like(query)
        for head, of_head in enumerate(lists):
            for rows, kept in pairs(torch.arange(query.shape[1]).split(128), of_head):
                keys = torch.cat([blocks[i] for i in kept])
                logits = query[head, rows] @ key[head, keys].T * query.shape[-1] ** -0.5
                output[head, rows] = logits.softmax(dim=-1) @ value[head, keys]
        return output.transpose(0, 1)[None]

    return attend


@contextlib.contextmanager
def attend_to_tiles(transformer, sparsity, grid, keyframes, sound, least_gap=1e-6):
    """Let the blocks of diffusers' transformer, with `components.add_gates`, attend as FastVideo's.

    Args:
        transformer: The transformer.
        sparsity: The share of the video's tiles that are left out.
        grid: The video's tokens.
        keyframes, sound: Their rows; all others are of text and video.
        least_gap: As for `attend_sparsely`.
    """
    dense, gates = transformer_minimax_h3.dispatch_attention_fn, []

    def attend(query, key, value, **options):
        if not gates:  # The text's own two layers.
            return dense(query, key, value, **options)
        gate = gates.pop()[0].unflatten(-1, query.shape[2:])
        words = query.shape[1] - keyframes - sound - math.prod(grid)
        tiles, cuts = cut_into_tiles(grid, (words, keyframes, sound))
        return video_sparse_attention(query[0], key[0], value[0], gate, tiles, cuts, sparsity, least_gap)[None]

    attentions = [block.attn for block in transformer.transformer_blocks]
    hooks = [
        attention.register_forward_pre_hook(lambda module, args: gates.append(module.to_gate_compress(args[0])))
        for attention in attentions
    ]
    transformer_minimax_h3.dispatch_attention_fn = attend
    try:
        yield
    finally:
        transformer_minimax_h3.dispatch_attention_fn = dense
        for hook in hooks:
            hook.remove()
