"""What `wan-tpu plan` says, and refuses. What is compiled is in a process of its own, which loads libtpu."""

import json
import subprocess
import sys

import pytest

from actors.cli import main
from tests.conftest import ROOT
from wan_tpu.versions import installed_version

pytest.importorskip("libtpu", reason="needs libtpu: pip install '.[tpu]'")

REFUSED = [
    (["--model", "wan2.2-ti2v-5b", "--size", "1280x720"], "multiple of 32, nearest 704"),
    (
        ["--preset", "diffusers", "--cache", "magcache"],
        "only for shift 5 and solver unipc, and the request has shift 3 and solver unipc; give preset original",
    ),
    (["--plot", "step.foo"], "allowed: .png"),
    (["--slice", "v5e-8", "--videos_a_day", "9"], "there is no price for v5e, only for v6e, v5p, v7x"),
    (["--layout", "one-expert-v6e"], "the model has no stage denoise; it has encoder, denoise_high"),
    (["--model", "ltx-2", "--layout", "fasth3-v6e", "--preset", "two-stages"], "no refine, which --preset two-stages"),
    (["--videos_a_day", "9", "--within", "soon"], "'soon' isn't a duration; write 90s, 10m or 2h"),
    (["--videos_a_day", "9", "--busy", "1"], "--busy is 1; it must lie between 0 and 1"),
]


# Of a step: most seconds, and GiB a device. v7x's tiles of attention compile in half the time that v6e's take, which
# tests/kernels/test_bundles.py has.
SMALL_STEP = 0.0062, 2.8  # 1.3B on v7x-1, 17 frames of 256x256
LARGE_STEP = {"0.0.50.1": (2.16, 9.8), "0.0.42.1": (2.40, 10.1)}  # A14B on v7x-4, 81 of 720x1280: by libtpu


ASK = """
import contextlib, io, json, sys
from actors.cli import main
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", *argv])
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def answers(*requests):
    """What `wan-tpu plan` says: (exit code, stdout, stderr) of each. In one process: it takes seconds to import."""
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(requests), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def step_of(model, kind, size, frames, folder):
    """The arguments for a step."""
    more = ["--program", "denoise step", "--compiled", str(folder)]
    return ["--model", model, "--slice", kind, "--size", size, "--frames", str(frames), *more]


@pytest.fixture(scope="module")
def plan_answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    step = step_of("wan2.1-t2v-1.3b", "v7x-1", "256x256", 17, folder)
    on_v6e = step_of("wan2.1-t2v-1.3b", "v6e-4", "256x256", 17, folder)
    report = folder / "doctor.json"
    measured = {"clock_hz": 1.1e9, "grid_step_s": 0.0}
    devices = {"kind": "TPU7x", "chip": "v7x", "rehearsal": False}
    report.write_text(
        json.dumps({"wan_tpu_doctor": 1, "devices": devices, "calibration": measured, "date": "2026-12-01"})
    )
    calibrated = ["--calibration", str(report)]
    return answers(step, [*step, "--json"], [*step, "--json", *calibrated], [*on_v6e, *calibrated])


@pytest.mark.thorough
def test_plan_says_what_fits(plan_answers):
    """On the smallest model at a small size; the second time nothing is compiled."""
    code, out, _ = plan_answers[0]
    assert code == 0
    assert "wan2.1-t2v-1.3b, 256x256, 17 frames (1280 tokens)" in out
    assert "denoise step" in out
    assert "yes, " in out
    assert ["compiling denoise step" in err for _, _, err in plan_answers[:2]] == [True, False]


@pytest.mark.thorough
def test_plan_is_priced_with_what_a_doctor_measured_and_says_so(plan_answers):
    """A step is compute-bound: at half the clock it takes nearly twice as long. Nothing is compiled again."""
    before, after = (json.loads(plan_answers[number][1])["plans"][0] for number in (1, -2))
    assert "compiling" not in plan_answers[-2][2]
    assert "doctor.json, v7x, 2026-12-01):\n  clock: 1.1 GHz in place of 2.2\n" in after["slice"]["calibrated"]
    seconds = [plan["stages"][0]["programs"][0]["optimistic"]["total"]["estimate"] for plan in (before, after)]
    assert 1.8 < seconds[1] / seconds[0] <= 2.001
    code, _, err = plan_answers[-1]
    assert code == 2 and "compiling" not in err
    assert "measured on v7x, and v6e-4 has v6e" in err


@pytest.mark.thorough
def test_a_small_model_s_step_takes_what_it_took(plan_answers):
    check_step(plan_answers[1], *SMALL_STEP)


@pytest.mark.thorough
def test_a_large_model_s_step_takes_what_the_docs_say(tmp_path):
    [answer] = answers([*step_of("wan2.2-i2v-a14b", "v7x-4", "1280x720", 81, tmp_path), "--json"])
    check_step(answer, *LARGE_STEP[installed_version("libtpu")])


def check_step(answer, seconds, gib):
    code, out, _ = answer
    assert code == 0
    [plan] = json.loads(out)["plans"]
    [step] = [program for stage in plan["stages"] for program in stage["programs"]]
    assert 0.95 * seconds < step["optimistic"]["total"]["estimate"] <= seconds
    assert 0.95 * gib < plan["largest_gib"] <= gib


def test_plan_refuses_what_it_does_not_know(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for argv, error in REFUSED:
        assert main(["plan", *([] if "--model" in argv else ["--model", "wan2.2-i2v-a14b"]), *argv]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and error in line
