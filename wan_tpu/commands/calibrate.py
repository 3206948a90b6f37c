"""`wan-tpu calibrate`: how a model's residuals change from step to step, for MagCache."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wan_tpu.checkpoint import SETTINGS
from wan_tpu.commands import arguments
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import InvalidInput
from wan_tpu.media.video import check_output

if TYPE_CHECKING:
    from wan_tpu.pipeline import Pipeline
    from wan_tpu.plan import RequestPlan


def calibrate(argv: Sequence[str]) -> None:
    """Measure the curve by which MagCache decides which steps it may skip, on one prompt and a few seeds.

    The curve holds for the shift, the solver and the boundary that it was measured with. With --sigmas, or a --preset
    that has some, it holds for these and for the step at which they switch experts.
    """
    parser = Parser(prog="wan-tpu calibrate", description=calibrate.__doc__)
    arguments.add_model_arguments(parser)
    arguments.add_request_arguments(parser)
    parser.add_argument("--seeds", type=int, default=1, help="videos to average over; default %(default)s")
    parser.add_argument(
        "--write", action="store_true", help=f"write into the {SETTINGS} of --model, a folder; else print"
    )
    args = parser.parse_args(argv)
    if args.seeds < 1:
        raise InvalidInput(f"--seeds is {args.seeds}; give 1 or more")
    file = Path(args.model_id) / SETTINGS
    if args.write and not file.parent.is_dir():
        raise InvalidInput(
            f"--write needs a folder, and --model is {args.model_id}; omit it, and copy the curve from the output"
        )
    request = arguments.request_from(args)
    if args.write:
        check_output(file, overwrite=True)

    pipe = arguments.pipeline_from(args)
    plan = pipe.plan(request)
    resolved = plan.request
    if resolved.cache is not None or (resolved.switch_step is not None and resolved.sigmas is None):
        raise InvalidInput(
            "calibration doesn't support --cache, and supports --switch_step only together with --sigmas"
        )
    if resolved.sigmas is None and (resolved.guidance_scale <= 1 or not pipe.runtime.model.spec.is_guided(resolved)):
        raise InvalidInput("a curve covers both branches of guidance; give a --guidance_scale above 1")
    curve = measure_curve(pipe, plan, args.seeds)
    if not args.write:
        print(json.dumps({"magcache": [curve]}))
        return
    content = json.loads(file.read_text()) if file.exists() else {}
    other_curves = [other for other in content.get("magcache", []) if _schedule_of(other) != _schedule_of(curve)]
    text = json.dumps(content | {"magcache": [*other_curves, curve]}, indent=2)
    # Put each step's two ratios on one line.
    file.write_text(re.sub(r"\[\s+([-\d.]+),\s+([-\d.]+)\s+\]", r"[\1, \2]", text) + "\n")
    print(f"wrote the curve for {resolved.steps} steps to {file}; --cache magcache uses it")


def _schedule_of(curve: dict[str, Any]) -> tuple[Any, ...]:
    """Return the schedule that a curve applies to, which distinguishes it from other curves."""
    sigmas = curve.get("sigmas")
    steps = (curve["shift"],) if sigmas is None else (tuple(sigmas), curve["first_low"])
    return (curve.get("solver", "unipc"), *steps)


def measure_curve(pipe: "Pipeline", plan: "RequestPlan", seeds: int) -> dict[str, Any]:
    """Return the curve of a request, as `wan_tpu.schedules.magcache.read_curve` reads it.

    Without guidance both branches have the prompt's ratios.
    """
    import dataclasses

    from wan_tpu import stages

    spec, experts = pipe.runtime.model.spec, plan.experts
    plan = pipe.fetch_adapters(plan)
    request, conditioning = plan.request, pipe.encode(plan)
    ratios = np.zeros((request.steps, 2))
    for seed in range(request.seed, request.seed + seeds):
        seeded_plan = plan.with_request(dataclasses.replace(request, seed=seed))
        state = stages.device_state(pipe.runtime, seeded_plan, pipe.initial_state(seeded_plan))
        for expert in experts:
            inputs = stages.expert_inputs(pipe.runtime, request, expert, conditioning)
            run = stages.ExpertRun(pipe.runtime, seeded_plan, expert, inputs, state, keeps_residuals=True)
            before = None
            for i in range(expert.start, expert.stop):
                run.step()
                step_ratios, before = run.residual_ratios(before)
                ratios[i] += step_ratios / seeds
            state = run.state
    first_low = experts[1].start if len(experts) > 1 else None
    curve = [[round(float(value), 5) for value in pair] for pair in ratios]
    schedule: dict[str, Any] = {} if request.sigmas is None else {"sigmas": list(request.sigmas)}
    schedule |= {"shift": request.shift, "boundary": spec.boundary_ratio, "solver": request.solver}
    return {"ratios": curve, "first_low": first_low} | schedule
