"""Plans that are shipped as data: they say what compiling anew says, for what is asked for by default."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.planning.slice_description import describe_slice
from cluster.slice_spec import SliceSpec
from scripts import price_models
from tests.wan_tpu.plans import MODEL, SLICE, make_plan
from wan_tpu.aot.names import DENOISE_PROGRAMS
from wan_tpu.errors import OutputError
from wan_tpu.families import list_published, published_spec
from wan_tpu.pricing import shipped_plans
from wan_tpu.pricing.plan_text import describe, to_json
from wan_tpu.pricing.planner import SlicePlanner
from wan_tpu.pricing.question import Question
from wan_tpu.pricing.shipped_plans import ShippedPlan
from wan_tpu.request import GenerationRequest, ResolvedRequest
from wan_tpu_kernels.catalogue import ATTENTION

ANY_MESH = None, None, None
SHIPPED = [(model, shipped) for model in list_published() for shipped in shipped_plans.read(model)]


def plan_request(model: str, **fields: int) -> ResolvedRequest:
    spec = published_spec(model)
    image = "t2v" not in spec.tasks
    return spec.plan(GenerationRequest(**fields), image=image, last=spec.last_images == "required").request


def test_plan_survives_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wan_tpu.pricing.question.FOLDER", tmp_path)
    plan = make_plan()
    for date in ("2026-11-29", "2026-11-30"):  # The later one replaces the earlier one.
        shipped_plans.add(plan, "bfloat16", date)
    question = Question.of(SLICE.name, "bfloat16", plan.request)
    found = shipped_plans.find(MODEL, question, ANY_MESH)
    assert found is not None
    assert len((tmp_path / f"{MODEL}.jsonl").read_text().splitlines()) == 1
    assert found.made["date"] == "2026-11-30"
    assert found.has_these_kernels
    assert not dataclasses.replace(found, made=found.made | {"kernels": "others"}).has_these_kernels
    again = found.answer(MODEL, SLICE, plan.request)
    assert to_json(again)["made"] == found.made
    assert to_json(plan)["made"] is None
    assert describe(again) == describe(plan)
    assert again.parts == plan.parts
    assert shipped_plans.find(MODEL, question, plan.mesh) == found
    assert shipped_plans.find(MODEL, question, (1, None, None)) is None


@pytest.mark.parametrize(
    ("slice_name", "dtype", "fields"),
    [("v6e-8", "bfloat16", {}), ("v6e-4", "int8", {}), ("v6e-4", "bfloat16", {"frames": 77})],
)
def test_another_question_has_no_answer(
    slice_name: str, dtype: str, fields: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wan_tpu.pricing.question.FOLDER", tmp_path)
    shipped_plans.add(make_plan(), "bfloat16", "2026-11-30")
    other = Question.of(slice_name, dtype, plan_request(MODEL, **fields))
    assert shipped_plans.find(MODEL, other, ANY_MESH) is None


def test_seed_and_prompt_ask_the_same() -> None:
    plain, seeded = (plan_request(MODEL, **fields) for fields in ({}, {"seed": 7}))
    assert Question.of("v6e-4", "bfloat16", plain) == Question.of("v6e-4", "bfloat16", seeded)


def test_shipped_plans_answer_today_s_defaults() -> None:
    stale = [
        (model, shipped.question.slice)
        for model, shipped in SHIPPED
        if shipped.question != Question.of(shipped.question.slice, shipped.question.dtype, plan_request(model))
    ]
    assert not stale, "scripts/price_models.py prices them anew"


def test_command_answers_without_a_compiler_in_three_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wan_tpu.pricing.question.FOLDER", tmp_path)
    shipped_plans.add(dataclasses.replace(make_plan(), request=plan_request(MODEL)), "bfloat16", "2026-11-30")
    measured = (
        "import pathlib, sys, time; sys.modules['libtpu'] = None; from actors.cli import main; "
        "from wan_tpu.pricing import question; "
        f"question.FOLDER = pathlib.Path({str(tmp_path)!r}); "
        f"main(['plan', '--model', {MODEL!r}, '--slice', {SLICE.name!r}]); print(time.process_time())"
    )
    printed = subprocess.run([sys.executable, "-c", measured], capture_output=True, text=True, check=True)
    assert "exposed transfers" in printed.stdout
    assert float(printed.stdout.splitlines()[-1]) < 3


def test_write_that_fails_leaves_the_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wan_tpu.pricing.question.FOLDER", tmp_path)
    shipped_plans.add(make_plan(), "bfloat16", "2026-11-30")
    file = tmp_path / f"{MODEL}.jsonl"
    before = file.read_bytes()
    (tmp_path / f".{file.name}.partial").symlink_to("/dev/full")
    with pytest.raises(OutputError):
        shipped_plans.add(make_plan(), "int8", "2026-12-01")
    assert file.read_bytes() == before


COMPILER = """#!{python}
import json, os, signal, sys
for line in sys.stdin:
    job, result = json.loads(line)
    if job["slice"]["name"] == "v6e-1":
        os.kill(os.getpid(), signal.SIGKILL)
    if job["slice"]["name"] == "v6e-4":
        sys.exit("ValueError: the compiler has a defect")
    with open(result + ".json", "w") as file:
        json.dump(dict(compile_s=1, compile_cpu_s=1, weights_bytes=2, over_bytes=1, refused="needs 1 byte more"), file)
    print(flush=True)
