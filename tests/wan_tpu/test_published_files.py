"""Published checkpoints open from their files as they are: under their names, with the defaults that `plan` has."""

import inspect
import json

import diffusers
import huggingface_hub
import numpy as np
import pytest
import transformers
from diffusers.pipelines import ltx2 as pipelines

from tests.wan_tpu import ltx2_files, minimax_h3_files, published_files
from tests.wan_tpu.published_files import EULER, WAN_I2V, write
from wan_tpu import CheckpointError, GenerationRequest, InvalidRequest
from wan_tpu.aot.key import settings
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import WanTpuError
from wan_tpu.families import list_hub_ids, list_published, name_of, open_checkpoint, open_spec, published_spec
from wan_tpu.families.cogvideox import published as cogvideox
from wan_tpu.families.cogvideox.config import SCHEDULER
from wan_tpu.families.hunyuan15 import published as hunyuan15
from wan_tpu.families.hunyuan15.config import GUIDER
from wan_tpu.families.ltx2 import classes as ltx2
from wan_tpu.families.minimax_h3 import classes as minimax_h3
from wan_tpu.families.model import open_model
from wan_tpu.families.shared.settings import ENCODERS, FLOW_MATCH_EULER, UNIPC
from wan_tpu.families.wan import published as wan

REPOSITORIES = published_files.REPOSITORIES | ltx2_files.LTX_REPOSITORIES
REPOSITORIES |= {minimax_h3_files.REPOSITORY: minimax_h3_files.FILES}
HUNYUAN_I2V = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v"
I2V_A14B = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
# Name, task, size, frames, steps, shift, guidance of both experts, first steps of the experts.
OPENED = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": ("wan2.1-t2v-1.3b", (480, 832, 81), 50, 3, (5, 5), (0,)),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": ("wan2.1-t2v-14b", (480, 832, 81), 50, 3, (5, 5), (0,)),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": ("wan2.1-i2v-14b-480p", (480, 832, 81), 50, 3, (5, 5), (0,)),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": ("wan2.1-i2v-14b-720p", (480, 832, 81), 50, 3, (5, 5), (0,)),
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": ("wan2.1-flf2v-14b-720p", (480, 832, 81), 50, 16, (5, 5), (0,)),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": ("wan2.2-t2v-a14b", (480, 832, 81), 50, 3, (5, 5), (0, 16)),
    I2V_A14B: ("wan2.2-i2v-a14b", (480, 832, 81), 50, 3, (5, 5), (0, 13)),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": ("wan2.2-ti2v-5b", (480, 832, 81), 50, 5, (5, 5), (0,)),
    "THUDM/CogVideoX-2b": ("cogvideox-2b", (480, 720, 49), 50, 1, (6, 6), (0,)),
    "THUDM/CogVideoX-2b, later": ("cogvideox-2b", (480, 720, 49), 50, 1, (6, 6), (0,)),
    "THUDM/CogVideoX-5b": ("cogvideox-5b", (480, 720, 49), 50, 1, (6, 6), (0,)),
    "THUDM/CogVideoX-5b-I2V": ("cogvideox-5b-i2v", (480, 720, 49), 50, 1, (6, 6), (0,)),
    "zai-org/CogVideoX1.5-5B": ("cogvideox1.5-5b", (768, 1360, 81), 50, 1, (6, 6), (0,)),
    "zai-org/CogVideoX1.5-5B, earlier": ("cogvideox1.5-5b", (768, 1360, 81), 50, 1, (6, 6), (0,)),
    "zai-org/CogVideoX1.5-5B-I2V": ("cogvideox1.5-5b-i2v", (768, 1360, 49), 50, 1, (6, 6), (0,)),
    "zai-org/CogVideoX1.5-5B-I2V, earlier": ("cogvideox1.5-5b-i2v", (768, 1360, 49), 50, 1, (6, 6), (0,)),
    **{
        f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{name}": (
            f"hunyuanvideo1.5-{name.replace('_', '-')}",
            (*size, 121),
            steps,
            shift,
            (guidance, guidance),
            (0,),
        )
        for name, size, steps, shift, guidance in (
            ("480p_t2v", (480, 848), 50, 5, 6),
            ("480p_i2v", (480, 848), 50, 5, 6),
            ("720p_t2v", (720, 1280), 50, 9, 6),
            ("720p_i2v", (720, 1280), 50, 7, 6),
            ("480p_t2v_distilled", (480, 848), 50, 5, 1),
            ("480p_i2v_distilled", (480, 848), 50, 5, 1),
            ("720p_i2v_distilled", (720, 1280), 50, 7, 1),
            ("480p_i2v_step_distilled", (480, 848), 50, 7, 1),
        )
    },
    "Lightricks/LTX-2": ("ltx-2", (512, 768, 121), 30, 1, (3, 3), (0,)),
    "rootonchair/LTX-2-19b-distilled": ("ltx-2-distilled", (1024, 1536, 121), 11, 1, (1, 1), (0, 8)),
    "diffusers/LTX-2.3-Diffusers": ("ltx-2.3", (512, 768, 121), 30, 1, (3, 3), (0,)),
    "diffusers/LTX-2.3-Distilled-Diffusers": ("ltx-2.3-distilled", (1024, 1536, 121), 11, 1, (1, 1), (0, 8)),
    minimax_h3_files.REPOSITORY: ("minimax-h3", (768, 1344, 124), 49, 12, (1, 1), (0,)),
}


