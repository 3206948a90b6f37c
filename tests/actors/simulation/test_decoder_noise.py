"""The decoder's noise: its slice draws it while the video is denoised, and whatever breaks costs no step."""

import functools

import pytest

from actors.slices.stage_runner import StageRunner
from tests.actors.simulation import test_chunks
from tests.actors.simulation.scenario import LAYOUTS
from tests.actors.simulation.submissions import plan_of

STEPS = 6
make = functools.partial(test_chunks.make, plan=plan_of(STEPS, "plain", "video 7", 7))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_is_drawn_before_the_latents_are_there(layout):
    drawn_s = {}

    def watch(run, making):
        for pool in run.pools.values():
            for replica in pool.replicas:
                host = replica.slice.host
                draw = host.draw_ahead
                host.draw_ahead = lambda *args, draw=draw: (drawn_s.setdefault("r", run.world.loop.now), draw(*args))[1]

    run, _, _ = make(layout, at_s=0.0, fault=watch)
    steps = run.world.steps["r"]
    assert [step for step, _, _ in steps] == list(range(1, STEPS + 1))
    assert steps[3][1] < drawn_s["r"] < steps[5][1]
    assert run.world.drawn_ahead["r"] == len(run.world.decoded["r"]) == 1


def lose(pool):
    def fault(run, making):
        for replica in run.pools[pool].replicas:
            if replica.streams:
                replica.kill("it was preempted")

    return fault


def restart_store(run, making):
    run.drivers[0].ref_store.__init__()


def drain(run, making):
    for replica in run.pools["vae"].replicas:
        if replica.streams:
            run.pools["vae"].drain(replica, 20.0)


@pytest.mark.parametrize("pool", ["vae", "low", None], ids=["decoder", "denoiser", "drain"])
def test_noise_of_what_is_lost_at_any_point_is_drawn_again(pool):
    fault = drain if pool is None else lose(pool)
    _, _, seconds = make()
    worlds = [make(at_s=at_s, fault=fault)[0].world for at_s in test_chunks.times(seconds)]
    assert sum(world.drawn_ahead["r"] for world in worlds) > len(worlds) / 2
    if pool != "low":  # The loss of a decoder costs no step.
        assert all([step for step, _, _ in world.steps["r"]] == list(range(1, STEPS + 1)) for world in worlds)


def test_restarted_store_at_any_point_leaves_nobody_waiting():
    _, _, seconds = make()
    for at_s in test_chunks.times(seconds):
        make(at_s=at_s, fault=restart_store)


def test_cancelled_request_leaves_no_noise_at_any_point():
    """`make` looks for what is left."""
    _, _, seconds = make()
    for at_s in test_chunks.times(seconds):
        _, _, took_s = make(at_s=at_s, fault=lambda run, making: making.cancel())
        assert took_s < at_s + 2.0


def test_leader_of_an_earlier_version_decodes_as_before(monkeypatch):
    """It looks for the first chunk of a video that has none."""
    decode = StageRunner.decode

    async def decode_as_before(runner, request, state):
        if state is None:
            await request.scope.find_chunk(0)
            raise AssertionError("there is no chunk to find")
        async for event in decode(runner, request, state):
            yield event

    _, _, usual_s = make()
    with monkeypatch.context() as patch:
        patch.setattr(StageRunner, "decode", decode_as_before)
        run, _, seconds = make()
    assert run.world.drawn_ahead["r"] == 0 and len(run.world.decoded["r"]) == 1
    assert seconds < usual_s + 0.2
