"""`wan-tpu plan`: GiB, seconds and dollars of a published model on slices, before any is rented."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.planning.calibration import load_calibration
from actors.planning.slice_description import describe_slice
from cluster.costs import capacity
from cluster.costs.capacity import CapacityAssumptions, Estimate, Fits, StageSeconds
from cluster.costs.prices import Prices
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec
from wan_tpu.commands.parser import Parser, add_mesh, add_precision
from wan_tpu.errors import InvalidInput, OutputError
from wan_tpu.families import list_published, name_of, published_spec
from wan_tpu.media.video import check_folder, check_output
from wan_tpu.plan import DECODER, ENCODER
from wan_tpu.reference import Reference
from wan_tpu.request import GenerationRequest, ResolvedRequest, parse_size
from wan_tpu.runtime import memory
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.folder import cache_folder
from wan_tpu.suggest import did_you_mean

if TYPE_CHECKING:
    from wan_tpu.pricing.plan import SlicePlan, StageNeeds
    from wan_tpu.pricing.planner import SlicePlanner, Task

PLOTS = (".png", ".svg", ".pdf")
MAX_LAYOUTS = 8  # The most layouts that are listed.
_ANY = Reference("image", None, 512, 512)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SUMMARY = """Plan a published model on TPU slices: does it fit, how long does it take, on which mesh, and what does a
video cost?

    wan-tpu plan --model MODEL --slice v6e-8 --size 1280x720 --frames 81 --steps 40 [--json]
    wan-tpu plan --model MODEL --slice v6e-8 --slice v5p-8 --program "denoise step" --plot step.png
    wan-tpu plan --model MODEL --layout a14b-balanced-v6e [--spot]
    wan-tpu plan --model MODEL --slice v6e-4 --slice v6e-8 --videos_a_day 5000 --within 10m [--spot]

A few plans of published models at their own sizes are shipped: these take seconds, and say with which
versions they were made. All else is compiled, as is everything with --anew: minutes the first time, on all cores, and
seconds from then on. --meshes also says what the denoise step would be on each other mesh. The third says what a layout
makes and costs, the last which layout meets a demand for the least money. With --calibration doctor.json, seconds are
priced with what `wan-tpu doctor` measured: clock, grid steps, device memory, links.