@pytest.fixture
def open_repository(tmp_path):
    """Opens a repository's files from a folder called as it is or otherwise; `...` in place of a value: no such key."""

    def open_files(repository, changed=None, name=None):
        files = dict(REPOSITORIES[repository])
        for file, values in (changed or {}).items():
            content = files.get(file, {}) | values
            files[file] = {key: value for key, value in content.items() if value is not ...}
        return open_spec(write(tmp_path / (name or repository.replace(", ", "-")), files))

    return open_files


def default_plan(spec, **fields):
    return spec.plan(GenerationRequest(**fields), image="t2v" not in spec.tasks, last=spec.last_images == "required")


@pytest.mark.parametrize("repository", REPOSITORIES)
def test_a_published_checkpoint_opens_as_what_it_is(repository, open_repository):
    spec = open_repository(repository)
    name, size, steps, shift, scales, starts = OPENED[repository]
    plan = default_plan(spec, preset="diffusers")
    request = plan.request
    assert spec.name == name
    assert (request.height, request.width, request.frames) == size
    assert (request.steps, request.shift) == (steps, shift)
    assert (request.guidance_scale, request.guidance_scale_2) == scales
    assert tuple(expert.start for expert in plan.experts) == starts
    # What `wan-tpu plan`, layouts and the README's figures are made from is the same.
    ours = published_spec(name)
    assert default_plan(ours) == default_plan(spec)
    assert (ours.tasks, ours.solvers, ours.stages) == (spec.tasks, spec.solvers, spec.stages)
    # Optional stages may have files of their own.
    assert [ours.components[stage] for stage in ours.stages] == [spec.components[stage] for stage in spec.stages]
    assert (ours.config.transformer, ours.config.vae) == (spec.config.transformer, spec.config.vae)


# What is published as files of another format, and what nobody has copied from the hub into a public repository.
WITHOUT_FILES = {"turbowan2.2-i2v-a14b", "helios-base", "helios-mid", "helios-distilled"}
WITHOUT_FILES |= {"ltx-2.5", "ltx-2.5-distilled", "fasth3-v1", "fasth3-v2"}


def test_every_published_model_is_among_them():
    names = {name for name, *_ in OPENED.values()}
    assert names | WITHOUT_FILES == {name for name in list_published() if not name.startswith("toy")}
    assert set(OPENED) == set(REPOSITORIES)
    assert all(published_spec(name).name == name for name in list_published())


