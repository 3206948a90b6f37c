"""Presets of the published Wan models with four steps, and their curves for MagCache.

LightX2V trained its adapters with Euler's method at sigma = shift s / (1 + (shift - 1) s), s = 1, 0.75, 0.5, 0.25 and
shift 5, two steps on each expert of Wan 2.2: github.com/ModelTC/LightX2V, configs/distill; the files are those of
huggingface.co/lightx2v/Wan2.2-Distill-Loras and Wan2.1-Distill-Loras. TurboDiffusion's models are distilled themselves
(`wan_tpu.schedules.flow.rcm`).

The curves were measured by the authors of MagCache (github.com/Zehong-Ma/MagCache), and are taken from maxdiffusion
(src/maxdiffusion/configs, 7cfb880), for 40 or 50 steps of UniPC. They have a pair for each step: the prompt's and the
negative prompt's branch. Each has the settings that it was published with.
"""

from wan_tpu.request import Preset
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.schedules import flow
from wan_tpu.schedules.magcache import Curve, MagCache

_HUB = "https://huggingface.co/"
_SHIFT = 5.0
SIGMAS = tuple(_SHIFT * s / (1 + (_SHIFT - 1) * s) for s in (1.0, 0.75, 0.5, 0.25))  # 1, 0.9375, 0.8333, 0.625


def _lightning(repository: str, adapters: tuple[RequestedAdapter, ...], **changes: int) -> dict[str, Preset]:
    settings = {
        "sigmas": SIGMAS,
        "shift": _SHIFT,
        "solver": "euler",
        "guidance_scale": 1.0,
        "guidance_scale_2": 1.0,
        "loras": adapters,
        **changes,
    }
    text = "four steps without guidance, by an adapter that was distilled for them; not what the model itself makes"
    return {"lightning": Preset(text, f"{_HUB}{repository}", tuple(settings.items()))}


def _lightning_of_two(task: str, date: str) -> dict[str, Preset]:
    repository = "lightx2v/Wan2.2-Distill-Loras"
    files = {side: f"wan2.2_{task}_A14b_{side}_noise_lora_rank64_lightx2v_4step_{date}" for side in ("high", "low")}
    high, low = (f"{repository}/{file}.safetensors" for file in files.values())
    return _lightning(
        repository, (RequestedAdapter(high, expert="high"), RequestedAdapter(low, expert="low")), switch_step=2
    )


def _lightning_of_one(file: str) -> dict[str, Preset]:
    repository = "lightx2v/Wan2.1-Distill-Loras"
    return _lightning(repository, (RequestedAdapter(f"{repository}/{file}_lora_rank64_lightx2v_4step.safetensors"),))


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

FEW_STEP_PRESETS: dict[str, dict[str, Preset]] = {
    "wan2.2-i2v-a14b": _lightning_of_two("i2v", "1022"),
    "wan2.2-t2v-a14b": _lightning_of_two("t2v", "1217"),
    "wan2.1-t2v-14b": _lightning_of_one("wan2.1_t2v_14b"),
    "wan2.1-i2v-14b-480p": _lightning_of_one("wan2.1_i2v"),
    "wan2.1-i2v-14b-720p": _lightning_of_one("wan2.1_i2v"),
}

