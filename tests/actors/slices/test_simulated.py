"""The simulated host is like the real one to whoever calls it, and notices payloads that are not its request's."""

import inspect
import subprocess
import sys

import pytest

from actors.observe.span import Span
from actors.slices.stage_host import StageHost
from cluster.layout import Layout
from scripts.simulation.measure import Load, pool_figures, videos_per_hour
from scripts.simulation.simulated import MODEL, Planned, SimulatedHost
from tests.conftest import PHOTO, ROOT, STAGES
from wan_tpu import GenerationRequest, InvalidInput
from wan_tpu.plan import PromptText


@pytest.fixture
def host(tmp_path):
    plan = Planned(0.0, 0.0, 0.0, 0.0, text=(1, 8, 4), mp4_bytes=20_000).save(tmp_path / "plan.json")
    return SimulatedHost(str(plan), STAGES)


def request(**fields):
    return GenerationRequest(image=PHOTO, height=64, width=64, frames=9, steps=4, **fields)


def test_simulated_host_has_the_methods_of_the_real_one():
    def methods(kind):
        members = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(m).parameters) for name, m in members if not name.startswith("_")}

    assert methods(SimulatedHost) == methods(StageHost)


def test_another_request_s_payload_is_noticed(host):
    mine, other = MODEL.plan(request(prompt="a", seed=3)), MODEL.plan(request(prompt="b", seed=4))
    texts = [host.encode_text(PromptText(prompt)).payload for prompt in other.prompts]
    with pytest.raises(InvalidInput, match="TextEmbedding"):
        host.prepare_denoise("k", mine.without_image(), *texts)
    prepare(host, other)
    with pytest.raises(InvalidInput, match=r"DenoiseState.*\b4\b"):
        prepare(host, mine, state=host.snapshot("k").payload)


def test_leaders_and_simulated_hosts_stay_small():
    """There may be many on a machine; JAX and torch alone would take 500 MB of each."""
    modules = "actors.slices.leader, actors.slices.references, actors.pipeline.driver, scripts.simulation.simulated"
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"jax", "torch", "matplotlib", "transformers", "diffusers"} & set(done.stdout.split())


def test_the_share_of_a_pool_is_planned_work_over_time():
    layout = Layout.parse(
        """
pools:
  encoder-decoder: {stages: [encoder, decoder], slice: v6e-1}
  high: {stages: [denoise_high], slice: v6e-1}
  low: {stages: [denoise_low], slice: v6e-1}
""",
        "here",
    )
    # Low: a step of 0.8 s by plan takes 0.9 s, and 0.1 s is lost after it. Full until all are begun.
    load = Load(requests=4, in_flight=2)
    for i in range(4):  # the window is 0 to 2.9 s
        span = Span(slice="l", request=f"r{i}", stage="denoise_low", kind="compute", start_s=i, seconds=0.9, pool="low")
        load.spans.append(span)
        load.ended[f"r{i}"] = i + 0.9
    figures = pool_figures(layout, load, {"encoder": 0, "denoise_high": 0, "denoise_low": 0.8, "decoder": 0})
    low = {pool.name: pool for pool in figures}["low"]
    assert low.bound_s == 0.8
    assert low.busy == pytest.approx(2.7 / 2.9) and low.share == pytest.approx(2.4 / 2.9)
    assert videos_per_hour(load) == pytest.approx(3600 * 3 / 2.9)
    with pytest.raises(ValueError, match="2 requests"):
        Load(2, 2, load.spans[1:2], {"r0": 0.9, "r1": 1.9}).full  # noqa: B018


def prepare(host, plan, state=None):
    texts = [host.encode_text(PromptText(prompt)).payload for prompt in plan.prompts]
    host.prepare_encode("k", plan.request)
    host.prepare_denoise("k", plan.without_image(), *texts, host.encode_image("k").payload, state)
