"""Predict when the chunks of a video become available if it is decoded chunk by chunk while it is denoised."""

from collections.abc import Mapping, Sequence

from wan_tpu.aot.names import ENLARGE, FIRST_ENLARGE, KEYS, STEP
from wan_tpu.plan import DECODER, ENCODER, Expert
from wan_tpu.pricing.host import chunk_seconds, expert_seconds
from wan_tpu.pricing.plan import ProgramPlan, StagePlan
from wan_tpu.pricing.playback import Playback
from wan_tpu.request import ResolvedRequest
from wan_tpu.spec import ModelSpec

# From one stage to the next: the median of 0.1 to 0.4 MB between pools of slices is up to 0.066 s (docs/benchmarks.md).
HAND_OVER_S = 0.066
LOOK_S = 0.05  # The longest that a denoised chunk waits until its decoder looks for it.


def predict_playback(
    spec: ModelSpec,
    request: ResolvedRequest,
    stages: Sequence[StagePlan],
    steps: Mapping[Expert, str],
    *,
    decodes_beside: bool,
) -> Playback | None:
    """Predict how a video plays, or return None where a program has no price.

    Args:
        spec: A model that denoises a video chunk after chunk.
        steps: The name of each expert's step.
        decodes_beside: Whether another slice of the same kind decodes a chunk while the next one is denoised.
    """
    seconds = {program.name: _seconds(program) for stage in stages for program in stage.programs}
    encoder = next((stage for stage in stages if stage.name == ENCODER), None)
    if encoder is None or encoder.seconds is None or None in seconds.values():
        return None
    prices = {name: price for name, price in seconds.items() if price is not None}
    decoder = [program for stage in stages if stage.name == DECODER for program in stage.programs]
    if not decoder or any(name not in prices for name in steps.values()):
        return None
    chunks = 1 + max(expert.chunk for expert in steps)
    decode_s = sum(prices[program.name] * program.calls for program in decoder) / chunks
    first_s, sent_s = prices[decoder[0].name], chunk_seconds(request)
    denoised_s = encoder.seconds.estimate + encoder.host_s + 2 * HAND_OVER_S
    # A slice that does both decodes between two steps of the next chunk.
    waits_s = LOOK_S + HAND_OVER_S + (0.0 if decodes_beside else max(prices[name] for name in steps.values()))
    decoded_s, first_frame_s, arrivals = 0.0, 0.0, []
    for chunk in range(chunks):
        chunk_experts = [expert for expert in steps if expert.chunk == chunk]
        denoised_s += sum(_expert_seconds(spec, request, expert, steps[expert], prices) for expert in chunk_experts)
        begins_s = max(decoded_s, denoised_s + waits_s)
        decoded_s = begins_s + decode_s
        denoised_s += 0.0 if decodes_beside else decode_s
        first_frame_s = first_frame_s or begins_s + first_s
        arrivals.append(decoded_s + sent_s)
    return Playback(first_frame_s, tuple(arrivals), request.frames / chunks / request.fps)


def _expert_seconds(
    spec: ModelSpec, request: ResolvedRequest, expert: Expert, step: str, prices: Mapping[str, float]
) -> float:
    """Return the seconds of one expert's steps of a chunk."""
    enlarge = (ENLARGE if step == STEP else FIRST_ENLARGE) if expert.enlarges else None
    before_s = prices.get(KEYS, 0.0) + (prices[enlarge] if enlarge is not None else 0.0)
    return before_s + prices[step] * (expert.stop - expert.start) + expert_seconds(spec, request, expert)


def _seconds(program: ProgramPlan) -> float | None:
    return None if program.optimistic is None else program.optimistic.total.estimate
