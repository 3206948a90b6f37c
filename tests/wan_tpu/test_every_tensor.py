"""Every tensor of a checkpoint, tables among them, is read, and what is read changes what is computed."""

import re

import jax
import pytest
from jax.interpreters import partial_eval
from safetensors import safe_open

from wan_tpu.aot.programs import AbstractRuntime, stage_programs
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.model import open_model
from wan_tpu.request import GenerationRequest
from wan_tpu.runtime.components import load_component, open_component
from wan_tpu.runtime.mesh import make_mesh

# One of each architecture, and what of its files no pipeline of diffusers uses either.
UNUSED = {
    "wan2.1-t2v-1.3b": "",
    "wan2.1-flf2v-14b-720p": r"image_encoder/vision_model\.encoder\.layers\.2\..*",
    "wan2.2-ti2v-5b": "",
    "turbowan2.2-i2v-a14b": "",
    "cogvideox-2b": "",
    "cogvideox-5b-i2v": "",
    "cogvideox1.5-5b-i2v": "",
    "hunyuanvideo1.5-480p-i2v": r"text_encoder/(layers\.[23]\..*|norm\.weight)|image_encoder/head\..*",
    "hunyuanvideo1.5-480p-i2v-step-distilled": r"text_encoder/(layers\.[23]\..*|norm\.weight)|image_encoder/head\..*",
    # Doubled latents aren't blurred: only a resampler that also makes them smaller again does that.
    "ltx-2": r"text_encoder/(vision_tower|multi_modal_projector)\..*|latent_upsampler/upsampler\.blur_down\.kernel",
    "ltx-2.3-distilled": r"text_encoder/(vision_tower|multi_modal_projector)\..*",
    # The VAE's own decoder is used unless wan_tpu.json chooses the other one.
    "ltx-2.5-distilled": r"text_encoder/model\.(vision_embedder|embed_vision|embed_audio)\..*"
    r"|diffusion_decoder/.*",
    # The output of Qwen's last layer but one is the text's embedding.
    "minimax-h3": r"text_encoder/(model\.language_model\.(layers\.4\..*|norm\.weight)|lm_head\..*)"
    r"|audio_vae/logs_proj\..*",
}
EACH_FAMILY = (
    "wan2.1-flf2v-14b-720p",
    "wan2.2-ti2v-5b",
    "cogvideox1.5-5b-i2v",
    "hunyuanvideo1.5-480p-i2v",
    "ltx-2.5-distilled",
    "minimax-h3",
)
KINDS = [kind if kind in EACH_FAMILY else pytest.param(kind, marks=pytest.mark.thorough) for kind in UNUSED]
# Read for what comes after CLIP's last layer but one, whose features Wan takes; for videos, where TI2V 5B is given an
# image; and to turn a spectrogram into sound, where LTX-2's vocoder only does the opposite.
IN_NO_RESULT = (
    r"vision_model\.post_layernorm\..*|visual_projection\..*|encoder\.down_blocks\.\d\.downsampler\.time_conv\..*"
    r"|mel_stft\.stft_fn\.inverse_basis"
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((1, 1, 1), heads=2)


@pytest.mark.parametrize("kind", KINDS)
def test_all_tensors_of_all_files_are_read(kind, checkpoint, mesh):
    opened, tensors, read = Checkpoint(checkpoint(kind)), {}, set()
    for path in opened.path("").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            tensors |= {f"{path.parent.name}/{name}": file.get_tensor(name) for name in names}
    for component in open_model(opened).components.values():
        part, stored = open_component(opened, component, "float32", mesh), {}
        for name in tensors:
            renamed = name.removeprefix(f"{component.folder}/")
            for pattern, replacement in component.renames:
                renamed = re.sub(pattern, replacement, renamed)
            if name.startswith(f"{component.folder}/"):
                stored[renamed] = name
        for name, weight in part.weights.items():
            plain = part.plain[name].removeprefix(component.converted)
            count = len(weight.blocks) if "*" in plain else 1
            read |= {stored[plain.replace("*", str(layer), 1)] for layer in range(count)}
    assert {name for name in tensors if not re.fullmatch(UNUSED[kind], name)} == read
    # Where all numbers of a tensor are ones or zeros, it could be ignored without a difference.
    assert [name for name, tensor in tensors.items() if tensor.unique().numel() == 1 < tensor.numel()] == []


def test_a_trained_table_is_read_as_the_file_has_it(checkpoint, mesh):
    opened = Checkpoint(checkpoint("cogvideox-5b-i2v"))
    component, name = open_model(opened).components["denoise"], "patch_embed.pos_embedding"
    loaded = load_component(opened, component, "float32", mesh).params[name]
    with safe_open(opened.path("transformer") / "diffusion_pytorch_model.safetensors", "np") as file:
        stored = file.get_tensor(name).astype("float32")
    assert (jax.device_get(loaded) == stored).all()
    assert abs(component.build().get_buffer(name).numpy() - stored).mean() > 0.05


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [EACH_FAMILY[0], *(pytest.param(kind, marks=pytest.mark.thorough) for kind in UNUSED if kind != EACH_FAMILY[0])],
)
def test_all_that_is_read_changes_what_is_computed(kind, checkpoint, mesh):
    opened = Checkpoint(checkpoint(kind))
    model = open_model(opened)
    runtime = AbstractRuntime(model, mesh, "float32")
    side = 128 if ("5b" in kind and "wan" in kind) or "ltx" in kind else 64
    size = {"height": side, "width": side * 3 // 2, "frames": model.spec.nearest_frames(9)}
    request = GenerationRequest(prompt="a cat", **size).resolve(model.spec.defaults)
    used = {}
    for program, arguments, _ in stage_programs(runtime, request).values():
        with jax.set_mesh(mesh):
            traced = jax.make_jaxpr(program.function)(*arguments).jaxpr
        _, needed = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
        # One component's weights, or a tuple of several's.
        weights = arguments[0] if isinstance(arguments[0], tuple) else (arguments[0],)
        leaves = [
            (owner, name)
            for params in weights
            for owner in [next(n for n in runtime._components if runtime._components[n].params is params)]
            for name in sorted(params)
        ]
        for (owner, name), need in zip(leaves, needed, strict=False):
            used.setdefault(owner, set()).update({name} if need else ())
    for component, names in used.items():
        read = open_component(opened, model.components[component], "float32", mesh).weights
        assert [name for name in read if name not in names and not re.fullmatch(IN_NO_RESULT, name)] == [], component
