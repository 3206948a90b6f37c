"""Predict, from a request's size, the seconds during which the host works and the devices wait.

They are seconds of one core, as measured by `python scripts/bench_host.py` (docs/benchmarks.md). Work that the host
does while the devices compute costs a video no time: drawing the noise of later steps and of the decoder, and encoding
all frames but the last.
"""

import math

from wan_tpu.plan import DECODER, ENCODER, VIDEO, Expert
from wan_tpu.reference import count_read
from wan_tpu.request import ResolvedRequest
from wan_tpu.spec import ModelSpec

DENOISE = "denoise"
_PROMPT_S = 0.0005  # Per prompt.
_PIXEL_S = 7e-8  # Per pixel of an image, or of a frame of a video, that the request begins with.
_NOISE_S = 4e-9  # Per random number.
_CORRELATED_NOISE_S = 5.5e-9  # Per random number of the correlated noise that enlarged latents get.
_COPY_S = 1e-9  # Per number that one stage hands to the next.
_HISTORY = 2  # Frames of a chunk's history, as a multiple of the chunk's own.
_CALL_S = 0.0028  # Between two steps: a slice's leader calls for each.
_MP4_S = 9e-8  # Per pixel of one frame: from the last decoded frame to the finished file.
# Per pixel of all frames, where a decoder returns them at once: 9.3 ns of a core with sound (2026-11-28), divided among
# eight threads that are busy three quarters of the time.
_ENCODE_S = 1.6e-9


def host_seconds(spec: ModelSpec, request: ResolvedRequest, images: int | None = None) -> dict[str, float]:
    """Return the host's seconds for a resolved request by stage: "encoder", "denoise" for all experts, "decoder".

    Args:
        images: How many images it has beside its references; the usual number if None.
    """
    images = spec.images_of(request)[0] if images is None else images
    pictures = request.frames if request.video is not None else images + count_read(request.references)
    pixels = request.height * request.width
    at_once = request.frames if len(spec.decoder_chunks(spec.decoded_shape(request)[2])) == 1 else 0
    return {
        ENCODER: _PROMPT_S * len(spec.prompts(request)) + _PIXEL_S * pictures * pixels,
        DENOISE: _denoise_seconds(spec, request),
        DECODER: (_ENCODE_S * at_once or _MP4_S) * pixels,
    }


def expert_seconds(spec: ModelSpec, request: ResolvedRequest, expert: Expert) -> float:
    """Return the host's seconds for one expert's steps of a chunk: its noise, the history, and the calls."""
    finished = math.prod(spec.latent_shape(request))
    latent_size = math.prod(spec.latent_shapes(request, expert.stop)[VIDEO])
    noise_s = _CORRELATED_NOISE_S * latent_size if expert.enlarges else _NOISE_S * finished
    copied = latent_size * (1 + spec.schedule(request).history_terms) + _HISTORY * finished
    return noise_s + _COPY_S * copied + _CALL_S * (1 + expert.stop - expert.start)


def chunk_seconds(request: ResolvedRequest) -> float:
    """Return the seconds from a chunk's last decoded frame until a client has it."""
    return _MP4_S * request.height * request.width


def _denoise_seconds(spec: ModelSpec, request: ResolvedRequest) -> float:
    experts = spec.experts(request)
    if spec.chunk_frames is not None:
        return sum(expert_seconds(spec, request, expert) for expert in experts)
    numbers = math.prod(spec.latent_shape(request))
    copied_numbers = numbers * (1 + spec.schedule(request).history_terms)
    return _NOISE_S * numbers + _COPY_S * copied_numbers * len(experts)
