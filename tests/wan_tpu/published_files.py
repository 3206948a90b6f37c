"""What the configuration files of published checkpoints say: facts, written down by hand, not made from our presets.

Each model's files are those of its repository on the Hugging Face hub, huggingface.co/REPOSITORY/blob/main/FOLDER/config.json
and scheduler/scheduler_config.json, or of public copies of them; keys that a file doesn't have are not here either.
Revisions that differ have a name of their own. Left out are keys of encoders that say nothing of their shape, and
`_class_name` but of schedulers. HunyuanVideo-1.5's encoders are those of google/byt5-small (with 1,510 tokens) and
google/siglip-so400m-patch14-384.
"""  # noqa: E501

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]

# fmt: off
# ---- Wan

WAN: Config = {
    "added_kv_proj_dim": None, "attention_head_dim": 128, "cross_attn_norm": True, "eps": 1e-6, "ffn_dim": 13824,
    "freq_dim": 256, "image_dim": None, "in_channels": 16, "num_attention_heads": 40, "num_layers": 40,
    "out_channels": 16, "patch_size": [1, 2, 2], "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024,
    "text_dim": 4096,
}
WAN_I2V = WAN | {"added_kv_proj_dim": 5120, "image_dim": 1280, "in_channels": 36}
WAN_22 = WAN | {"pos_embed_seq_len": None}
WAN_VAE: Config = {
    "attn_scales": [], "base_dim": 96, "dim_mult": [1, 2, 4, 4], "dropout": 0.0, "num_res_blocks": 2,
    "temperal_downsample": [False, True, True], "z_dim": 16,
    "latents_mean": [
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
        -0.9497, 0.2503, -0.2921,
    ],
    "latents_std": [
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
        2.8251, 1.916,
    ],
}
WAN_VAE_22 = WAN_VAE | {
    "base_dim": 160, "clip_output": False, "decoder_base_dim": 256, "in_channels": 12, "is_residual": True,
    "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "scale_factor_temporal": 4, "z_dim": 48,
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.157,
        -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322,
        0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052,
        0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165,
        0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917,
        0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06,
        0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}
UMT5: Config = {
    "d_ff": 10240, "d_kv": 64, "d_model": 4096, "dense_act_fn": "gelu_new", "dropout_rate": 0.1,
    "feed_forward_proj": "gated-gelu", "is_gated_act": True, "layer_norm_epsilon": 1e-6, "model_type": "umt5",
    "num_heads": 64, "num_layers": 24, "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32,
    "vocab_size": 256384,
}
CLIP: Config = {
    "hidden_act": "gelu", "hidden_size": 1280, "image_size": 224, "intermediate_size": 5120, "layer_norm_eps": 1e-5,
    "model_type": "clip_vision_model", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 32,
    "patch_size": 14, "projection_dim": 1024,
}
UNIPC: Config = {
    "_class_name": "UniPCMultistepScheduler", "beta_end": 0.02, "beta_schedule": "linear", "beta_start": 0.0001,
    "disable_corrector": [], "dynamic_thresholding_ratio": 0.995, "final_sigmas_type": "zero",
    "lower_order_final": True, "num_train_timesteps": 1000, "predict_x0": True, "prediction_type": "flow_prediction",
    "rescale_betas_zero_snr": False, "sample_max_value": 1.0, "solver_order": 2, "solver_p": None,
    "solver_type": "bh2", "steps_offset": 0, "thresholding": False, "timestep_spacing": "linspace",
    "trained_betas": None, "use_beta_sigmas": False, "use_exponential_sigmas": False, "use_flow_sigmas": True,
    "use_karras_sigmas": False,
}
UNIPC_22 = UNIPC | {"time_shift_type": "exponential", "use_dynamic_shifting": False}
WAN_INDEX: Config = {
    "scheduler": ["diffusers", "UniPCMultistepScheduler"], "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"], "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}
