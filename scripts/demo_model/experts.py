"""Train the tokenizer, the text encoder and the two experts, each expert on its side of the boundary.

Training is by flow matching: x = (1 - sigma) clip + sigma noise, and the velocity is noise - clip, which is what
diffusers' schedulers expect. Noise levels have the sampler's distribution: shift s / (1 + (shift - 1) s) for uniform s.

Shapes: B clips, Z latent channels, T latent frames, H W latent height and width.
"""

import contextlib
import math
import re
import string
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import sizes
from .scenes import FRAMES, Scene, all_words, caption, draw_scene, first_frame, opposite
from .score import save_rows, score
from .training import Run, load_average, train
from .vae import load_vae, statistics

_SENTENCES = 4000  # The number of sentences whose words are counted.
_MULTIPLE = 32  # Sentences are padded to a multiple of this; all are shorter, so that all batches have one shape.
_RARE = -12.0  # The log probability of a letter, which is below that of any word.


def train_tokenizer(seed: int) -> transformers.T5TokenizerFast:
    """Return a T5 tokenizer (unigram) with the training set's words; any other word is spelled in letters.

    The words are counted, because the trainer of the tokenizers library, which uses expectation maximisation, keeps
    letters and drops words on a grammar of 60 words.
    """
    counts = Counter(all_words())  # The tokenizer knows every word of the grammar, drawn or not.
    for i in range(_SENTENCES):
        counts.update(re.findall(r"\w+|,", caption(draw_scene(seed, i, held_out=False))))
    total = sum(counts.values())
    words = {word if word == "," else f"▁{word}": math.log(n / total) for word, n in counts.most_common()}
    letters = dict.fromkeys(["▁", *string.ascii_letters, *string.digits, *string.punctuation], _RARE)
    vocabulary = [(name, 0.0) for name in ("<pad>", "</s>", "<unk>")] + list((letters | words).items())
    return transformers.T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=sizes.TEXT_TOKENS)


def new_text_encoder(vocabulary: int) -> transformers.UMT5EncoderModel:
    """Return an untrained encoder for a tokenizer of `vocabulary` pieces."""
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**(sizes.TEXT_ENCODER | {"vocab_size": vocabulary})))


