"""LTX-2's transformer, against diffusers' module."""

import diffusers
import jax
import numpy as np
import pytest
import torch

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.ltx2 import components, positions, transformer
from wan_tpu.families.ltx2.guidance import evaluations
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.families.ltx2.spec import Ltx2Spec
from wan_tpu.families.ltx2.streams.modulation import Times
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh

GRID, SOUND, TEXT = (3, 2, 5), 11, 12
TIME, FPS = 640.5, 24.0
# How many latent frames, and latents of the sound, have no noise, some, and again none.
KNOWN = {"nothing": {}, "image": {"frames": [1, 2]}, "ends": {"frames": [1, 1, 1], "sounds": [3, 6, 2]}}
KINDS = ["ltx-2.3", "ltx-2", "ltx-2.5"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("ltx2") / request.param, request.param)


@pytest.fixture(scope="module")
def theirs(folder):
    # LTX-2.0's configuration switches off what Lightricks' guidance perturbs.
    module = diffusers.LTX2VideoTransformer3DModel.from_pretrained(folder / "transformer", perturbed_attn=True)
    return module.eval().requires_grad_(False)


def draw_inputs(config, *, known, cross_timestep=True):
    """Return inputs where nothing is known, an image, or the beginning and the end of both video and sound."""
    rng = np.random.default_rng(0)

    def draw_normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    text = (config.caption_channels,) * 2
    if not config.use_prompt_embeddings:
        text = config.cross_attention_dim, config.audio_cross_attention_dim
    # The first latent frame is marked in LTX-2.5, unless diffusers' pipelines are followed.
    marker = {"marker": np.float32(known != "nothing")} if config.use_keyframes_abs_pos_embedding else {}
    times = {part: np.float32([0, TIME, 0][: len(counts)]) for part, counts in KNOWN[known].items()}
    names = {"frames": "video", "sounds": "audio"}
    own = {f"{names[part]} times": values for part, values in times.items()}
    if not cross_timestep:
        patterns = "cross_{} times", "{}_gate times"
        own |= {pattern.format(names[part]): values for part, values in times.items() for pattern in patterns}
    return (
        marker
        | own
        | KNOWN[known]
        | {
            "video": draw_normal(1, config.in_channels, *GRID),
            "audio": draw_normal(SOUND, config.audio_in_channels),
            "text": draw_normal(2, TEXT, text[0]),
            "audio_text": draw_normal(2, TEXT, text[1]),
            "time": np.float32([TIME]),
        }
    )


def predict(folder, mesh, inputs):
    """Return the predictions of video [E, L, C] and sound [E, A, C] for `inputs`, by the names of the arguments."""
    config = Ltx2Spec.open(Checkpoint(folder)).config
    loaded = load_component(Checkpoint(folder), components.transformer(config), "float32", mesh)
    video, audio, text, audio_text = (inputs[name] for name in ("video", "audio", "text", "audio_text"))
    frames, sounds = inputs.get("frames", [video.shape[2]]), inputs.get("sounds", [len(audio)])
    counts = transformer.LatentCounts(tuple(map(int, frames)), tuple(map(int, sounds)))
    tables = positions.make_tables(config.transformer, video.shape[2:], len(audio), FPS)

    @jax.jit
    def run(params, video, audio, conditions):
        return transformer.predict(
            loaded.module, params, mesh, video, audio, conditions, counts, evaluations(config, 4)
        )

    time = inputs["time"]
    times = Times(*(inputs.get(f"{name} times", time) for name in Times._fields))
    conditions = transformer.Conditions(times, text, audio_text, tables, inputs.get("marker"))
    return [np.asarray(part) for part in run(loaded.params, video, audio, conditions)]


@torch.no_grad()
def predict_theirs(theirs, inputs, *, cross_timestep=True):
    """Return what diffusers' pipelines compute: the prompt's, the negative prompt's, perturbed, isolated."""
    video = torch.from_numpy(inputs["video"])[0].flatten(1).T[None]
    time = torch.tensor([TIME])
    times = {"video times": time, "audio times": time}
    for part, name, tokens in (("frames", "video times", GRID[1] * GRID[2]), ("sounds", "audio times", 1)):
        if part in inputs:
            times[name] = torch.tensor(np.repeat(inputs[name], tokens * np.array(inputs[part])))[None]
    marked = torch.zeros(1, video.shape[1], 1)
    marked[:, : GRID[1] * GRID[2]] = float(inputs.get("marker", 0))
    results = []
    for index, options in (
        (0, {}),
        (1, {}),
        (0, {"spatio_temporal_guidance_blocks": [1]}),
        (0, {"isolate_modalities": True}),
    ):
        mask = torch.ones(1, TEXT)
        results.append(
            theirs(
                hidden_states=video,
                audio_hidden_states=torch.from_numpy(inputs["audio"])[None],
                encoder_hidden_states=torch.from_numpy(inputs["text"][index : index + 1]),
                audio_encoder_hidden_states=torch.from_numpy(inputs["audio_text"][index : index + 1]),
                timestep=times["video times"],
                audio_timestep=times["audio times"],
                sigma=time,
                encoder_attention_mask=mask,
                audio_encoder_attention_mask=mask,
                num_frames=GRID[0],
                height=GRID[1],
                width=GRID[2],
                fps=FPS,
                audio_num_frames=SOUND,
                use_cross_timestep=cross_timestep,
                video_keyframes_mask=marked,
                return_dict=False,
                **options,
            )
        )
    return [torch.cat(parts).numpy() for parts in zip(*results, strict=True)]


def difference(ours, expected):
    return np.sqrt(((ours - expected) ** 2).mean() / (expected**2).mean())


@pytest.mark.parametrize(
    ("known", "cross_timestep"),
    [
        ("nothing", True),
        ("image", True),
        # An option of diffusers, by which known tokens attend to the other stream as such.
        pytest.param("image", False, marks=pytest.mark.thorough),
        ("ends", True),
        pytest.param("ends", False, marks=pytest.mark.thorough),
    ],
)
def test_every_evaluation_is_that_of_diffusers(known, cross_timestep, folder, theirs):
    inputs = draw_inputs(theirs.config, known=known, cross_timestep=cross_timestep)
    mesh = make_mesh((1, 1, 1), heads=4, devices=jax.devices()[:1])
    with jax.default_matmul_precision("highest"):
        ours = predict(folder, mesh, inputs)
    for mine, expected in zip(ours, predict_theirs(theirs, inputs, cross_timestep=cross_timestep), strict=True):
        assert mine.shape == expected.shape
        assert difference(mine, expected) < 1e-5
    first = ours[0][0]
    assert all(difference(other, first) > 1e-3 for other in ours[0][1:])  # Each evaluation differs.
