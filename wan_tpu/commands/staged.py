"""The stages as processes of their own, with files between them: to debug, and to retry from any point.

stage1  ->  generation_config.json, stage1_embeddings.safetensors
stage2  ->  stage2_config.json, stage2_latents.safetensors   (also the state at the boundary)
stage3  ->  the video
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wan_tpu.commands import arguments, generate
from wan_tpu.data import Conditioning, DenoiseState, load_value, save_value
from wan_tpu.errors import InvalidInput
from wan_tpu.record import Recorder, write_json
from wan_tpu.request import ResolvedRequest
from wan_tpu.video import check_output

CONFIG = "generation_config.json"
EMBEDDINGS = "stage1_embeddings.safetensors"
SAMPLING = "stage2_config.json"
LATENTS = "stage2_latents.safetensors"


def encode(argv: Sequence[str]) -> None:
    """Encoder stage: write the embeddings and all settings, the resolved shift included, into a folder."""
    parser = argparse.ArgumentParser(prog="stage1_encoder", description=encode.__doc__)
    arguments.add_model_arguments(parser)
    arguments.add_request_arguments(parser)
    parser.add_argument("--output_dir", type=Path, default=Path("stages"), help="default %(default)s")
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args(argv)

    request = arguments.request_from(args)
    for name in (CONFIG, EMBEDDINGS):
        check_output(args.output_dir / name, overwrite=args.overwrite)
    pipe = arguments.pipeline_from(args)
    request = pipe.resolve(request)
    recorder = Recorder(pipe.runtime)
    with recorder.stage("encoder"):
        conditioning = pipe.encode(request)
    save_value(conditioning, args.output_dir / EMBEDDINGS)
    _write_config(args.output_dir / CONFIG, args.model_id, pipe.runtime.dtype, request)
    print(recorder.table())
    print(f"wrote {args.output_dir / EMBEDDINGS} and {CONFIG}")


def denoise(argv: Sequence[str]) -> None:
    """Expert stages: read the embeddings, write the latents; may stop at the boundary and go on from there."""
    parser = argparse.ArgumentParser(prog="stage2_transformer", description=denoise.__doc__)
    _add_input(parser)
    arguments.add_sampling_arguments(parser)
    arguments.add_profile_arguments(parser)
    parser.add_argument(
        "--warmup_steps", type=int, default=0, help="steps run and thrown away first, to time warm ones"
    )
    parser.add_argument("--stop_after_high", action="store_true", help="stop when the high-noise expert is done")
    parser.add_argument("--resume", action="store_true", help="go on from the state in the folder")
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args(argv)

    folder: Path = args.input_dir
    overrides = {
        "steps": args.num_steps,
        "guidance_scale": args.guidance_scale,
        "guidance_scale_2": args.guidance_scale_2 if args.guidance_scale_2 is not None else args.guidance_scale,
        "seed": args.seed,
    }
    if args.resume and any(value is not None for value in overrides.values()):
        raise InvalidInput("--resume goes on with the settings it began with; leave the sampling options out")
    if args.warmup_steps < 0:
        raise InvalidInput(f"--warmup_steps is {args.warmup_steps}; give 0 or more")
    check_output(folder / LATENTS, overwrite=args.overwrite or args.resume)
    model_id, dtype, request = _read_config(folder / (SAMPLING if args.resume else CONFIG))
    request = dataclasses.replace(request, **{name: value for name, value in overrides.items() if value is not None})
    conditioning = load_value(Conditioning, folder / EMBEDDINGS)
    resumed = load_value(DenoiseState, folder / LATENTS) if args.resume else None

    pipe = arguments.pipeline_from(args, model_id, dtype)
    state = resumed or pipe.initial_state(request)
    stop = pipe.table(request).high_noise_steps(pipe.runtime.model.boundary_ratio) if args.stop_after_high else None
    if args.warmup_steps:
        pipe.denoise(request, conditioning, state, stop=min(state.step + args.warmup_steps, request.steps))
    _write_config(folder / SAMPLING, model_id, pipe.runtime.dtype, request)
    recorder = Recorder(pipe.runtime)
    profiler = arguments.profiler_from(args)
    state = generate.denoise_recorded(pipe, recorder, request, conditioning, state, profiler, stop=stop)
    save_value(state, folder / LATENTS)
    print(recorder.table())
    print(f"wrote {folder / LATENTS}, {state.step} of {request.steps} steps done")


def decode(argv: Sequence[str]) -> None:
    """Decoder stage: read the latents, write video, contact sheet and record."""
    parser = argparse.ArgumentParser(prog="stage3_vae_decoder", description=decode.__doc__)
    _add_input(parser)
    parser.add_argument("--output_video", type=Path, help="default video.mp4 in the input folder")
    parser.add_argument("--fps", type=float, help="default: as in stage 1")
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args(argv)

    folder: Path = args.input_dir
    outputs = arguments.check_outputs(args.output_video or folder / "video.mp4", overwrite=args.overwrite)
    model_id, dtype, request = _read_config(folder / SAMPLING)
    request = request if args.fps is None else dataclasses.replace(request, fps=args.fps)
    state = load_value(DenoiseState, folder / LATENTS)
    if state.step != request.steps:
        raise InvalidInput(
            f"{folder / LATENTS} has {state.step} of {request.steps} steps; run stage 2 with --resume first"
        )
    pipe = arguments.pipeline_from(args, model_id, dtype)
    recorder = Recorder(pipe.runtime)
    generate.decode_to_files(pipe, recorder, request, state.latents, outputs, overwrite=args.overwrite)
    recorder.save(outputs[2], request)
    generate.report(outputs, recorder)


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input_dir", type=Path, default=Path("stages"), help="folder of stage 1; default %(default)s")
    parser.add_argument("--model_id", help="default: as in stage 1")
    arguments.add_device_arguments(parser)


def _write_config(path: Path, model_id: str, dtype: str, request: ResolvedRequest) -> None:
    write_json(path, {"model_id": model_id, "dtype": dtype, "request": request.to_json()})


def _read_config(path: Path) -> tuple[str, str, ResolvedRequest]:
    """Return model id, dtype and request; the image has done its work in stage 1 and is left out."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        known = {field.name for field in dataclasses.fields(ResolvedRequest)} - {"image"}
        fields = {name: value for name, value in content["request"].items() if name in known}
        return content["model_id"], content["dtype"], ResolvedRequest(**fields)
    except OSError:
        raise InvalidInput(f"{path} is missing; run the stage before this one into the same folder first") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path} is damaged ({error!r}); run the stage that writes it again") from None
