#!/usr/bin/env python3
"""Time the small model of docs/benchmarks.md against diffusers, on this machine, in one run.

Both sides run the same checkpoint on the same inputs in float32, alternately, after a warm-up; each figure is the
best of the runs, which is what a noisy machine distorts least. Compile time is printed apart and not in the ratio.
"""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # diffusers runs on the CPU too

import diffusers
import numpy as np
import torch

from wan_tpu import GenerationRequest, Pipeline, load_pipeline, stages
from wan_tpu.plan import VIDEO
from wan_tpu.progress import Silent
from wan_tpu.runtime.program import place
from wan_tpu.tiny import make_checkpoint

EXPERT = {"num_attention_heads": 4, "attention_head_dim": 128, "ffn_dim": 2048, "num_layers": 8, "text_dim": 256}
HEIGHT, WIDTH, FRAMES = 320, 320, 17  # 5 x 20 x 20 = 2,000 tokens
PROGRAMS = {"step": "denoise step", "encode": "vae_encoder", "decode": "decoder "}


def main() -> None:
    """Print seconds and ratios of a denoise step, VAE encode and VAE decode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", choices=["diffusers"], default="diffusers")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--vae_base_dim", type=int, default=32, help="width of the VAE (the published one: 96)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        vae = {"base_dim": args.vae_base_dim, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
        checkpoint = make_checkpoint(Path(folder), "wan2.2-i2v-a14b", transformer=EXPERT, vae=vae)
        pipe = load_pipeline(checkpoint, dtype="float32", mesh=(1, 1, 1))
        runtime, cases = pipe.runtime, _cases(pipe, checkpoint)
        print(f"{os.cpu_count()} cores, torch {torch.get_num_threads()} threads, float32, best of {args.runs}")
        print(f"{'':<8}{'compile s':>11}{'wan-tpu s':>11}{'diffusers s':>13}{'ratio':>8}")
        for name, (ours, theirs) in cases.items():
            got, expected = ours(), theirs()
            assert np.abs(got - expected).max() < 1e-3 * max(1.0, np.abs(expected).max()), f"{name}: results differ"
            best = [np.inf, np.inf]
            for _ in range(args.runs):
                for i, side in enumerate((ours, theirs)):
                    best[i] = min(best[i], _seconds(side))
            compile_s = sum(p.compile_s for title, p in runtime.programs.items() if PROGRAMS[name] in title)
            print(f"{name:<8}{compile_s:11.1f}{best[0]:11.2f}{best[1]:13.2f}{best[1] / best[0]:8.2f}", flush=True)


def _seconds(run: Callable[[], np.ndarray]) -> float:
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cases(pipe: Pipeline, checkpoint: Path) -> dict[str, tuple[Callable[[], np.ndarray], Callable[[], np.ndarray]]]:
    """Return, for each piece of work, it here and it in diffusers; both give the same array."""
    model, runtime = pipe.runtime.model, pipe.runtime
    image = Path(__file__).resolve().parent.parent / "examples" / "cat.png"
    plan = pipe.plan(
        GenerationRequest(prompt="A cat", image=image, height=HEIGHT, width=WIDTH, frames=FRAMES, steps=10)
    )
    request, expert = plan.request, plan.experts[0]
    conditioning = pipe.encode(plan)
    state = pipe.initial_state(plan)
    loaded = runtime.component("denoise_high")
    program = stages.step_program(runtime, loaded.module)
    inputs_of_expert = stages.expert_inputs(runtime, request, expert, conditioning)
    step_inputs = stages.step_conditioning(runtime, loaded, inputs_of_expert)
    start = place(state.parts, runtime.mesh)
    numbers = place(stages.step_numbers(model.spec.schedules(request), 0), runtime.mesh)

    transformer = diffusers.WanTransformer3DModel.from_pretrained(checkpoint / "transformer").eval()
    vae = diffusers.AutoencoderKLWan.from_pretrained(checkpoint / "vae").eval()
    scheduler = diffusers.UniPCMultistepScheduler.from_pretrained(checkpoint / "scheduler")
    latents = torch.from_numpy(state.latents)
    hidden = torch.cat([latents, torch.from_numpy(conditioning.image_latents)], dim=1)
    texts = [torch.tensor(text) for text in (conditioning.prompt["text"], (conditioning.negative or {})["text"])]
    inputs = stages.image_inputs(runtime, request)
    assert inputs is not None
    pixels = torch.from_numpy(np.concatenate(model.video_condition(request), axis=2))
    scaled = torch.from_numpy(model.vae_latents(state.latents))

    def step_here() -> np.ndarray:
        return np.asarray(program(loaded.params, start, numbers, step_inputs)[0][VIDEO][0])

    @torch.no_grad()
    def step_there() -> np.ndarray:
        scheduler.set_timesteps(request.steps)
        timestep = scheduler.timesteps[0]
        conditional, unconditional = (
            transformer(hidden, timestep.expand(1), text, return_dict=False)[0] for text in texts
        )
        velocity = unconditional + request.guidance_scale * (conditional - unconditional)
        return scheduler.step(velocity, timestep, latents, return_dict=False)[0].numpy()

    def encode_here() -> np.ndarray:
        return np.concatenate(list(stages.vae_encode(runtime, inputs.chunks)), axis=2)

    @torch.no_grad()
    def encode_there() -> np.ndarray:
        return vae.encode(pixels).latent_dist.parameters.numpy()

    def decode_here() -> np.ndarray:
        return np.concatenate(list(stages.decode(runtime, state.latents, Silent())))

    @torch.no_grad()
    def decode_there() -> np.ndarray:
        return (vae.decode(scaled).sample[0].permute(1, 2, 3, 0) / 2 + 0.5).numpy()

    return {
        "step": (step_here, step_there),
        "encode": (encode_here, encode_there),
        "decode": (decode_here, decode_there),
    }


if __name__ == "__main__":
    main()
