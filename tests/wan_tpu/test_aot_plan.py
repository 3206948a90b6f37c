"""Plans as people and programs read them, and what the compiler's refusals become."""

import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.wan_tpu.plans import MODEL, SLICE, make_plan, prediction
from wan_tpu import GenerationRequest, InvalidRequest, Unavailable
from wan_tpu.aot.programs import (
    ENLARGE,
    FIRST_ENLARGE,
    FIRST_STEP,
    SKIPPED,
    SMALLEST_STEP,
    STEP,
    UNGUIDED_KEYS,
    UNGUIDED_SKIPPED,
    UNGUIDED_STEP,
    AbstractRuntime,
    stage_programs,
)
from wan_tpu.families import published_spec
from wan_tpu.families.model import published_model
from wan_tpu.plan import Expert
from wan_tpu.pricing import compiling
from wan_tpu.pricing.causes import largest_gains, list_causes
from wan_tpu.pricing.compiling import Compiled, Compilers, Job
from wan_tpu.pricing.cost import Times
from wan_tpu.pricing.plan import KEYS, ProgramPlan, SlicePlan, StagePlan, add_memory, share_of_peak
from wan_tpu.pricing.plan_text import compare, describe, draw, to_json
from wan_tpu.pricing.planner import SlicePlanner, make_plans
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.memory import GIB, needed_bytes
from wan_tpu.runtime.mesh import make_mesh


@functools.cache
def make_jobs(**fields: Any) -> dict[str, Job]:
    """Return jobs as a planner makes them, but for one device of this machine in place of the slice's."""
    spec = published_spec(MODEL)
    request = GenerationRequest(height=480, width=832, **{"frames": 81} | fields).resolve(spec.defaults)
    planner = SlicePlanner(MODEL, request, SLICE, dtype="bfloat16", cache=Path("unused"), report=print)
    return {name: job for name, (job, _) in planner.jobs(make_mesh((1, 1, 1), heads=spec.heads)).items()}


@pytest.fixture
def plan() -> SlicePlan:
    return make_plan()


def test_a_plan_says_what_fits_and_what_does_not(plan):
    text = describe(plan)
    assert f"{MODEL}, 832x480, 81 frames (32760 tokens), 50 steps" in text
    assert "yes, 29.0 GiB free" in text
    assert "NO, by 10.0 GiB (needs 41.0 GiB on each device, which has 31.2)" in text
    assert "doesn't fit: decoder later" in text


def test_a_plan_says_both_figures_and_both_paths_of_attention(plan):
    lines = describe(plan).splitlines()
    [optimistic, online] = [line for line in lines if "/" in line and "GiB" not in line and "docs" not in line]
    assert optimistic.split()[:4] == ["denoise", "step", "2.000", "1.500"]
    assert online.split()[:5] == ["all", "heads", "online", "2.500", "2.000"]
    assert "2.00    1.50      2.50    2.00" in compare([plan])
    assert any("up to 7 % longer" in line for line in lines)


def test_a_plan_says_which_figures_were_measured(plan):
    measured = dataclasses.replace(plan, slice=dataclasses.replace(SLICE, calibrated="measured (doctor.json):"))
    lines = describe(measured).splitlines()
    assert "measured (doctor.json):" in lines
    assert not any("up to 7 % longer" in line for line in lines)
    assert to_json(measured)["slice"]["calibrated"] == "measured (doctor.json):"


def test_seconds_and_shares_are_of_the_whole_video(plan):
    denoise, decoder = plan.stages
    assert denoise.seconds == Times(100.0, 75.0, 37.5)
    assert decoder.seconds is None
    assert share_of_peak(denoise, plan) == pytest.approx(1e17 / (100 * 4 * 918e12))
    assert plan.resident_gib == 2 * 2 + 1 + 40.5  # two experts, the decoder, the largest of what isn't weights, code
    assert [line.split()[-1] for line in describe(plan).splitlines() if line.startswith("denoise   ")] == ["0.500"]


