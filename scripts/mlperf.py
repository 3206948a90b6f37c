r"""MLPerf's text-to-video benchmark through this project: its LoadGen asks, a pipeline answers, VBench judges.

    pip install '.[mlperf]'
    python scripts/mlperf.py run --model Wan-AI/Wan2.2-T2V-A14B-Diffusers --prompts samples.txt --output out \\
        --scenario Offline
    python scripts/mlperf.py run ... --accuracy             # all prompts once, as files of their names
    python scripts/mlperf.py score --videos out/videos --vbench VBENCH_CHECKOUT

The setting is that of github.com/mlcommons/inference, text_to_video (closed division): Wan 2.2 T2V A14B, 1280x720, 81
frames, 20 steps of UniPC, guidance 4 and 3, seed 42. Its prompts (samples.txt, 248 of VBench's) and its latents to
begin with (fixed_latent.pt) are files of that repository. What LoadGen wants of a scenario (at least 10 minutes and 248
videos offline) is in LoadGen itself, by the model's name; with `--trial N` it asks for N prompts once, for no result.

With `--pools` videos are made by the pools of a running pipeline (`wan-tpu pipeline up`), so many at once as it takes;
else in this process, one after the other. VBench needs a checkout and its own packages, and a GPU to be quick.
"""

import argparse
import asyncio
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import mlperf_loadgen as loadgen
import numpy as np

from actors.commands.arguments import add_cluster_arguments
from actors.commands.connection import find_gcs_address
from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.cli import run as run_command
from wan_tpu.commands.parser import Parser, add_model, add_precision
from wan_tpu.errors import InvalidInput

MODEL = "wan-2.2-t2v-a14b"  # LoadGen's name for it
SCENARIOS = {"Offline": loadgen.TestScenario.Offline, "SingleStream": loadgen.TestScenario.SingleStream}
# inference_config.yaml of mlcommons/inference, text_to_video/wan2.2-t2v-14b (e93f59d)
SETTINGS: dict[str, Any] = {
    "height": 720, "width": 1280, "frames": 81, "steps": 20, "seed": 42, "guidance_scale": 4.0, "guidance_scale_2": 3.0,
    "negative_prompt": "vivid colors, overexposed, static, blurry details, subtitles, style,\n"
    "work of art, painting, picture, still, overall grayish, worst quality,\n"
    "low quality, JPEG artifacts, ugly, deformed, extra fingers, poorly drawn hands,\n"
    "poorly drawn face, deformed, disfigured, deformed limbs, fused fingers,\n"
    "static image, cluttered background, three legs, many people in the background,\n"
    "walking backwards",
}  # fmt: skip
FPS = 25  # of the files: the reference writes them so, and VBench's measure of motion depends on it
DIMENSIONS = ("subject_consistency", "dynamic_degree", "motion_smoothness", "appearance_style", "scene",
              "background_consistency")  # fmt: skip
AT_LEAST = 69.7752  # per cent: 99 % of the reference's 70.48

Generate = Callable[[int], bytes]  # the number of a prompt -> an mp4


