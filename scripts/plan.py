#!/usr/bin/env python3
"""Plan a published model on TPU slices: does it fit, how long does it take, on which mesh?

    plan.py --model wan2.2-i2v-a14b --slice v6e-8 --size 720*1280 --frames 81 --steps 40 [--json]
    plan.py --model wan2.2-i2v-a14b --slice v6e-8 --slice v5p-8 --program "denoise step" --plot step.png

The first also says what the denoise step would be on each other mesh of the slice: half of its
13 minutes on two cores (--no-meshes).

Every program is compiled for the slice by libtpu's compiler (`pip install ".[tpu]"`); no TPU and no weights are
needed. What was compiled once is kept in --cache. docs/performance.md says what the seconds mean.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["JAX_PLATFORMS"] = "cpu"  # slices are described, this machine's own accelerators stay untouched

from described import described, run

from cluster.slice_spec import SliceSpec
from wan_tpu.errors import OutputError
from wan_tpu.families import preset_spec, published
from wan_tpu.request import GenerationRequest, parse_size

if TYPE_CHECKING:
    from wan_tpu.pricing.plan import Plan

PLOTS = (".png", ".svg", ".pdf")


def main() -> int:
    """Print the plans; return 1 when a program of them doesn't fit or can't be compiled."""
    args = _arguments()

    from wan_tpu.pricing.plan import STEP
    from wan_tpu.pricing.plan_text import compare, describe, draw, to_json

    if args.plot:
        _check_plot(args.plot)
    _check_cache(args.cache)
    plans, others = _plans(args)
    if args.plot:
        draw([plan for plan in plans if any(program.name == STEP for program in plan.programs)], args.plot)
    if args.json:
        print(json.dumps({"plans": [to_json(plan) for plan in plans], "other_meshes": [to_json(p) for p in others]}))
    else:
        print("\n\n".join(describe(plan) for plan in plans))
        if others:
            print(f"\nother meshes\n{compare(others)}")
    return 1 if any(program.compiled.refused for plan in plans for program in plan.programs) else 0


def _plans(args: argparse.Namespace) -> "tuple[list[Plan], list[Plan]]":
    """Return the plans asked for, and those of other meshes (the denoise step only)."""
    from wan_tpu.pricing.plan import STEP, Planner

    height, width = parse_size(args.size) if args.size else (None, None)
    given = GenerationRequest(
        height=height, width=width, frames=args.frames, steps=args.steps, guidance_scale=args.guidance_scale
    )
    request = given.resolve(preset_spec(args.model).defaults)
    plans, others = [], []
    for name in args.slice:
        planner = Planner(
            args.model,
            request,
            described(SliceSpec(name)),
            dtype=args.dtype,
            cache=args.cache,
            report=_progress(),
        )
        plan = planner.plan((args.dp, args.sp, args.tp), only=args.program)
        plans.append(plan)
        if args.meshes:
            others += [planner.plan(mesh, only=STEP) for mesh in planner.meshes() if mesh != plan.mesh]
    return plans, others


def _check_plot(file: Path) -> None:
    """Raise `OutputError` before minutes of compiling, not after."""
    if file.suffix not in PLOTS:
        raise OutputError(f"--plot {file} ends with {file.suffix or 'nothing'}; allowed are {', '.join(PLOTS)}")
    if not file.absolute().parent.is_dir():
        raise OutputError(f"--plot {file}: {file.absolute().parent} is no folder; make it first")


def _check_cache(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--cache {folder} can't be made ({error.strerror}); give another folder") from None


def _progress():  # type: ignore[no-untyped-def]
    start = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=published(), default="wan2.2-i2v-a14b")
    parser.add_argument("--slice", action="append", help="such as v6e-8; may be given several times")
    parser.add_argument("--size", help="HEIGHT*WIDTH; default the model's")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance_scale", type=float)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    for axis in ("dp", "sp", "tp"):
        parser.add_argument(f"--{axis}", type=int)
    parser.add_argument(
        "--meshes",
        action=argparse.BooleanOptionalAction,
        help="the denoise step on every other mesh, too; the default where neither mesh nor program is chosen",
    )
    parser.add_argument("--program", help='only this one, such as "denoise step"')
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="an image of the denoise steps' seconds (needs matplotlib)")
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--cache", type=Path, default=home / "wan-tpu" / "plan", help="default %(default)s")
    args = parser.parse_args()
    args.slice = args.slice or ["v6e-8"]
    if args.meshes is None:
        args.meshes = args.program is None and (args.dp, args.sp, args.tp) == (None, None, None)
    return args


if __name__ == "__main__":
    run(main)