WITH_CLIP = {"image_encoder": ["transformers", "CLIPVisionModelWithProjection"]}
IMAGE_PROCESSOR = {"image_processor": ["transformers", "CLIPImageProcessor"]}
TWO_EXPERTS = {"transformer_2": ["diffusers", "WanTransformer3DModel"]}

# ---- CogVideoX

COGVIDEOX_2B: Config = {
    "activation_fn": "gelu-approximate", "attention_bias": True, "attention_head_dim": 64, "dropout": 0.0,
    "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 16, "max_text_seq_length": 226,
    "norm_elementwise_affine": True, "norm_eps": 1e-5, "num_attention_heads": 30, "num_layers": 30,
    "out_channels": 16, "patch_size": 2, "sample_frames": 49, "sample_height": 60, "sample_width": 90,
    "spatial_interpolation_scale": 1.875, "temporal_compression_ratio": 4, "temporal_interpolation_scale": 1.0,
    "text_embed_dim": 4096, "time_embed_dim": 512, "timestep_activation_fn": "silu",
}
COGVIDEOX_5B = COGVIDEOX_2B | {
    "num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True,
}
COGVIDEOX_5B_I2V = COGVIDEOX_5B | {"in_channels": 32, "use_learned_positional_embeddings": True}
COGVIDEOX_15 = COGVIDEOX_5B | {
    "patch_bias": False, "patch_size_t": 2, "sample_frames": 81, "sample_height": 300, "sample_width": 300,
    "use_learned_positional_embeddings": False,
}
COGVIDEOX_15_I2V = COGVIDEOX_15 | {"in_channels": 32, "ofs_embed_dim": 512}
EARLIER = {"sample_height": 96, "sample_width": 170}
COGVIDEOX_VAE: Config = {
    "act_fn": "silu", "block_out_channels": [128, 256, 256, 512], "down_block_types": ["CogVideoXDownBlock3D"] * 4,
    "force_upcast": True, "in_channels": 3, "latent_channels": 16, "latents_mean": None, "latents_std": None,
    "layers_per_block": 3, "norm_eps": 1e-6, "norm_num_groups": 32, "out_channels": 3, "sample_height": 480,
    "sample_width": 720, "scaling_factor": 1.15258426, "shift_factor": None, "temporal_compression_ratio": 4,
    "up_block_types": ["CogVideoXUpBlock3D"] * 4, "use_post_quant_conv": False, "use_quant_conv": False,
}
COGVIDEOX_VAE_5B = COGVIDEOX_VAE | {"scaling_factor": 0.7}
DDIM: Config = {
    "_class_name": "CogVideoXDDIMScheduler", "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "beta_start": 0.00085, "clip_sample": False, "clip_sample_range": 1.0, "num_train_timesteps": 1000,
    "prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "sample_max_value": 1.0,
    "set_alpha_to_one": True, "snr_shift_scale": 1.0, "steps_offset": 0, "timestep_spacing": "trailing",
    "trained_betas": None,
}
COGVIDEOX_INDEX: Config = {
    "scheduler": ["diffusers", "CogVideoXDDIMScheduler"], "text_encoder": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "T5Tokenizer"], "transformer": ["diffusers", "CogVideoXTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLCogVideoX"],
}
T5 = UMT5 | {"model_type": "t5", "vocab_size": 32128}

# ---- HunyuanVideo-1.5