def main(argv: Sequence[str]) -> int:
    """Run what the first argument names; return the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_actions(dest="action", required=True, parser_class=Parser)
    _run_arguments(actions.add_parser("run", help="one LoadGen test"))
    score = actions.add_parser("score", help="judge the videos of an accuracy run")
    score.add_argument("--videos", type=Path, required=True)
    score.add_argument("--vbench", type=Path, required=True, help="checkout of github.com/Vchitect/VBench")
    score.add_argument("--processes", type=int, default=1, help="of torch.distributed, one a GPU; default %(default)s")
    args = parser.parse_args(argv)
    return test(args) if args.action == "run" else judge(args.videos, args.vbench, args.processes)


def _run_arguments(parser: Parser) -> None:
    add_model(parser, help="as wan-tpu generate; not with --pools")
    parser.add_argument("--prompts", type=Path, required=True, help="a prompt a line")
    parser.add_argument("--output", type=Path, required=True, help="LoadGen's logs, and videos/")
    parser.add_argument("--scenario", choices=SCENARIOS, default="Offline", help="default %(default)s")
    parser.add_argument("--accuracy", action="store_true", help="each prompt once, to be judged; else for time")
    parser.add_argument("--fixed_latent", type=Path, help="fixed_latent.pt; not with --pools")
    add_precision(parser)
    parser.add_argument("--user_conf", type=Path, help="LoadGen's settings of a submitter (target rates)")
    parser.add_argument("--pools", action="store_true", help="those of a running pipeline, --name of --address")
    parser.add_argument("--trial", type=int, metavar="N", help="N prompts alone, for no time: not a result")
    parser.add_argument(
        "--change", action="append", default=[], metavar="FIELD=VALUE", help="of the setting; no result"
    )
    add_cluster_arguments(parser)


def test(args: argparse.Namespace) -> int:
    """Let LoadGen ask once; its summary is printed, and written beside the videos."""
    if (args.model_id is not None) == args.pools or (args.pools and args.fixed_latent is not None):
        raise InvalidInput("give --model, to make videos in this process, or --pools; only the former takes latents")
    try:
        prompts = [line.strip() for line in args.prompts.read_text().splitlines() if line.strip()][: args.trial]
    except (OSError, UnicodeError) as error:
        raise InvalidInput(f"--prompts {args.prompts} can't be read ({error})") from None
    if not prompts:
        raise InvalidInput(f"--prompts {args.prompts} has none; give a prompt a line")
    changed = {name: _value(text) for name, _, text in (change.partition("=") for change in args.change)}
    requests = requests_of(prompts, changed)
    videos = args.output / "videos"
    videos.mkdir(parents=True, exist_ok=True)

    def keep(number: int, mp4: bytes) -> bytes:
        (videos / f"{prompts[number].replace('/', '-')}-0.mp4").write_bytes(mp4)
        return hashlib.sha256(mp4).digest()

    answers = _Together(args, requests, keep) if args.pools else _Alone(_in_process(args, requests), keep)
    loadgen.StartTestWithLogSettings(
        system := loadgen.ConstructSUT(answers.issue, answers.flush),
        library := loadgen.ConstructQSL(len(prompts), len(prompts), lambda samples: None, lambda samples: None),
        _settings(args, len(prompts)),
        _log_settings(args.output),
        "",
    )
    loadgen.DestroyQSL(library)
    loadgen.DestroySUT(system)
    summary = (args.output / "mlperf_log_summary.txt").read_text()
    print(summary)
    if args.trial or args.change:
        print("A trial: this is no result.")
    return 0


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def requests_of(prompts: Sequence[str], changed: Mapping[str, Any]) -> list[GenerationRequest]:
    """Return the benchmark's requests; `changed` holds fields that differ from its setting."""
    allowed = sorted(field.name for field in dataclasses.fields(GenerationRequest))
    if unknown := sorted(set(changed) - set(allowed)):
        raise InvalidInput(f"--change {unknown[0]} is no field of a request; allowed are {', '.join(allowed)}")
    return [GenerationRequest(**{"prompt": prompt, "fps": FPS, **SETTINGS, **changed}) for prompt in prompts]


def _settings(args: argparse.Namespace, count: int) -> loadgen.TestSettings:
    settings = loadgen.TestSettings()
    user = args.user_conf or args.output / "user.conf"
    if args.user_conf is None:
        user.write_text("")  # LoadGen reads its own settings of the model with the first file that it is given
    settings.FromConfig(str(user), MODEL, args.scenario)
    settings.scenario = SCENARIOS[args.scenario]
    settings.mode = loadgen.TestMode.AccuracyOnly if args.accuracy else loadgen.TestMode.PerformanceOnly
    if args.trial:
        settings.min_duration_ms, settings.performance_sample_count_override = 0, count
        settings.min_query_count = settings.max_query_count = count
    return settings


def _log_settings(output: Path) -> loadgen.LogSettings:
    files = loadgen.LogOutputSettings()
    files.outdir, files.copy_summary_to_stdout = str(output), False
    settings = loadgen.LogSettings()
    settings.log_output, settings.enable_trace = files, False
    return settings


class _Alone:
    """Answers one question after the other, in a thread of LoadGen's."""

    def __init__(self, generate: Generate, keep: Callable[[int, bytes], bytes]) -> None:
        self._generate, self._keep = generate, keep

    def issue(self, samples: Sequence[Any]) -> None:
        """Make what LoadGen asks for."""
        for sample in samples:
            try:
                complete(sample.id, self._keep(sample.index, self._generate(sample.index)))
            except Exception as error:
                stop(error)

    def flush(self) -> None:
        """Nothing is held back."""