def test_every_published_model_has_its_address_on_the_hub():
    addresses = {name: repository for repository, (name, *_) in OPENED.items() if "," not in repository}
    assert list_hub_ids().items() >= addresses.items()
    assert list_hub_ids().keys() == list_published().keys() - {"turbowan2.2-i2v-a14b", "ltx-2.5"}
    assert name_of("wan-ai/wan2.2-I2V-A14B-Diffusers") == "wan2.2-i2v-a14b"


def test_names_of_models_are_addresses_unless_a_folder_has_that_name(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(WanTpuError, match="TI2V-5B-Diffusers"):
        open_checkpoint("wan2.2-ti2v-5b")
    with pytest.raises(CheckpointError, match=r"wan2\.2-ti2v-5b"):  # The nearest name.
        open_checkpoint("wan2.2-ti2v-5")
    write(tmp_path / "wan2.2-ti2v-5b", REPOSITORIES["Wan-AI/Wan2.2-TI2V-5B-Diffusers"])
    assert open_checkpoint("wan2.2-ti2v-5b").source == str(tmp_path / "wan2.2-ti2v-5b")


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        (diffusers.WanTransformer3DModel, wan.TRANSFORMER_14B),
        (diffusers.AutoencoderKLWan, wan.VAE_21),
        (diffusers.CogVideoXTransformer3DModel, cogvideox.TRANSFORMER_2B),
        (diffusers.AutoencoderKLCogVideoX, cogvideox.VAE_2B),
        (diffusers.HunyuanVideo15Transformer3DModel, hunyuan15.TRANSFORMER),
        (diffusers.AutoencoderKLHunyuanVideo15, hunyuan15.VAE),
        (diffusers.LTX2VideoTransformer3DModel, ltx2.TRANSFORMER),
        (pipelines.LTX2TextConnectors, ltx2.CONNECTORS),
        (diffusers.AutoencoderKLLTX2Video, ltx2.VAE),
        (diffusers.AutoencoderKLLTX2Audio, ltx2.AUDIO_VAE),
        (pipelines.LTX2Vocoder, ltx2.VOCODER),
        (pipelines.LTX2VocoderWithBWE, ltx2.VOCODER_BWE),
        (pipelines.LTX2LatentUpsamplerModel, ltx2.UPSAMPLER),
        (diffusers.LTX2VideoDiffusionDecoderModel, ltx2.DIFFUSION_DECODER),
        (diffusers.FlowMatchEulerDiscreteScheduler, ltx2.SCHEDULER),
        (diffusers.MiniMaxH3Transformer3DModel, minimax_h3.TRANSFORMER),
        (diffusers.AutoencoderKLMiniMaxH3, minimax_h3.VAE),
        (diffusers.AutoencoderKLMiniMaxH3Audio, minimax_h3.AUDIO_VAE),
        (diffusers.MiniMaxH3Scheduler, minimax_h3.SCHEDULER),
    ],
)
def test_what_a_file_leaves_out_is_what_diffusers_class_takes(kind, ours):
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    assert json.loads(json.dumps({parameter.name: parameter.default for parameter in parameters})) == ours


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        (diffusers.UniPCMultistepScheduler, UNIPC),
        (diffusers.FlowMatchEulerDiscreteScheduler, FLOW_MATCH_EULER),
        (diffusers.CogVideoXDDIMScheduler, SCHEDULER),
        (diffusers.CogVideoXDPMScheduler, SCHEDULER),
        (diffusers.ClassifierFreeGuidance, GUIDER),
    ],
)
def test_what_a_scheduler_leaves_out_is_what_diffusers_class_takes(kind, ours):
    parameters = inspect.signature(kind.__init__).parameters
    assert {name: parameters[name].default for name in ours} == ours


@pytest.mark.parametrize("kind", ENCODERS)
def test_what_an_encoder_leaves_out_is_what_transformers_class_takes(kind):
    config = getattr(transformers, kind).config_class().to_dict()
    assert {name: config[name] for name in ENCODERS[kind]} == ENCODERS[kind]


