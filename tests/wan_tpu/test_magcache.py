"""MagCache: the decisions and the latents of diffusers' own hook, on the same curves; resumed, refused, measured."""

import json
import shutil

import diffusers
import numpy as np
import pytest
import torch
from diffusers.hooks.mag_cache import MagCacheConfig, apply_mag_cache

from tests.conftest import PHOTO, record_steps
from tests.wan_tpu.diffusers_steps import keep_latents
from tests.wan_tpu.test_parity import LATENT_TOLERANCE
from wan_tpu import GenerationRequest, cli, load_pipeline
from wan_tpu.commands.calibrate import calibrate
from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families import open_spec, published_spec
from wan_tpu.schedules.magcache import Curve, MagCache, choose_skipped, parse_magcache
from wan_tpu.stages import ExpertRun, device_state, expert_inputs

KIND = "wan2.2-i2v-a14b"
STEPS = 12
SIZE = {"height": 64, "width": 96, "frames": 9, "shift": 5.0}


def hooked_decisions(ratios, cache):
    """Return which passes diffusers' hook skips over blocks that do something."""

    class Block(torch.nn.Module):
        def forward(self, hidden_states):
            return hidden_states * 1.01

    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer_blocks = torch.nn.ModuleList([Block(), Block()])

        def forward(self, x):
            for block in self.transformer_blocks:
                x = block(x)
            return x

    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry

    TransformerBlockRegistry.register(Block, TransformerBlockMetadata(return_hidden_states_index=0))
    module, skipped = Blocks(), []
    config = MagCacheConfig(
        threshold=cache.threshold,
        max_skip_steps=cache.max_skip_steps,
        retention_ratio=cache.retention_ratio,
        num_inference_steps=len(ratios),
        mag_ratios=list(ratios),
    )
    apply_mag_cache(module, config)
    head = module.transformer_blocks[0]._diffusers_hook.hooks["mag_cache_leader_block_hook"]
    for _ in ratios:
        module(torch.ones(1, 2, 3))
        state = head.state_manager.get_state()
        skipped.append(not state.should_compute)
    return np.array(skipped)


@pytest.mark.parametrize("name", ["wan2.2-t2v-a14b", "wan2.2-i2v-a14b", "wan2.1-t2v-14b", "wan2.1-i2v-14b-480p"])
def test_decisions_are_those_of_diffusers_hook(name):
    [curve] = published_spec(name).curves
    ratios = np.array(curve.ratios, np.float32)
    first = curve.first_low or 0
    for threshold, most, retention in ((0.04, 2, 0.2), (0.06, 2, 0.2), (0.12, 2, 0.1), (0.3, 5, 0.0), (0.01, 1, 0.5)):
        cache = MagCache(threshold, most, retention)
        phases = [(0, first), (first, len(ratios))] if first else [(0, len(ratios))]
        got = choose_skipped(curve, cache, phases)
        for branch in (0, 1):
            halves = [hooked_decisions(ratios[start:stop, branch].tolist(), cache) for start, stop in phases]
            assert np.array_equal(got[:, branch], np.concatenate(halves)), (cache, branch)


def test_another_number_of_steps_has_diffusers_interpolation():
    ratios = tuple((float(r), float(r)) for r in 1 - np.arange(1, 31) * 0.002)
    for steps in (1, 7, 29, 45):
        got = choose_skipped(Curve(ratios, None, 5.0, None, MagCache(0.05, 2, 0.2)), MagCache(), [(0, steps)])
        config = MagCacheConfig(
            num_inference_steps=steps, mag_ratios=[r for r, _ in ratios], threshold=0.05, max_skip_steps=2
        )
        assert np.array_equal(got[:, 0], hooked_decisions(config.mag_ratios.tolist(), MagCache(0.05, 2, 0.2)))


