"""The toy family as one that denoises chunk after chunk: each at half its size first, from the chunk before it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import torch
from safetensors.torch import load_file

from tests.wan_tpu import toy_family
from tests.wan_tpu.toy_family import CHANNELS, STRIDE, Colours, Repeating, ToyModel, ToySpec
from wan_tpu.families.chunked import ChunkedModel
from wan_tpu.plan import VIDEO, Expert
from wan_tpu.schedules import flow

FRAMES, LATENTS = 5, 2  # Of a chunk.
MIXED = 0.75, 0.5  # The shares of larger latents and of noise.


class ChunkedToySpec(ToySpec):
    name = "toy-in-chunks"
    defaults = dataclasses.replace(ToySpec.defaults, frames=15)
    chunk_frames = LATENTS
    frame_offset = frame_step = FRAMES

    def latent_frames(self, frames):
        return frames // FRAMES * LATENTS

    def latent_shape(self, request):
        return 1, CHANNELS, LATENTS, request.height // STRIDE, request.width // STRIDE

    def decoded_shape(self, request):
        return 1, CHANNELS, self.latent_frames(request.frames), request.height // STRIDE, request.width // STRIDE

    def latent_shapes(self, request, step):
        expert = next(expert for expert in self.experts(request) if step <= expert.stop)
        *rest, height, width = self.latent_shape(request)
        return {VIDEO: (*rest, height, width) if expert.enlarges else (*rest, height // 2, width // 2)}

    def schedule(self, request):
        half = flow.euler(request.steps // 2, request.shift)
        schedule = half
        for _ in range(2 * request.frames // FRAMES - 1):
            schedule = schedule.followed_by(half)
        return schedule

    def experts(self, request):
        half = request.steps // 2
        stretches = range(2 * request.frames // FRAMES)
        return tuple(
            Expert(("rough", "fine")[i % 2], i * half, (i + 1) * half, False, i % 2 == 1, i // 2) for i in stretches
        )


class ChunkedToyModel(ChunkedModel, ToyModel):
    def chunk_noise(self, request, expert, generator, images):
        torchs = torch.Generator().manual_seed(request.seed)
        if generator is not None:
            torchs.set_state(torch.from_numpy(generator.copy()))
        noise = torch.randn(self.spec.latent_shapes(request, expert.stop)[VIDEO], generator=torchs)
        return noise.numpy(), torchs.get_state().numpy()

    def renoising(self, request, expert):
        return MIXED

    def enlarge_chunk(self, latents):
        return latents.repeat(2, axis=3).repeat(2, axis=4)

    def chunk_history(self, request, chunks, image_latents):
        mean = chunks[-1].mean((0, 2, 3, 4)) if chunks else np.zeros(CHANNELS, np.float32)
        return {"before": mean}

    def velocity(self, module, params, mesh, inputs):
        before = inputs.keys["before"][:, None, None, None]
        return {VIDEO: super().velocity(module, params, mesh, inputs)[VIDEO] + before.astype(jnp.float32)}


def chunks(folder, text, request):
    """The latents of each chunk after its last step, and their colours, by torch alone."""
    rough, fine, vae = Colours(), Colours(), Repeating()
    for module, name in ((rough, "transformer"), (fine, "transformer_2"), (vae, "vae")):
        module.load_state_dict(load_file(folder / name / "diffusion_pytorch_model.safetensors"))
    schedule, generator = flow.euler(request.steps // 2, request.shift), torch.Generator().manual_seed(request.seed)
    sigmas, moved = [*schedule.sigmas, 0.0], torch.from_numpy(text).mean(1)[0]
    before, results = torch.zeros(CHANNELS), []
    rows, columns = request.height // STRIDE, request.width // STRIDE
    with torch.no_grad():
        for _ in range(request.frames // FRAMES):
            x = torch.randn(1, CHANNELS, LATENTS, rows // 2, columns // 2, generator=generator)
            for module in (rough, fine):
                if module is fine:
                    x = MIXED[0] * x.repeat_interleave(2, 3).repeat_interleave(2, 4)
                    x = x + MIXED[1] * torch.randn(x.shape, generator=generator)
                for step, time in enumerate(schedule.timesteps.tolist()):
                    pixels = x.permute(0, 2, 3, 4, 1)
                    velocity = (module.own(pixels) + module.of_text(moved)) * time / 1000 + before
                    x = x + (sigmas[step + 1] - sigmas[step]) * velocity.permute(0, 4, 1, 2, 3)
            before = x.mean((0, 2, 3, 4))
            results.append((x.numpy(), vae.colour(x.permute(0, 2, 3, 4, 1))[0].numpy()))
    return results


FAMILY = dataclasses.replace(
    toy_family.FAMILY,
    hub_ids={"toy-in-chunks": "nobody/toy-in-chunks"},
    published={"toy-in-chunks": toy_family.FAMILY.published["toy-large"]},
    spec=ChunkedToySpec,
    model=f"{__name__}:ChunkedToyModel",
)