# fmt: off
_T2V_A14B = (
    (1, 1), (1.00124, 1.00155), (0.99822, 0.99851), (0.99696, 0.99687), (0.99703, 0.99732), (0.9966, 0.99679),
    (0.99602, 0.99658), (0.99578, 0.99664), (0.99484, 0.9949), (0.99633, 0.996), (0.99659, 0.99683),
    (0.99534, 0.99549), (0.99584, 0.99577), (0.99681, 0.99694), (0.99563, 0.99554), (0.9944, 0.99473),
    (0.99594, 0.9964), (0.99466, 0.99461), (0.99453, 0.99481), (0.99389, 0.99365), (0.99391, 0.99406),
    (0.99354, 0.99361), (0.99283, 0.99278), (0.99268, 0.99263), (0.99057, 0.99091), (0.99125, 0.99126),
    (0.65523, 0.65252), (0.98808, 0.98852), (0.98765, 0.98736), (0.9851, 0.98535), (0.98311, 0.98339),
    (0.9805, 0.9806), (0.97776, 0.97771), (0.97278, 0.97286), (0.96731, 0.96728), (0.95857, 0.95855),
    (0.94385, 0.94385), (0.92118, 0.921), (0.88108, 0.88076), (0.80263, 0.80181),
)
_I2V_A14B = (
    (1, 1), (0.99191, 0.99144), (0.99356, 0.99337), (0.99326, 0.99285), (0.99251, 0.99264), (0.99393, 0.99366),
    (0.9943, 0.9943), (0.99276, 0.99288), (0.99389, 0.99393), (0.99274, 0.99289), (0.99316, 0.9931),
    (0.99379, 0.99377), (0.99268, 0.99271), (0.99222, 0.99227), (0.99175, 0.9916), (0.91076, 0.91046),
    (0.98931, 0.98933), (0.99087, 0.99088), (0.98852, 0.98855), (0.98895, 0.98896), (0.98806, 0.98808),
    (0.9871, 0.98711), (0.98613, 0.98618), (0.98434, 0.98435), (0.983, 0.98307), (0.98185, 0.98187),
    (0.98131, 0.98131), (0.9783, 0.97835), (0.97619, 0.9762), (0.97264, 0.9727), (0.97088, 0.97098),
    (0.96568, 0.9658), (0.96045, 0.96055), (0.95322, 0.95335), (0.94579, 0.94594), (0.93297, 0.93311),
    (0.91699, 0.9172), (0.89174, 0.89202), (0.8541, 0.85446), (0.79823, 0.79902),
)
_T2V_14B = (
    (1, 1), (1.02504, 1.03017), (1.00025, 1.00251), (0.9985, 0.99962), (0.99779, 0.99771), (0.9966, 0.99658),
    (0.99482, 0.99476), (0.99467, 0.99451), (0.99664, 0.99656), (0.99434, 0.99431), (0.99533, 0.99545),
    (0.99468, 0.99465), (0.99438, 0.99434), (0.99516, 0.99517), (0.99384, 0.9938), (0.99404, 0.99401),
    (0.99517, 0.99516), (0.99409, 0.99408), (0.99428, 0.99426), (0.99347, 0.99343), (0.99418, 0.99416),
    (0.99271, 0.99269), (0.99313, 0.99311), (0.99215, 0.99215), (0.99218, 0.99215), (0.99216, 0.99217),
    (0.99163, 0.99161), (0.99138, 0.99135), (0.98982, 0.9898), (0.98996, 0.98995), (0.9887, 0.98866),
    (0.98772, 0.9877), (0.98767, 0.98765), (0.98573, 0.9857), (0.98501, 0.98498), (0.9838, 0.98376),
    (0.98177, 0.98173), (0.98037, 0.98035), (0.97678, 0.97677), (0.97546, 0.97543), (0.97184, 0.97183),
    (0.96711, 0.96708), (0.96349, 0.96345), (0.95629, 0.95625), (0.94926, 0.94929), (0.93964, 0.93961),
    (0.92511, 0.92504), (0.90693, 0.90678), (0.8796, 0.87945), (0.86111, 0.86189),
)
_I2V_14B_720P = (
    (1, 1), (0.99428, 0.99498), (0.98588, 0.98621), (0.98273, 0.98281), (0.99018, 0.99023), (0.98911, 0.98917),
    (0.98646, 0.98652), (0.99454, 0.99456), (0.9891, 0.98909), (0.99124, 0.99127), (0.99102, 0.99103),
    (0.99215, 0.99212), (0.99515, 0.99515), (0.99576, 0.99572), (0.99068, 0.99072), (0.99097, 0.99097),
    (0.99166, 0.99169), (0.99041, 0.99042), (0.99201, 0.99198), (0.99101, 0.99101), (0.98599, 0.98603),
    (0.98845, 0.98844), (0.98848, 0.98851), (0.98862, 0.98857), (0.98718, 0.98719), (0.98497, 0.98497),
    (0.98264, 0.98263), (0.98389, 0.98393), (0.97938, 0.9794), (0.97535, 0.97536), (0.97498, 0.97499),
    (0.973, 0.97301), (0.96827, 0.96828), (0.96261, 0.96263), (0.95335, 0.9534), (0.94649, 0.94655),
    (0.93397, 0.93414), (0.91636, 0.9165), (0.89088, 0.89109), (0.8679, 0.86768),
)
_I2V_14B_480P = (
    (1, 1), (0.98783, 0.98993), (0.97559, 0.97593), (0.98311, 0.98319), (0.98202, 0.98225), (0.9888, 0.98878),
    (0.98762, 0.98759), (0.98957, 0.98971), (0.99052, 0.99043), (0.99383, 0.99384), (0.98857, 0.9886),
    (0.99065, 0.99068), (0.98845, 0.98847), (0.99057, 0.99057), (0.98957, 0.98961), (0.98601, 0.9861),
    (0.98823, 0.98823), (0.98756, 0.98759), (0.98808, 0.98814), (0.98721, 0.98724), (0.98571, 0.98572),
    (0.98543, 0.98544), (0.98157, 0.98165), (0.98411, 0.98413), (0.97952, 0.97953), (0.98149, 0.9815),
    (0.9774, 0.97742), (0.97825, 0.97826), (0.97355, 0.97361), (0.97085, 0.97087), (0.97056, 0.97055),
    (0.96588, 0.96587), (0.96113, 0.96124), (0.9567, 0.95681), (0.94961, 0.94969), (0.93973, 0.93988),
    (0.93217, 0.93224), (0.91878, 0.91896), (0.90955, 0.90954), (0.92617, 0.92616),
)
# fmt: on

# A fifth of each expert's steps is retained; of 26 and 14, maxdiffusion's rounding makes that five and two.
CURVES = {
    "wan2.2-t2v-a14b": Curve(_T2V_A14B, 26, 12.0, 0.875, MagCache(0.04, 2, 0.175)),
    "wan2.2-i2v-a14b": Curve(_I2V_A14B, 15, 5.0, 0.9, MagCache(0.06, 2, 0.2)),
    "wan2.1-t2v-14b": Curve(_T2V_14B, None, 5.0, None, MagCache(0.12, 2, 0.2)),
    "wan2.1-i2v-14b-720p": Curve(_I2V_14B_720P, None, 5.0, None, MagCache(0.12, 2, 0.2)),
    "wan2.1-i2v-14b-480p": Curve(_I2V_14B_480P, None, 3.0, None, MagCache(0.12, 2, 0.2)),
}
