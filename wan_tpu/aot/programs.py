"""Every program that a video needs, with the shapes of its arguments, to be compiled ahead of time."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from wan_tpu.adapters.merging import abstract_merge
from wan_tpu.aot.executables import Executables
from wan_tpu.aot.names import (
    ADAPTERS,
    ENLARGE,
    FIRST_ENLARGE,
    FIRST_STEP,
    KEYS,
    SKIPPED,
    SMALLEST_STEP,
    STEP,
    UNGUIDED_KEYS,
    UNGUIDED_SKIPPED,
    UNGUIDED_STEP,
)
from wan_tpu.families.chunked import ChunkedModel
from wan_tpu.families.model import Model
from wan_tpu.plan import AUDIO, DECODER, ENCODER, VIDEO, Expert
from wan_tpu.reference import count_read
from wan_tpu.request import ResolvedRequest
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.runtime.components import DTYPES, SCALE, Loaded, abstract_component
from wan_tpu.runtime.mesh import replicated_sharding
from wan_tpu.runtime.program import Program
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.stages import (
    enlarging_program,
    growing_program,
    image_program,
    keys_program,
    reference_program,
    residual_shape,
    sound_decoders,
    sound_program,
    step_numbers,
    step_program,
    text_program,
    vae_programs,
)
from wan_tpu.stages.decoder_noise import noise_sharding

RANK = 64  # The rank of LightX2V's adapters, assumed for all adapters.

# By name: the program, its arguments as shapes with shardings, and how often it runs for one video.
StagePrograms = dict[str, tuple[Program, tuple[Any, ...], int]]


class AbstractRuntime(Runtime):
    """A runtime with shapes instead of weights: its programs can be compiled, but not run."""

    def __init__(self, model: Model, mesh: Mesh, dtype: str, *, executables: Executables | None = None) -> None:
        super().__init__(model, mesh, dtype, keep_weights=True, executables=executables)

    def component(self, name: str, adapters: tuple[RequestedAdapter, ...] = ()) -> Loaded:
        """Return a component's module and the shapes and shardings of its weights."""
        name = self.model.same_weights.get(name, name)
        if name not in self._components:
            self._components[name] = abstract_component(self.model.components[name], self.dtype, self.mesh)
        return self._components[name]


def stage_programs(
    runtime: Runtime, request: ResolvedRequest, stages: Sequence[str] | None = None, *, images: int | None = None
) -> StagePrograms:
    """Return the programs of a resolved request, in the order in which they first run.

    Args:
        runtime: A runtime for the mesh; it may hold shapes instead of weights.
        stages: The stages whose programs are returned; all of the model's if None.
        images: How many images the request has beside its references, one of `ModelSpec.images_of`; the usual number
            if None.
    """
    stages = tuple(runtime.model.spec.components) if stages is None else stages
    images = runtime.model.spec.images_of(request)[0] if images is None else images
    images += count_read(request.references)
    programs: StagePrograms = {}
    if "encoder" in stages:
        for name in runtime.model.token_shapes:
            programs[name] = _text_encoder(runtime, name, request, images)
        components = runtime.model.spec.components[ENCODER]
        if "image_encoder" in components:
            programs["image_encoder"] = _image_encoder(runtime)
        if request.references is not None:
            programs |= _references(runtime, request, images)
        elif "vae_encoder" in components and (images or request.video is not None):
            programs |= _vae(runtime, "vae_encoder", runtime.model.image_chunks(request, images))
    all_experts = runtime.model.spec.experts(request)
    experts = [expert for expert in all_experts if expert.stage in stages]
    programs |= _adapters(runtime, request, experts)
    has_guided = any(expert.guided for expert in all_experts)
    for guided in (True, False):
        if group := [expert for expert in experts if expert.guided is guided]:
            programs[KEYS if guided or not has_guided else UNGUIDED_KEYS] = _keys(runtime, request, group, images)
    # Experts whose latents have the same size, and all or none of whom have guidance, run the same program.
    names = name_steps(runtime.model, request, all_experts)
    for name in dict.fromkeys(names.values()):
        if group := [expert for expert in experts if names[expert] == name]:
            programs |= _denoise(runtime, request, group, name, images)
    for name, kind in ((STEP, ENLARGE), (FIRST_STEP, FIRST_ENLARGE)):
        if group := [expert for expert in experts if expert.enlarges and names[expert] == name]:
            programs[kind] = _enlarging(runtime, request, group, images)
    if DECODER in stages:
        chunks = runtime.model.latent_chunks(request)
        programs |= _sound(runtime, request) | _vae(
            runtime, "decoder", chunks, runtime.model.spec.decoder_noise_shape(request)
        )
    return programs