def test_published_curves_skip_as_many_steps_as_is_said_of_them():
    """maxdiffusion measured 1.82 x for T2V and 1.75 x for I2V; 18 and 17 of 40 steps are what the curves allow."""
    for name, expected in (("wan2.2-t2v-a14b", 18), ("wan2.2-i2v-a14b", 17)):
        spec = published_spec(name)
        request = spec.plan(GenerationRequest(cache="magcache", preset="original"), image="i2v" in spec.tasks).request
        skipped = spec.plan_skips(request)
        assert skipped.all(1).sum() == expected and np.array_equal(skipped[:, 0], skipped[:, 1])


# ---- on the small model, with a curve that skips some steps of either expert, and in two of them one branch alone


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    copy = tmp_path_factory.mktemp("cached") / "model"
    shutil.copytree(checkpoint(KIND), copy)
    spec = open_spec(copy)
    first = spec.experts(spec.plan(GenerationRequest(steps=STEPS, **SIZE), image=True).request)[0].stop
    ratios = np.full((STEPS, 2), 0.97)
    ratios[3, 1] = ratios[first + 5, 0] = 1.5
    curve = {"ratios": ratios.tolist(), "first_low": first, "shift": 5.0, "boundary": 0.9}
    (copy / "wan_tpu.json").write_text(json.dumps({"magcache": [curve]}))
    return copy


@pytest.fixture(scope="module")
def pipe(folder):
    return load_pipeline(folder, "float32", (1, 1, 1))


def request(**more):
    fields = {
        "prompt": "a cat",
        "negative_prompt": "",
        "image": PHOTO,
        "steps": STEPS,
        "guidance_scale": 3.5,
        "cache": "magcache:0.1,2,0.2",
    }
    return GenerationRequest(**SIZE | fields | more)


def test_latents_are_those_of_diffusers_with_its_hook(folder, pipe):
    plan = pipe.plan(request())
    ours = plan.request
    spec = pipe.runtime.model.spec
    reference = diffusers.WanImageToVideoPipeline.from_pretrained(folder)
    reference.set_progress_bar_config(disable=True)
    reference.scheduler = diffusers.UniPCMultistepScheduler.from_config(reference.scheduler.config, flow_shift=5.0)
    ratios = np.array(spec.curves[0].ratios)
    for expert, module in zip(plan.experts, (reference.transformer, reference.transformer_2), strict=True):
        config = MagCacheConfig(
            threshold=0.1, max_skip_steps=2, retention_ratio=0.2, num_inference_steps=expert.stop - expert.start,
            mag_ratios=[1.0] * (expert.stop - expert.start),
        )  # fmt: skip
        apply_mag_cache(module, config)
        config.mag_ratios = ByBranch(module, ratios[expert.start : expert.stop])
    noise = np.random.default_rng(0).standard_normal(spec.latent_shape(ours)).astype(np.float32)
    expected = []

    reference(
        image=ours.image, prompt="a cat", height=64, width=96, num_frames=9, num_inference_steps=STEPS,
        guidance_scale=3.5, latents=torch.from_numpy(noise), callback_on_step_end=keep_latents(expected),
        output_type="latent",
    )  # fmt: skip
    events = record_steps(pipe, request(), noise)
    decided = np.array(plan.skipped)
    assert 2 <= decided.all(1).sum() < STEPS and (decided[:, 0] != decided[:, 1]).any()
    assert [event.skipped for event in events] == decided.all(1).tolist()
    for event, latents in zip(events, expected, strict=True):
        assert np.abs(event.latents - latents).max() <= LATENT_TOLERANCE * np.abs(latents).max()


class ByBranch:
    """A curve for each branch, which diffusers' config has no place for: its hook asks for one step's ratio."""

    def __init__(self, module, ratios):
        self._state = module.blocks[0]._diffusers_hook.hooks["mag_cache_leader_block_hook"].state_manager
        self._ratios = torch.tensor(ratios, dtype=torch.float32)

    def __len__(self):
        return len(self._ratios)

    def __getitem__(self, step):
        return self._ratios[step, 0 if self._state._context.name == "cond" else 1]


