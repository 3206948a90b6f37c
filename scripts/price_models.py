#!/usr/bin/env python3
"""Price published models at their own sizes on common slices, for `wan-tpu plan` to answer without a compiler.

    price_models.py                                       # all that is missing: up to 500 CPU seconds a line
    price_models.py --model minimax-h3 --slice v6e-8 --anew

A plan is written as soon as it is made, and compiled programs are kept, so that a run which was ended goes on when it
is started again. Programs that an earlier model has, too, such as its decoder, are only traced. A line that fails is
reported, and the others are priced.
"""

import argparse
import datetime
import sys
from pathlib import Path

from actors.planning.slice_description import describe_slice
from cluster.slice_spec import SliceSpec
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import CompileFailed, WanTpuError
from wan_tpu.families import list_published, published_spec
from wan_tpu.pricing import shipped_plans
from wan_tpu.pricing.compiling import Compilers
from wan_tpu.pricing.planner import SlicePlanner, make_plans
from wan_tpu.pricing.question import Question
from wan_tpu.request import GenerationRequest
from wan_tpu.storage.folder import cache_folder

SLICES = ("v6e-8", "v7x-8", "v6e-4", "v5p-8", "v7x-4", "v6e-16", "v6e-1")
DTYPE = "bfloat16"


def main() -> int:
    """Write the plans that are missing, or all that were asked for; return 1 if some couldn't be made."""
    args, failed = _arguments(), False
    compilers = Compilers(args.compiled)
    for slice_name in args.slice or SLICES:
        for model in args.model or list_published():
            try:
                _price(model, slice_name, args.compiled, compilers, anew=args.anew)
            except WanTpuError as error:
                compilers.close()
                failed, compilers = True, Compilers(args.compiled)
                print(f"{model} on {slice_name} isn't priced: {error}", flush=True)
    compilers.close()
    return int(failed)


def _price(model: str, slice_name: str, cache: Path, compilers: Compilers, *, anew: bool) -> None:
    """Write a plan, unless there is one; raises `WanTpuError` if it can't be made."""
    spec = published_spec(model)
    images = "t2v" not in spec.tasks
    request = spec.plan(GenerationRequest(), image=images, last=spec.last_images == "required").request
    question = Question.of(slice_name, DTYPE, request)
    if not anew and shipped_plans.find(model, question, (None, None, None)):
        return
    described = describe_slice(SliceSpec(slice_name))
    planner = SlicePlanner(model, request, described, dtype=DTYPE, cache=cache, report=_report)
    [plan] = make_plans([planner.task((None, None, None))], compilers)
    refused = [program for program in plan.programs if program.compiled.refused]
    for program in refused:
        if not program.compiled.over_bytes:  # The compiler failed. Only what doesn't fit is an answer.
            raise CompileFailed(f"{program.name}: {program.compiled.refused}")
    shipped_plans.add(plan, DTYPE, datetime.date.today().isoformat())
    print(f"{model} on {slice_name}: {', '.join(p.name for p in refused) or 'no program'} refused", flush=True)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = Parser(prog="price_models.py", description=__doc__)
    parser.add_argument("--model", action="append", choices=list_published(), metavar="MODEL", help="default all")
    parser.add_argument("--slice", action="append", help=f"default {', '.join(SLICES)}")
    parser.add_argument("--anew", action="store_true", help="also what was priced before")
    parser.add_argument("--compiled", type=Path, default=cache_folder() / "plan", help="default %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
