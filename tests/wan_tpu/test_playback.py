"""What a plan says of a video that plays while it is made, chunk after chunk."""

import dataclasses

import pytest

from tests.wan_tpu.plans import SLICE, make_plan, prediction
from wan_tpu import GenerationRequest
from wan_tpu.aot.names import ENLARGE, FIRST_ENLARGE, FIRST_STEP, KEYS, SMALLEST_STEP, STEP
from wan_tpu.families import published_spec
from wan_tpu.pricing.chunk_times import HAND_OVER_S, LOOK_S, predict_playback
from wan_tpu.pricing.compiling import Compiled
from wan_tpu.pricing.cost import Times
from wan_tpu.pricing.host import host_seconds
from wan_tpu.pricing.plan import ProgramPlan, StagePlan
from wan_tpu.pricing.plan_text import describe, to_json
from wan_tpu.pricing.planner import SlicePlanner
from wan_tpu.pricing.playback import Playback
from wan_tpu.runtime.mesh import make_mesh

SPEC = published_spec("helios-distilled")
NAMES = SMALLEST_STEP, FIRST_STEP, STEP


def resolve(chunks):
    return GenerationRequest(frames=33 * chunks, fps=24).resolve(SPEC.defaults)


def make_stages(steps_s, decoder_s, chunks):
    """Return stages that take these seconds: a step at each size, and the decoder's first and later latent frames."""

    def program(name, calls, seconds):
        path = dataclasses.replace(prediction(0.0), total=Times(seconds, seconds))
        return ProgramPlan(name, calls, Compiled(1.0, 1.0, 1), path, path)

    prices = dict(zip(NAMES, steps_s, strict=True)) | {KEYS: 0.0, ENLARGE: 0.0, FIRST_ENLARGE: 0.0}
    decoder = (program("decoder first", chunks, decoder_s[0]), program("decoder later", 8 * chunks, decoder_s[1]))
    return (
        StagePlan("encoder", (program("text_encoder", 1, 0.1),), 1),
        StagePlan("denoise", tuple(program(name, 1, price) for name, price in prices.items()), 1),
        StagePlan("decoder", decoder, 1),
    )


def predict(steps_s, decoder_s, *, chunks=44, decodes_beside=True):
    request = resolve(chunks)
    steps = {expert: NAMES[i % 3] for i, expert in enumerate(SPEC.experts(request))}
    stages = make_stages(steps_s, decoder_s, chunks)
    return predict_playback(SPEC, request, stages, steps, decodes_beside=decodes_beside)


def test_video_whose_chunks_come_in_time_never_waits():
    played = predict((0.02, 0.03, 0.07), (0.004, 0.004))
    assert len(played.arrivals_s) == 44 and played.chunk_s == pytest.approx(33 / 24)
    assert played.lag_s <= 0
    # The first chunk has twice as many steps, and the first frame needs no other.
    steps_s, host_s = 4 * 0.12, host_seconds(SPEC, resolve(1))["denoise"]
    assert played.first_frame_s == pytest.approx(0.1 + steps_s + host_s + 3 * HAND_OVER_S + LOOK_S + 0.004)
    assert played.start_s > played.first_frame_s + 8 * 0.004
    assert 0.24 < played.interval_s < 0.24 + 0.05


def test_decoding_beside_the_steps_hides_all_but_the_slower_of_both():
    seconds = (0.1, 0.2, 0.3), (0.05, 0.05)
    alone, beside = (predict(*seconds, decodes_beside=value) for value in (False, True))
    assert alone.interval_s - beside.interval_s == pytest.approx(9 * 0.05)
    slow_decoder = predict((0.1, 0.2, 0.3), (0.2, 0.2))
    assert slow_decoder.interval_s == pytest.approx(9 * 0.2)


def test_video_that_is_made_too_slowly_says_how_long_it_would_wait():
    played = predict((0.3, 0.3, 0.3), (0.05, 0.05))
    assert played.lag_s == pytest.approx(43 * (played.interval_s - played.chunk_s))
    places = {"on the same slice": played, "on another v6e-4": predict((0.02, 0.03, 0.07), (0.004, 0.004))}
    both = dataclasses.replace(make_plan(), request=resolve(44), playbacks=places)
    slow, fast = (line for line in describe(both).splitlines() if line.startswith("chunks decoded"))
    assert f"wait {played.lag_s:.2f} s" in slow
    assert f"from {places['on another v6e-4'].start_s:.2f} s" in fast
    assert to_json(both)["playbacks"]["on the same slice"]["arrivals_s"][0] == played.start_s


def test_plans_of_all_lengths_share_their_programs_and_say_how_they_play(tmp_path):
    digests = set()
    for chunks in (2, 44):
        planner = SlicePlanner(
            "helios-distilled", resolve(chunks), SLICE, dtype="int8", cache=tmp_path, report=print, images=0
        )
        digests.add(planner.jobs(make_mesh((1, 1, 1), heads=SPEC.heads))[STEP][0].digest)
        seconds = (0.02, 0.03, 0.07), (0.004, 0.004)
        playbacks = planner._predict_playbacks(make_stages(*seconds, chunks))
        assert list(playbacks) == ["on the same slice", "on another v6e-4"]
        assert playbacks["on another v6e-4"] == predict(*seconds, chunks=chunks)
        encoder, denoise, decoder = make_stages(*seconds, chunks)
        refused = dataclasses.replace(decoder.programs[0], optimistic=None)
        decoder = dataclasses.replace(decoder, programs=(refused, decoder.programs[1]))
        assert planner._predict_playbacks((encoder, denoise, decoder)) == {}
    assert len(digests) == 1


def test_single_chunk_plays_when_it_is_there():
    played = predict((0.1, 0.2, 0.3), (0.05, 0.05), chunks=1)
    assert played.lag_s == 0 and played.interval_s == 0
    assert Playback(1.0, (2.0,), 1.375).start_s == 2.0


def test_host_draws_the_noise_of_every_chunk():
    seconds = [host_seconds(SPEC, resolve(chunks))["denoise"] for chunks in (1, 2, 3)]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0], rel=0.5)
    # Noise of 553 thousand numbers twice, and of a quarter, besides calls and copies.
    assert seconds[2] - seconds[1] > 553e3 * (4e-9 + 5.5e-9 * 1.25)