"""


@pytest.mark.thorough
@pytest.mark.loads_libtpu
def test_failures_are_not_shipped_and_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("libtpu", reason="needs the TPU's compiler: pip install '.[tpu]'")
    compiler, model = tmp_path / "compiler", "ltx-2.3-distilled"
    compiler.write_text(COMPILER.format(python=sys.executable))
    compiler.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(compiler))
    monkeypatch.setattr("wan_tpu.pricing.question.FOLDER", tmp_path)
    slices = [f"--slice=v6e-{chips}" for chips in (1, 4, 8)]
    monkeypatch.setattr(sys, "argv", ["price_models.py", f"--model={model}", f"--compiled={tmp_path}", *slices])
    assert price_models.main() == 1
    assert [shipped.question.slice for shipped in shipped_plans.read(model)] == ["v6e-8"]
    printed = capsys.readouterr().out
    assert "SIGKILL" in printed and "a defect" in printed


def cheapest_programs() -> list[Any]:
    """Return the cheapest program to compile of each of three models, and one with our attention, a step if possible.

    That one takes a minute of a core at most, in `make thorough`.
    """
    cheapest: dict[str, tuple[float, ShippedPlan, str]] = {}
    attention: list[tuple[bool, float, str, ShippedPlan, str]] = []
    for model, shipped in SHIPPED:
        for program in (program for stage in shipped.fields["stages"] for program in stage["programs"]):
            if program["compiled"]["refused"]:
                continue
            cpu_s, name = program["compiled"]["compile_cpu_s"], program["name"]
            candidate = cpu_s, shipped, name
            cheapest[model] = min(cheapest.get(model, candidate), candidate, key=lambda entry: entry[0])
            if program["optimistic"]["by_category"][ATTENTION]["estimate"] > 0 and cpu_s <= 60:
                attention.append((name not in DENOISE_PROGRAMS, cpu_s, model, shipped, name))
    models = sorted(cheapest, key=lambda model: cheapest[model][0])[:3]
    chosen = [(model, *cheapest[model][1:]) for model in models]
    with_attention = [entry[2:] for entry in sorted(attention, key=lambda entry: entry[:2])[:1]]
    return [*chosen, *(pytest.param(*entry, marks=pytest.mark.thorough) for entry in with_attention)]


@pytest.mark.long
@pytest.mark.parametrize(("model", "shipped", "name"), cheapest_programs())
def test_compiling_anew_gives_the_same_seconds(model: str, shipped: ShippedPlan, name: str, tmp_path: Path) -> None:
    request, described = plan_request(model), describe_slice(SliceSpec(shipped.question.slice))
    planner = SlicePlanner(model, request, described, dtype="bfloat16", cache=tmp_path, report=print)
    (anew,) = planner.plan(shipped.fields["mesh"], only=name).programs
    (before,) = [p for p in shipped.answer(model, described, request).programs if p.name == name]
    for path in ("optimistic", "online"):
        assert getattr(anew, path).total.estimate == pytest.approx(getattr(before, path).total.estimate, rel=0.01)
    assert anew.compiled.total_bytes == pytest.approx(before.compiled.total_bytes, rel=0.01)