def name_steps(model: Model, request: ResolvedRequest, experts: Sequence[Expert]) -> dict[Expert, str]:
    """Return the name of each expert's step among the programs of a request, by its latents' size and its guidance."""
    shapes = {expert: model.spec.latent_shapes(request, expert.stop)[VIDEO] for expert in experts}
    sizes = sorted(set(shapes.values()), reverse=True)
    names = {expert: (STEP, FIRST_STEP, SMALLEST_STEP)[sizes.index(shape)] for expert, shape in shapes.items()}
    guided = {names[expert] for expert in experts if expert.guided}
    return {expert: UNGUIDED_STEP if name in guided and not expert.guided else name for expert, name in names.items()}


def programs_by_images(
    runtime: Runtime, request: ResolvedRequest, stages: Sequence[str] | None = None
) -> dict[int, list[tuple[str, Program, tuple[Any, ...]]]]:
    """Return the programs that a request needs, with names and arguments, by number of images, the usual one first.

    A program depends on how many images there are, not on which end of the video they are at. For unusual numbers of
    images, only the programs that differ from those of the usual number are returned.

    Args:
        runtime, request, stages: As for `stage_programs`.
    """
    usual, *other_counts = runtime.model.spec.images_of(request)
    programs = stage_programs(runtime, request, stages, images=usual)
    result = {usual: [(name, program, arguments) for name, (program, arguments, _) in programs.items()]}
    depends = len(runtime.model.image_latents_shapes(runtime.model.spec.latent_shapes(request, 0)[VIDEO])) > 1
    for images in other_counts:
        if images and not depends:  # A model whose latents are alike for one and two images needs no other programs.
            continue
        kind = "two images" if images else "no image"
        result[images] = []
        for name, (program, arguments, _) in stage_programs(runtime, request, stages, images=images).items():
            if _shapes(arguments) != _shapes(programs[name][1]):
                result[images].append((f"{name}, {kind}", program, arguments))
    return result


def _shapes(arguments: tuple[Any, ...]) -> tuple[Any, list[tuple[tuple[int, ...], Any]]]:
    leaves, structure = jax.tree.flatten(arguments)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _text_encoder(
    runtime: Runtime, name: str, request: ResolvedRequest, images: int
) -> tuple[Program, tuple[Any, ...], int]:
    reads_images = images > 0 and runtime.model.spec.reads_images
    program, params = text_program(runtime, name, images=reads_images)
    if reads_images:
        shapes = runtime.model.image_token_shapes(request, images)[name]
        read = jax.tree.map(lambda x: _array(runtime, x.shape, x.dtype), shapes)
        return program, (params, *read), 1
    tokens = [_array(runtime, shape, jnp.int32) for shape in runtime.model.token_shapes[name]]
    return program, (params, *tokens), len(runtime.model.spec.prompts(request))


def _image_encoder(runtime: Runtime) -> tuple[Program, tuple[Any, ...], int]:
    loaded = runtime.component("image_encoder")
    pixels = _array(runtime, runtime.model.image_pixels_shape, DTYPES[runtime.dtype])
    return image_program(runtime, loaded.module), (loaded.params, pixels), 1


def _references(runtime: Runtime, request: ResolvedRequest, images: int) -> StagePrograms:
    """Return the programs that encode a request's references, one for each shape."""
    counts = collections.Counter(runtime.model.reference_shapes(request, images))
    programs: StagePrograms = {}
    for (name, shape, dtype), calls in counts.items():
        loaded = runtime.component(name)
        arguments = loaded.params, _array(runtime, shape, dtype)
        programs[f"{name} {list(shape)}"] = reference_program(runtime, name, loaded.module), arguments, calls
    return programs


def _keys(
    runtime: Runtime, request: ResolvedRequest, experts: list[Expert], images: int
) -> tuple[Program, tuple[Any, ...], int]:
    model, loaded, dtype = runtime.model, _expert(runtime, request, experts), DTYPES[runtime.dtype]
    branches = 2 if any(expert.guided for expert in experts) else 1
    text = {
        name: _array(runtime, (branches, *shape), jnp.int32 if integers else dtype)
        for name, (shape, integers) in _prompt_shapes(model, request, images).items()
    }
    text |= model.variant(request)
    features = None
    if "image_encoder" in model.spec.components[ENCODER]:
        features = _array(runtime, model.image_features_shape, dtype)
    return keys_program(runtime, loaded.module), (loaded.params, text, features), len(experts)


