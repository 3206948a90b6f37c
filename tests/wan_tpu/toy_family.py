"""A family in one file: a transformer of one matrix, a decoder that repeats pixels. Two experts, no guidance, Euler."""

import dataclasses
import json
import math
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from wan_tpu.families.family import Family
from wan_tpu.families.model import Model
from wan_tpu.families.shared.causal_vae import CausalChunks
from wan_tpu.families.shared.flop_count import count
from wan_tpu.families.shared.t5 import text_encoder
from wan_tpu.families.shared.tokenizer import train_tokenizer
from wan_tpu.families.shared.tokenizing import tokenize
from wan_tpu.plan import VIDEO, Expert
from wan_tpu.request import Defaults
from wan_tpu.runtime.bridge import call, to_jax
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.mesh import Rule, replicated_sharding
from wan_tpu.schedules import flow
from wan_tpu.spec import ModelSpec

CHANNELS, TOKENS, WIDTH, STRIDE = 4, 16, 32, 8
TEXT = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}


class Colours(torch.nn.Module):
    """The transformer: each pixel of the latents by itself, moved by the mean of the text and by the time."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Linear(CHANNELS, CHANNELS)
        self.of_text = torch.nn.Linear(WIDTH, CHANNELS)


class Repeating(torch.nn.Module):
    """The VAE: a colour for each pixel of the latents."""

    def __init__(self):
        super().__init__()
        self.colour = torch.nn.Linear(CHANNELS, 3)


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    text_encoder: dict


class ToySpec(ModelSpec):
    name = "toy-large"
    tasks = ("t2v",)
    components: ClassVar = {
        "encoder": ("text_encoder",),
        "rough": ("rough",),
        "fine": ("fine",),
        "decoder": ("decoder",),
    }
    defaults = Defaults(
        height=64, width=96, frames=9, fps=8, steps=4, guidance_scale=1, guidance_scale_2=1, shift=2, solver="euler"
    )
    solvers = ("euler",)
    heads = 1
    boundary_ratio = 0.5
    size_multiple = STRIDE

    def __init__(self, config):
        self.config = config

    def __eq__(self, other):
        return type(self) is type(other) and self.config == other.config

    __hash__ = None

    @classmethod
    def open(cls, checkpoint):
        return cls(ToyConfig(checkpoint.config("text_encoder")))

    def latent_shape(self, request):
        return 1, CHANNELS, (request.frames - 1) // 4 + 1, request.height // STRIDE, request.width // STRIDE

    def tokens(self, latent_shape):
        return math.prod(latent_shape[2:])

    def schedule(self, request):
        return flow.euler(request.steps, request.shift)

    def experts(self, request):
        first = int((self.schedule(request).timesteps >= 500).sum())
        both = Expert("rough", 0, first, False), Expert("fine", first, request.steps, False)
        return tuple(expert for expert in both if expert.stop > expert.start)


class ToyFlops:
    def encoder(self, request, *, prompts):
        ids = torch.ones(1, TOKENS, dtype=torch.int32, device="meta")
        build = text_encoder("T5EncoderModel", TEXT | {"vocab_size": 400}).build
        return prompts * count(build, lambda module: module(ids))

    def step(self, latent_shape, *, branches, images=0):
        return 2 * branches * math.prod(latent_shape) * CHANNELS

    def decoder(self, latent_shape):
        return 2 * 3 * math.prod(latent_shape)


class ToyModel(Model):
    flops = ToyFlops()
    text_shape = (TOKENS, WIDTH)

    @property
    def components(self):
        def plain(folder, build):
            return Component(folder, build, lambda module, mesh: None, (), (Rule(".*", ()),))

        return {
            "text_encoder": text_encoder("T5EncoderModel", self.config.text_encoder),
            "rough": plain("transformer", Colours),
            "fine": plain("transformer_2", Colours),
            "decoder": plain("vae", Repeating),
        }

    token_shapes: ClassVar = {"text_encoder": ((1, TOKENS),)}
    prompt_shapes: ClassVar = {"moved": ((WIDTH,), False), "length": ((), True)}

    def tokenize(self, prompt):
        ids, _, warnings = tokenize(self.tokenizers["text_encoder"], prompt, TOKENS)
        return {"text_encoder": (ids,)}, warnings

    def encode_text(self, component, loaded, ids):
        return call(loaded[0].module, loaded[0].params, lambda module, ids: module(ids).last_hidden_state, ids)

    def prompt_arrays(self, tokens, encoded):
        """Under names of its own, one of them integers."""
        count = np.array([(tokens["text_encoder"][0] != 0).sum()], np.int32)
        return {"moved": encoded["text_encoder"].mean(1), "length": count}

    def text_keys(self, module, params, mesh, text, image):
        assert text["length"].dtype == jnp.int32
        return {"moved": jax.lax.with_sharding_constraint(text["moved"], replicated_sharding(mesh))}

    def velocity(self, module, params, mesh, inputs):
        def method(module, pixels, moved):
            return module.own(pixels) + module.of_text(moved)

        moved = inputs.keys["moved"]
        pixels = inputs.latents.transpose(0, 2, 3, 4, 1).astype(moved.dtype)
        velocity = call(module, params, method, pixels, moved[0]) * (inputs.timestep / 1000).astype(pixels.dtype)
        return {VIDEO: velocity.transpose(0, 4, 1, 2, 3).astype(jnp.float32)}

    def vae_decoder(self, module, mesh):
        def run(module, cut, x, history):
            colour = x @ to_jax(module.colour.weight).T + to_jax(module.colour.bias)
            wide = colour.repeat(STRIDE, axis=1).repeat(STRIDE, axis=2)
            return wide if history.first else wide.repeat(4, axis=0)

        return CausalChunks(module, mesh, run, lambda x: x, lambda x: x, scale=1, later_frames=1)


def make_checkpoint(folder: Path, kind, *, seed=0):
    """Write a complete checkpoint as diffusers lays it out."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    config = transformers.T5Config(**TEXT, vocab_size=len(tokenizer))
    transformers.T5EncoderModel(config).save_pretrained(folder / "text_encoder")
    for name, module in (("transformer", Colours()), ("transformer_2", Colours()), ("vae", Repeating())):
        (folder / name).mkdir()
        save_file(module.state_dict(), folder / name / "diffusion_pytorch_model.safetensors")
        (folder / name / "config.json").write_text("{}")
    index = {
        "_class_name": "ToyPipeline",
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "transformer": ["toy", "Colours"],
        "transformer_2": ["toy", "Colours"],
        "vae": ["toy", "Repeating"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def colours(folder: Path, text: np.ndarray, noise: np.ndarray, steps: int, shift: float):
    """The latents after the last step, and the colour of each of their pixels, by torch alone."""
    from safetensors.torch import load_file

    rough, fine, vae = Colours(), Colours(), Repeating()
    for module, name in ((rough, "transformer"), (fine, "transformer_2"), (vae, "vae")):
        module.load_state_dict(load_file(folder / name / "diffusion_pytorch_model.safetensors"))
    schedule = flow.euler(steps, shift)
    x, moved = torch.from_numpy(noise).permute(0, 2, 3, 4, 1), torch.from_numpy(text).mean(1)[0]
    sigmas = [*schedule.sigmas, 0.0]
    with torch.no_grad():
        for step, time in enumerate(schedule.timesteps.tolist()):
            module = rough if time >= 500 else fine
            x = x + (sigmas[step + 1] - sigmas[step]) * (module.own(x) + module.of_text(moved)) * time / 1000
        return x.permute(0, 4, 1, 2, 3).numpy(), vae.colour(x)[0].numpy()


FAMILY = Family(
    name="toy",
    title="a toy",
    hub_ids={"toy-large": "nobody/toy-large"},
    transformer="Colours",
    published={"toy-large": ToyConfig(TEXT | {"vocab_size": 400})},
    spec=ToySpec,
    model=f"{__name__}:ToyModel",
    small=f"{__name__}:make_checkpoint",
)
