"""What the configuration files of LTX-2 and LTX-2.3 on the Hugging Face hub say, as in `published_files`.

The encoder is google/gemma-3-12b-it. LTX-2.3's files have the SHA-256 sums that a public program knows them by.
"""

from tests.wan_tpu.published_files import EULER, Config

# fmt: off
LTX: Config = {
    "activation_fn": "gelu-approximate", "attention_bias": True, "attention_head_dim": 128, "attention_out_bias": True,
    "audio_attention_head_dim": 64, "audio_cross_attention_dim": 2048, "audio_hop_length": 160,
    "audio_in_channels": 128, "audio_num_attention_heads": 32, "audio_out_channels": 128, "audio_patch_size": 1,
    "audio_patch_size_t": 1, "audio_pos_embed_max_pos": 20, "audio_sampling_rate": 16000, "audio_scale_factor": 4,
    "base_height": 2048, "base_width": 2048, "caption_channels": 3840, "causal_offset": 1, "cross_attention_dim": 4096,
    "cross_attn_timestep_scale_multiplier": 1000, "in_channels": 128, "norm_elementwise_affine": False,
    "norm_eps": 1e-6, "num_attention_heads": 32, "num_layers": 48, "out_channels": 128, "patch_size": 1,
    "patch_size_t": 1, "pos_embed_max_pos": 20, "qk_norm": "rms_norm_across_heads", "rope_double_precision": True,
    "rope_theta": 10000.0, "rope_type": "split", "timestep_scale_multiplier": 1000, "vae_scale_factors": [8, 32, 32],
}
LTX_23 = LTX | {
    "audio_cross_attn_mod": True, "audio_gated_attn": True, "cross_attn_mod": True, "gated_attn": True,
    "perturbed_attn": True, "use_prompt_embeddings": False,
}
LTX_CONNECTORS: Config = {
    "audio_connector_attention_head_dim": 128, "audio_connector_num_attention_heads": 30,
    "audio_connector_num_layers": 2, "audio_connector_num_learnable_registers": 128, "caption_channels": 3840,
    "causal_temporal_positioning": False, "connector_rope_base_seq_len": 4096, "rope_double_precision": True,
    "rope_theta": 10000.0, "rope_type": "split", "text_proj_in_factor": 49, "video_connector_attention_head_dim": 128,
    "video_connector_num_attention_heads": 30, "video_connector_num_layers": 2,
    "video_connector_num_learnable_registers": 128,
}
LTX_CONNECTORS_23 = LTX_CONNECTORS | {
    "audio_connector_attention_head_dim": 64, "audio_connector_num_attention_heads": 32,
    "audio_connector_num_layers": 8, "audio_gated_attn": True, "audio_hidden_dim": 2048,
    "per_modality_projections": True, "proj_bias": True, "video_connector_num_attention_heads": 32,
    "video_connector_num_layers": 8, "video_gated_attn": True, "video_hidden_dim": 4096,
}
LTX_VAE: Config = {
    "block_out_channels": [256, 512, 1024, 2048], "decoder_block_out_channels": [256, 512, 1024],
    "decoder_causal": False, "decoder_inject_noise": [False] * 4, "decoder_layers_per_block": [5, 5, 5, 5],
    "decoder_spatial_padding_mode": "reflect", "decoder_spatio_temporal_scaling": [True] * 3,
    "down_block_types": ["LTX2VideoDownBlock3D"] * 4,
    "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"], "encoder_causal": True,
    "encoder_spatial_padding_mode": "zeros", "in_channels": 3, "latent_channels": 128,
    "layers_per_block": [4, 6, 6, 2, 2], "out_channels": 3, "patch_size": 4, "patch_size_t": 1,
    "resnet_norm_eps": 1e-6, "scaling_factor": 1.0, "spatial_compression_ratio": 32,
    "spatio_temporal_scaling": [True] * 4, "temporal_compression_ratio": 8, "timestep_conditioning": False,
    "upsample_factor": [2, 2, 2], "upsample_residual": [True] * 3,
}
LTX_VAE_23 = LTX_VAE | {
    "block_out_channels": [256, 512, 1024, 1024], "decoder_block_out_channels": [256, 512, 512, 1024],
    "decoder_inject_noise": [False] * 5, "decoder_layers_per_block": [4, 6, 4, 2, 2],
    "decoder_spatial_padding_mode": "zeros", "decoder_spatio_temporal_scaling": [True] * 4,
    "layers_per_block": [4, 6, 4, 2, 2], "upsample_factor": [2, 2, 1, 2], "upsample_residual": [False] * 4,
    "upsample_type": ["spatiotemporal", "spatiotemporal", "temporal", "spatial"],
}
LTX_AUDIO_VAE: Config = {
    "attn_resolutions": None, "base_channels": 128, "causality_axis": "height", "ch_mult": [1, 2, 4],
    "double_z": True, "dropout": 0.0, "in_channels": 2, "is_causal": True, "latent_channels": 8, "mel_bins": 64,
    "mel_hop_length": 160, "mid_block_add_attention": False, "norm_type": "pixel", "num_res_blocks": 2,
    "output_channels": 2, "resolution": 256, "sample_rate": 16000,
}
LTX_VOCODER: Config = {
    "hidden_channels": 1024, "in_channels": 128, "leaky_relu_negative_slope": 0.1, "out_channels": 2,
    "output_sampling_rate": 24000, "resnet_dilations": [[1, 3, 5]] * 3, "resnet_kernel_sizes": [3, 7, 11],
    "upsample_factors": [6, 5, 2, 2, 2], "upsample_kernel_sizes": [16, 15, 8, 4, 4],
}
LTX_VOCODER_23: Config = {
    "act_fn": "snakebeta", "antialias": True, "antialias_kernel_size": 12, "antialias_ratio": 2,
    "bwe_act_fn": "snakebeta", "bwe_antialias": True, "bwe_antialias_kernel_size": 12, "bwe_antialias_ratio": 2,
    "bwe_final_act_fn": None, "bwe_final_bias": False, "bwe_hidden_channels": 512, "bwe_in_channels": 128,
    "bwe_leaky_relu_negative_slope": 0.1, "bwe_out_channels": 2, "bwe_resnet_dilations": [[1, 3, 5]] * 3,
    "bwe_resnet_kernel_sizes": [3, 7, 11], "bwe_upsample_factors": [6, 5, 2, 2, 2],
    "bwe_upsample_kernel_sizes": [12, 11, 4, 4, 4], "filter_length": 512, "final_act_fn": None, "final_bias": False,
    "hidden_channels": 1536, "hop_length": 80, "in_channels": 128, "input_sampling_rate": 16000,
    "leaky_relu_negative_slope": 0.1, "num_mel_channels": 64, "out_channels": 2, "output_sampling_rate": 48000,
    "resnet_dilations": [[1, 3, 5]] * 3, "resnet_kernel_sizes": [3, 7, 11], "upsample_factors": [5, 2, 2, 2, 2, 2],
    "upsample_kernel_sizes": [11, 4, 4, 4, 4, 4], "window_length": 512,
}
LTX_UPSAMPLER: Config = {
    "_class_name": "LTX2LatentUpsamplerModel", "dims": 3, "in_channels": 128, "mid_channels": 1024,
    "num_blocks_per_stage": 4, "rational_spatial_scale": 2.0, "spatial_upsample": True, "temporal_upsample": False,
    "use_rational_resampler": True,
}
GEMMA: Config = {
    "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144, "initializer_range": 0.02,
    "mm_tokens_per_image": 256, "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text", "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
LTX_SCHEDULER = EULER | {
    "base_image_seq_len": 1024, "base_shift": 0.95, "max_shift": 2.05, "shift": 1.0, "shift_terminal": 0.1,
    "use_dynamic_shifting": True,
}
LTX_SCHEDULER_DISTILLED = LTX_SCHEDULER | {"shift_terminal": None, "use_dynamic_shifting": False}
LTX_INDEX: Config = {
    "_class_name": "LTX2Pipeline", "audio_vae": ["diffusers", "AutoencoderKLLTX2Audio"],
    "connectors": ["ltx2", "LTX2TextConnectors"], "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Gemma3ForConditionalGeneration"],
    "tokenizer": ["transformers", "GemmaTokenizerFast"],
    "transformer": ["diffusers", "LTX2VideoTransformer3DModel"], "vae": ["diffusers", "AutoencoderKLLTX2Video"],
}
# fmt: on