class PaddedText(WanAttnProcessor):
    """Cross-attention to 512 tokens of text that are computed from a few, without approximation.

    Pipelines pad embeddings with zeros to 512 tokens and mask none of them, so all padding has the same key. In
    training, one row of zeros stands for all rows beyond the longest sentence of a batch: with the logarithm of their
    number added to its logit, it has the same share of the softmax. Otherwise padding would take half of a step's time.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        """Attend as diffusers does; the last row of text with less than 512 tokens stands for all padding."""
        if encoder_hidden_states is not None and encoder_hidden_states.shape[1] < sizes.TEXT_TOKENS:
            length = encoder_hidden_states.shape[1]
            attention_mask = hidden_states.new_zeros(1, 1, 1, length)
            attention_mask[..., -1] = math.log(sizes.TEXT_TOKENS - length + 1)
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)


def embed(
    encoder: transformers.UMT5EncoderModel, tokenizer: transformers.T5TokenizerFast, sentences: list[str]
) -> torch.Tensor:
    """Return embeddings [B, L + 1, C], zero after each sentence; the last row is for all padding (`PaddedText`)."""
    tokens = tokenizer(sentences, padding=True, pad_to_multiple_of=_MULTIPLE, return_tensors="pt").to(encoder.device)
    hidden = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    return torch.nn.functional.pad(hidden * tokens.attention_mask[..., None], (0, 0, 0, 1))


EXPERTS = ("transformer", "transformer_2")  # The high-noise and the low-noise expert.


@dataclass(frozen=True)
class Latents:
    """Encoded clips of one width, normalised.

    Attributes:
        clips: [2, N, Z, T, H, W]: the clips that the captions describe, and their opposites.
        conditions: [N, ...].
        scenes: The N scenes as drawn.
    """

    clips: torch.Tensor
    conditions: torch.Tensor
    scenes: list[Scene]


@dataclass(frozen=True)
class Trained:
    """All components of the model, on one device."""

    tokenizer: transformers.T5TokenizerFast
    modules: torch.nn.ModuleDict
    vae: diffusers.AutoencoderKLWan


def train_experts(run: Run, schedule: sizes.Schedule = sizes.EXPERTS_SCHEDULE) -> bool:
    """Train text encoder and experts on the encoded clips; return whether all their steps are done."""
    model = new_model(run)
    latents, mean, std = read_latents(run)
    _set_statistics(model.vae, mean, std)
    modules, tokenizer = model.modules, model.tokenizer
    if run.compiled:
        _compile(modules)
    clips_of = np.array([len(group.scenes) for group in latents], float)

    def loss_of(step: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng([run.seed, step])
        # Two steps at a time of one width: steps alternate between the experts, and both must see both widths.
        group = latents[
            int(np.random.default_rng([run.seed, step // 2, 1]).choice(len(latents), p=clips_of / clips_of.sum()))
        ]
        x, condition, sentences = _batch(group, rng, schedule.batch, run.device)
        high = step % 2 == 0
        sigma = noise_levels(rng, schedule.batch, high=high).to(run.device)
        noise = torch.randn_like(x)
        at = sigma[:, None, None, None, None]
        inputs = torch.cat([(1 - at) * x + at * noise, condition], dim=1)
        expert = modules[EXPERTS[0] if high else EXPERTS[1]]
        with torch.autocast(run.device.type, torch.bfloat16), attention_over_few_tokens(run.device):
            text = embed(modules["text_encoder"], tokenizer, sentences)
            velocity = expert(inputs, sigma * 1000, text, return_dict=False)[0]
        loss = (velocity.float() - (noise - x)).square().mean()
        return {"loss": loss, "high" if high else "low": loss}

    @torch.compiler.set_stance("force_eager")  # Compiling its other shapes for a few calls wouldn't pay.
    def sheet(step: int) -> None:
        draw_sheet(run, model, step)

    return train("experts", run, schedule, modules, loss_of, sheet)


def new_model(run: Run) -> Trained:
    """Return the trained VAE with an untrained text encoder and untrained experts, always the same for a seed."""
    tokenizer = train_tokenizer(run.seed)
    torch.manual_seed(run.seed)
    modules = torch.nn.ModuleDict({"text_encoder": new_text_encoder(len(tokenizer))})
    for name in EXPERTS:
        expert = diffusers.WanTransformer3DModel.from_config(sizes.TRANSFORMER)
        for block in expert.blocks:
            block.attn2.set_processor(PaddedText())
        modules[name] = expert
    return Trained(tokenizer, modules, load_vae(run))


def load_model(run: Run) -> Trained:
    """Return the trained model, with the statistics of its latents in the VAE's configuration."""
    model = new_model(run)
    load_average("experts", run, model.modules)
    _, mean, std = read_latents(run)
    _set_statistics(model.vae, mean, std)
    return model


def read_latents(run: Run) -> tuple[list[Latents], list[float], list[float]]:
    """Return the encoded clips, a group for each width, and the mean and deviation by which they are normalised."""
    files = sorted((run.folder / "latents").glob("*.pt"))
    if not files:
        raise SystemExit(f"error: {run.folder} holds no encoded clips; run the stage latents first")
    stored = [(int(file.name.split("-")[0]), torch.load(file, weights_only=True)) for file in files]
    mean, std = statistics([state["clips"] for _, state in stored])
    shape = (-1, 1, 1, 1)
    centre, scale = torch.tensor(mean).view(shape), torch.tensor(std).view(shape)
    groups = []
    for width in sorted({width for width, _ in stored}):
        states = [state for at, state in stored if at == width]
        clips = (torch.cat([state["clips"] for state in states], dim=1).float() - centre) / scale
        conditions = (torch.cat([state["conditions"] for state in states]).float() - centre) / scale
        indices = torch.cat([state["indices"] for state in states]).tolist()
        groups.append(Latents(clips, conditions, [draw_scene(run.seed, i, held_out=False) for i in indices]))
    return groups, mean, std


def pipeline_of(model: Trained) -> diffusers.WanImageToVideoPipeline:
    """Return diffusers' own pipeline around the model."""
    return diffusers.WanImageToVideoPipeline(
        tokenizer=model.tokenizer,
        text_encoder=model.modules["text_encoder"],
        vae=model.vae,
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=sizes.SHIFT
        ),
        transformer=model.modules[EXPERTS[0]],
        transformer_2=model.modules[EXPERTS[1]],
        boundary_ratio=sizes.BOUNDARY,
    )


