"""Where the published models are on the Hugging Face hub, as diffusers' checkpoints. Imports nothing."""

_HUNYUAN = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-"
# By the names that `wan-tpu models` lists. TurboWan is published as .pth files only (`wan-tpu convert`).
HUB_IDS: dict[str, str] = {
    "cogvideox-2b": "THUDM/CogVideoX-2b",
    "cogvideox-5b": "THUDM/CogVideoX-5b",
    "cogvideox-5b-i2v": "THUDM/CogVideoX-5b-I2V",
    "cogvideox1.5-5b": "zai-org/CogVideoX1.5-5B",
    "cogvideox1.5-5b-i2v": "zai-org/CogVideoX1.5-5B-I2V",
    "helios-base": "BestWishYsh/Helios-Base",
    "helios-mid": "BestWishYsh/Helios-Mid",
    "helios-distilled": "BestWishYsh/Helios-Distilled",
    "hunyuanvideo1.5-480p-t2v": f"{_HUNYUAN}480p_t2v",
    "hunyuanvideo1.5-480p-i2v": f"{_HUNYUAN}480p_i2v",
    "hunyuanvideo1.5-720p-t2v": f"{_HUNYUAN}720p_t2v",
    "hunyuanvideo1.5-720p-i2v": f"{_HUNYUAN}720p_i2v",
    "hunyuanvideo1.5-480p-t2v-distilled": f"{_HUNYUAN}480p_t2v_distilled",
    "hunyuanvideo1.5-480p-i2v-distilled": f"{_HUNYUAN}480p_i2v_distilled",
    "hunyuanvideo1.5-720p-i2v-distilled": f"{_HUNYUAN}720p_i2v_distilled",
    "hunyuanvideo1.5-480p-i2v-step-distilled": f"{_HUNYUAN}480p_i2v_step_distilled",
    "ltx-2": "Lightricks/LTX-2",
    "ltx-2-distilled": "rootonchair/LTX-2-19b-distilled",
    "ltx-2.3": "diffusers/LTX-2.3-Diffusers",
    "ltx-2.3-distilled": "diffusers/LTX-2.3-Distilled-Diffusers",
    "minimax-h3": "MiniMaxAI/MiniMax-H3",
    "wan2.1-t2v-1.3b": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "wan2.1-t2v-14b": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "wan2.1-i2v-14b-480p": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    "wan2.1-i2v-14b-720p": "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
    "wan2.1-flf2v-14b-720p": "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
    "wan2.2-t2v-a14b": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "wan2.2-i2v-a14b": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "wan2.2-ti2v-5b": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
}


def name_of(model: str) -> str:
    """Return a published model's name, given its name or hub id; anything else is returned as it is."""
    return next((name for name, hub_id in HUB_IDS.items() if hub_id.lower() == model.lower()), model)
