#!/usr/bin/env python3
"""Measure what a preview by a tiny decoder (TAEHV) costs the host at a model's own size. Its weights are random."""

import tempfile
import time
from pathlib import Path

import numpy as np
from published.taehv_file import make_file

from wan_tpu.commands.parser import Parser
from wan_tpu.families import list_published
from wan_tpu.families.model import published_model
from wan_tpu.previews.painter import Painter
from wan_tpu.request import GenerationRequest


def main() -> None:
    """Paint three previews after one that compiles, and print the seconds of the fastest."""
    parser = Parser(prog="bench_previews.py", description=__doc__)
    parser.add_argument("--model", default="wan2.2-t2v-a14b", choices=list_published(), metavar="MODEL")
    model = published_model(parser.parse_args().model)
    plan = model.spec.plan(GenerationRequest())
    shape = model.spec.latent_shape(plan.request)
    latents = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "decoder.safetensors")
        make_file(file, channels=shape[1])
        painter = Painter(model, file)
        painter.paint(latents, None, plan.request)
        seconds = []
        for _ in range(3):
            start, busy = time.perf_counter(), time.process_time()
            painter.paint(latents, None, plan.request)
            seconds.append((time.process_time() - busy, time.perf_counter() - start))
    cpu_s, wall_s = min(seconds)
    print(f"{plan.request.width}x{plan.request.height}: {cpu_s:.1f} CPU s, {wall_s:.1f} s")


if __name__ == "__main__":
    main()