class _Together:
    """Answers all questions at once, as many as a running pipeline takes, on a loop in a thread."""

    def __init__(
        self, args: argparse.Namespace, requests: Sequence[GenerationRequest], keep: Callable[[int, bytes], bytes]
    ) -> None:
        from actors.commands.drive import choose_in_flight
        from actors.pipeline.client import PipelineClient
        from actors.pipeline.pools import find_spec
        from cluster.connect import connect

        connect(find_gcs_address(args))
        spec = find_spec(args.name)
        if spec is None:
            raise InvalidInput(f"there is no pipeline {args.name!r} on this cluster: wan-tpu status")
        self._client, self._keep = PipelineClient(spec), keep
        self._plans = [spec.model.plan(request) for request in requests]
        self._room = asyncio.Semaphore(choose_in_flight(None, spec))
        self._loop, self._issued = asyncio.new_event_loop(), 0
        self._run = uuid.uuid4().hex  # a name that was used before would go on from where that one was
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def issue(self, samples: Sequence[Any]) -> None:
        """Begin with what LoadGen asks for."""
        for sample in samples:
            self._issued += 1
            asyncio.run_coroutine_threadsafe(self._answer(sample.index, sample.id, self._issued), self._loop)

    def flush(self) -> None:
        """Nothing is held back."""

    async def _answer(self, index: int, id: int, number: int) -> None:
        try:
            async with self._room:
                name = f"mlperf-{self._run}-{number}"
                video = await self._client.generate(self._plans[index], id=name, on_event=lambda span: None)
            complete(id, await asyncio.to_thread(self._keep, index, video.mp4))
        except Exception as error:
            stop(error)


def stop(error: Exception) -> NoReturn:
    """End this process: LoadGen has no way to end a test, and would ask on until its time is over."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(getattr(error, "exit_code", 1))


def complete(id: int, answer: bytes) -> None:
    """Tell LoadGen what a question was answered with."""
    content = np.frombuffer(answer, np.uint8).copy()
    loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(id, content.ctypes.data, content.nbytes)])


def _in_process(args: argparse.Namespace, requests: Sequence[GenerationRequest]) -> Generate:
    pipeline = load_pipeline(args.model_id, dtype=args.dtype)
    noise = None
    if args.fixed_latent is not None:
        import torch

        noise = torch.load(args.fixed_latent, weights_only=True, map_location="cpu").float().numpy()

    def generate(number: int) -> bytes:
        path = args.output / "latest.mp4"
        pipeline.generate(requests[number], noise=noise).save(path)
        content = path.read_bytes()
        path.unlink()
        return content

    generate(0)  # compiles, and reads weights: LoadGen's clock doesn't begin before
    return generate


def judge(videos: Path, vbench: Path, processes: int) -> int:
    """Have VBench judge the videos of an accuracy run; return 0 where they are good enough, else 1."""
    results = videos.parent / "vbench"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    command += [str(vbench / "evaluate.py"), f"--videos_path={videos}", f"--output_path={results}"]
    if not (vbench / "evaluate.py").is_file() or not videos.is_dir():
        raise InvalidInput(
            f"there is no {vbench}/evaluate.py, or no folder {videos}; give a checkout and a run's videos/"
        )
    done = subprocess.run([*command, "--load_ckpt_from_local=True", "--dimension", *DIMENSIONS], check=False)
    if done.returncode:
        raise InvalidInput(f"VBench ended with {done.returncode}; see its own output above")
    reports = sorted(results.glob("results_*_eval_results.json"), key=lambda path: path.stat().st_mtime)
    if not reports:
        raise InvalidInput(f"VBench has written no results to {results}; see its own output")
    newest = reports[-1]
    scores = {name: 100 * value[0] for name, value in json.loads(newest.read_text()).items()}
    if missing := set(DIMENSIONS) - set(scores):
        raise InvalidInput(f"VBench has not judged {', '.join(sorted(missing))}; see its own output")
    mean = sum(scores[name] for name in DIMENSIONS) / len(DIMENSIONS)
    for name in DIMENSIONS:
        print(f"{name:24s} {scores[name]:7.2f}")
    print(f"{'mean':24s} {mean:7.2f}, {'enough' if mean >= AT_LEAST else 'not enough'}: at least {AT_LEAST}")
    return int(mean < AT_LEAST)


if __name__ == "__main__":
    sys.exit(run_command(main))
