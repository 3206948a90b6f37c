"""The defaults of the classes of LTX-2's parts, for keys that a configuration lacks.

Published files have only the keys that their class had when they were written. Source: diffusers 0.42.1.
"""

from typing import Any

# fmt: off
TRANSFORMER: dict[str, Any] = {
    "in_channels": 128, "out_channels": 128, "patch_size": 1, "patch_size_t": 1, "num_attention_heads": 32,
    "attention_head_dim": 128, "cross_attention_dim": 4096, "vae_scale_factors": [8, 32, 32], "pos_embed_max_pos": 20,
    "base_height": 2048, "base_width": 2048, "gated_attn": False, "cross_attn_mod": False, "audio_in_channels": 128,
    "audio_out_channels": 128, "audio_patch_size": 1, "audio_patch_size_t": 1, "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 64, "audio_cross_attention_dim": 2048, "audio_scale_factor": 4,
    "audio_pos_embed_max_pos": 20, "audio_sampling_rate": 16000, "audio_hop_length": 160, "audio_gated_attn": False,
    "audio_cross_attn_mod": False, "num_layers": 48, "activation_fn": "gelu-approximate",
    "qk_norm": "rms_norm_across_heads", "norm_elementwise_affine": False, "norm_eps": 1e-6, "caption_channels": 3840,
    "attention_bias": True, "attention_out_bias": True, "rope_theta": 10000.0, "rope_double_precision": True,
    "causal_offset": 1, "timestep_scale_multiplier": 1000, "cross_attn_timestep_scale_multiplier": 1000,
    "rope_type": "interleaved", "use_prompt_embeddings": True, "perturbed_attn": False, "ff_bias": True,
    "audio_ff_bias": True, "use_prompt_adaln_single": True, "use_keyframes_abs_pos_embedding": False,
}
CONNECTORS: dict[str, Any] = {
    "caption_channels": 3840, "text_proj_in_factor": 49, "video_connector_num_attention_heads": 30,
    "video_connector_attention_head_dim": 128, "video_connector_num_layers": 2,
    "video_connector_num_learnable_registers": 128, "video_gated_attn": False,
    "audio_connector_num_attention_heads": 30, "audio_connector_attention_head_dim": 128,
    "audio_connector_num_layers": 2, "audio_connector_num_learnable_registers": 128, "audio_gated_attn": False,
    "connector_rope_base_seq_len": 4096, "rope_theta": 10000.0, "rope_double_precision": True,
    "causal_temporal_positioning": False, "rope_type": "interleaved", "per_modality_projections": False,
    "video_hidden_dim": 4096, "audio_hidden_dim": 2048, "proj_bias": False,
}
VAE: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 128, "block_out_channels": [256, 512, 1024, 2048],
    "down_block_types": ["LTX2VideoDownBlock3D"] * 4, "decoder_block_out_channels": [256, 512, 1024],
    "layers_per_block": [4, 6, 6, 2, 2], "decoder_layers_per_block": [5, 5, 5, 5],
    "spatio_temporal_scaling": [True] * 4, "decoder_spatio_temporal_scaling": [True] * 3,
    "decoder_inject_noise": [False] * 4,
    "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
    "upsample_type": ["spatiotemporal"] * 3, "upsample_residual": [True] * 3, "upsample_factor": [2, 2, 2],
    "timestep_conditioning": False, "patch_size": 4, "patch_size_t": 1, "resnet_norm_eps": 1e-6, "scaling_factor": 1.0,
    "encoder_causal": True, "decoder_causal": True, "encoder_spatial_padding_mode": "zeros",
    "decoder_spatial_padding_mode": "reflect", "spatial_compression_ratio": None, "temporal_compression_ratio": None,
}
AUDIO_VAE: dict[str, Any] = {
    "base_channels": 128, "output_channels": 2, "ch_mult": [1, 2, 4], "num_res_blocks": 2, "attn_resolutions": None,
    "in_channels": 2, "resolution": 256, "latent_channels": 8, "norm_type": "pixel", "causality_axis": "height",
    "dropout": 0.0, "mid_block_add_attention": False, "sample_rate": 16000, "mel_hop_length": 160, "is_causal": True,
    "mel_bins": 64, "double_z": True,
}
VOCODER: dict[str, Any] = {
    "in_channels": 128, "hidden_channels": 1024, "out_channels": 2, "upsample_kernel_sizes": [16, 15, 8, 4, 4],
    "upsample_factors": [6, 5, 2, 2, 2], "resnet_kernel_sizes": [3, 7, 11],
    "resnet_dilations": [[1, 3, 5], [1, 3, 5], [1, 3, 5]], "act_fn": "leaky_relu", "leaky_relu_negative_slope": 0.1,
    "antialias": False, "antialias_ratio": 2, "antialias_kernel_size": 12, "final_act_fn": "tanh", "final_bias": True,
    "output_sampling_rate": 24000,
}
VOCODER_BWE: dict[str, Any] = {
    "in_channels": 128, "hidden_channels": 1536, "out_channels": 2, "upsample_kernel_sizes": [11, 4, 4, 4, 4, 4],
    "upsample_factors": [5, 2, 2, 2, 2, 2], "resnet_kernel_sizes": [3, 7, 11],
    "resnet_dilations": [[1, 3, 5], [1, 3, 5], [1, 3, 5]], "act_fn": "snakebeta", "leaky_relu_negative_slope": 0.1,
    "antialias": True, "antialias_ratio": 2, "antialias_kernel_size": 12, "final_act_fn": None, "final_bias": False,
    "bwe_in_channels": 128, "bwe_hidden_channels": 512, "bwe_out_channels": 2,
    "bwe_upsample_kernel_sizes": [12, 11, 4, 4, 4], "bwe_upsample_factors": [6, 5, 2, 2, 2],
    "bwe_resnet_kernel_sizes": [3, 7, 11], "bwe_resnet_dilations": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
    "bwe_act_fn": "snakebeta", "bwe_leaky_relu_negative_slope": 0.1, "bwe_antialias": True, "bwe_antialias_ratio": 2,
    "bwe_antialias_kernel_size": 12, "bwe_final_act_fn": None, "bwe_final_bias": False, "filter_length": 512,
    "hop_length": 80, "window_length": 512, "num_mel_channels": 64, "input_sampling_rate": 16000,
    "output_sampling_rate": 48000,
}
UPSAMPLER: dict[str, Any] = {
    "in_channels": 128, "mid_channels": 1024, "num_blocks_per_stage": 4, "dims": 3, "spatial_upsample": True,
    "temporal_upsample": False, "rational_spatial_scale": 2.0, "use_rational_resampler": True,
}
DIFFUSION_DECODER: dict[str, Any] = {
    "out_channels": 3, "latent_channels": 128, "patch_size": 4, "scaling_factor": 1.0, "decoder_head_dim": 64,
    "decoder_stage_channels": [2048, 1024, 512, 512, 256], "decoder_stage_depths": [4, 6, 4, 2, 8],
    "decoder_stage_kernels": [[3, 7, 7], [3, 7, 7], [3, 5, 5], [3, 5, 5]],
    "decoder_upsample_strides": [[1, 2, 2], [2, 1, 1], [2, 2, 2], [2, 2, 2]],
    "decoder_upsample_channel_reductions": [2, 2, 1, 2], "decoder_stage5_kernel": [11, 11, 11],
    "decoder_t_emb_dim": 384, "decoder_timestep_scale_multiplier": 1000.0, "decoder_model_output_type": "x0",
    "decoder_num_inference_steps": 1, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8,
}
DURATION_HEAD: dict[str, Any] = {
    "video_cross_attention_dim": 4096, "audio_cross_attention_dim": 2048, "pooler_hidden_dim": 256, "num_queries": 1,
    "num_pooler_heads": 4, "mlp_hidden_dim": 256,
}
SCHEDULER: dict[str, Any] = {
    "num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": False, "base_shift": 0.5, "max_shift": 1.15,
    "base_image_seq_len": 256, "max_image_seq_len": 4096, "invert_sigmas": False, "shift_terminal": None,
    "use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False,
    "time_shift_type": "exponential", "stochastic_sampling": False,
}
# fmt: on
# What files of the text encoder leave out and this project reads itself, by class; the class fills in the rest.
TEXT_ENCODERS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {"vocab_size": 262208},
    "Gemma4UnifiedForConditionalGeneration": {"vocab_size": 262144},
}
VOCODERS = {"LTX2Vocoder": VOCODER, "LTX2VocoderWithBWE": VOCODER_BWE}
