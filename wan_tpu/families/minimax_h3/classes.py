"""The defaults of the classes of MiniMax-H3's parts, for keys that a configuration lacks.

Published files have only the keys that their class had when they were written. Sources: diffusers 0.42.1, whose
defaults are the published model's values, and transformers 5.24.
"""

from typing import Any

# fmt: off
TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 56, "attention_head_dim": 128, "hidden_size": 5376, "num_layers": 50,
    "num_refiner_layers": 2, "ffn_dim": 14336, "in_channels": 24, "audio_in_channels": 32, "patch_size": [1, 2, 2],
    "text_dim": 5120, "freq_dim": 256, "time_embed_hidden_dim": 5376, "time_embed_dim": 2688, "rope_freq_dim": 16,
    "rope_theta": 10000.0, "norm_eps": 1e-5, "qk_norm_eps": 1e-5, "final_norm_eps": 1e-5,
}
VAE: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 24,
    "block_out_channels": [128, 256, 256, 512, 512, 1024], "layers_per_block": 2,
    "spatial_downsample_factors": [2, 2, 2, 2, 1, 1], "temporal_downsample_factors": [1, 2, 2, 1, 1, 1],
    "norm_num_groups": 32, "norm_eps": 1e-6, "spatial_padding_mode": "reflect", "decoder_num_layers": 36,
    "decoder_num_attention_heads": 32, "decoder_attention_head_dim": 64, "decoder_num_register_tokens": 4,
    "decoder_ffn_mult": 4, "decoder_rope_theta": 100.0, "decoder_rope_dim_ratio": 0.75, "decoder_norm_eps": 1e-5,
    "clip_length": 17, "token_drop": 3, "latents_mean": [0.0] * 24, "latents_std": [1.0] * 24,
}
AUDIO_VAE: dict[str, Any] = {
    "encoder_dim": 64, "encoder_rates": [2, 4, 4, 5, 5], "latent_dim": 2048, "latent_channels": 32,
    "num_attention_heads": 8, "decoder_dim": 1024, "decoder_rates": [5, 5, 2, 2, 2, 2, 2],
    "decoder_kernel_sizes": [9, 9, 4, 4, 4, 4, 4], "resblock_kernel_sizes": [3, 7, 11],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]], "sampling_rate": 32000, "latents_mean": None,
    "latents_std": None,
}
SCHEDULER: dict[str, Any] = {"shift": 12.0}
TEXT: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "attention_bias": False,
}
VISION: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
}
# Defaults of Qwen2VLImageProcessor, and the limits of an image's pixels with Qwen3-VL.
PROCESSOR: dict[str, Any] = {
    "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "do_resize": True, "do_rescale": True,
    "do_normalize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
PICTURE: dict[str, int] = {"shortest_edge": 65536, "longest_edge": 16777216}
# The same of Qwen3-VL's video_preprocessor_config.json, for all frames of a video together.
CLIP: dict[str, int] = {"shortest_edge": 4096, "longest_edge": 25165824}
# Of modular_model_index.json: the short side and the most pixels of a video, and the short side of a reference image.
CANVAS: dict[str, int] = {
    "canvas_short_edge": 768, "canvas_max_pixels": 768 * 1344, "reference_image_short_edge": 2048,
}
# fmt: on