@pytest.mark.parametrize(
    ("repository", "component", "part"),
    [
        ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "text_encoder", "text_encoder"),
        ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "image_encoder", "image_encoder"),
        ("THUDM/CogVideoX-5b", "text_encoder", "text_encoder"),
        (HUNYUAN_I2V, "text_encoder", "text_encoder"),
        (HUNYUAN_I2V, "text_encoder_2", "glyph_encoder"),
        (HUNYUAN_I2V, "image_encoder", "image_encoder"),
    ],
)
def test_encoder_whose_file_leaves_keys_out_has_the_defaults_of_its_class(repository, component, part, open_repository):
    kind = REPOSITORIES[repository]["model_index.json"][component][1]
    spec = open_repository(repository, {f"{component}/config.json": dict.fromkeys(ENCODERS[kind], ...)})
    config = getattr(spec.config, part)
    assert {name: config[name] for name in ENCODERS[kind]} == ENCODERS[kind]
    with pytest.raises(CheckpointError, match=f"'many'.*{component}/config.json"):
        open_repository(repository, {f"{component}/config.json": dict.fromkeys(ENCODERS[kind], "many")})


SCHEDULER_FILE = "scheduler/scheduler_config.json"


@pytest.mark.parametrize(
    ("repository", "changed", "message"),
    [  # Keys left out of a scheduler mean noise prediction, or a schedule without a shift: diffusers would run these.
        (I2V_A14B, {SCHEDULER_FILE: {"prediction_type": ...}}, "scheduler prediction_type 'epsilon'"),
        (I2V_A14B, {SCHEDULER_FILE: {"use_flow_sigmas": ...}}, "scheduler use_flow_sigmas False.*True"),
        (I2V_A14B, {SCHEDULER_FILE: {"sigma_min": 0.1}}, "scheduler sigma_min 0.1.*None"),
        ("THUDM/CogVideoX-5b", {SCHEDULER_FILE: {"prediction_type": ...}}, "scheduler prediction_type 'epsilon'"),
        (I2V_A14B, {SCHEDULER_FILE: {"_class_name": "DDIMScheduler"}}, "UniPCMultistepScheduler"),
        # The high-noise expert of the revision 348da65e has the file of Wan 2.1's.
        (
            I2V_A14B,
            {"transformer/config.json": WAN_I2V | {"pos_embed_seq_len": ...}},
            "added_kv_proj_dim.*5120.*None.*image_dim.*1280.*None",
        ),
        (I2V_A14B, {"vae/config.json": {"scale_factor_spatial": None}}, r"scale_factor_spatial None.*\b8\b"),
        (I2V_A14B, {"transformer/config.json": {"num_layers": "40"}}, "num_layers '40'.*transformer/config.json"),
        (I2V_A14B, {"model_index.json": {"transformer": ["diffusers", {}]}}, r'transformer.*\["diffusers", {}\]'),
        (I2V_A14B, {"model_index.json": {"expand_timesteps": "no"}}, "expand_timesteps 'no'.*true.*false"),
        (I2V_A14B, {"wan_tpu.json": {"model": "wan3"}}, "model 'wan3'.*wan2.1-t2v-1.3b"),
        (I2V_A14B, {"wan_tpu.json": {"model": "wan2.2-t2v-a14b"}}, "wan2.2-i2v-a14b"),
    ],
)
def test_a_checkpoint_that_diffusers_runs_otherwise_is_refused(repository, changed, message, open_repository):
    with pytest.raises(CheckpointError, match=message):
        open_repository(repository, changed)


def test_experts_are_compared_by_what_they_say(open_repository):
    """One may leave out what the other says, as long as it is the class's default."""
    assert (
        open_repository(I2V_A14B, {"transformer/config.json": {"pos_embed_seq_len": ..., "eps": ...}}).name
        == "wan2.2-i2v-a14b"
    )