Programs are compiled for the slice by libtpu's compiler (`pip install ".[tpu]"`); no TPU and no weights are
needed. What was compiled once is kept in --compiled. docs/performance.md says what the seconds and dollars mean.
"""


def plan(argv: Sequence[str]) -> int:
    """Print the plans; return 1 when a program of them doesn't fit or can't be compiled."""
    args = _parse_arguments(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"  # Slices are described; this machine's own accelerators stay untouched.
    if args.plot:
        _check_plot(args.plot)
    check_folder(args.compiled, "--compiled")
    args.calibration = None if args.calibration is None else load_calibration(args.calibration)
    if args.layout is not None or args.videos_a_day is not None:
        _print_costs(args)
        return 0
    if args.program is not None:
        _check_program(args.program, args.model)
    return _print_programs(args)


def _check_program(name: str, model: str) -> None:
    """Raise `InvalidInput` for a name that no program of a model begins with; tracing them all takes a minute."""
    from wan_tpu.aot.names import ADAPTERS, DENOISE_PROGRAMS, KEYS, UNGUIDED_KEYS

    spec = published_spec(model)
    parts = [own for stage, own in spec.components.items() if stage not in spec.expert_stages]
    programs = (*itertools.chain(*parts), KEYS, UNGUIDED_KEYS, *DENOISE_PROGRAMS, ADAPTERS)
    if not any(name == other or name.startswith((f"{other} ", f"{other},")) for other in programs):
        raise InvalidInput(
            f"there is no program {name!r}{did_you_mean(name, programs)}; it is one of "
            f"{', '.join(map(repr, programs))}, or a part of one, such as 'decoder first'"
        )


def _print_programs(args: argparse.Namespace) -> int:
    from wan_tpu.pricing.plan_text import compare, describe, draw, to_json

    mesh = (args.dp, args.sp, args.tp)
    shipped = {name: _find_shipped(args, SliceSpec(name), mesh) for name in args.slice}
    planners = {
        name: _make_planner(args, SliceSpec(name)) for name in args.slice if shipped[name] is None or args.meshes
    }
    for planner in planners.values():  # All are checked before the first is compiled for.
        planner.mesh(mesh)
    anew, alternatives = _plan_meshes(args, shipped, planners)
    plans = [shipped[name] or anew[name] for name in args.slice]
    if args.plot:
        draw(plans, args.plot)
    if args.json:
        print(
            json.dumps({"plans": [to_json(plan) for plan in plans], "other_meshes": [to_json(p) for p in alternatives]})
        )
    else:
        print("\n\n".join(describe(plan) for plan in plans))
        if alternatives:
            print(f"\nother meshes\n{compare(alternatives)}")
    return 1 if any(program.compiled.refused for plan in plans for program in plan.programs) else 0


def _plan_meshes(
    args: argparse.Namespace, shipped: "Mapping[str, SlicePlan | None]", planners: "Mapping[str, SlicePlanner]"
) -> "tuple[dict[str, SlicePlan], list[SlicePlan]]":
    """Return the plans of slices that have no shipped one, and with --meshes those of the step on other meshes."""
    from wan_tpu.aot.names import STEP

    mesh = (args.dp, args.sp, args.tp)
    asked = [name for name in planners if shipped[name] is None]
    tasks = [planners[name].task(mesh, args.program) for name in asked]
    for name, planner in planners.items() if args.meshes else ():
        plan = shipped[name]
        own = tuple(planner.mesh(mesh).shape.values()) if plan is None else plan.mesh
        tasks += [planner.task(other, STEP) for other in planner.meshes() if other != own]
    if len(tasks) > len(asked):
        print(f"the denoise step on {len(tasks) - len(asked)} other meshes, too", file=sys.stderr)
    plans = _make_plans(args, tasks)
    return dict(zip(asked, plans, strict=False)), plans[len(asked) :]


def _make_plans(args: argparse.Namespace, tasks: "Sequence[Task]") -> "list[SlicePlan]":
    if not tasks:  # A shipped plan is read in less time than this import takes.
        return []
    from wan_tpu.pricing.compiling import Compilers
    from wan_tpu.pricing.planner import make_plans

    with contextlib.closing(Compilers(args.compiled)) as compilers:
        return make_plans(tasks, compilers)


def _find_shipped(args: argparse.Namespace, kind: SliceSpec, mesh: Sequence[int | None]) -> "SlicePlan | None":
    """Return the shipped plan of what was asked for, and say where it is from; None if that must be compiled."""
    counts = args.images is not None or args.prompt_tokens is not None or args.references
    if args.anew or args.program or args.calibration or counts or args.decoder:
        return None
    from wan_tpu.pricing import shipped_plans
    from wan_tpu.pricing.question import Question

    request = _read_request(args)
    shipped = shipped_plans.find(args.model, Question.of(kind.name, args.dtype, request), mesh)
    if shipped is None:
        return None
    made = f"{shipped.made['date']} with jax {shipped.made['jax']} and libtpu {shipped.made['libtpu']}"
    kernels = "" if shipped.has_these_kernels else ", and perhaps with other kernels than these"
    print(f"{kind.name}: shipped figures, made on {made}{kernels}; --anew compiles", file=sys.stderr)
    return shipped.answer(args.model, describe_slice(kind), request)


def _make_planner(args: argparse.Namespace, kind: SliceSpec) -> "SlicePlanner":
    from wan_tpu.pricing.planner import SlicePlanner

    return SlicePlanner(
        args.model,
        _read_request(args),
        describe_slice(kind, args.calibration),
        dtype=args.dtype,
        cache=args.compiled,
        report=_make_report(),
        images=args.images,
        prompt_tokens=args.prompt_tokens,
        decoder=args.decoder,
    )


def _read_request(args: argparse.Namespace) -> ResolvedRequest:
    height, width = (None, None) if args.size is None else parse_size(args.size)
    request = GenerationRequest(
        height=height,
        width=width,
        frames=args.frames,
        steps=args.steps,
        guidance_scale=args.guidance_scale,
        preset=args.preset,
        cache=args.cache,
    )
    spec = published_spec(args.model, args.decoder)
    if args.references:
        # A model that takes none refuses any.
        usual = spec.typical_references(request) if spec.takes_references else ()
        typical, *_ = *usual, dataclasses.replace(request, references=(_ANY,))
        request = dataclasses.replace(typical, references=tuple(typical.references or ()) * args.references)
    return spec.plan(request, image="t2v" not in spec.tasks, last=spec.last_images == "required").request


# ---- dollars


def _print_costs(args: argparse.Namespace) -> None:
    """Print what a layout makes and costs, or the layouts that meet a demand."""
    if args.references and args.layout is None:
        raise InvalidInput("--references is for plans of slices and layouts; leave it out beside --videos_a_day")
    spec, request = published_spec(args.model), _read_request(args)
    assumptions = CapacityAssumptions(
        Prices.load(args.prices), args.capacity, args.region, args.busy, args.cold_start_s, args.starts_a_day
    )
    layout = None if args.layout is None else Layout.load(args.layout)
    if layout is not None:
        layout.check_stages(tuple(spec.components), spec.optional_stages)
        if missing := ", ".join(sorted(_list_stages(spec, request) - layout.stages)):
            cause = "--references" if args.references else f"--preset {args.preset}"
            raise InvalidInput(f"{args.layout} has no {missing}, which {cause} needs; leave that out, or add the stage")
    measured = ""
    for kind in [pool.slice for pool in layout.pools] if layout else map(SliceSpec, args.slice):
        assumptions.prices.chip_hour(
            kind, assumptions.capacity, assumptions.region
        )  # A missing price is refused before minutes of compiling.
        measured = describe_slice(kind, args.calibration).calibrated
    seconds, fits = _measure_stages(args, layout)
    if layout is not None:
        videos_an_hour = None if args.videos_a_day is None else args.videos_a_day / 24
        estimates = [capacity.estimate(layout, seconds, assumptions, videos_an_hour)]
    else:
        experts = [expert.stage for expert in spec.experts(request)]
        estimates = capacity.recommend(
            seconds, spec.stages, experts, assumptions, args.videos_a_day, args.within, fits=fits
        )
    if args.plot:
        _draw(estimates, args.plot)
    if args.json:
        print(json.dumps([_as_json(estimate) | {"calibrated": measured} for estimate in estimates]))
        return
    size = f"{request.width}x{request.height}, {request.frames} frames, {request.steps} steps"
    where = assumptions.region or "the cheapest region"
    print(
        f"{args.model}, {size}; predicted seconds; "
        f"{assumptions.capacity} prices of {assumptions.prices.date} in {where},"
    )
    print(
        f"chips alone; slices busy {assumptions.busy:.0%} at most, "
        f"each starting {assumptions.starts_a_day:g} x a day in {assumptions.cold_start_s:g} s\n"
    )
    if measured:
        print(f"{measured}\n")
    print(_format_table(estimates[:MAX_LAYOUTS]))
    print(f"\n{_format_estimate(estimates[0])}")
    if layout is None:
        print(f"\n# the cheapest, as a layout\n{estimates[0].text}", end="")


def _measure_stages(args: argparse.Namespace, layout: Layout | None) -> tuple[StageSeconds, Fits]:
    """Compile and price the stages: all on each kind of slice, or those of a layout's pools on theirs.

    Returns:
        What a video takes of them, and whether a slice has memory for some of them together.
    """
    from wan_tpu.pricing.plan import add_memory

    spec, request = published_spec(args.model), _read_request(args)
    used = _list_stages(spec, request)
    needs: dict[str, dict[str, StageNeeds]] = {}
    tasks: list[tuple[SliceSpec, Sequence[int | None], Sequence[str]]]
    if layout is None:
        tasks = [(SliceSpec(name), (None, None, None), spec.stages) for name in args.slice]
    else:
        tasks = [(pool.slice, pool.mesh, [s for s in pool.stages if s in used]) for pool in layout.pools]
    tasks = [task for task in tasks if task[2]]  # Other requests than these keep a pool without stages busy.
    shipped = [_find_shipped(args, kind, mesh) for kind, mesh, _ in tasks]
    anew = [
        _make_planner(args, kind).task(mesh, stages=stages)
        for (kind, mesh, stages), found in zip(tasks, shipped, strict=True)
        if found is None
    ]
    made = iter(_make_plans(args, anew))
    for (kind, _, stages), found in zip(tasks, shipped, strict=True):
        experts = [expert for expert in spec.experts(request) if found or expert.stage in stages]
        of_plan = (found or next(made)).needs(experts)
        of_kind = needs.setdefault(kind.name, {})
        of_kind |= {stage: need for stage, need in of_plan.items() if stage in stages}
        missing = [stage for stage in stages if stage not in of_kind]
        if layout is not None and missing:
            raise InvalidInput(f"{', '.join(missing)} can't be compiled for a {kind}: wan-tpu plan --slice {kind}")

    def fits(kind: SliceSpec, stages: Sequence[str]) -> bool:
        return memory.fits(add_memory(needs[kind.name][stage] for stage in stages), kind.chip.device_bytes)

    seconds = {kind: {stage: need.seconds for stage, need in of_kind.items()} for kind, of_kind in needs.items()}
    for pool in () if layout is None else layout.pools:
        unused = dict.fromkeys(set(pool.stages) - used, 0.0)
        seconds[pool.slice.name] = unused | seconds.get(pool.slice.name, {})
    return seconds, fits


def _list_stages(spec: ModelSpec, request: ResolvedRequest) -> set[str]:
    """Return the stages that a request passes."""
    return {ENCODER, DECODER, *(expert.stage for expert in spec.experts(request))}


def _format_table(estimates: Sequence[Estimate]) -> str:
    lines = [f"{'':<34}{'chips':>6}{'videos/h':>10}{'to a video':>12}{'$ an hour':>11}{'$ a video':>11}"]
    for estimate in estimates:
        figures = f"{estimate.videos_an_hour:>10.1f}{estimate.to_a_video_s:>10.0f} s{estimate.dollars_an_hour:>11.2f}"
        lines.append(f"{estimate.name[-34:]:<34}{estimate.chips:>6}{figures}{estimate.dollars_a_video:>11.3f}")
    return "\n".join(lines)


def _format_estimate(estimate: Estimate) -> str:
    lines = [f"{estimate.name}\n{'pool':<16}{'slice':<8}{'replicas':>9}{'s a video':>11}{'busy':>7}{'waits, s':>10}"]
    for load in estimate.pools:
        start = f"{load.pool.name:<16}{load.pool.slice.name:<8}{load.replicas:>9}{load.seconds:>11.2f}"
        lines.append(f"{start}{load.busy:>7.0%}{load.wait_s:>10.1f}")
    return "\n".join(lines)


def _as_json(estimate: Estimate) -> dict[str, Any]:
    pools = [
        vars(load) | {"pool": load.pool.name, "stages": load.pool.stages, "slice": load.pool.slice.name}
        for load in estimate.pools
    ]
    return vars(estimate) | {"chips": estimate.chips, "text": estimate.text, "pools": pools}


def _draw(estimates: Sequence[Estimate], path: Path) -> None:
    """Draw dollars a video over seconds to one, a point a layout; the first is the cheapest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    for number, estimate in enumerate(estimates[:MAX_LAYOUTS]):
        axes.scatter(
            estimate.to_a_video_s, estimate.dollars_a_video, s=40, color="#c0392b" if number == 0 else "#4878a8"
        )
        axes.annotate(
            f"{estimate.name}, {estimate.chips} chips", (estimate.to_a_video_s, estimate.dollars_a_video), fontsize=8
        )
    axes.scatter([], [], s=40, color="#c0392b", label="cheapest")
    axes.scatter([], [], s=40, color="#4878a8", label="other layouts that meet the demand")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("What a video costs and how long it takes, by layout (predicted)", loc="left", fontsize=11)
    axes.set_xlabel("seconds to a video, mean (predicted)")
    axes.set_ylabel("US dollars a video")
    axes.set_xlim(0, None)
    axes.set_ylim(0, None)
    figure.savefig(path)