def test_a_run_goes_on_from_the_latest_step_that_reuses_nothing(pipe):
    plan = pipe.plan(request())
    conditioning = pipe.encode(plan)
    whole = pipe.denoise(plan, conditioning, pipe.initial_state(plan))
    decided = np.array(plan.skipped)
    for expert in plan.experts:
        state = pipe.denoise(plan, conditioning, pipe.initial_state(plan), stop=expert.start)
        inputs = expert_inputs(pipe.runtime, plan.request, expert, conditioning)
        run = ExpertRun(pipe.runtime, plan, expert, inputs, device_state(pipe.runtime, plan, state))
        while run.state.step < expert.stop:
            run.step()
            resumable = run.resumable
            assert resumable.step == expert.stop or not decided[resumable.step].any()
            assert run.state.step - resumable.step <= 4
            again = pipe.denoise(plan, conditioning, resumable)
            assert np.array_equal(again.latents, whole.latents)


def test_cached_steps_are_another_program_that_leaves_the_exact_one_alone(pipe):
    before, cached, after = (record_steps(pipe, request(**of)) for of in ({"cache": None}, {}, {"cache": None}))
    assert np.array_equal(before[-1].latents, after[-1].latents)
    assert np.abs(cached[-1].latents - before[-1].latents).max() > 1e-3  # it is lossy
    spec = pipe.runtime.model.spec
    names = [spec.plan(request(cache=cache)).shapes["denoise_high"] for cache in ("magcache", None)]
    assert names[0] == f"{names[1]} cached"


def test_unguided_experts_skip_by_the_prompts_branch(pipe):
    events = record_steps(pipe, request(guidance_scale=1.0))
    decided = np.array(pipe.plan(request(guidance_scale=1.0)).skipped)
    assert [event.skipped for event in events] == decided[:, 0].tolist()


@pytest.mark.thorough
def test_calibration_measures_what_diffusers_does(checkpoint, tmp_path, capsys):
    copy = tmp_path / "model"
    shutil.copytree(checkpoint(KIND), copy)
    reference = diffusers.WanImageToVideoPipeline.from_pretrained(copy)
    reference.set_progress_bar_config(disable=True)
    reference.scheduler = diffusers.UniPCMultistepScheduler.from_config(reference.scheduler.config, flow_shift=5.0)
    uncached = request(cache=None, steps=6, seed=3)
    spec = open_spec(copy)
    experts = spec.plan(uncached).experts
    for expert, module in zip(experts, (reference.transformer, reference.transformer_2), strict=True):
        steps = expert.stop - expert.start
        apply_mag_cache(module, MagCacheConfig(calibrate=True, num_inference_steps=steps))
    reference(
        image=uncached.image, prompt="a cat", height=64, width=96, num_frames=9, num_inference_steps=6,
        guidance_scale=3.5, generator=torch.Generator().manual_seed(3), output_type="latent",
    )  # fmt: skip
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("[1.0")]
    argv = ["--model_id", str(copy), "--prompt", "a cat", "--image", str(PHOTO), "--size", "96x64", "--frames", "9"]
    argv += ["--negative_prompt", "", "--steps", "6", "--shift", "5", "--guidance_scale", "3.5", "--seed", "3"]
    argv += ["--dtype", "float32", "--dp", "1"]
    assert cli.run(calibrate, argv) == 0
    [curve] = json.loads(capsys.readouterr().out)["magcache"]
    schedule = [curve[name] for name in ("first_low", "shift", "boundary", "solver")]
    assert schedule == [experts[0].stop, 5.0, 0.9, "unipc"]
    # diffusers prints a branch's ratios when it has made its last step: prompt, then negative, by experts.
    for branch in (0, 1):
        expected = printed[branch] + printed[2 + branch]
        np.testing.assert_allclose(np.array(curve["ratios"])[:, branch], expected, atol=2e-4)
    assert cli.run(calibrate, [*argv, "--seeds", "2", "--write"]) == 0
    assert [len(curve.ratios) for curve in open_spec(copy).curves] == [6]
    assert cli.run(calibrate, [*argv, "--guidance_scale", "1"]) == 2
    assert cli.run(calibrate, [*argv, "--switch_step", "2"]) == 2


