#!/usr/bin/env python3
"""Compile every program of a model ahead of time and keep the executables in a folder.

    precompile.py --model Wan-AI/Wan2.2-I2V-A14B-Diffusers --slice v6e-8 --size 1280x720 executables/
    precompile.py --model Wan-AI/Wan2.2-I2V-A14B-Diffusers --layout a14b-balanced-v6e --size 1280x720 executables/
    precompile.py --model examples/small-wan2.2-i2v --size 64x64 --frames 17 --dtype float32 executables/   # here

`wan-tpu generate --executables executables/` then loads them; so do the pools of a pipeline, each the programs of its
stages on its slice, which --layout compiles. With --slice or --layout no TPU is needed, but libtpu is
(`pip install ".[tpu]"`). Of a checkpoint only configurations are read; the name of a published model (`wan-tpu models`)
stands for its configuration without its files, whose programs serve where the files say exactly the same.
"""

import argparse
import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.planning.slice_description import describe_slice
from cluster.errors import ClusterError
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.cli import run
from wan_tpu.commands.parser import Parser, add_mesh, add_model, add_precision
from wan_tpu.families import list_published
from wan_tpu.request import GenerationRequest, parse_size

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from wan_tpu.families.model import Model


def main() -> int:
    """Print a line for each program; return the exit code."""
    args = _arguments()

    import jax

    from wan_tpu.aot.precompile import precompile
    from wan_tpu.families.model import open_model, published_model
    from wan_tpu.runtime.mesh import make_mesh

    try:
        name = args.model_id
        model = published_model(name) if name in list_published() else open_model(Checkpoint(name))
        height, width = (None, None) if args.size is None else parse_size(args.size)
        partial = GenerationRequest(
            height=height, width=width, frames=args.frames, guidance_scale=args.guidance_scale, preset=args.preset
        )
        preset = dict(model.spec.presets[args.preset].settings) if args.preset else {}
        request = partial.resolve(model.spec.defaults_for(partial, None), preset)
        models = [model.for_text(model.spec.fit_text_rows(count)) for count in args.prompt_tokens] or [model]
        parts = _parts(args, model)
        # The most frequent references, if some pool is for requests with them.
        hosted = model.spec.limit_to({stage for part in parts for stage in part.stages})
        requests = hosted.typical_requests(request)
        for part in parts:
            devices = describe_slice(part.slice).devices() if part.slice else None
            mesh = make_mesh(part.mesh, heads=model.spec.heads, devices=devices)
            print(f"{part.name}{model.spec.name}, mesh {dict(mesh.shape)} of {_kind(part, mesh)}", flush=True)
            for sized, needed in itertools.product(models, requests):
                for done in precompile(sized, needed, mesh, args.dtype, args.folder, stages=part.stages):
                    took = f"{done.compile_s:8.1f} s compiling{done.seconds:8.1f} s in all"
                    print(f"{done.name:<20}{done.refusal or took}", flush=True)
    except jax.errors.JaxRuntimeError as error:  # all that a compiler says
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True)
class _Part:
    """Stages that are compiled for one slice: all of them, or those of a layout's pool."""

    name: str
    slice: SliceSpec | None
    mesh: tuple[int | None, int | None, int | None]
    stages: tuple[str, ...]


def _parts(args: argparse.Namespace, model: "Model") -> list[_Part]:
    if args.layout:
        pools = Layout.load(args.layout).pools
        return [_Part(f"pool {pool.name}: ", pool.slice, pool.mesh, pool.stages) for pool in pools]
    kind = SliceSpec(args.slice) if args.slice else None
    return [_Part("", kind, (args.dp, args.sp, args.tp), model.spec.stages)]


def _kind(part: _Part, mesh: "Mesh") -> str:
    return f"{part.slice or 'this machine'} ({mesh.devices.flat[0].device_kind})"


def _arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, required=True, help="diffusers directory, hub id, or a published model's name")
    where = parser.add_alternatives()
    where.add_argument("--slice", help="such as v6e-8; this machine's own devices when left out")
    where.add_argument("--layout", help="file or shipped name: every pool's stages, for its slice and mesh")
    parser.add_argument("--size", help="WIDTHxHEIGHT in pixels")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--preset", help="whose programs differ from the usual ones: turbo-4-sla, fasth3-vsa")
    parser.add_argument("--guidance_scale", type=float)
    parser.add_argument(
        "--prompt_tokens",
        type=int,
        nargs="+",
        default=[],
        help="MiniMax-H3: of prompts to compile for, such as 1024 6000",
    )
    add_precision(parser)
    add_mesh(parser)
    parser.add_argument("folder", help="or gs://bucket/folder")
    args = parser.parse_args()
    if args.layout and any((args.dp, args.sp, args.tp)):
        parser.error("the mesh's axes are the layout's; write them there")
    return args


if __name__ == "__main__":
    sys.exit(run(lambda _: main(), expected=(ClusterError, ValueError, OSError)))