def _expert(runtime: Runtime, request: ResolvedRequest, experts: list[Expert]) -> Loaded:
    """Return the experts' weights, with those that a request's adapters add."""
    name = experts[0].stage
    loaded = runtime.component(name)
    return loaded.with_added(runtime.model.components[name]) if runtime.model.adds_weights(request) else loaded


def _prompt_shapes(model: Model, request: ResolvedRequest, images: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return the shapes of a prompt's arrays, as `Model.prompt_shapes`."""
    if images and model.spec.reads_images:
        return model.image_prompt_shapes(request, images)
    return model.prompt_shapes


def _adapters(runtime: Runtime, request: ResolvedRequest, experts: list[Expert]) -> StagePrograms:
    """Return the programs that apply a request's adapters.

    Without the adapters' files, they are assumed to change every matrix of the layers, with rank `RANK`.
    """
    programs: StagePrograms = {}
    shardings: dict[str, list[Any]] = {}
    for expert in experts:
        if not request.adapters_for(expert.stage):
            continue
        params = runtime.component(expert.stage).params
        for weight, base in params.items():
            if base.ndim != 3 or not weight.endswith(".weight"):
                continue
            name = f"{ADAPTERS} {list(base.shape)}" + (" in 8 bits" if weight + SCALE in params else "")
            # Most rules give all matrices of the same shape the same sharding.
            known = shardings.setdefault(name, [])
            if base.sharding not in known:
                known.append(base.sharding)
            if number := known.index(base.sharding):
                name += f", {known[number].spec}"
            program, arguments, calls = programs.get(name) or (
                *abstract_merge(runtime, base, params.get(weight + SCALE), RANK),
                0,
            )
            programs[name] = program, arguments, calls + 1
    return programs


def _enlarging(
    runtime: Runtime, request: ResolvedRequest, experts: Sequence[Expert], images: int
) -> tuple[Program, tuple[Any, ...], int]:
    smaller, larger = (
        {part: _array(runtime, shape, jnp.float32) for part, shape in shapes.items()}
        for shapes in (runtime.model.spec.latent_shapes(request, step) for step in (experts[0].start, experts[0].stop))
    )
    numbers = {part: _array(runtime, (), jnp.float32) for part in larger}
    if runtime.model.spec.chunk_frames is not None:
        number = numbers[VIDEO]
        return growing_program(runtime), (smaller[VIDEO], larger[VIDEO], (number, number)), len(experts)
    program, params = enlarging_program(runtime, experts[0])
    image = None if request.references is not None else _image_latents(runtime, request, experts[0], images)
    return program, (params, smaller, image, larger, numbers), len(experts)


def _image_latents(
    runtime: Runtime, request: ResolvedRequest, expert: Expert, images: int
) -> jax.ShapeDtypeStruct | None:
    """Return the latents of a request's images, as an expert takes them; None without any."""
    shapes, has_any = runtime.model.condition_shapes(request, expert), images or request.references is not None
    return _array(runtime, shapes[min(images, len(shapes)) - 1], jnp.float32) if has_any and shapes else None


def _denoise(
    runtime: Runtime, request: ResolvedRequest, experts: list[Expert], name: str, images: int
) -> StagePrograms:
    model, loaded = runtime.model, _expert(runtime, request, experts)
    schedules = model.spec.schedules(request)
    shapes = model.spec.latent_shapes(request, experts[-1].stop)
    latents = {part: _array(runtime, shape, jnp.float32) for part, shape in shapes.items()}
    numbers = {
        part: {name: _array(runtime, value.shape, jnp.float32) for name, value in numbers.items()}
        for part, numbers in step_numbers(schedules, 0).items()
    }
    for part, schedule in schedules.items():
        if any(schedule.draws[experts[0].start : experts[-1].stop]):
            numbers[part]["noise"] = latents[part]
    program, arguments, _ = _keys(runtime, request, experts, images)
    keys = model.key_shapes(runtime.mesh, jax.eval_shape(program.function, *arguments))
    prompt = _prompt_shapes(model, request, images)
    integers = {name: shape for name, (shape, is_integer) in prompt.items() if is_integer}
    text = {name: np.zeros((1, *shape), np.int32) for name, shape in integers.items()}
    constants = model.constants(request, shapes[VIDEO], text)
    first = _image_latents(runtime, request, experts[-1], images)
    if isinstance(model, ChunkedModel):
        image = None if first is None else np.zeros(first.shape, np.float32)
        constants |= model.chunk_history(request, (), image)
        first = None
    keys |= {name: _array(runtime, value.shape, value.dtype) for name, value in constants.items()}
    keys |= model.variant(request)
    conditioning = (keys, first)
    parts = {part: (array, (array,) * schedules[part].history_terms) for part, array in latents.items()}
    arguments = (loaded.params, parts, numbers, conditioning)
    steps = sum(expert.stop - expert.start for expert in experts)
    skipped = model.spec.plan_skips(request)
    if skipped is None:
        return {name: (step_program(runtime, loaded.module), arguments, steps)}
    branches = 2 if any(expert.guided for expert in experts) else 1
    residual = residual_shape(runtime, shapes[VIDEO], branches)
    computed = jax.ShapeDtypeStruct((branches,), np.bool_, sharding=replicated_sharding(runtime.mesh))
    reused_steps = sum(int(skipped[expert.start : expert.stop, :branches].all(1).sum()) for expert in experts)
    partial, reused = (step_program(runtime, loaded.module, kind) for kind in ("some", "all"))
    return {
        name: (partial, (*arguments, residual, computed), steps - reused_steps),
        UNGUIDED_SKIPPED if name == UNGUIDED_STEP else SKIPPED: (reused, (*arguments, residual), reused_steps),
    }


def _sound(runtime: Runtime, request: ResolvedRequest) -> StagePrograms:
    """Return the programs that decode a request's sound; none if the model or the request has no sound."""
    model = runtime.model
    programs: StagePrograms = {}
    if not model.spec.has_sound(request):
        return programs
    value = _array(runtime, model.spec.latent_shapes(request, request.steps)[AUDIO], jnp.float32)
    for name in sound_decoders(model):
        loaded = runtime.component(name)
        program = sound_program(runtime, name, loaded.module)
        programs[name] = program, (loaded.params, value), 1
        result = jax.eval_shape(program.function, loaded.params, value)
        value = _array(runtime, result.shape, result.dtype)
    return programs


def _vae(
    runtime: Runtime, name: str, shapes: Sequence[tuple[int, ...]], noise: tuple[int, ...] | None = None
) -> StagePrograms:
    """Return the programs of a VAE half: of the first chunk, of later ones, and of the last if it has its own shape."""
    loaded, dtype = runtime.component(name), DTYPES[runtime.dtype]
    if name == "decoder":
        dtype = runtime.model.latents_dtype or dtype
    chunks: list[Any] = [_array(runtime, shape, dtype) for shape in shapes]
    if noise is not None:
        sharding = noise_sharding(runtime.mesh, noise)
        chunks[0] = chunks[0], jax.ShapeDtypeStruct(noise, DTYPES[runtime.dtype], sharding=sharding)
    x, *later_chunks = chunks
    half, first, later = vae_programs(runtime, name, loaded.module, 1 + len(later_chunks))
    begins_anew = name == "vae_encoder" and all(chunk.shape[2] == 1 for chunk in later_chunks)
    cache = half.cache_shapes(loaded.params, x) if later_chunks and not begins_anew else ()
    if not cache and name == "vae_encoder":  # Nothing is cached between keyframes: each is encoded as a first chunk.
        sizes = collections.Counter([x, *later_chunks])
        return {
            f"{name} first{', larger' * (frame is not x)}": (first, (loaded.params, frame), calls)
            for frame, calls in sizes.items()
        }
    # A chunk that was denoised separately is decoded separately, starting with a first chunk of latent frames.
    per_chunk = (runtime.model.spec.chunk_frames if name == DECODER else None) or len(shapes)
    programs: StagePrograms = {f"{name} first": (first, (loaded.params, x), len(shapes) // per_chunk)}
    for shape in dict.fromkeys(other.shape for other in later_chunks):
        chunks = [other for i, other in enumerate(later_chunks, 1) if other.shape == shape and i % per_chunk]
        kind = "later" if shape == later_chunks[0].shape else "later, last"
        programs[f"{name} {kind}"] = (later, (loaded.params, chunks[0], cache), len(chunks))
    return programs


def _array(runtime: Runtime, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated_sharding(runtime.mesh))