@pytest.mark.thorough
def test_explicit_sigmas_have_a_curve_of_their_own(folder, tmp_path):
    """As presets give them: measured without guidance, kept beside the model's own, and holding for nothing else."""
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    argv = ["--model_id", str(copy), "--prompt", "a cat", "--image", str(PHOTO), "--size", "96x64", "--frames", "9"]
    argv += ["--sigmas", "1", "0.9", "0.7", "0.4", "--switch_step", "2", "--guidance_scale", "1", "--solver", "euler"]
    argv += ["--dtype", "float32", "--dp", "1"]
    for _ in range(2):  # the second takes the first one's place
        assert cli.run(calibrate, [*argv, "--write"]) == 0
    own, few = open_spec(copy).curves
    assert (own.sigmas, len(own.ratios), few.sigmas, few.first_low) == (None, STEPS, (1.0, 0.9, 0.7, 0.4), 2)
    pipe = load_pipeline(copy, "float32", (1, 1, 1))
    fields = {"steps": None, "guidance_scale": 1.0, "shift": None, "cache": "magcache:10,1,0"}
    fields |= {"sigmas": [1, 0.9, 0.7, 0.4], "switch_step": 2, "solver": "euler"}
    events = record_steps(pipe, request(**fields))
    assert [event.skipped for event in events] == [False, True, False, True]
    for other in ({"switch_step": 1}, {"sigmas": [1, 0.9, 0.7, 0.3]}):
        with pytest.raises(InvalidRequest, match="sigmas"):
            pipe.plan(request(**fields | other))
    with pytest.raises(InvalidRequest, match="sigmas"):
        pipe.plan(request(**fields | {"solver": "unipc"}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache": "teacache"}, "magcache:0.06,2,0.2"),
        ({"cache": "magcache:x"}, "magcache:0.06,2,0.2"),
        ({"cache": "magcache:0.1,0"}, r" 1\b"),
        ({"cache": "magcache:0.1,2,3"}, r" 1\b"),
        ({"shift": 8.0}, r"shift 5\b.*solver unipc.*shift 8\b.*solver unipc"),
        ({"solver": "euler"}, r"shift 5\b.*solver euler"),
        ({"sigmas": [1.0, 0.5]}, "sigmas.*switch.*wan-tpu"),
        ({"switch_step": 3}, "switch_step.*sigmas"),
    ],
)
def test_settings_that_no_curve_is_for_are_refused(pipe, fields, message):
    cleared = {"steps": None} if "sigmas" in fields else {}
    with pytest.raises(InvalidRequest, match=message) as raised:
        pipe.plan(request(**cleared | fields))
    assert raised.value.field == "cache"


def test_models_without_a_curve_say_how_to_get_one(checkpoint):
    with pytest.raises(InvalidRequest, match="wan-tpu calibrate"):
        open_spec(checkpoint(KIND)).plan(request())
    assert str(parse_magcache("magcache:0.060,2")) == "magcache:0.06,2"


def test_damaged_curve_is_refused(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damaged = ({"ratios": []}, {"ratios": [[1, 1]], "first_low": 5, "shift": 5}, {"ratios": [[1]], "shift": 5}, 3)
    for curve in (*damaged, {"ratios": [[1, 1]], "shift": 5, "sigmas": [1.0, 0.5]}):
        (copy / "wan_tpu.json").write_text(json.dumps({"magcache": [curve]}))
        with pytest.raises(CheckpointError, match="wan-tpu calibrate"):
            open_spec(copy)
