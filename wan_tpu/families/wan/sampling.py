"""Presets of the published Wan models: distilled to four unguided steps, by adapters or whole.

LightX2V trained them with Euler's method at sigma = shift s / (1 + (shift - 1) s), s = 1, 0.75, 0.5, 0.25 and shift 5,
two steps on each expert of Wan 2.2: github.com/ModelTC/LightX2V, configs/distill; the files are those of
huggingface.co/lightx2v/Wan2.2-Distill-Loras and Wan2.1-Distill-Loras. TurboDiffusion's models are distilled themselves
(`wan_tpu.schedules.flow.rcm`).
"""

from wan_tpu.lora import Lora
from wan_tpu.request import Preset
from wan_tpu.schedules import flow

_HUB = "https://huggingface.co/"
_SHIFT = 5.0
SIGMAS = tuple(_SHIFT * s / (1 + (_SHIFT - 1) * s) for s in (1.0, 0.75, 0.5, 0.25))  # 1, 0.9375, 0.8333, 0.625


def _lightning(repository: str, loras: tuple[Lora, ...], **more: int) -> dict[str, Preset]:
    settings = {
        "sigmas": SIGMAS,
        "shift": _SHIFT,
        "solver": "euler",
        "guidance_scale": 1.0,
        "guidance_scale_2": 1.0,
        "loras": loras,
        **more,
    }
    about = "four steps without guidance, by an adapter that was distilled for them; not what the model itself makes"
    return {"lightning": Preset(about, f"{_HUB}{repository}", tuple(settings.items()))}


def _two_experts(task: str, date: str) -> dict[str, Preset]:
    repository = "lightx2v/Wan2.2-Distill-Loras"
    files = {one: f"wan2.2_{task}_A14b_{one}_noise_lora_rank64_lightx2v_4step_{date}" for one in ("high", "low")}
    high, low = (f"{repository}/{file}.safetensors" for file in files.values())
    return _lightning(repository, (Lora(high, expert="high"), Lora(low, expert="low")), switch_step=2)


def _one_expert(file: str) -> dict[str, Preset]:
    repository = "lightx2v/Wan2.1-Distill-Loras"
    return _lightning(repository, (Lora(f"{repository}/{file}_lora_rank64_lightx2v_4step.safetensors"),))


TURBO = Preset(
    "four steps without guidance, each with fresh noise: what this model was distilled for",
    f"{_HUB}TurboDiffusion/TurboWan2.2-I2V-A14B-720P",
    (
        ("sigmas", tuple(flow.rcm(4, 1.0).sigmas.tolist())),
        ("solver", "rcm"),
        ("guidance_scale", 1.0),
        ("guidance_scale_2", 1.0),
    ),
)

PRESETS: dict[str, dict[str, Preset]] = {
    "wan2.2-i2v-a14b": _two_experts("i2v", "1022"),
    "wan2.2-t2v-a14b": _two_experts("t2v", "1217"),
    "wan2.1-t2v-14b": _one_expert("wan2.1_t2v_14b"),
    "wan2.1-i2v-14b-480p": _one_expert("wan2.1_i2v"),
    "wan2.1-i2v-14b-720p": _one_expert("wan2.1_i2v"),
}