def draw_sheet(run: Run, model: Trained, step: int, scenes: int = 3) -> None:
    """Make, score and draw clips of held-out scenes and their opposites, with diffusers' pipeline."""
    pipeline = pipeline_of(model)
    pipeline.set_progress_bar_config(disable=True)
    drawn = [draw_scene(run.seed, i, held_out=True, width=64) for i in range(scenes)]
    pairs = [each for scene in drawn for each in (scene, opposite(scene))]
    clips = [generate(pipeline, scene, seed=i, device=run.device) for i, scene in enumerate(pairs)]
    scores = [score(clip, scene) for clip, scene in zip(clips, pairs, strict=True)]
    print(f"held-out scenes after {step} steps: {np.mean([each.whole for each in scores]):.2f} of sub-scores right")
    save_rows(run.folder / f"experts-{step:06d}.png", clips, [caption(scene) for scene in pairs])


def generate(
    pipeline: diffusers.WanImageToVideoPipeline, scene: Scene, *, seed: int, device: torch.device
) -> np.ndarray:
    """Return the clip that diffusers' pipeline makes from a scene's picture and sentence, float32 [T, H, W, 3]."""
    picture = pipeline.video_processor.preprocess(first_frame(scene)[None] / np.float32(255)).to(device)
    return pipeline(
        image=picture,
        prompt=caption(scene),
        height=picture.shape[2],
        width=picture.shape[3],
        num_frames=FRAMES,
        num_inference_steps=sizes.STEPS,
        guidance_scale=sizes.GUIDANCE,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="np",
    ).frames[0]


def noise_levels(rng: np.random.Generator, size: int, *, high: bool) -> torch.Tensor:
    """Return noise levels [B] of one side of the boundary, distributed like those of the sampler."""
    boundary = sizes.BOUNDARY / (sizes.SHIFT - (sizes.SHIFT - 1) * sizes.BOUNDARY)
    # Levels are evenly spaced from a random offset, so that a batch covers all of them, which steadies the loss.
    s = (np.arange(size) + rng.random()) / size
    s = boundary + s * (1 - boundary) if high else s * boundary
    return torch.from_numpy(sizes.SHIFT * s / (1 + (sizes.SHIFT - 1) * s)).float()


def _batch(
    group: Latents, rng: np.random.Generator, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return clips, conditions (4 mask channels, then latents) and sentences, some of them empty for guidance."""
    chosen = rng.integers(len(group.scenes), size=size)
    other_way = rng.integers(2, size=size)
    x = group.clips[torch.from_numpy(other_way), torch.from_numpy(chosen)].to(device)
    known = group.conditions[torch.from_numpy(chosen)].to(device)
    mask = torch.zeros_like(known[:, :4])
    mask[:, :, 0] = 1
    sentences = []
    for i, other in zip(chosen, other_way, strict=True):
        scene = opposite(group.scenes[i]) if other else group.scenes[i]
        worded = caption(replace(scene, wording=int(rng.integers(4))))
        sentences.append("" if rng.random() < sizes.TEXT_DROPOUT else worded)
    return x, torch.cat([mask, known], dim=1), sentences


def attention_over_few_tokens(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context for attention: on a CPU, flash attention's backward pass takes half of a step at 80 tokens."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else contextlib.nullcontext()


def _compile(modules: torch.nn.ModuleDict) -> None:
    # wan_tpu imports torchax, which registers its device as an accelerator; torch.compile would ask it for a stream.
    torch.accelerator.is_available = lambda: False
    for name in EXPERTS:
        modules[name].compile_repeated_blocks(dynamic=False)


def _set_statistics(vae: diffusers.AutoencoderKLWan, mean: list[float], std: list[float]) -> None:
    digits = 4  # Wan's published statistics have as many.
    vae.register_to_config(
        latents_mean=[round(value, digits) for value in mean], latents_std=[round(value, digits) for value in std]
    )


LARGEST_MB = 20


def export(run: Run, target: Path) -> float:
    """Write the model into `target`, with weights in float16, and return its size in MB.

    Raises:
        SystemExit: It is larger than `LARGEST_MB`.
    """
    pipeline = pipeline_of(load_model(run))
    for name in ("text_encoder", "transformer", "transformer_2", "vae"):
        # With to(), diffusers would keep some parameters in float32, which takes a fifth more room.
        for parameter in getattr(pipeline, name).parameters():
            parameter.data = parameter.data.half()
    pipeline.save_pretrained(target)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file()) / 1e6
    if size > LARGEST_MB:
        raise SystemExit(f"error: {target} takes {size:.1f} MB; at most {LARGEST_MB} may be shipped")
    return size
