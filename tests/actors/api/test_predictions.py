"""What operators see predicted and measured of a service's stages."""

import io
import subprocess
import sys

import pytest
from PIL import Image

from actors.api.core.service import Service
from actors.api.http.app import make_app
from actors.api.predictions import predict
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.planning.slice_description import describe_slice
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec
from tests.actors.api.serving import create, listening, open_client, wait_for_end, working
from tests.actors.small_spec import SPEC
from tests.waiting import wait_for
from tests.wan_tpu.plans import prediction
from wan_tpu import GenerationRequest
from wan_tpu.aot.names import STEP
from wan_tpu.families import published_spec
from wan_tpu.pricing import question, shipped_plans
from wan_tpu.pricing.causes import list_causes
from wan_tpu.pricing.compiling import Compiled
from wan_tpu.pricing.plan import ProgramPlan, SlicePlan, StagePlan
from wan_tpu.runtime.mesh import MeshShape

ONE_POOL = "pools:\n  all:\n    stages: [encoder, denoise_high, denoise_low, decoder]\n    slice: v6e-8\n"
USUAL = "96x64, 9 frames, 4 steps"


def make_spec(layout=ONE_POOL, model=SPEC, **settings):
    return PipelineSpec(
        Layout.parse(layout, "layout"), PipelineSettings("model", "snapshots", **settings), model, lasting=True
    )


def read_stages(http):
    return http.get("/v1/admin/state").raise_for_status().json()["stages"]


def add_plan():
    """Ship a plan of the small videos: 1.5 s for their text, 2 s a step, and half a second of the host in all steps."""
    request = SPEC.plan(GenerationRequest()).request
    compiled = Compiled(1.0, 1.0, 0, 0)
    stages = [
        StagePlan("encoder", (ProgramPlan("text_encoder", 1, compiled, prediction(0.5), prediction(0.5)),), 1),
        StagePlan("denoise", (ProgramPlan(STEP, 4, compiled, prediction(1.0), prediction(1.0)),), 1, host_s=0.5),
    ]
    described = describe_slice(SliceSpec("v6e-8"))
    plan = SlicePlan(SPEC.name, described, MeshShape(2, 1, 4), request, 54, tuple(stages), experts=2)
    shipped_plans.add(plan, "bfloat16", "2026-12-01")


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(question, "FOLDER", tmp_path / "shipped")
    add_plan()


def test_state_has_predicted_beside_measured_seconds(settings, engine, shipped):
    app = make_app(Service(settings, SPEC), pools=predict(make_spec()))
    with listening(app) as address, working(settings, engine), open_client(address) as http:
        fresh = read_stages(http)
        for frames in (9, 9, 13):
            wait_for_end(http, create(http, num_frames=frames).json()["id"])
        ended = wait_for(lambda: len(rows := [row for row in read_stages(http) if row["jobs"]]) == 2 * 4 and rows)
    assert [(row["stage"], row["predicted_seconds"], row["measured_seconds"], row["jobs"]) for row in fresh] == [
        ("encoder", 1.5, None, 0),
        ("denoise_high", 4.25, None, 0),
        ("denoise_low", 4.25, None, 0),
    ]
    usual, longer = ended[:4], ended[4:]
    assert {(row["pool"], row["slice"], row["video"]) for row in usual} == {("all", "v6e-8", USUAL)}
    # The engine says a quarter of a second for each of two steps, and for the encoder and the decoder.
    assert [(row["stage"], row["measured_seconds"], row["ratio"], row["jobs"]) for row in usual] == [
        ("encoder", 0.25, 0.167, 2),
        ("denoise_high", 0.5, 0.118, 2),
        ("denoise_low", 0.5, 0.118, 2),
        ("decoder", 0.25, None, 2),
    ]
    assert [bool(row["note"]) for row in usual] == [False, False, False, True]
    assert {(row["predicted_seconds"], row["ratio"], row["jobs"]) for row in longer} == {(None, None, 1)}
    assert all("13 frames" in row["note"] and "v6e-8" in row["note"] for row in longer)


def test_other_inputs_are_measured_but_not_predicted(settings, engine, shipped):
    picture = io.BytesIO()
    Image.new("RGB", (96, 64)).save(picture, "PNG")
    app = make_app(Service(settings, SPEC), pools=predict(make_spec()))
    with listening(app) as address, working(settings, engine), open_client(address) as http:
        job = http.post(
            "/v1/videos",
            data={"prompt": "a cat", "num_frames": "9"},
            files={"input_reference": ("a.png", picture.getvalue(), "image/png")},
        ).json()
        wait_for_end(http, job["id"])
        measured = wait_for(lambda: [row for row in read_stages(http) if row["measured_seconds"]])
    assert [row["stage"] for row in measured] == ["encoder", "denoise_high", "denoise_low", "decoder"]
    assert all(row["predicted_seconds"] is None and row["note"] for row in measured)


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(f"{ONE_POOL}emulate: {{devices_per_host: 1}}\n"),
        make_spec(chips="simulated"),
        make_spec(kernels="reference"),
        make_spec(dtype="int8"),
        make_spec(ONE_POOL.replace("v6e-8", "v6e-4")),
        make_spec(f"{ONE_POOL}    mesh: {{dp: 1}}\n"),
    ],
    ids=["emulated", "simulated", "no kernels", "8 bits", "another slice", "another mesh"],
)
def test_nothing_is_predicted_for_other_programs_or_chips(spec, shipped):
    [pool] = predict(spec)
    assert pool.predictions == ()
    assert pool.conditions


def test_a_plan_that_can_not_be_read_predicts_nothing(shipped):
    question.locate_plans(SPEC.name).write_text("{}")
    [pool] = predict(make_spec())
    assert pool.predictions == () and pool.conditions


def test_shipped_seconds_of_all_stages_are_those_of_the_plan():
    model = published_spec("wan2.2-i2v-a14b")
    [pool] = predict(make_spec(model=model))
    [predicted] = pool.predictions
    [shipped] = [plan for plan in shipped_plans.read(model.name) if plan.question.slice == "v6e-8"]
    request = model.plan(GenerationRequest(), image=True).request
    causes = list_causes(shipped.answer(model.name, describe_slice(SliceSpec("v6e-8")), request))
    assert predicted.seconds.keys() == set(pool.stages)
    total = sum(cause.seconds for cause in causes)  # Each of its terms is rounded to five digits in the file.
    assert sum(predicted.seconds.values()) == pytest.approx(total, rel=1e-4)


def test_an_ingress_compares_without_jax():
    code = "import sys, actors.api.http.app, actors.api.processes; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