def test_the_texts_keys_and_the_steps_have_one_copy_of_the_weights(plan):
    denoise, decoder = plan.stages
    keys = dataclasses.replace(
        denoise.programs[0], name=KEYS, compiled=dataclasses.replace(denoise.programs[0].compiled, code_bytes=0)
    )
    both = dataclasses.replace(denoise, programs=(keys, *denoise.programs))
    assert dataclasses.replace(plan, stages=(both, decoder)).resident_gib == plan.resident_gib


def test_json_holds_everything(plan):
    read = json.loads(json.dumps(to_json(plan)))
    assert read["mesh"] == {"dp": 2, "sp": 1, "tp": 2}
    assert read["stages"][0]["programs"][0]["online"]["by_category"]["attention"] == {
        "estimate": 1.5,
        "floor": 1.5,
        "limit": 0.75,
    }
    assert read["stages"][1]["programs"][0]["compiled"]["over_bytes"] == 10 * GIB


def test_a_video_s_seconds_are_divided_among_their_causes(plan):
    causes = {cause.name: cause for cause in list_causes(plan)}
    assert {name: (cause.seconds, cause.limit) for name, cause in causes.items()} == {
        "attention": (50.0, 25.0),
        **dict.fromkeys(["matrix products", "vector work", "copies", "exposed transfers"], (12.5, 3.125)),
        "host": (0.5, 0.5),
    }
    assert [cause.name for cause in largest_gains([*causes.values()], 1)] == ["attention"]
    assert next((cause["name"], cause["gain"]) for cause in to_json(plan)["causes"]) == ("matrix products", 9.375)


def test_each_stage_is_a_cause_of_its_own(plan):
    denoise, decoder = plan.stages
    step = denoise.programs[0]
    names = {
        "encoder": ["text_encoder", "text_encoder_2", "vae_encoder first"],
        "decoder": ["decoder first", "vocoder"],
    }
    stages = [
        dataclasses.replace(
            stage, name=name, programs=tuple(dataclasses.replace(step, name=n, calls=1) for n in programs)
        )
        for stage, (name, programs) in zip((decoder, decoder), names.items(), strict=True)
    ]
    seconds = {cause.name: cause.seconds for cause in list_causes(dataclasses.replace(plan, stages=tuple(stages)))}
    assert seconds == {"text": 4.0, "images": 2.0, "decoder": 2.0, "sound": 2.0}


