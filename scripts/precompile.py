#!/usr/bin/env python3
"""Compile every program of a model ahead of time and keep the executables in a folder.

    precompile.py --model_id Wan-AI/Wan2.2-I2V-A14B-Diffusers --slice v6e-8 --size 720*1280 executables/
    precompile.py --model_id demo/checkpoint --size 160*240 --frames 17 --dtype float32 executables/   # this machine

`wan-tpu generate --executables executables/` then loads them. With --slice no TPU is needed, but libtpu is
(`pip install ".[aot]"`). Of the checkpoint only configurations are read; --model takes a published one instead, whose
programs serve where its files say exactly the same.
"""

import argparse
import sys
from pathlib import Path

from described import described

from cluster.slice_spec import SliceSpec
from wan_tpu import GenerationRequest
from wan_tpu.aot.precompile import precompile
from wan_tpu.checkpoint import DTYPES, Checkpoint
from wan_tpu.errors import WanTpuError
from wan_tpu.families import open_model
from wan_tpu.families.wan import WanModel
from wan_tpu.families.wan_presets import PRESETS
from wan_tpu.mesh import make_mesh
from wan_tpu.request import parse_size


def main() -> int:
    """Print a line for each program; return the exit code."""
    args = _arguments()
    try:
        model = open_model(Checkpoint(args.model_id)) if args.model_id else WanModel(PRESETS[args.model])
        height, width = parse_size(args.size) if args.size else (None, None)
        given = GenerationRequest(height=height, width=width, frames=args.frames, guidance_scale=args.guidance_scale)
        devices = described(SliceSpec(args.slice)).devices() if args.slice else None
        mesh = make_mesh((args.dp, args.sp, args.tp), heads=model.heads, devices=devices)
        print(f"{model.preset}, mesh {dict(mesh.shape)} of {mesh.devices.flat[0].device_kind}", flush=True)
        for done in precompile(model, given.resolve(model.defaults), mesh, args.dtype, args.folder, args.batch):
            print(f"{done.name:<20}{done.compile_s:8.1f} s compiling{done.seconds:8.1f} s in all", flush=True)
    except (WanTpuError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model_id", help="diffusers directory or hub id; only its configurations are read")
    which.add_argument("--model", choices=PRESETS, help="a published configuration, without its files")
    parser.add_argument("--slice", help="such as v6e-8; this machine's own devices when left out")
    parser.add_argument("--size", help="HEIGHT*WIDTH")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--guidance_scale", type=float)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    for axis in ("dp", "sp", "tp"):
        parser.add_argument(f"--{axis}", type=int)
    parser.add_argument("--batch", type=int, default=1, help="requests whose steps run together, as in the layout")
    parser.add_argument("folder", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