@pytest.mark.parametrize(
    ("changed", "name", "model"),
    [
        ({}, "models/wan-2.1-i2v-720p/bf16", "720p"),
        ({}, "models/720p/Wan2.1-I2V-14B-480P", "480p"),
        ({}, "models--Wan-AI--Wan2.1-I2V-14B-720P-Diffusers/snapshots/8823af45fcc5", "720p"),
        ({"model_index.json": {"_name_or_path": "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"}}, "mine", "720p"),
        ({"wan_tpu.json": {"model": "wan2.1-i2v-14b-720p"}}, "Wan2.1-I2V-14B-480P", "720p"),
        ({}, "mine", "480p"),
    ],
)
def test_which_of_two_equal_models_it_is_says_its_name(changed, name, model, open_repository):
    assert open_repository("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", changed, name).name == f"wan2.1-i2v-14b-{model}"


def test_a_copy_says_which_model_it_is_of(tmp_path, open_repository):
    """As `weights convert` writes it, whatever its folder is called."""
    source = write(tmp_path / "Wan2.1-I2V-14B-720P", REPOSITORIES["Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"])
    copy = tmp_path / "copy"
    for name, content in Checkpoint(source).read_small_files().items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    assert open_spec(copy).name == "wan2.1-i2v-14b-720p"
    assert Checkpoint(copy).read_small_files() == Checkpoint(copy / ".").read_small_files()
    assert Checkpoint(copy).index["_name_or_path"] == str(source)


def test_the_solver_is_the_scheduler_s(open_repository):
    euler = dict.fromkeys(REPOSITORIES[I2V_A14B][SCHEDULER_FILE], ...) | EULER | {"shift": 4.0}
    spec = open_repository(I2V_A14B, {SCHEDULER_FILE: euler})
    plan = default_plan(spec, steps=7)
    assert (plan.request.solver, plan.request.shift, spec.solvers) == ("euler", 4.0, ("euler", "unipc"))
    theirs = diffusers.FlowMatchEulerDiscreteScheduler.from_config(EULER | {"shift": 4.0})
    theirs.set_timesteps(7)
    np.testing.assert_allclose(spec.schedule(plan.request).timesteps, theirs.timesteps, rtol=1e-6)
    assert default_plan(spec, solver="unipc").request.solver == "unipc"


def test_another_revision_makes_what_today_s_makes(open_repository):
    spec = open_repository("zai-org/CogVideoX1.5-5B, earlier")
    portrait = spec.plan(GenerationRequest(height=1360, width=768)).request
    assert (portrait.height, portrait.width) == (1360, 768)


def test_settings_that_no_class_has_are_not_handed_to_it(open_repository):
    """diffusers warns of TI2V 5B's clip_output each time that it builds a VAE."""
    assert "clip_output" not in open_repository("Wan-AI/Wan2.2-TI2V-5B-Diffusers").config.vae


@pytest.mark.parametrize("name", wan.SAMPLING)
def test_magcaches_curves_hold_for_wans_own_settings(name):
    """They were measured with the shift of wan/configs; diffusers takes another."""
    spec = published_spec(name)
    plan = default_plan(spec)
    if spec.config.two_experts and spec.config.attention_density is None:
        assert [expert.stop - expert.start for expert in plan.experts] == ([26, 14] if "t2v" in name else [15, 25])
    if spec.curves:
        assert default_plan(spec, cache="magcache").request.cache == "magcache"
        if default_plan(spec, preset="diffusers").request.shift != plan.request.shift:
            with pytest.raises(InvalidRequest, match="preset original"):
                default_plan(spec, cache="magcache", preset="diffusers")


def test_name_of_a_link_counts_and_stored_executables_are_of_no_name(tmp_path):
    """The two Wan 2.1 I2V are the same files: a name tells their resolution, and changes no program."""
    folder = write(tmp_path / "model", REPOSITORIES["Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"])
    (tmp_path / "Wan2.1-I2V-720P").symlink_to(folder)
    unnamed, linked = (open_model(Checkpoint(tmp_path / name)) for name in ("model", "Wan2.1-I2V-720P"))
    assert (unnamed.spec.name, linked.spec.name) == ("wan2.1-i2v-14b-480p", "wan2.1-i2v-14b-720p")
    assert settings(unnamed.config, "bfloat16") == settings(linked.config, "bfloat16")