def test_a_plot_is_drawn(plan, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[tpu]'")
    draw([plan], tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_job_survives_the_way_to_its_process_and_its_key_says_what_changes_it():
    job = make_jobs()[STEP]
    assert Job.from_json(json.dumps(dataclasses.asdict(job))) == job
    others = [make_jobs(frames=5)[STEP], make_jobs(guidance_scale=1.0)[STEP], make_jobs()[KEYS]]
    others.append(dataclasses.replace(job, slice=dataclasses.replace(SLICE, topology="v5p:2x2x1")))
    assert len({job.digest, *(other.digest for other in others)}) == 5
    same = dataclasses.replace(job, slice=dataclasses.replace(SLICE, link_bytes_per_s=1.0))  # prices, not programs
    assert same.digest == job.digest


@pytest.mark.long
def test_what_a_crash_left_half_written_is_compiled_again(tmp_path):
    job = dataclasses.replace(make_jobs()[STEP], model="unknown")
    program_file = tmp_path / f"{job.digest}.hlo.gz"
    program_file.with_name(f"{job.digest}.json").write_text(json.dumps(dataclasses.asdict(Compiled(1.0, 2.0, 3))))
    program_file.write_bytes(gzip.compress(b"HloModule"))
    with contextlib.closing(Compilers(tmp_path)) as compilers:
        assert compilers.compile(job) == (Compiled(1.0, 2.0, 3), "HloModule")
        program_file.write_bytes(program_file.read_bytes()[:-10])
        assert "KeyError: 'unknown'" in compilers.compile(job)[0].refused  # by the process that compiles


def test_other_stages_are_not_traced_to_compile_a_step(tmp_path):
    planner = SlicePlanner(
        MODEL, GenerationRequest().resolve(published_spec(MODEL).defaults), SLICE, dtype="bfloat16", cache=tmp_path,
        report=print,
    )  # fmt: skip
    mesh = make_mesh((1, 1, 1), heads=published_spec(MODEL).heads)
    [(name, (job, _))] = planner.jobs(mesh, only=STEP).items()
    assert (name, job.stages) == (STEP, ("denoise",))
    assert {name: job.stages for name, job in make_jobs().items() if job.stages != ("denoise",)} == {
        "text_encoder": ("encoder",), "decoder first": ("decoder",), "decoder later": ("decoder",),
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match=STEP):
        planner.jobs(mesh, ["denoise"], "denoise stop")


@pytest.mark.loads_libtpu
def test_process_that_compiles_traces_only_its_job_s_stages():
    pytest.importorskip("libtpu", reason="needs the TPU's compiler: pip install '.[tpu]'")
    shared = dataclasses.asdict(dataclasses.replace(make_jobs()[STEP], program="", depends_on={}))
    assert set(compiling._list_programs(json.dumps(shared))) == {KEYS, STEP}


@pytest.mark.loads_libtpu
def test_weights_that_fit_no_device_are_refused_without_the_compiler(tmp_path):
    pytest.importorskip("libtpu", reason="needs the TPU's compiler: pip install '.[tpu]'")
    job = make_jobs()[STEP]
    small = dataclasses.replace(job.slice, hardware=dataclasses.replace(job.slice.hardware, hbm_bytes=GIB))
    compiling._compile(dataclasses.replace(job, slice=small), tmp_path / "step")
    compiled = Compiled(**json.loads((tmp_path / "step.json").read_text()))
    assert compiled.refused.startswith("its weights alone take 2.6 GiB")
    assert compiled.over_bytes == compiled.weights_bytes - GIB and compiled.compile_cpu_s < 1


@pytest.mark.thorough
def test_program_that_another_model_has_too_is_compiled_once(tmp_path):
    job = make_jobs()[KEYS]
    other = dataclasses.replace(job, depends_on=job.depends_on | {"settings": "of another model"})
    with contextlib.closing(Compilers(tmp_path)) as compilers:
        (first, hlo), (second, same_hlo) = map(compilers.compile, (job, other))
    assert job.digest != other.digest and not first.refused and hlo
    assert (second, same_hlo) == (first, hlo)  # With the first one's seconds.


CHILD = """#!{python}
import gzip, json, os, signal, sys, time
for line in sys.stdin:
    job, result = json.loads(line)
    if job["program"] == "wait":
        time.sleep(60)
    if job["program"] == "fail":
        sys.exit("ValueError: " + job["dtype"])
    if job["program"].startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, job["program"]))
    print("KeyError: earlier", file=sys.stderr)
    with gzip.open(result + ".hlo.gz", "wt") as file:
        file.write("HloModule")
    with open(result + ".json", "w") as file:
        json.dump(dict(compile_s=os.getpid(), compile_cpu_s=0, weights_bytes=0), file)
    print(flush=True)
"""


@pytest.fixture
def make_job(tmp_path, monkeypatch):
    """Return a function that makes a job of what the compiling process should do; that process is a stand-in."""
    child, numbers = tmp_path / "child", itertools.count()
    child.write_text(CHILD.format(python=sys.executable))
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))

    def make(what: str) -> Job:
        number = str(next(numbers))
        return dataclasses.replace(make_jobs()[STEP], program=what, dtype=number, depends_on={"number": number})

    return make


