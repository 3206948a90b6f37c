"""MLPerf's LoadGen asks a small model for videos; what VBench would judge is there, and so is its verdict."""

import hashlib
import json

import numpy as np
import pytest
import torch

from scripts import mlperf
from wan_tpu.cli import run
from wan_tpu.media.reading import read_frames

PROMPTS = ["a cat", "a dog / a bird", "rain"]
SMALL = [f"--change={field}={value}" for field, value in {"height": 64, "width": 96, "frames": 5, "steps": 2}.items()]


@pytest.fixture
def arguments(checkpoint, tmp_path):
    """Arguments of a test with three prompts on a small model."""
    prompts = tmp_path / "samples.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n\n")
    folder = str(checkpoint("wan2.2-t2v-a14b"))
    command = ["--model_id", folder, "--prompts", prompts, "--output", tmp_path / "out", "--dtype", "float32", *SMALL]
    return ["run", *map(str, command)]


@pytest.fixture
def noise(tmp_path):
    """The latents that MLPerf has every video made from."""
    drawn = torch.randn(1, 16, 2, 8, 12, generator=torch.Generator().manual_seed(1))
    torch.save(drawn, tmp_path / "fixed_latent.pt")
    return drawn.numpy()


@pytest.mark.thorough
def test_loadgen_asks_for_every_prompt_once_from_the_same_latents(arguments, noise, pipeline, tmp_path, capsys):
    more = ["--trial", "3", "--accuracy", "--fixed_latent", str(tmp_path / "fixed_latent.pt")]
    assert run(mlperf.main, [*arguments, *more]) == 0
    videos = tmp_path / "out" / "videos"
    names = {f"{prompt.replace('/', '-')}-0.mp4" for prompt in PROMPTS}
    assert {path.name for path in videos.iterdir()} == names
    log = json.loads((tmp_path / "out" / "mlperf_log_accuracy.json").read_text())
    hashes = {each["qsl_idx"]: bytes.fromhex(each["data"]) for each in log}
    for index, prompt in enumerate(PROMPTS):
        file = videos / f"{prompt.replace('/', '-')}-0.mp4"
        assert hashes[index] == hashlib.sha256(file.read_bytes()).digest()
    request = mlperf.requests_of(PROMPTS[-1:], {"height": 64, "width": 96, "frames": 5, "steps": 2})[0]
    assert (request.guidance_scale, request.guidance_scale_2, request.seed, request.fps) == (4.0, 3.0, 42, 25)
    alone = pipeline("wan2.2-t2v-a14b").generate(request, noise=noise).save(tmp_path / "alone.mp4")
    np.testing.assert_array_equal(*([np.asarray(frame) for frame in read_frames(path, 5)] for path in (file, alone)))
    assert "no result" in capsys.readouterr().out


@pytest.mark.thorough  # LoadGen spins meanwhile
@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("Offline", "Samples per second"),
        pytest.param("SingleStream", "90.0th percentile latency", marks=pytest.mark.thorough),
    ],
)
def test_it_is_timed(scenario, message, arguments, capsys):
    assert run(mlperf.main, [*arguments, "--trial", "2", "--scenario", scenario]) == 0
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--pools"], "or --pools"),
        (["--prompts", "/nowhere"], "/nowhere can't be read"),
        (["--change", "height=63"], "height is 63"),
        (["--change", "size=3"], "--change size is no field of a request"),
        (["--prompts", "/dev/null"], "/dev/null has none"),
    ],
)
def test_what_cannot_be_asked_is_said(arguments, more, message, capsys):
    assert run(mlperf.main, [*arguments, *more]) == 2
    assert message in capsys.readouterr().err


EVALUATE = """
import argparse, json
parser = argparse.ArgumentParser()
for name in ("videos_path", "output_path", "load_ckpt_from_local"):
    parser.add_argument("--" + name)
parser.add_argument("--dimension", nargs="+")
args = parser.parse_args()
import pathlib
pathlib.Path(args.output_path).mkdir(exist_ok=True)
scores = {name: [SCORE, []] for name in args.dimension}
pathlib.Path(args.output_path, "results_1_eval_results.json").write_text(json.dumps(scores))
"""  # in the form of VBench's own, whose models have gigabytes


@pytest.mark.thorough
@pytest.mark.parametrize(("score", "code"), [(0.70, 0), (0.69, 1)])
def test_the_verdict_is_that_of_the_rules(score, code, tmp_path, capsys):
    (tmp_path / "evaluate.py").write_text(EVALUATE.replace("SCORE", str(score)))
    command = ["score", "--videos", str(tmp_path / "videos"), "--vbench", str(tmp_path)]
    assert run(mlperf.main, command) == 2
    assert "or no folder" in capsys.readouterr().err
    (tmp_path / "videos").mkdir()
    assert run(mlperf.main, command) == code
    assert f"{100 * score:7.2f}, {'not ' * code}enough: at least 69.7752" in capsys.readouterr().out
