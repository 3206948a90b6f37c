"""The published MiniMax-H3: its configuration, to compile it without weights, and its sampling settings.

Sources: MiniMaxAI/MiniMax-H3 on the Hugging Face hub, whose settings are the defaults of diffusers' classes, and
diffusers 0.42.1, modular_pipelines/minimax_h3; those of FastVideo's are in fasth3.py. The text encoder is that of
Qwen/Qwen3-VL-32B-Instruct. The authors' README (MiniMax-AI/MiniMax-H3 1bc8e18e) has a short side of 768 pixels and 24
frames a second, their requests there 16:9; the server that it names, SGLang, 50 points and no negative prompt
(configs/sample/minimax_h3.py at 03d03aa7).
"""

import dataclasses
from typing import Any

from wan_tpu.families.minimax_h3 import classes, fasth3
from wan_tpu.families.minimax_h3.config import MiniMaxH3Config
from wan_tpu.request import Defaults

CUSTOM = "a custom MiniMax-H3"
STEPS = 49  # Diffusers' 50 points of its schedule, whose last one is the video.

# fmt: off
# The configuration of Qwen3-VL 32B.
TEXT: dict[str, Any] = classes.TEXT | {
    "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rope_parameters": {
        "rope_theta": 5000000.0, "rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = classes.VISION | {"out_hidden_size": 5120}
VAE: dict[str, Any] = classes.VAE | {
    "latents_mean": [
        0.858090341091156, -0.9606591463088989, 1.0661640167236328, -0.5090325474739075, -0.2727581858634949,
        -1.3675414323806763, -0.2553254961967468, -0.26907554268836975, -0.5376840829849243, -0.0464097298681736,
        0.6657370328903198, 0.19690127670764923, -0.5460608005523682, -0.4035342037677765, -0.23683024942874908,
        0.25928452610969543, -0.30133944749832153, 0.211341992020607, -1.1206848621368408, 0.3581933379173279,
        -0.04225143790245056, 0.2604829967021942, 0.22864092886447906, 0.7056031823158264,
    ],
    "latents_std": [
        1.2223774194717407, 1.2767263650894165, 1.6831774711608887, 1.7549455165863037, 1.5636216402053833,
        2.194143533706665, 0.9653137922286987, 1.0569885969161987, 0.841948926448822, 0.7729952931404114,
        1.8955937623977661, 0.946841835975647, 0.7996809482574463, 0.44988900423049927, 0.7197399735450745,
        0.6936293244361877, 2.961095094680786, 2.7694199085235596, 3.0496184825897217, 2.1088054180145264,
        3.276226282119751, 3.1627357006073, 2.2816812992095947, 2.6127843856811523,
    ],
}
AUDIO_VAE: dict[str, Any] = classes.AUDIO_VAE | {
    "latents_mean": [
        -0.020211687488382354, 0.3876466479950502, -0.04398279799186767, -0.28591514936373, 0.08179686214561671,
        -0.35782641352446604, 0.040623809960919084, -0.01552534501956604, -0.223362481667332, 0.1821006842509091,
        0.2941778783780663, -0.07901167601970885, -0.056815072777201, -0.3699028221860095, -0.31616315591624855,
        0.5905951377425391, -0.052139568068853864, 0.013673160263486295, -0.03691647864630577, 0.09732660653298163,
        -0.3394662328788498, -0.30685677538541667, -0.24504598907458763, -0.034698524462007344, 0.02868032184767538,
        -0.21217779266454084, -0.1678263169941987, 0.3221287889040614, -0.1223055851554907, 0.4356604928128464,
        -0.0502599202236253, 0.3979258376211797,
    ],
    "latents_std": [
        1.6895524230479284, 2.76263727217653, 1.7945344281264435, 1.6801681847309828, 1.6390226546605453,
        2.7788298348882177, 1.7659090095747236, 1.6199757612137327, 2.6336525640336896, 1.8539356672817833,
        2.5056497896915633, 1.811019237886178, 1.9579657790720237, 1.6685498243529284, 1.4922469314453364,
        3.298670198067373, 1.9491804496832168, 1.8720003270431442, 1.8334080103291832, 1.6488070416529093,
        1.6176957696319716, 1.9131449234774398, 1.5695245398428617, 1.6943659940415912, 1.8318420762504692,
        1.5540637421583379, 1.9344930328968526, 1.599198216109855, 1.718045989838149, 1.6307219190837705,
        1.8661226051202384, 1.5613768203168363,
    ],
}
# fmt: on
PUBLISHED: dict[str, MiniMaxH3Config] = {
    "minimax-h3": MiniMaxH3Config(
        transformer=classes.TRANSFORMER,
        text_encoder=TEXT,
        vision=VISION,
        vae=VAE,
        audio_vae=AUDIO_VAE,
        scheduler=classes.SCHEDULER,
        audio_scheduler={"shift": 3.0},
    ),
}
# FastVideo's distilled transformers, with the other components of the published model.
PUBLISHED["fasth3-v1"] = dataclasses.replace(PUBLISHED["minimax-h3"], fasth3=fasth3.V1, canvas=None)
PUBLISHED["fasth3-v2"] = dataclasses.replace(PUBLISHED["fasth3-v1"], fasth3=fasth3.V2, scheduler={"shift": 10.0})
HUB_IDS: dict[str, str] = {
    "minimax-h3": "MiniMaxAI/MiniMax-H3",
    "fasth3-v1": "FastVideo/FastVideo-FastH3-4-step-v1",
    "fasth3-v2": "FastVideo/FastVideo-FastH3-8-Step-V2",
}


def recognise(config: MiniMaxH3Config) -> str:
    """Return the name of the published model with a configuration, or `CUSTOM`."""
    for name, published in PUBLISHED.items():
        if (config.transformer, config.fasth3) == (published.transformer, published.fasth3):
            return name
    return CUSTOM


def defaults(config: MiniMaxH3Config) -> Defaults:
    """Return a model's published sampling settings."""
    return Defaults(
        height=768,
        width=1344,
        frames=124,
        fps=24,
        steps=STEPS if config.fasth3 is None else len(config.fasth3.levels),
        guidance_scale=1.0,
        guidance_scale_2=1.0,
        shift=float(config.scheduler["shift"]),
        solver="euler",
        generate_audio=True,
    )


diffusers_defaults = defaults


def source(config: MiniMaxH3Config) -> str:
    """Return the address of the authors' files, which name the shifts."""
    if config.fasth3 is not None:
        return f"https://huggingface.co/{HUB_IDS.get(recognise(config), HUB_IDS['fasth3-v2'])}"
    return "https://github.com/MiniMax-AI/MiniMax-H3/blob/8d8824ef/FL2VA/model_index.json"
