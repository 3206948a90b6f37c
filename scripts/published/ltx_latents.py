"""Latents of Lightricks' own pipelines, ltx-core and ltx-pipelines 1.0.0 of PyPI, with a small checkpoint's weights.

`scripts/compare_ltx.py` runs this file in an environment of its own, in which wan-tpu isn't installed. Lightricks'
pipelines, their arguments' defaults, samplers and modules run as they are, with these exceptions:

- They compute in bfloat16, and round the positions of the video's tokens to it, too; here in float32.
- They read weights and sizes from one file; here each module is built from a diffusers checkpoint's configuration, and
  has that checkpoint's values, under the names in diffusers' scripts/convert_ltx2_to_diffusers.py.
- Small models have fewer layers, channels and bins of sound than the constants in their code say.
- Latents are kept, and nothing is decoded.
- They add an adapter's products to weights in bfloat16 only; here the same products are added in float32.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from ltx_core.loader import LoraPathStrengthAndSDOps, fuse_loras
from ltx_core.loader.primitives import LoraStateDictWithStrength
from ltx_core.loader.sft_loader import SafetensorsStateDictLoader
from ltx_core.model.transformer import X0Model
from ltx_core.model.transformer.model import LTXModel
from ltx_core.model.transformer.rope import LTXRopeType
from ltx_core.model.transformer.text_projection import create_caption_projection
from ltx_core.model.upsampler.model import LatentUpsampler
from ltx_core.model.video_vae.video_vae import VideoEncoder
from ltx_core.text_encoders.gemma import GemmaTextEncoder
from ltx_core.text_encoders.gemma.embeddings_connector import Embeddings1DConnector
from ltx_core.text_encoders.gemma.embeddings_processor import EmbeddingsProcessor
from ltx_core.text_encoders.gemma.feature_extractor import FeatureExtractorV1, FeatureExtractorV2
from ltx_core.text_encoders.gemma.tokenizer import LTXVGemmaTokenizer
from ltx_core.types import AudioLatentShape, VideoPixelShape
from ltx_names import STATISTICS, TRANSFORMER_NAMES, Float32, list_encoder_blocks
from ltx_pipelines import distilled, ti2vid_one_stage, ti2vid_two_stages
from ltx_pipelines.utils import args, constants
from safetensors.torch import load_file

TEXT_NAMES = {
    "feature_extractor.aggregate_embed": "text_proj_in",
    "feature_extractor.video_aggregate_embed": "video_text_proj_in",
    "feature_extractor.audio_aggregate_embed": "audio_text_proj_in",
    "transformer_1d_blocks": "transformer_blocks",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
}
VAE_NAMES = {
    "down_blocks.0": "down_blocks.0",
    "down_blocks.1": "down_blocks.0.downsamplers.0",
    "down_blocks.2": "down_blocks.1",
    "down_blocks.3": "down_blocks.1.downsamplers.0",
    "down_blocks.4": "down_blocks.2",
    "down_blocks.5": "down_blocks.2.downsamplers.0",
    "down_blocks.6": "down_blocks.3",
    "down_blocks.7": "down_blocks.3.downsamplers.0",
    "down_blocks.8": "mid_block",
    "res_blocks": "resnets",
}


class Ledger:
    """In place of their `ModelLedger`: the modules of one checkpoint, in float32, and adapters of its transformer."""

    def __init__(self, folder: Path, adapters: Sequence[LoraPathStrengthAndSDOps] = ()) -> None:
        self._folder, self._adapters = folder, adapters

    def with_additional_loras(self, loras: Sequence[LoraPathStrengthAndSDOps]) -> "Ledger":
        """Return the same with further adapters."""
        return Ledger(self._folder, (*self._adapters, *loras))

    def read_config(self, part: str) -> dict[str, Any]:
        """Return the configuration of a part."""
        config: dict[str, Any] = json.loads((self._folder / part / "config.json").read_text())
        return config

    def _fill(self, module: torch.nn.Module, part: str, names: dict[str, str], prefix: str = "") -> torch.nn.Module:
        values: dict[str, torch.Tensor] = {}
        for file in sorted((self._folder / part).glob("*.safetensors")):
            values |= load_file(file)
        state = {}
        for name in module.state_dict():
            theirs = re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], name) if names else name
            state[name] = values[STATISTICS.get(name.rpartition(".")[2], prefix + theirs)]
        module.load_state_dict(state, strict=True, assign=True)
        return module.float().eval().requires_grad_(False)

    def text_encoder(self) -> Any:
        """Return Gemma and its tokenizer."""
        model = transformers.Gemma3ForConditionalGeneration.from_pretrained(
            self._folder / "text_encoder", dtype=torch.float32
        )
        tokenizer = LTXVGemmaTokenizer(str(self._folder / "tokenizer"), 1024)
        return GemmaTextEncoder(model=model.eval(), tokenizer=tokenizer, dtype=torch.float32)

    def gemma_embeddings_processor(self) -> Any:
        """Return the connectors."""
        config = self.read_config("connectors")
        flat = config["caption_channels"] * config["text_proj_in_factor"]
        if config["per_modality_projections"]:
            widths = [
                config[f"{stream}_connector_num_attention_heads"] * config[f"{stream}_connector_attention_head_dim"]
                for stream in ("video", "audio")
            ]
            video, audio = (torch.nn.Linear(flat, width, bias=config["proj_bias"]) for width in widths)
            extractor: Any = FeatureExtractorV2(video, config["caption_channels"], audio)
        else:
            extractor = FeatureExtractorV1(torch.nn.Linear(flat, config["caption_channels"], bias=False), is_av=True)
        connectors = {
            f"{stream}_connector": Embeddings1DConnector(
                attention_head_dim=config[f"{stream}_connector_attention_head_dim"],
                num_attention_heads=config[f"{stream}_connector_num_attention_heads"],
                num_layers=config[f"{stream}_connector_num_layers"],
                positional_embedding_theta=config["rope_theta"],
                positional_embedding_max_pos=[config["connector_rope_base_seq_len"]],
                num_learnable_registers=config[f"{stream}_connector_num_learnable_registers"],
                rope_type=LTXRopeType(config["rope_type"]),
                double_precision_rope=config["rope_double_precision"],
                apply_gated_attention=config[f"{stream}_gated_attn"],
            )
            for stream in ("video", "audio")
        }
        return self._fill(EmbeddingsProcessor(feature_extractor=extractor, **connectors), "connectors", TEXT_NAMES)

    def transformer(self) -> Any:
        """Return the transformer, which estimates clean latents."""
        config = self.read_config("transformer")
        projections = {}
        if config["use_prompt_embeddings"]:
            projections = {
                "caption_projection": create_caption_projection(config),
                "audio_caption_projection": create_caption_projection(config, audio=True),
            }
        model = LTXModel(
            num_attention_heads=config["num_attention_heads"],
            attention_head_dim=config["attention_head_dim"],
            in_channels=config["in_channels"],
            out_channels=config["out_channels"],
            num_layers=config["num_layers"],
            cross_attention_dim=config["cross_attention_dim"],
            norm_eps=config["norm_eps"],
            positional_embedding_theta=config["rope_theta"],
            positional_embedding_max_pos=[config["pos_embed_max_pos"], config["base_height"], config["base_width"]],
            timestep_scale_multiplier=config["timestep_scale_multiplier"],
            audio_num_attention_heads=config["audio_num_attention_heads"],
            audio_attention_head_dim=config["audio_attention_head_dim"],
            audio_in_channels=config["audio_in_channels"],
            audio_out_channels=config["audio_out_channels"],
            audio_cross_attention_dim=config["audio_cross_attention_dim"],
            audio_positional_embedding_max_pos=[config["audio_pos_embed_max_pos"]],
            av_ca_timestep_scale_multiplier=config["cross_attn_timestep_scale_multiplier"],
            rope_type=LTXRopeType(config["rope_type"]),
            double_precision_rope=config["rope_double_precision"],
            apply_gated_attention=config["gated_attn"],
            cross_attention_adaln=config["cross_attn_mod"],
            **projections,
        )
        return X0Model(self._adapt(self._fill(model, "transformer", TRANSFORMER_NAMES)))

    def _adapt(self, model: torch.nn.Module) -> torch.nn.Module:
        """Add the adapters' products to a transformer's weights."""
        loader = SafetensorsStateDictLoader()
        contents = [
            LoraStateDictWithStrength(loader.load(adapter.path, adapter.sd_ops), adapter.strength)
            for adapter in self._adapters
        ]
        for name, weight in model.state_dict().items():
            change = fuse_loras._prepare_deltas(contents, name, torch.float32, weight.device)
            if change is not None:
                weight += change
        return model

    def video_encoder(self) -> Any:
        """Return the VAE's encoder."""
        config = self.read_config("vae")
        encoder = VideoEncoder(
            out_channels=config["latent_channels"],
            encoder_blocks=list_encoder_blocks(config),
            patch_size=config["patch_size"],
        )
        return self._fill(encoder, "vae", VAE_NAMES, "encoder.")

    def spatial_upsampler(self) -> Any:
        """Return the model that doubles the size of latents."""
        config = self.read_config("latent_upsampler")
        upsampler = LatentUpsampler(
            in_channels=config["in_channels"],
            mid_channels=config["mid_channels"],
            num_blocks_per_stage=config["num_blocks_per_stage"],
            spatial_scale=config["rational_spatial_scale"],
            rational_resampler=config["use_rational_resampler"],
        )
        return self._fill(upsampler, "latent_upsampler", {})

    def _nothing(self) -> None:
        """In place of what decodes."""

    video_decoder = audio_decoder = vocoder = _nothing


def run(case: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the latents of video and sound, and the settings that their command line has by default.

    Args:
        case: The checkpoint's `folder` and `kind`; `prompt`, `image` (a path or None), `seed`, `steps` with guidance,
            `height`, `width` and `frames`; the `adapter` of the second stage after guidance, or None for one stage.
    """
    ledger, is_distilled = Ledger(Path(case["folder"])), case["kind"].endswith("distilled")
    module: Any = distilled if is_distilled else ti2vid_two_stages if case["adapter"] else ti2vid_one_stage
    kept: dict[str, np.ndarray] = {}
    module.torch = Float32("torch")
    module.ModelLedger = lambda **_: ledger
    module.vae_decode_video = lambda latents, *_, **__: kept.update(video=latents.numpy())
    module.vae_decode_audio = lambda latents, *_, **__: kept.update(audio=latents.numpy())
    _set_sound(ledger.read_config("audio_vae"))

    params = constants.LTX_2_3_PARAMS if "2.3" in case["kind"] else constants.LTX_2_PARAMS
    if is_distilled:
        parse, files = (
            args.default_2_stage_distilled_arg_parser,
            ["distilled-checkpoint-path", "spatial-upsampler-path"],
        )
    elif case["adapter"]:
        parse, files = args.default_2_stage_arg_parser, ["checkpoint-path", "spatial-upsampler-path", "distilled-lora"]
    else:
        parse, files = args.default_1_stage_arg_parser, ["checkpoint-path"]
    required = [f"--{name}={case['adapter'] or '/'}" for name in ("gemma-root", "prompt", "output-path", *files)]
    defaults = vars(parse(params).parse_args(required))

    transformer, options = ledger.read_config("transformer"), {}
    if is_distilled:
        pipeline: Any = distilled.DistilledPipeline("", "", "", [])
    else:
        if case["adapter"]:
            pipeline = ti2vid_two_stages.TI2VidTwoStagesPipeline("", defaults["distilled_lora"], "", "", [])
        else:
            pipeline = ti2vid_one_stage.TI2VidOneStagePipeline("", "", [])
        for name in ("video_guider_params", "audio_guider_params"):
            guider = getattr(params, name)
            # The same place among fewer layers.
            blocks = [block * transformer["num_layers"] // 48 for block in guider.stg_blocks]
            options[name] = replace(guider, stg_blocks=blocks)
        options |= {"negative_prompt": defaults["negative_prompt"], "num_inference_steps": case["steps"]}
    pipeline.pipeline_components.video_latent_channels = transformer["in_channels"]
    with torch.inference_mode():
        pipeline(
            prompt=case["prompt"],
            seed=case["seed"],
            height=case["height"],
            width=case["width"],
            num_frames=case["frames"],
            frame_rate=defaults["frame_rate"],
            images=[args.ImageConditioningInput(case["image"], 0, 1.0)] if case["image"] else [],
            **options,
        )
    names = {"height": "height", "width": "width", "num_frames": "frames", "frame_rate": "fps"}
    if not is_distilled:
        names |= {"num_inference_steps": "steps", "negative_prompt": "negative_prompt"}
        names |= {"video_cfg_guidance_scale": "guidance_scale"}
    settings = {ours: defaults[theirs] for theirs, ours in names.items()}
    if case["adapter"]:
        settings["steps"] += len(constants.STAGE_2_DISTILLED_SIGMA_VALUES) - 1
    return kept, settings


def _set_sound(config: dict[str, Any]) -> None:
    """Have the sound's latents take their sizes from a configuration."""
    from_duration = AudioLatentShape.from_duration

    def measure(shape: VideoPixelShape) -> AudioLatentShape:
        return from_duration(
            shape.batch,
            float(shape.frames) / float(shape.fps),
            channels=config["latent_channels"],
            mel_bins=config["mel_bins"] // 4,
            sample_rate=config["sample_rate"],
            hop_length=config["mel_hop_length"],
        )

    AudioLatentShape.from_video_pixel_shape = staticmethod(measure)


if __name__ == "__main__":
    torch.cuda.synchronize = lambda *_: None  # Their pipelines call it on machines without CUDA, too.
    results: dict[str, Any] = {}
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        latents, settings = run(case)
        results |= {f"{name} {part}": value for part, value in latents.items()}
        results[f"{name} settings"] = np.array(json.dumps(settings))
    np.savez(sys.argv[2], **results)
