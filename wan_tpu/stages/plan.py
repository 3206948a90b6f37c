"""What a request asks of which stage: known from the request and the model's configuration, without weights."""

from wan_tpu.errors import InvalidRequest
from wan_tpu.expert import Expert
from wan_tpu.families import Model
from wan_tpu.request import ResolvedRequest
from wan_tpu.solvers import solver_table


def experts(model: Model, request: ResolvedRequest) -> list[Expert]:
    """Return who denoises which steps of a resolved request, experts with no step left out."""
    table = solver_table(request.solver, request.steps, request.shift)
    boundary = table.high_noise_steps(model.boundary_ratio)
    both = [
        Expert("denoise_high", 0, boundary, request.guidance_scale),
        Expert("denoise_low", boundary, table.steps, request.guidance_scale_2),
    ]
    return [expert for expert in both if expert.start < expert.stop]


def whose_turn(model: Model, request: ResolvedRequest, step: int) -> Expert:
    """Return the expert that runs the step after `step` are done; raises `InvalidRequest` after the last one."""
    for expert in experts(model, request):
        if expert.start <= step < expert.stop:
            return expert
    raise InvalidRequest(f"all {request.steps} steps of the request are done; collect its latents and decode them")


def program_shapes(model: Model, request: ResolvedRequest, *, image: bool) -> dict[str, str]:
    """Name, by stage, the set of programs that a resolved request needs: what is compiled anew for another name.

    Requests whose experts have equal names can be stepped together.

    image  whether the request has one; experts may hold a request without its pixels
    """
    size = f"{request.height}x{request.width}"
    task = "i2v" if image else "t2v"
    found = {"encoder": f"encoder {size}" if image else "encoder text"}
    for expert in experts(model, request):
        branches = 2 if expert.guided else 1
        found[expert.stage] = f"{expert.stage} {size}x{request.frames} {task} {branches} {request.solver}"
    return found | {"decoder": f"decoder {size}"}


def guided(model: Model, request: ResolvedRequest) -> bool:
    """Whether any expert uses guidance, so that the negative prompt is needed."""
    return request.guidance_scale > 1 or (model.boundary_ratio is not None and request.guidance_scale_2 > 1)


def prompts(model: Model, request: ResolvedRequest) -> list[str]:
    """Return the texts whose embeddings a request needs: the prompt and, under guidance, the negative prompt."""
    return [request.prompt, request.negative_prompt or ""] if guided(model, request) else [request.prompt]


def stage_components(model: Model) -> dict[str, tuple[str, ...]]:
    """Return which components each stage of this model runs; a model with one expert has no "denoise_low"."""
    encoder = ["text_encoder"]
    if "i2v" in model.tasks:
        encoder += ["image_encoder", "vae_encoder"] if model.needs_image_features else ["vae_encoder"]
    found: dict[str, tuple[str, ...]] = {"encoder": tuple(encoder), "denoise_high": ("denoise_high",)}
    if model.boundary_ratio is not None:
        found["denoise_low"] = ("denoise_low",)
    return found | {"decoder": ("decoder",)}