HUNYUAN: Config = {
    "attention_head_dim": 128, "image_embed_dim": 1152, "in_channels": 65, "mlp_ratio": 4.0,
    "num_attention_heads": 16, "num_layers": 54, "num_refiner_layers": 2, "out_channels": 32, "patch_size": 1,
    "patch_size_t": 1, "qk_norm": "rms_norm", "rope_axes_dim": [16, 56, 56], "rope_theta": 256.0,
    "text_embed_2_dim": 1472, "text_embed_dim": 3584,
}
HUNYUAN_VAE: Config = {
    "block_out_channels": [128, 256, 512, 1024, 1024], "downsample_match_channel": True, "in_channels": 3,
    "latent_channels": 32, "layers_per_block": 2, "out_channels": 3, "scaling_factor": 1.03682,
    "spatial_compression_ratio": 16, "temporal_compression_ratio": 4, "upsample_match_channel": True,
}
QWEN: Config = {
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 128000, "model_type": "qwen2_5_vl_text", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
}
BYT5 = UMT5 | {"model_type": "t5", "d_ff": 3584, "d_model": 1472, "num_heads": 6, "num_layers": 12, "vocab_size": 1510}
SIGLIP: Config = {
    "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
    "layer_norm_eps": 1e-6, "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
}
EULER: Config = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "base_image_seq_len": 256, "base_shift": 0.5,
    "invert_sigmas": False, "max_image_seq_len": 4096, "max_shift": 1.15, "num_train_timesteps": 1000,
    "shift_terminal": None, "stochastic_sampling": False, "time_shift_type": "exponential", "use_beta_sigmas": False,
    "use_dynamic_shifting": False, "use_exponential_sigmas": False, "use_karras_sigmas": False,
}
GUIDER: Config = {
    "enabled": True, "guidance_rescale": 0.0, "start": 0.0, "stop": 1.0, "use_original_formulation": False,
}
HUNYUAN_INDEX: Config = {
    "guider": ["diffusers", "ClassifierFreeGuidance"], "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLTextModel"], "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"], "tokenizer_2": ["transformers", "ByT5Tokenizer"],
    "transformer": ["diffusers", "HunyuanVideo15Transformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLHunyuanVideo15"],
}
WITH_SIGLIP = {
    "feature_extractor": ["transformers", "SiglipImageProcessor"],
    "image_encoder": ["transformers", "SiglipVisionModel"],
}
# fmt: on


def _wan(
    transformer: Config, shift: float, *, vae: Config = WAN_VAE, scheduler: Config = UNIPC, **index: Any
) -> dict[str, Config]:
    image_to_video = transformer["in_channels"] == 36
    index = {"_class_name": "WanImageToVideoPipeline" if image_to_video else "WanPipeline"} | WAN_INDEX | index
    files = {
        "model_index.json": index,
        "transformer/config.json": transformer,
        "vae/config.json": vae,
        "text_encoder/config.json": UMT5,
        "scheduler/scheduler_config.json": scheduler | {"flow_shift": shift},
    }
    if index.get("image_encoder", [None])[0]:
        files["image_encoder/config.json"] = CLIP
    if index.get("transformer_2", [None])[0]:
        files["transformer_2/config.json"] = transformer
    return files


def _cogvideox(transformer: Config, vae: Config, snr_shift: float) -> dict[str, Config]:
    name = "CogVideoXImageToVideoPipeline" if transformer["in_channels"] == 32 else "CogVideoXPipeline"
    return {
        "model_index.json": {"_class_name": name} | COGVIDEOX_INDEX,
        "transformer/config.json": transformer,
        "vae/config.json": vae,
        "text_encoder/config.json": T5,
        "scheduler/scheduler_config.json": DDIM | {"snr_shift_scale": snr_shift},
    }


def _hunyuan(task: str, target: int, shift: float, guidance: float = 6.0, **more: Any) -> dict[str, Config]:
    image = task == "i2v"
    name = "HunyuanVideo15ImageToVideoPipeline" if image else "HunyuanVideo15Pipeline"
    files = {
        "model_index.json": {"_class_name": name} | HUNYUAN_INDEX | (WITH_SIGLIP if image else {}),
        "transformer/config.json": HUNYUAN | {"task_type": task, "target_size": target} | more,
        "vae/config.json": HUNYUAN_VAE,
        "text_encoder/config.json": QWEN,
        "text_encoder_2/config.json": BYT5,
        "scheduler/scheduler_config.json": EULER | {"shift": shift},
        "guider/guider_config.json": GUIDER | {"guidance_scale": guidance},
    }
    return files | ({"image_encoder/config.json": SIGLIP} if image else {})


