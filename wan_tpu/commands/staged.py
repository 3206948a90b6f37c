"""The stages as separate processes with files between them, to debug them and to retry from any point.

stage1  ->  generation_config.json, stage1_embeddings.safetensors
stage2  ->  stage2_latents.safetensors   (also the state at the boundary, with the settings that produced it)
stage3  ->  the video
"""

import argparse
import dataclasses
import json
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan_tpu.commands import arguments
from wan_tpu.commands.importing import heavy_imports
from wan_tpu.commands.parser import Parser, add_model
from wan_tpu.data import Conditioning, DenoiseState, load_value, save_value, write_json
from wan_tpu.errors import InvalidInput, InvalidRequest, WanTpuError
from wan_tpu.lengths import describe_length
from wan_tpu.media.video import check_output
from wan_tpu.plan import DECODER, ENCODER
from wan_tpu.reference import UNREAD, parse_references, restore_references
from wan_tpu.request import IMAGES, GenerationRequest, ResolvedRequest, override
from wan_tpu.sources.disk import explain_disk_error, is_permanent

if TYPE_CHECKING:
    from wan_tpu.pipeline import Pipeline

CONFIG = "generation_config.json"
EMBEDDINGS = "stage1_embeddings.safetensors"
LATENTS = "stage2_latents.safetensors"


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings that every file of one run of the stages carries.

    Attributes:
        id: A new one for each run of stage 1.
        model_id: The checkpoint.
        dtype: The precision.
        request: The request, every field filled in.
        warnings: Warnings about the prompts and images, for the video's record.
    """

    id: str
    model_id: str
    dtype: str
    request: ResolvedRequest
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values. The image is left out, because only stage 1 uses it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"request": self.request.to_json()}

    @classmethod
    def from_json(cls, content: Any, path: Path) -> "Run":
        """Read the values of `to_json`; raises `InvalidInput` naming `path` when one is missing or wrong."""
        try:
            known = {field.name for field in dataclasses.fields(ResolvedRequest)} - {*IMAGES, "video"}
            fields = {name: value for name, value in content["request"].items() if name in known}
            run_id, model_id, dtype = (str(content[name]) for name in ("id", "model_id", "dtype"))
            request = ResolvedRequest(**restore_references(fields))
            return cls(run_id, model_id, dtype, request, tuple(content["warnings"]))
        except (AttributeError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path} is damaged ({error!r}); run the stage that writes it again") from None


def encode(argv: Sequence[str]) -> None:
    """Encoder stage: write the embeddings and all settings, the resolved shift included, into a folder."""
    parser = Parser(prog="wan-tpu stage1", description=encode.__doc__)
    arguments.add_model_arguments(parser)
    arguments.add_request_arguments(parser)
    parser.add_argument("--output_dir", type=Path, default=Path("stages"), help="its folder; default %(default)s")
    arguments.add_overwrite(parser)
    args = parser.parse_args(argv)

    request = arguments.request_from(args)
    if unread := [one.kind for one in parse_references(request.references or ()) or () if one.kind in UNREAD]:
        raise InvalidRequest(
            f"references has a {unread[0]}, whose sound isn't kept between the stages; use wan-tpu generate",
            "references",
        )
    for name in (CONFIG, EMBEDDINGS):
        check_output(
            args.output_dir / name,
            overwrite=args.overwrite,
            inputs=(args.image, args.last_image, args.video, args.model_id),
        )

    with heavy_imports():
        from wan_tpu.commands.recorded import Recorder, encode_recorded

    pipe = arguments.pipeline_from(args)
    plan = pipe.plan(request)
    assert pipe.runtime.model.checkpoint is not None
    pipe.fetch_adapters(plan)  # Bad adapters are refused before any work.
    pipe.check_components(*pipe.runtime.model.spec.components[ENCODER])
    recorder = Recorder(pipe.runtime, plan)
    for warning in describe_length(args.seconds, plan.request, pipe.runtime.model.spec):
        recorder.warn(warning)
    encoding = pipe.make_executor(plan, warn=recorder.warn, around=recorder.operation)
    encode_recorded(encoding)
    source = pipe.runtime.model.checkpoint.source
    run = Run(uuid.uuid4().hex, source, pipe.runtime.dtype, encoding.plan.request, tuple(recorder.warnings))
    save_value(encoding.conditioning, args.output_dir / EMBEDDINGS, {"id": run.id})
    write_json(args.output_dir / CONFIG, run.to_json())
    print(recorder.table())
    print(f"wrote {args.output_dir / EMBEDDINGS} and {CONFIG}")


def denoise(argv: Sequence[str]) -> None:
    """Expert stages: read the embeddings and write the latents. They can stop at the boundary and go on from there."""
    parser = Parser(prog="wan-tpu stage2", description=denoise.__doc__)
    _add_input(parser)
    arguments.add_sampling_arguments(parser)
    arguments.add_profile_arguments(parser)
    parser.add_argument(
        "--warmup_steps", type=int, default=0, help="steps run and thrown away first, to time warm ones"
    )
    parser.add_argument(
        "--stop_after_high", action="store_true", help="stop when the first of two experts or stages is done"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the state in the folder")
    arguments.add_overwrite(parser)
    args = parser.parse_args(argv)

    folder: Path = args.input_dir
    if args.warmup_steps < 0:
        raise InvalidInput(f"--warmup_steps is {args.warmup_steps}; give 0 or more")
    conditioning, encoded = _read_stage1(folder)
    run, resumed = encoded, None
    if args.resume:
        resumed, run = _read_state(folder, run.id)
    run = _with_overrides(run, args)
    if not (args.overwrite or args.resume):
        _refuse_unfinished(folder)
    check_output(folder / LATENTS, overwrite=args.overwrite or args.resume)

    with heavy_imports():
        from wan_tpu.commands.recorded import Recorder, denoise_recorded

    pipe = arguments.pipeline_from(args, run.model_id, run.dtype)
    run = _on_pipeline(run, pipe, resumed=args.resume)
    spec = pipe.runtime.model.spec
    has_drawn = spec.seeds_images and (conditioning.image_latents is not None or conditioning.generator is not None)
    if has_drawn and run.request.seed != encoded.request.seed:
        # diffusers draws the images' noise, and then the video's, from one generator.
        raise InvalidInput(
            f"--seed is {run.request.seed}, but stage 1 drew the images' noise with seed {encoded.request.seed}; "
            f"omit --seed, or run stage 1 again with --seed {run.request.seed}"
        )
    has_video = conditioning.video_latents is not None
    has_last = spec.last_images == "required" or conditioning.has_last_image
    has_image = conditioning.has_image and run.request.references is None
    spec.check(run.request, image=has_image, last=has_last, video=has_video)
    plan = spec.plan_resolved(run.request, image=has_image, last=has_last)
    pipe.check_components(*(expert.stage for expert in plan.experts))
    plan = pipe.fetch_adapters(plan)
    state = resumed or pipe.initial_state(plan, conditioning=conditioning)
    stop = plan.experts[0].stop if args.stop_after_high else None
    if args.warmup_steps:
        pipe.denoise(plan, conditioning, state, stop=min(state.step + args.warmup_steps, plan.steps))
    recorder = Recorder(pipe.runtime, plan)
    profiler = arguments.profiler_from(args)
    denoising = pipe.make_executor(plan, conditioning=conditioning, state=state, around=recorder.operation)
    denoise_recorded(denoising, recorder, profiler, stop=stop)
    state = denoising.state
    # One file holds the latents and their settings, so that the two always belong together.
    save_value(state, folder / LATENTS, run.to_json())
    print(recorder.table())
    print(f"wrote {folder / LATENTS}, {state.step} of {plan.steps} steps done")


def decode(argv: Sequence[str]) -> None:
    """Decoder stage: read the latents, write video, contact sheet and record."""
    parser = Parser(prog="wan-tpu stage3", description=decode.__doc__)
    _add_input(parser)
    parser.add_argument(
        "--output",
        "--output_video",
        dest="output_video",
        metavar="OUTPUT",
        type=Path,
        help="the mp4; default video.mp4 in the input folder",
    )
    parser.add_argument("--fps", type=float, help="frames a second of the written video; default: as in stage 1")
    arguments.add_overwrite(parser)
    args = parser.parse_args(argv)

    folder: Path = args.input_dir
    state, run = _read_state(folder, None)
    request = run.request if args.fps is None else dataclasses.replace(run.request, fps=args.fps)
    inputs = (args.model_id or run.model_id, *(folder / name for name in (CONFIG, EMBEDDINGS, LATENTS)))
    video = args.output_video or folder / "video.mp4"
    outputs = arguments.check_outputs(video, overwrite=args.overwrite, inputs=inputs)

    with heavy_imports():
        from wan_tpu.commands.recorded import Recorder, decode_to_files, report

    pipe = arguments.pipeline_from(args, run.model_id, run.dtype)
    plan = pipe.runtime.model.spec.plan_resolved(request, image=False)  # No image is encoded any more.
    if state.step != plan.steps:
        raise InvalidInput(
            f"{folder / LATENTS} is after step {state.step} of {plan.steps}; finish it with stage 2 and --resume"
        )
    pipe.check_components(*pipe.runtime.model.spec.components[DECODER])
    recorder = Recorder(pipe.runtime, plan, run.warnings)
    decoding = pipe.make_executor(plan, state=state, around=recorder.operation)
    decode_to_files(decoding, recorder, request, outputs, overwrite=args.overwrite)
    report(outputs, recorder, request)


def _add_input(parser: Parser) -> None:
    parser.add_argument("--input_dir", type=Path, default=Path("stages"), help="folder of stage 1; default %(default)s")
    add_model(parser, help="name, hub id or diffusers directory; default: as in the stage before")
    arguments.add_device_arguments(parser)


def _read_stage1(folder: Path) -> tuple[Conditioning, Run]:
    path = folder / CONFIG
    try:
        run = Run.from_json(json.loads(path.read_text()), path)
    except OSError as error:
        if not is_permanent(error):
            raise explain_disk_error(error, path) from None
        reason = error.strerror or error
        raise InvalidInput(f"{path} can't be read ({reason}); run wan-tpu stage1 into {folder} first") from None
    except ValueError as error:
        raise InvalidInput(f"{path} is damaged ({error}); run stage 1 again") from None
    conditioning, notes = load_value(Conditioning, folder / EMBEDDINGS)
    if notes.get("id") != run.id:
        raise InvalidInput(
            f"{CONFIG} and {EMBEDDINGS} in {folder} come from different runs of stage 1; run stage 1 again"
        )
    return conditioning, run


def _read_state(folder: Path, run_id: str | None) -> tuple[DenoiseState, Run]:
    """Return the state in a folder and its settings; it must belong to the run `run_id`, unless that is None."""
    state, notes = load_value(DenoiseState, folder / LATENTS)
    run = Run.from_json(notes, folder / LATENTS)
    if run_id not in (None, run.id):
        raise InvalidInput(
            f"{folder / LATENTS} was computed from embeddings that stage 1 has since replaced; run stage 2 with "
            "--overwrite instead of --resume"
        )
    return state, run


def _refuse_unfinished(folder: Path) -> None:
    """Raise `InvalidInput` if a folder has a state that can be continued: an overwritten one would be lost."""
    try:
        state, run = _read_state(folder, None)
    except WanTpuError:
        return  # There is none, or it can't be continued.
    if state.step < run.request.steps:
        raise InvalidInput(
            f"{folder / LATENTS} is after step {state.step} of {run.request.steps}; go on from there with --resume, or "
            "begin again with --overwrite"
        )


def _on_pipeline(run: Run, pipe: "Pipeline", *, resumed: bool) -> Run:
    """Return a run with the model and precision of the pipeline that computes its latents.

    Raises:
        InvalidInput: A resumed run was started with another precision.
    """
    assert pipe.runtime.model.checkpoint is not None
    now = dataclasses.replace(run, model_id=pipe.runtime.model.checkpoint.source, dtype=pipe.runtime.dtype)
    if resumed and now.dtype != run.dtype:
        raise InvalidInput(
            f"--precision is {now.dtype}, but the run to resume began with {run.dtype}; omit --precision"
        )
    # The same checkpoint may have been moved or converted in the meantime.
    if resumed and now.model_id != run.model_id:
        warnings.warn(
            f"the run began with the weights of {run.model_id} and continues with those of {now.model_id}", stacklevel=2
        )
    return now


def _with_overrides(run: Run, args: argparse.Namespace) -> Run:
    """Return a run whose settings are overridden by the sampling options of stage 2, as they override a preset.

    A switch step given in stage 1 is dropped as well if the schedule changes.
    """
    options = {name: value for name in arguments.SAMPLING if (value := getattr(args, name)) is not None}
    if args.resume and options:
        raise InvalidInput("--resume keeps the settings that the run began with; omit the sampling options")
    request = GenerationRequest(**options)
    settings = {field.name: getattr(run.request, field.name) for field in dataclasses.fields(run.request)}
    overridden = override(settings, {name: getattr(request, name) for name in options})
    return dataclasses.replace(run, request=ResolvedRequest(**overridden))