# ----


def _check_plot(file: Path) -> None:
    """Raise `OutputError` before minutes of compiling, not after."""
    if file.suffix not in PLOTS:
        raise OutputError(f"--plot {file} ends with {file.suffix or 'nothing'}; allowed: {', '.join(PLOTS)}")
    check_output(file, overwrite=True)


@functools.cache  # Slices are compiled for at the same time, and share a clock.
def _make_report():  # type: ignore[no-untyped-def]
    start = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)


def _parse_duration(text: str) -> float:
    """Return seconds of "90s", "10m", "2h"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a duration; write 90s, 10m or 2h")
    return float(match[1]) * _SECONDS[match[2]]


def _parse_positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a positive number")
    return value


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="wan-tpu plan", description=_SUMMARY)
    parser.add_argument(
        "--model",
        "--model_id",
        type=name_of,
        choices=list_published(),
        required=True,
        metavar="MODEL",
        help="a published model's name or hub id: wan-tpu models",
    )
    parser.add_argument("--slice", action="append", help="kind of slice, such as v6e-8; may be repeated")
    parser.add_argument("--size", help="WIDTHxHEIGHT in pixels; default: the model's size")
    parser.add_argument("--frames", type=int, help="length of the video; default: the model's length")
    parser.add_argument(
        "--images", type=int, help="number of images of a request; default: 1 if the model takes images"
    )
    parser.add_argument(
        "--references",
        type=int,
        default=0,
        metavar="N",
        help="a request with N reference images, seen at the video's size (reference_size match)",
    )
    parser.add_argument(
        "--prompt_tokens",
        type=int,
        help="length of the prompt, if the model's programs depend on it; default: a short one",
    )
    parser.add_argument("--preset", help="a named way to sample, such as lightning")
    parser.add_argument("--decoder", help="decoder in place of the usual one, such as diffusion")
    parser.add_argument("--cache", help="step cache, such as magcache")
    parser.add_argument("--steps", type=int, help="denoising steps of all experts together; default: the model's")
    parser.add_argument("--guidance_scale", type=float, help="1 turns guidance off, which halves the work of a step")
    add_precision(parser)
    add_mesh(parser)
    parser.add_argument(
        "--meshes",
        action="store_true",
        help="also plan the denoise step on every other mesh",
    )
    parser.add_argument("--anew", action="store_true", help="compile even if a plan is shipped")
    parser.add_argument("--program", help='plan only this program, such as "denoise step"')
    parser.add_argument(
        "--calibration", type=Path, help="doctor.json of such a slice: its measured figures in place of published ones"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot", type=Path, help="write an image of a video's seconds by cause, or of the dollars of layouts"
    )
    parser.add_argument("--compiled", type=Path, default=cache_folder() / "plan", help="default %(default)s")
    money = parser.add_group("dollars")
    money.add_argument("--layout", help="say what this layout makes and costs: a file, or the name of a shipped one")
    money.add_argument("--videos_a_day", type=_parse_positive, help="find the cheapest layout that makes this many")
    money.add_argument(
        "--within",
        type=_parse_duration,
        default=float("inf"),
        help="the longest time from a request to its video: 90s, 10m, 2h",
    )
    money.add_argument(
        "--spot", dest="capacity", action="store_const", const="spot", default="on-demand", help="spot prices"
    )
    money.add_argument("--capacity", default="on-demand", help="column of the price table; default %(default)s")
    money.add_argument("--region", help="region of the price table; default: the cheapest")
    money.add_argument("--prices", type=Path, help="your own table, of the form of cluster/costs/prices.yaml")
    money.add_argument(
        "--busy",
        type=float,
        default=0.8,
        help="the largest share of its time that a slice may work; default %(default)s",
    )
    money.add_argument(
        "--cold_start_s",
        type=_parse_positive,
        default=120.0,
        help="seconds from the start of a slice until it works; default %(default)s",
    )
    money.add_argument(
        "--starts_a_day", type=_parse_positive, default=1.0, help="starts of each slice a day; default %(default)s"
    )
    parser.set_defaults(capacity="on-demand")  # Two options set it.
    args = parser.parse_args(argv)
    if not 0 < args.busy < 1:
        raise InvalidInput(f"--busy is {args.busy:g}; it must lie between 0 and 1, such as 0.8")
    if args.starts_a_day * args.cold_start_s >= capacity.DAY_S:
        raise InvalidInput(
            "with these values slices would spend all their time starting; give fewer --starts_a_day "
            "or a smaller --cold_start_s"
        )
    args.slice = args.slice or ["v6e-8"]
    return args