def test_a_process_compiles_one_job_after_the_other_until_one_makes_it_crash(make_job, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_count_cores", lambda: 1)
    with contextlib.closing(Compilers(tmp_path)) as compilers:
        ids = [compilers.compile(make_job("succeed"))[0].compile_s for _ in range(2)]
        for _ in range(2):
            job = make_job("fail")
            assert f"ValueError: {job.dtype}" in compilers.compile(job)[0].refused
        ids += [compilers.compile(make_job("succeed"))[0].compile_s for _ in range(2)]
        assert ids[0] == ids[1] != ids[2] == ids[3]
        crash = compilers.compile(make_job("SIGSEGV"))[0].refused
        assert str(-signal.SIGSEGV) in crash and "earlier" not in crash  # What an earlier job wrote isn't its cause.
        with pytest.raises(Unavailable, match="SIGKILL"):
            compilers.compile(make_job("SIGKILL"))
        with pytest.raises(KeyboardInterrupt):
            compilers.compile(make_job("SIGINT"))
        assert compilers.compile(make_job("succeed"))[1] == "HloModule"
    with pytest.raises(Unavailable):
        compilers.compile(make_job("succeed"))


@pytest.mark.parametrize(("what", "error"), [("SIGKILL", Unavailable), ("SIGINT", KeyboardInterrupt)])
def test_a_plan_that_fails_compiles_nothing_more(what, error, make_job, tmp_path, monkeypatch):
    spec = published_spec(MODEL)
    request = GenerationRequest().resolve(spec.defaults)
    planner = SlicePlanner(MODEL, request, SLICE, dtype="bfloat16", cache=tmp_path, report=print)
    jobs = {**{f"program {i}": make_job("wait") for i in range(5)}, STEP: make_job(what)}
    monkeypatch.setattr(planner, "mesh", lambda axes: make_mesh((1, 1, 1), heads=spec.heads))
    monkeypatch.setattr(planner, "jobs", lambda *_: {name: (job, 1) for name, job in jobs.items()})
    start = time.monotonic()
    with pytest.raises(error):
        planner.plan((1, 1, 1))
    assert time.monotonic() - start < 50


def test_plans_of_several_meshes_are_compiled_by_the_same_processes(make_job, tmp_path, monkeypatch):
    spec = published_spec(MODEL)
    request = GenerationRequest().resolve(spec.defaults)
    monkeypatch.setattr(compiling, "_count_cores", lambda: 1)
    tasks = []
    for _ in range(2):
        planner = SlicePlanner(MODEL, request, SLICE, dtype="bfloat16", cache=tmp_path, report=print)
        jobs = {name: (make_job("succeed"), 1) for name in (KEYS, STEP)}
        monkeypatch.setattr(planner, "mesh", lambda axes: make_mesh((1, 1, 1), heads=spec.heads))
        monkeypatch.setattr(planner, "jobs", lambda *_, jobs=jobs: jobs)
        monkeypatch.setattr(planner, "_price", lambda *_: (prediction(1.0), prediction(1.0)))
        tasks.append(planner.task((1, 1, 1)))
    with contextlib.closing(Compilers(tmp_path)) as compilers:
        plans = make_plans(tasks, compilers)
    assert [len({program.compiled.compile_s for program in plan.programs}) for plan in plans] == [1, 1]
    assert plans[0].programs[0].compiled.compile_s == plans[1].programs[0].compiled.compile_s


def test_no_more_processes_compile_than_a_container_has_memory_for(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    counts = []
    for limit in (13 * GIB, GIB):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        counts.append(Compilers(tmp_path).count)
    assert counts == [2, 1]


def test_fields_compile_programs_again_only_where_these_take_other_arguments():
    """Of the fields, those that aren't a program's shapes reach it as numbers."""

    def list_changed(**fields: Any) -> set[str]:
        jobs, others = make_jobs(), make_jobs(**fields)
        return {name for name in jobs if jobs[name].digest != others[name].digest}

    assert list_changed(steps=20, shift=3.0, seed=1, prompt="a cat", guidance_scale=4.0) == set()
    assert list_changed(guidance_scale=1.0) == {KEYS, STEP}
    assert list_changed(solver="euler") == {STEP}  # It has no history.


def test_a_stage_takes_its_experts_share_and_what_is_refused_is_left_out(plan):
    keys = ProgramPlan(KEYS, 2, Compiled(5.0, 9.0, 2 * GIB, 3 * GIB), prediction(0.0), prediction(0.0))
    denoise = StagePlan("denoise", (keys, *plan.stages[0].programs), int(1e17), host_s=1.0)
    needs = dataclasses.replace(plan, stages=(denoise, plan.stages[1])).needs(
        [Expert("high", 0, 20, True), Expert("low", 20, 50, True)]
    )
    assert list(needs) == ["high", "low"]  # the decoder can't be compiled
    seconds = 50 * 2.0 + 2 * 1.0 + 1.0  # of the host
    assert [needed.seconds for needed in needs.values()] == pytest.approx([seconds * 20 / 50, seconds * 30 / 50])
    for needed in needs.values():
        # Code stays on the device, as weights do.
        assert needed_bytes(add_memory([needed])) == 2 * GIB + GIB // 2 + 3 * GIB
    # Together they have two experts' weights, and run the same programs.
    assert needed_bytes(add_memory(needs.values())) == 2 * 2 * GIB + GIB // 2 + 3 * GIB


def test_two_stages_share_a_transformer_and_each_takes_its_own_programs_seconds(plan):
    """Of LTX-2: the second stage's steps have four times the tokens of the first one's."""

    def program(name, calls, seconds, weights):
        paths = [dataclasses.replace(prediction(0.0), total=Times(seconds, seconds))] * 2
        return ProgramPlan(name, calls, Compiled(5.0, 9.0, weights * GIB, GIB, code_bytes=GIB // 4), *paths)

    programs = (
        *(program(KEYS, 2, 0.0, 4), program(FIRST_STEP, 8, 1.0, 4)),
        *(program(STEP, 3, 4.0, 4), program(ENLARGE, 1, 0.5, 1)),
    )
    stage = StagePlan("denoise", programs, int(1e17))
    two_stages = dataclasses.replace(plan, stages=(stage,), same_weights={"refine": "denoise"})
    experts = [Expert("denoise", 0, 8, False), Expert("refine", 8, 11, False, enlarges=True)]
    needs = two_stages.needs(experts)
    assert [needed.seconds for needed in needs.values()] == pytest.approx([8 * 1.0, 3 * 4.0 + 0.5])
    assert needed_bytes(add_memory([needs["denoise"]])) == (4 + 2 * 0.25 + 1) * GIB
    assert needed_bytes(add_memory([needs["refine"]])) == (4 + 1 + 3 * 0.25 + 1) * GIB
    assert needed_bytes(add_memory(needs.values())) == (4 + 1 + 4 * 0.25 + 1) * GIB
    # Of a pool that has one of the stages, the plan has this one's programs alone.
    for expert, own in zip(experts, (programs[:2], (programs[0], *programs[2:])), strict=True):
        pool = dataclasses.replace(two_stages, stages=(dataclasses.replace(stage, programs=own),))
        assert pool.needs([expert]) == {expert.stage: needs[expert.stage]}


def test_a_pool_of_the_first_of_two_stages_runs_the_smaller_step():
    model = published_model("ltx-2.3-distilled")
    request = GenerationRequest(height=64, width=128, frames=9).resolve(model.spec.defaults)
    runtime = AbstractRuntime(model, make_mesh((1, 1, 1), heads=model.spec.heads), "bfloat16")
    pools = [set(stage_programs(runtime, request, [stage])) for stage in ("denoise", "refine")]
    assert pools == [{KEYS, FIRST_STEP}, {KEYS, ENLARGE, STEP}]


def test_an_expert_without_guidance_runs_programs_of_its_own(plan):
    model = published_model("wan2.2-t2v-a14b")
    request = GenerationRequest(height=64, width=64, frames=5, guidance_scale_2=1, cache="magcache")
    request = request.resolve(model.spec.defaults)
    runtime = AbstractRuntime(model, make_mesh((1, 1, 1), heads=model.spec.heads), "bfloat16")
    pools = {stage: stage_programs(runtime, request, [stage]) for stage in model.spec.denoise_stages}
    guided, unguided = ({name: calls for name, (_, _, calls) in programs.items()} for programs in pools.values())
    assert (guided.keys(), unguided.keys()) == ({KEYS, STEP, SKIPPED}, {UNGUIDED_KEYS, UNGUIDED_STEP, UNGUIDED_SKIPPED})
    experts = model.spec.experts(request)
    assert guided[STEP] + guided[SKIPPED] == experts[0].stop
    assert unguided[UNGUIDED_STEP] + unguided[UNGUIDED_SKIPPED] == request.steps - experts[0].stop
    path = dataclasses.replace(prediction(0.0), total=Times(1.0, 1.0))
    calls = guided | unguided
    programs = tuple(ProgramPlan(name, n, plan.programs[0].compiled, path, path) for name, n in calls.items())
    needs = dataclasses.replace(plan, stages=(StagePlan("denoise", programs, int(1e17)),)).needs(experts)
    assert [needed.seconds for needed in needs.values()] == [sum(guided.values()), sum(unguided.values())]


def test_chunks_of_a_video_run_three_steps_and_two_enlargings_and_are_decoded_alone(plan):
    """Of Helios: the first of two chunks has twice as many steps, each has nine latent frames, as has a still image."""
    model = published_model("helios-distilled")
    request = GenerationRequest(height=64, width=64, frames=66).resolve(model.spec.defaults)
    runtime = AbstractRuntime(model, make_mesh((1, 1, 1), heads=model.spec.heads), "bfloat16")
    calls = {name: calls for name, (_, _, calls) in stage_programs(runtime, request).items()}
    steps = {SMALLEST_STEP: 6, FIRST_STEP: 6, STEP: 6, FIRST_ENLARGE: 2, ENLARGE: 2}
    vae = {"vae_encoder first": 1, "vae_encoder later": 8, "decoder first": 2, "decoder later": 16}
    assert calls == {"text_encoder": 1, KEYS: 6} | steps | vae
    # All stretches of steps are one stage's, which takes the seconds of all programs.
    path = dataclasses.replace(prediction(0.0), total=Times(1.0, 1.0))
    programs = tuple(ProgramPlan(name, n, plan.programs[0].compiled, path, path) for name, n in steps.items())
    stage = StagePlan("denoise", programs, int(1e17))
    [needed] = dataclasses.replace(plan, stages=(stage,)).needs(model.spec.experts(request)).values()
    assert needed.seconds == pytest.approx(sum(steps.values()))


def test_a_cached_step_is_compiled_for_the_schedule_of_its_curve(tmp_path):
    spec = published_spec("wan2.2-i2v-a14b")
    request = spec.plan(GenerationRequest(preset="original", cache="magcache"), image=True).request
    planner = SlicePlanner(spec.name, request, SLICE, dtype="bfloat16", cache=tmp_path, report=print)
    job, _ = planner.jobs(make_mesh((1, 1, 1), heads=spec.heads))[STEP]
    compiled = ResolvedRequest(**json.loads(json.dumps(job.request)))  # as the process that compiles it does
    assert (spec.plan_skips(compiled) == spec.plan_skips(request)).all()


@pytest.mark.thorough
def test_a_plan_with_keyframes_has_the_programs_that_read_them_and_those_of_the_sound(tmp_path):
    model = published_model("minimax-h3")
    request = GenerationRequest().resolve(model.spec.defaults)
    runtime = AbstractRuntime(model, make_mesh((1, 1, 1), heads=model.spec.heads), "bfloat16")
    rows, sizes, digests, operations = [], [], set(), []
    for images in (0, 2):
        planner = SlicePlanner(
            "minimax-h3", request, SLICE, dtype="bfloat16", cache=tmp_path, report=print, images=images
        )
        programs = stage_programs(runtime, request, images=images)
        calls = {name: calls for name, (_, _, calls) in programs.items()}
        assert calls.get("vae_encoder first", 0) == images
        assert calls["text_encoder"] == calls["audio_decoder"] == calls["decoder first"] == 1
        _, (weights, ids, *_), _ = programs["text_encoder"]
        rows.append(ids.shape[1])
        sizes.append(sum(weight.size for weight in jax.tree.leaves(weights)))
        digests.add(planner.jobs(runtime.mesh)["text_encoder"][0].digest)
        [encoder] = planner._stages([ProgramPlan("text_encoder", 1, Compiled(0.0, 0.0, 0), None, None)])
        operations.append(encoder.flops)
    # The tower reads 1008 tokens of each keyframe, which stand between two marks.
    assert rows[1] - rows[0] == 2 * 1010 and sizes[1] - sizes[0] == pytest.approx(0.58e9, rel=0.05)
    assert len(digests) == 2 and operations[1] > 2 * operations[0]
    with pytest.raises(InvalidRequest, match=r"images is 3.* 0 .*1 .*2"):
        SlicePlanner("minimax-h3", request, SLICE, dtype="bfloat16", cache=tmp_path, report=print, images=3)