def _ltx(version: str, *, distilled: bool) -> dict[str, Config]:
    new = version == "2.3"
    files = {
        "model_index.json": LTX_INDEX | {"vocoder": ["ltx2", "LTX2VocoderWithBWE" if new else "LTX2Vocoder"]},
        "transformer/config.json": LTX_23 if new else LTX,
        "connectors/config.json": LTX_CONNECTORS_23 if new else LTX_CONNECTORS,
        "vae/config.json": LTX_VAE_23 if new else LTX_VAE,
        "audio_vae/config.json": LTX_AUDIO_VAE,
        "vocoder/config.json": LTX_VOCODER_23 if new else LTX_VOCODER,
        "text_encoder/config.json": GEMMA,
        "scheduler/scheduler_config.json": LTX_SCHEDULER_DISTILLED if distilled else LTX_SCHEDULER,
    }
    if distilled or not new:
        files["latent_upsampler/config.json"] = LTX_UPSAMPLER | ({"use_rational_resampler": False} if new else {})
    return files


LTX_REPOSITORIES: dict[str, dict[str, Config]] = {
    "Lightricks/LTX-2": _ltx("2.0", distilled=False),
    "rootonchair/LTX-2-19b-distilled": _ltx("2.0", distilled=True),
    "diffusers/LTX-2.3-Diffusers": _ltx("2.3", distilled=False),
    "diffusers/LTX-2.3-Distilled-Diffusers": _ltx("2.3", distilled=True),
}
