"""Make small, complete checkpoints of every Wan model from diffusers' and transformers' own classes.

Random weights, real everything else: component classes, configuration keys, file layout, a tokenizer trained on
real sentences. They stand in for 30 to 130 GB downloads in the demo, the tests and the benchmarks. Deterministic: the
same call writes the same bytes.
"""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from wan_tpu.families.wan.presets import PRESETS, VAE_21, VAE_22, WanConfig

KINDS = tuple(PRESETS)

_HEADS, _HEAD_WIDTH = 2, 24
_TEXT_WIDTH = 32
_IMAGE_WIDTH = 40

_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": _HEADS,
    "attention_head_dim": _HEAD_WIDTH,
    "text_dim": _TEXT_WIDTH,
    "freq_dim": 32,
    "ffn_dim": 96,
    "num_layers": 2,
}
_VAE: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
_TEXT_ENCODER: dict[str, Any] = {"d_model": _TEXT_WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_IMAGE_ENCODER: dict[str, Any] = {
    "hidden_size": _IMAGE_WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 16,
}


def make_checkpoint(
    folder: Path,
    kind: str = "wan2.2-i2v-a14b",
    *,
    transformer: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    shift: float | None = None,
    seed: int = 0,
) -> Path:
    """Write a small checkpoint in the shape of the published model `kind` (one of `KINDS`).

    transformer, vae, shift  override the small configuration
    """
    preset = PRESETS[kind]
    torch.manual_seed(seed)
    experts = ["transformer", "transformer_2"] if preset.two_experts else ["transformer"]
    clip = preset.image_encoder is not None
    settings = preset.transformer | _TRANSFORMER
    if clip:
        settings |= {"image_dim": _IMAGE_WIDTH, "added_kv_proj_dim": _HEADS * _HEAD_WIDTH}
    settings |= transformer or {}
    residual = preset.vae is VAE_22
    for name in experts:
        diffusers.WanTransformer3DModel.from_config(settings).save_pretrained(folder / name)
    small_vae = (VAE_22 | {"base_dim": 8, "decoder_base_dim": 8, "num_res_blocks": 1}) if residual else VAE_21 | _VAE
    diffusers.AutoencoderKLWan.from_config(small_vae | (vae or {})).save_pretrained(folder / "vae")
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    text = _TEXT_ENCODER | {"vocab_size": len(tokenizer), "d_model": settings["text_dim"]}
    config = transformers.UMT5Config(**(preset.text_encoder | text))
    transformers.UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    if clip:
        _save_image_encoder(folder)
    diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=preset.shift if shift is None else shift
    ).save_pretrained(folder / "scheduler")
    _write_index(folder, preset, clip=clip)
    return folder


def _save_image_encoder(folder: Path) -> None:
    config = transformers.CLIPVisionConfig(hidden_act="gelu", **_IMAGE_ENCODER)
    transformers.CLIPVisionModel(config).save_pretrained(folder / "image_encoder")
    size = {"height": _IMAGE_ENCODER["image_size"], "width": _IMAGE_ENCODER["image_size"]}
    transformers.CLIPImageProcessor(size={"shortest_edge": size["height"]}, crop_size=size).save_pretrained(
        folder / "image_processor"
    )


def _write_index(folder: Path, preset: WanConfig, *, clip: bool) -> None:
    """Write model_index.json as diffusers' save_pretrained does."""
    image_to_video = preset.transformer["in_channels"] == 36
    index: dict[str, Any] = {
        "_class_name": "WanImageToVideoPipeline" if image_to_video else "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": preset.boundary_ratio,
        "expand_timesteps": preset.expand_timesteps,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"] if preset.two_experts else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if image_to_video:
        index["image_encoder"] = ["transformers", "CLIPVisionModel"] if clip else [None, None]
        index["image_processor"] = ["transformers", "CLIPImageProcessor"] if clip else [None, None]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def train_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Train a T5-like tokenizer (unigram, "▁" for spaces, "</s>" at the end) on the sentences below."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


_SENTENCES = """
A cat looks into the camera, its whiskers moving in a light breeze, soft afternoon light on its fur.
A dog runs along the beach while waves roll in and the sun goes down behind the hills.
Two people walk through a quiet street in the rain; lanterns are reflected on the wet stones.
The camera moves slowly forward over a green valley, clouds drift across the mountains.
A red ball rolls to the right over a green floor and bounces off a blue box.
Steam rises from a cup of coffee on a wooden table next to an open book.
A small boat crosses the lake at dawn, its wake spreading in long smooth lines.
Leaves fall from the trees in the park, children play and laugh in the distance.
Close-up of hands kneading dough, flour in the air, warm light from the window on the left.
A train passes over the bridge, the river below is fast and full after the storm.
Snow covers the roofs of the village; smoke comes out of the chimneys into a clear blue sky.
The astronaut turns round, the Earth is mirrored in the visor of the helmet.
A flower opens in time lapse, drops of water shine on its petals.
Static, overexposed, blurred details, worst quality, low quality, JPEG compression residue, ugly,
extra fingers, poorly drawn hands, deformed, disfigured, still picture, messy background, walking backwards.
High quality, detailed, cinematic, smooth motion, 4K, 24 frames per second, shallow depth of field.
""".strip().splitlines()