_NO_CLIP = {"image_encoder": [None, None], "image_processor": [None, None]}
_ONE_EXPERT = {"boundary_ratio": None, "expand_timesteps": True, "transformer_2": [None, None]}
_A14B = {"scheduler": UNIPC_22} | TWO_EXPERTS
REPOSITORIES: dict[str, dict[str, Config]] = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _wan(WAN | {"ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30}, 3.0),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _wan(WAN, 3.0),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": _wan(WAN_I2V, 3.0, **WITH_CLIP, **IMAGE_PROCESSOR),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": _wan(WAN_I2V, 3.0, **WITH_CLIP, **IMAGE_PROCESSOR),
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": _wan(
        WAN_I2V | {"pos_embed_seq_len": 514}, 16.0, **WITH_CLIP, image_processor=["transformers", "CLIPProcessor"]
    ),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": _wan(WAN_22, 3.0, boundary_ratio=0.875, **_A14B),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": _wan(
        WAN_22 | {"in_channels": 36}, 3.0, boundary_ratio=0.9, **_NO_CLIP, **_A14B
    ),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": _wan(
        WAN_22 | {"ffn_dim": 14336, "in_channels": 48, "num_attention_heads": 24, "num_layers": 30, "out_channels": 48},
        5.0,
        vae=WAN_VAE_22,
        scheduler=UNIPC_22,
        **_ONE_EXPERT,
    ),
    "THUDM/CogVideoX-2b": _cogvideox(COGVIDEOX_2B, COGVIDEOX_VAE, 3.0),
    "THUDM/CogVideoX-2b, later": _cogvideox(
        COGVIDEOX_2B | {"use_rotary_positional_embeddings": False}, COGVIDEOX_VAE, 3.0
    ),
    "THUDM/CogVideoX-5b": _cogvideox(COGVIDEOX_5B, COGVIDEOX_VAE_5B, 1.0),
    "THUDM/CogVideoX-5b-I2V": _cogvideox(COGVIDEOX_5B_I2V, COGVIDEOX_VAE_5B, 1.0),
    "zai-org/CogVideoX1.5-5B": _cogvideox(COGVIDEOX_15, COGVIDEOX_VAE_5B, 1.0),
    "zai-org/CogVideoX1.5-5B, earlier": _cogvideox(COGVIDEOX_15 | EARLIER, COGVIDEOX_VAE_5B, 1.0),
    "zai-org/CogVideoX1.5-5B-I2V": _cogvideox(COGVIDEOX_15_I2V, COGVIDEOX_VAE_5B | {"invert_scale_latents": True}, 1.0),
    "zai-org/CogVideoX1.5-5B-I2V, earlier": _cogvideox(
        COGVIDEOX_15_I2V | EARLIER, COGVIDEOX_VAE_5B | {"invert_scale_latents": True}, 1.0
    ),
    **{
        f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{name}": files
        for name, files in {
            "480p_t2v": _hunyuan("t2v", 640, 5.0),
            "480p_i2v": _hunyuan("i2v", 640, 5.0),
            "720p_t2v": _hunyuan("t2v", 960, 9.0),
            "720p_i2v": _hunyuan("i2v", 960, 7.0),
            "480p_t2v_distilled": _hunyuan("t2v", 640, 5.0, 1.0),
            "480p_i2v_distilled": _hunyuan("i2v", 640, 5.0, 1.0),
            "720p_i2v_distilled": _hunyuan("i2v", 960, 7.0, 1.0),
            "480p_i2v_step_distilled": _hunyuan("i2v", 640, 7.0, 1.0, use_meanflow=True),
        }.items()
    },
}


def write(folder: Path, files: dict[str, Config]) -> Path:
    """Write a repository's configuration files into a folder; return it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder
