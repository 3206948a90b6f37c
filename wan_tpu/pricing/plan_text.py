"""Plans as text, as JSON and as a plot."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wan_tpu.aot.names import STEP
from wan_tpu.pricing.causes import CAUSES, HOST, largest_gains, list_causes
from wan_tpu.pricing.cost import CATEGORIES
from wan_tpu.pricing.plan import Prediction, ProgramPlan, SlicePlan, share_of_peak
from wan_tpu.runtime.memory import GIB, fits

SHORT = "predicted; kernels that were measured took up to 7 % longer: docs/performance.md, published measurements"


def describe(plan: SlicePlan) -> str:
    request, memory = plan.request, plan.slice.hardware.hbm_bytes / GIB
    size = f"{request.width}x{request.height}, {request.frames} frames ({plan.tokens} tokens), {request.steps} steps"
    lines = [
        f"{plan.model}, {size}"
        + ("" if plan.images is None else f", images: {plan.images}")
        + ("" if plan.text_rows is None else f", prompts of up to {plan.text_rows} tokens"),
        f"{plan.slice.name}, mesh {_format_mesh(plan)}, {memory:g} GiB a device can be used",
        "",
    ]
    width = max([20, *(len(program.name) + 2 for program in plan.programs)])
    columns = f"{'calls':>6}{'weights':>9}{'other':>8}{'code':>6}{'GiB':>5}{'compile':>9}{'CPU':>8}   fits"
    lines.append(f"{'':<{width}}{columns}")
    lines += [_format_memory(program, memory, width) for program in plan.programs]
    lines += [
        "",
        f"{'seconds a call':<{width}}{'estimate':>9}{'floor':>8}  {'':<2}" + "".join(f"{n:>15}" for n in CATEGORIES),
    ]
    priced = [line for program in plan.programs for line in _format_seconds(program, width)]
    lines += priced or ["nothing was compiled"]
    lines += ["", f"{'seconds a video':<{width}}{'estimate':>9}{'floor':>8}{'of peak':>10}{'and the host':>14}"]
    for stage in plan.stages:
        seconds = stage.seconds
        if seconds is None:
            lines.append(f"{stage.name:<{width}}  not all of it could be compiled")
            continue
        share = share_of_peak(stage, plan)
        lines.append(
            f"{stage.name:<{width}}{seconds.estimate:>9.2f}{seconds.floor:>8.2f}{share:>10.1%}{stage.host_s:>14.3f}"
        )
    if any(stage.seconds for stage in plan.stages):
        lines.append(plan.slice.calibrated or SHORT)
        lines += ["", *_format_causes(plan, max(width, 26))]
    if plan.playbacks:
        lines += ["", *(f"chunks decoded {place}: {_format_playback(plan, place)}" for place in plan.playbacks)]
    lines += ["", *_format_verdict(plan, memory)]
    return "\n".join(lines)


def compare(plans: Sequence[SlicePlan]) -> str:
    """Return the denoise step of several plans, a line each."""
    lines = [f"{'one step':<12}{'mesh':<22}{'GiB':>6}{'estimate':>10}{'floor':>8}  all heads online{'compile s':>11}"]
    for plan in plans:
        step = next(program for program in plan.programs if program.name == STEP)
        start = f"{plan.slice.name:<12}{_format_mesh(plan):<22}{step.compiled.total_bytes / GIB:>6.1f}"
        if step.optimistic is None or step.online is None:
            lines.append(f"{start}  {step.compiled.refused}")
            continue
        total, online = step.optimistic.total, step.online.total
        figures = f"{total.estimate:>10.2f}{total.floor:>8.2f}{online.estimate:>10.2f}{online.floor:>8.2f}"
        lines.append(f"{start}{figures}{step.compiled.compile_s:>11.0f}")
    return "\n".join(lines)


def to_json(plan: SlicePlan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "made": plan.made,
        "request": plan.request.to_json(),
        "images": plan.images,
        "text_rows": plan.text_rows,
        "tokens": plan.tokens,
        "slice": dataclasses.asdict(plan.slice),
        "mesh": plan.mesh._asdict(),
        "playbacks": {place: dataclasses.asdict(playback) for place, playback in plan.playbacks.items()},
        "resident_gib": plan.resident_gib,
        "largest_gib": plan.largest_gib,
        "causes": [dataclasses.asdict(cause) | {"gain": cause.gain} for cause in list_causes(plan)],
        "stages": [
            dataclasses.asdict(stage)
            | {"share_of_peak": share_of_peak(stage, plan)}
            | {"seconds": None if stage.seconds is None else dataclasses.asdict(stage.seconds)}
            for stage in plan.stages
        ],
    }


def draw(plans: Sequence[SlicePlan], path: Path) -> None:
    """Draw a video's seconds, stacked by cause: of each plan what is predicted, beside what the chips allow."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(max(6.5, 2.5 + 1.6 * len(plans)), 4.8), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(CAUSES, map(tuple, colormaps["tab20"](range(len(CAUSES)))), strict=True))
    drawn = set[str]()
    for i, plan in enumerate(plans):
        for offset, name, faded in ((-0.2, "seconds", 1.0), (0.2, "limit", 0.55)):
            base = 0.0
            for cause in list_causes(plan):
                height = getattr(cause, name)
                axes.bar(i + offset, height, 0.36, bottom=base, color=colours[cause.name], alpha=faded)
                drawn.add(cause.name)
                base += height
            axes.text(i + offset, base, f"{base:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(plans)), [f"{plan.slice.name}\n{_format_mesh(plan)}" for plan in plans], fontsize=8)
    axes.set_ylabel("seconds")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    request = plans[0].request
    size = f"{request.width}x{request.height}, {request.frames} frames, {request.steps} steps"
    figure.suptitle(f"Predicted seconds of a video: {plans[0].model}, {size}", x=0.01, ha="left", fontsize=11)
    handles = [Patch(color=colours[name], label=name) for name in CAUSES if name in drawn]
    handles += [Patch(color="0.3", label="left: predicted"), Patch(color="0.3", alpha=0.55, label="right: limit")]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _format_causes(plan: SlicePlan, width: int) -> list[str]:
    causes = list_causes(plan)
    total = sum(cause.seconds for cause in causes)
    lines = [f"{'seconds a video by cause':<{width}}{'estimate':>9}{'share':>8}{'limit':>10}"]
    for cause in causes:
        limit = "" if cause.name == HOST else f"{cause.limit:.3f}"
        lines.append(f"{cause.name:<{width}}{cause.seconds:>9.3f}{cause.seconds / total:>8.1%}{limit:>10}")
    limits = sum(cause.limit for cause in causes)
    lines.append(f"{'in all':<{width}}{total:>9.3f}{'':>8}{limits:>10.3f}")
    gains = largest_gains(causes)
    return [*lines, *(f"{cause.gain:.2f} s of {cause.name} are above the limit; {cause.help}" for cause in gains)]


def _format_memory(program: ProgramPlan, memory: float, width: int) -> str:
    compiled = program.compiled
    weights, other, code = (getattr(compiled, f"{kind}_bytes") / GIB for kind in ("weights", "other", "code"))
    total = compiled.total_bytes / GIB
    if compiled.over_bytes:
        fits = f"NO, by {compiled.over_bytes / GIB:.1f} GiB ({compiled.refused})"
    elif compiled.refused:
        fits = f"NO: {compiled.refused}"
    else:
        # The sum of arguments, results and temporaries is more than the compiler needs, because it shares memory among
        # them.
        fits = f"yes, {memory - total:.1f} GiB free" if total < memory else "yes, just"
    start = f"{program.name:<{width}}{program.calls:>6}{weights:>9.2f}{other:>8.2f}{code:>6.2f}{total:>5.1f}"
    return f"{start}{compiled.compile_s:>7.0f} s{compiled.compile_cpu_s:>6.0f} s   {fits}"


def _format_seconds(program: ProgramPlan, width: int) -> list[str]:
    if program.optimistic is None or program.online is None:
        return []
    lines = [_format_prediction(program.name, program.optimistic, width)]
    if program.online.total != program.optimistic.total:
        lines.append(_format_prediction("  all heads online", program.online, width))
    return [*lines, *(f"  NOT COUNTED: {name}" for name in program.optimistic.unpriced)]


def _format_prediction(name: str, prediction: Prediction, width: int) -> str:
    both = [prediction.by_category[category] for category in CATEGORIES]
    parts = "".join(f"{f'{times.estimate:.3f}/{times.floor:.3f}':>15}" for times in both)
    return f"{name:<{width}}{prediction.total.estimate:>9.3f}{prediction.total.floor:>8.3f}    {parts}"


def _format_playback(plan: SlicePlan, place: str) -> str:
    playback = plan.playbacks[place]
    frames = plan.request.frames / len(playback.arrivals_s)
    text = (
        f"the first frame {playback.first_frame_s:.2f} s after the request; one of {playback.chunk_s:.2f} s every "
        f"{playback.interval_s:.2f} s ({frames / playback.interval_s:.1f} frames a second); "
        if len(playback.arrivals_s) > 1
        else f"the first frame {playback.first_frame_s:.2f} s after the request; "
    )
    if playback.lag_s <= 0:
        return f"{text}plays from {playback.start_s:.2f} s after the request, and never waits"
    return (
        f"{text}played from {playback.start_s:.2f} s on, it would wait {playback.lag_s:.2f} s in all; plays without a "
        f"wait from {playback.start_s + playback.lag_s:.2f} s after the request"
    )


def _format_verdict(plan: SlicePlan, memory: float) -> list[str]:
    large = [program.name for program in plan.programs if program.compiled.over_bytes]
    other = [program.name for program in plan.programs if program.compiled.refused and program.name not in large]
    if large or other:
        return [
            f"{problem}: {', '.join(names)}" for problem, names in (("doesn't fit", large), ("failed", other)) if names
        ]
    resident = "fit" if fits(plan.parts, plan.slice.hardware.hbm_bytes) else "do NOT fit"
    return [
        f"one component at a time: {plan.largest_gib:.1f} GiB a device; "
        f"all {plan.resident_gib:.1f} GiB resident {resident} ({memory - plan.resident_gib:+.1f})"
    ]


def _format_mesh(plan: SlicePlan) -> str:
    devices = math.prod(plan.mesh)
    return f"dp {plan.mesh.dp} x sp {plan.mesh.sp} x tp {plan.mesh.tp}" + ("" if devices > 1 else " (one device)")
