"""One test for each mistake that public ports of these models have made."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchax
import transformers
from diffusers import AutoencoderKLWan

from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.families.model import StepInputs
from wan_tpu.plan import VIDEO
from wan_tpu.runtime import bridge
from wan_tpu.runtime.program import place
from wan_tpu.stages import expert_inputs, step_conditioning, step_numbers, step_program
from wan_tpu.tiny import make_checkpoint

KIND = "wan2.1-t2v-1.3b"
REQUEST = {
    "prompt": "A cat",
    "height": 32,
    "width": 48,
    "frames": 5,
    "steps": 2,
    "guidance_scale": 2.0,
    "shift": 5.0,
}


def test_vae_statistics_come_from_the_checkpoint(tmp_path):
    """Hard-coded ones give a black video as soon as a VAE has others."""
    statistics = {"latents_mean": [0.5] * 16, "latents_std": [1 / 8] * 16}
    folder = make_checkpoint(tmp_path / "checkpoint", "wan2.1-t2v-1.3b", vae=statistics)
    pipe = load_pipeline(folder, dtype="float32", mesh=(1, 1, 1))
    latents = np.random.default_rng(0).standard_normal((1, 16, 1, 4, 6)).astype(np.float32)
    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    with torch.no_grad():
        expected = vae.decode(torch.from_numpy(latents / 8 + 0.5)).sample[0].permute(1, 2, 3, 0).numpy() / 2 + 0.5
    got = np.concatenate(list(pipe.decode(latents)))
    assert np.abs(got - expected).max() < 1e-4


def test_torchax_is_never_enabled_globally(checkpoint):
    """Enabled before the weights are loaded, it turns every torch tensor into a jax array on device 0."""
    pipe = load_pipeline(checkpoint("wan2.1-t2v-1.3b"), dtype="float32", mesh=(1, 1, 1))
    before = pipe.runtime.component("denoise")
    pipe.generate(GenerationRequest(height=32, width=48, frames=1, steps=1, guidance_scale=1.0))
    after = pipe.runtime.component("text_encoder")
    assert not torchax.default_env().enabled
    assert type(torch.ones(1) + 1) is torch.Tensor
    for loaded in (before, after):
        assert all(isinstance(value, jax.Array) for value in loaded.params.values())
        assert all(p.is_meta for p in loaded.module.parameters())


def test_model_outputs_never_leak_out_of_the_bridge():
    """transformers' ModelOutput is no pytree to JAX: its tensors would leave the trace unconverted."""
    config = transformers.UMT5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    module = transformers.UMT5EncoderModel._from_config(config, attn_implementation="eager").eval()
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in module.named_parameters()}
    ids = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(TypeError, match="BaseModelOutput"):
        bridge.call(module, params, lambda module, ids: module(ids), ids)
    out = jax.jit(lambda params, ids: bridge.call(module, params, lambda m, ids: m(ids).last_hidden_state, ids))(
        params, ids
    )
    expected = module(torch.ones(1, 4, dtype=torch.int32)).last_hidden_state.detach().numpy()
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_the_bfloat16_step_solves_nothing_and_combines_in_float32(pipeline):
    """UniPC's linear solve in bfloat16 loses the corrector: here it is done on the host, in float64."""
    pipe = pipeline(KIND, "bfloat16")
    runtime = pipe.runtime
    plan = pipe.plan(GenerationRequest(**REQUEST))
    conditioning = pipe.encode(plan)
    schedule = pipe.runtime.model.spec.schedule(plan.request)
    loaded = runtime.component("denoise")
    shared = step_conditioning(runtime, loaded, expert_inputs(runtime, plan.request, plan.experts[0], conditioning))
    rng = np.random.default_rng(0)
    shape = runtime.model.spec.latent_shape(plan.request)
    latents, *history = (rng.standard_normal(shape).astype(np.float32) for _ in range(4))
    program = step_program(runtime, loaded.module)
    parts, numbers = {VIDEO: (latents, tuple(history))}, step_numbers({VIDEO: schedule}, 1)
    args = (loaded.params, *place((parts, numbers), runtime.mesh), shared)
    text = program.compile(*args).as_text()
    assert not re.search(r"triangular|cholesky|lu_|getrf|trsm", text)
    stepped, finite, _ = program(*args)
    got = stepped[VIDEO][0]
    velocity = np.asarray(
        jax.jit(functools.partial(runtime.model.velocity, loaded.module), static_argnums=1)(
            loaded.params,
            runtime.mesh,
            StepInputs(latents, schedule.timesteps[1], np.float32(schedule.guidance[1]), *shared),
        )[VIDEO],
        np.float64,
    )
    terms = [latents, latents - schedule.sigmas[1] * velocity, *history]
    expected = sum(c * term for c, term in zip(schedule.matrices[1][0], terms, strict=True))
    assert bool(finite)
    assert got.dtype == np.float32
    # float32 gives 1e-7; a combination in bfloat16 would be off by 4e-3. The velocity itself is recomputed in another
    # program, whose fusions may round bfloat16 elsewhere: hence the room.
    assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()
