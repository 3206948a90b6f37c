"""Previews: a step's clean latents, their pictures, and a run that doesn't notice them."""

import base64
import dataclasses
import io
import threading

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import ROOT
from tests.waiting import wait_for
from wan_tpu import GenerationRequest
from wan_tpu.commands.previewing import PreviewOptions, showing_previews
from wan_tpu.data import DenoiseState
from wan_tpu.families import list_published, open_checkpoint, published_spec
from wan_tpu.families.model import open_model
from wan_tpu.plan import Expert
from wan_tpu.previews.colours import fit_colours, load_colours
from wan_tpu.previews.terminal import draw_inline
from wan_tpu.schedules import flow
from wan_tpu.stage_machine import EncodeText, Step
from wan_tpu.stages.clean import estimate_clean

SHAPE = (1, 4, 2, 3, 5)
KIND = "wan2.1-t2v-1.3b"


def take_step(schedule, i, state, prediction, noise):
    """Return the state after a step of a schedule and its clean latents, from the schedule's own numbers."""
    alpha = 1 if schedule.alphas is None else schedule.alphas[i]
    clean = alpha * state.latents - schedule.sigmas[i] * prediction
    terms = [state.latents, clean, *state.history, *([] if noise is None else [noise])]
    latents, *history = (sum(c * term for c, term in zip(row, terms, strict=True)) for row in schedule.matrices[i])
    return DenoiseState(latents.astype(np.float32), tuple(term.astype(np.float32) for term in history), i + 1), clean


def check_estimates(schedule, where, first=0):
    rng = np.random.default_rng(0)
    state = DenoiseState(
        rng.standard_normal(SHAPE).astype(np.float32),
        tuple(np.zeros(SHAPE, np.float32) for _ in range(schedule.history_terms)),
        first,
    )
    for i in range(first, schedule.steps):
        noise = rng.standard_normal(SHAPE).astype(np.float32) if schedule.noise_terms else None
        before, prediction = state, rng.standard_normal(SHAPE)
        state, clean = take_step(schedule, i, before, prediction, noise)
        estimate = estimate_clean(schedule.matrices[i], before, state, noise).to_host()
        # A step that changes the latents by a share s of x0 gives x0 with their rounding, 2^-24, divided by s.
        share = np.abs(schedule.matrices[i][:, 1]).max()
        tolerance = 4e-7 * max(1, np.abs(clean).max(), np.abs(before.latents).max()) / min(1, share)
        assert np.abs(estimate - clean).max() <= tolerance, (where, i)
        assert estimate.dtype == np.float32


@pytest.mark.parametrize("kind", list_published())
def test_clean_latents_follow_from_the_states_of_every_model(kind):
    spec = published_spec(kind)
    for preset in spec.presets:
        last = spec.last_images == "required"
        request = spec.typical_requests(GenerationRequest(prompt="a cat", preset=preset))[0]
        plan = spec.plan(request, image="t2v" not in spec.tasks, last=last)
        check_estimates(spec.schedule(plan.request), (kind, preset))


def test_clean_latents_follow_from_the_states_of_every_solver():
    for steps in (1, 2, 7, 50):
        for schedule in (flow.unipc(steps, 5.0), flow.euler(steps, 5.0), flow.euler_rising(steps, 12.0)):
            check_estimates(schedule, steps)
        check_estimates(flow.unipc(steps, 5.0, first=steps // 2), steps, first=steps // 2)
    check_estimates(flow.rcm(4, 1.0), "rcm")


def test_previews_are_due_after_each_quarter_but_not_at_the_end():
    plan = published_spec(KIND).plan(GenerationRequest(prompt="a cat"))

    def due(first, stop):
        return dataclasses.replace(plan, experts=(Expert("denoise", first, stop, True),)).preview_steps

    assert [due(0, steps) for steps in (1, 2, 3, 4, 8, 50)] == [(), (1,), (1, 2), (1, 2, 3), (2, 4, 6), (13, 25, 38)]
    assert due(10, 50) == (20, 30, 40)


# ---- Colours.


def test_a_linear_map_is_found_again():
    rng = np.random.default_rng(0)
    weights, bias = rng.standard_normal((16, 3)) * 0.02, np.array([0.4, 0.5, 0.6])
    latents = rng.standard_normal((500, 16))
    colours = fit_colours(latents, latents @ weights + bias)
    np.testing.assert_allclose(colours.weights, weights, atol=1e-4)
    np.testing.assert_allclose(colours.bias, bias, atol=1e-4)
    assert colours.error < 1e-3
    picture = latents.T.reshape(16, 5, 10, 10).astype(np.float32)
    np.testing.assert_allclose(colours.paint(picture).reshape(-1, 3), latents @ weights + bias, atol=1e-3)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WAN_TPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "previews"


def test_the_map_gives_back_the_colours_of_a_trained_vae_and_is_fitted_once(cache):
    folder = ROOT / "examples" / "small-wan2.2-i2v"
    model = open_model(open_checkpoint(folder))
    colours = load_colours(model)
    [file] = cache.iterdir()
    written = file.read_bytes(), file.stat().st_mtime_ns
    assert np.array_equal(colours.weights, load_colours(model).weights)
    assert (file.read_bytes(), file.stat().st_mtime_ns) == written
    file.write_text(file.read_text()[:100])
    assert np.array_equal(load_colours(model).weights, colours.weights)
    assert file.read_bytes() == written[0]
    vae = diffusers.AutoencoderKLWan.from_pretrained(folder, subfolder="vae")
    picture = np.asarray(Image.open(ROOT / "examples" / "ball.png").convert("RGB").resize((64, 64)), np.float32) / 255
    pixels = torch.from_numpy(2 * picture - 1).permute(2, 0, 1)[None, :, None]
    with torch.no_grad():
        moments = vae.encode(pixels).latent_dist.mean.numpy()
    mean, deviation = (np.array(vae.config[f"latents_{name}"]).reshape(1, -1, 1, 1, 1) for name in ("mean", "std"))
    painted = colours.paint(((moments - mean) / deviation)[0].astype(np.float32))[0]
    expected = picture.reshape(8, 8, 8, 8, 3).mean(axis=(1, 3))
    unexplained = np.mean((painted - expected) ** 2) / np.mean((expected - expected.mean(axis=(0, 1))) ** 2)
    assert unexplained < 0.8


# ---- A run with previews.


def test_a_video_is_the_same_with_previews_and_when_they_fail(pipeline, cache):
    pipe = pipeline(KIND)
    pipe.painter.prepare()
    request = GenerationRequest(prompt="a cat", height=32, width=48, frames=9, steps=4, seed=3)
    latents = {}

    def keep_latents(run):
        return lambda event: latents.setdefault(run, []).append(event.latents)

    plain = pipe.generate(request, on_step=keep_latents("plain"))
    seen, first = [], threading.Event()

    def show(preview):
        seen.append(preview)
        first.set()

    def wait(event):
        if event.step == 2:
            assert first.wait(60)

    def keep_and_wait(event):
        keep_latents("shown")(event)
        wait(event)

    shown = pipe.generate(request, on_step=keep_and_wait, on_preview=show)
    assert np.array_equal(shown.pixels, plain.pixels)
    assert np.array_equal(np.stack(latents["shown"]), np.stack(latents["plain"]))
    assert seen[0].step == 1 and {preview.step for preview in seen} <= {1, 2, 3} and seen[0].steps == 4
    assert seen[0].picture.size == (96, 64)  # Frames of 48x32 in two columns; three latent frames make two rows.
    assert np.asarray(seen[0].picture).std() > 1

    calls = []

    def fail(preview):
        calls.append(preview.step)
        first.set()
        raise RuntimeError("the preview's function fails")

    first.clear()
    failed = pipe.generate(request, on_step=wait, on_preview=fail)
    assert calls[0] == 1
    assert np.array_equal(failed.pixels, plain.pixels)


def test_the_last_steps_estimate_is_the_video(pipeline):
    pipe = pipeline(KIND)
    for solver in ("unipc", "euler"):
        plan = pipe.plan(GenerationRequest(prompt="a cat", height=32, width=48, frames=5, steps=4, solver=solver))
        events = []
        state = pipe.denoise(plan, pipe.encode(plan), pipe.initial_state(plan), on_step=events.append)
        np.testing.assert_allclose(events[-1].clean.to_host(), state.latents, atol=1e-5)
        # Noise falls step by step, so each estimate is nearer to the video than the latents of the same step.
        for event in events[:-1]:
            distance = [np.mean((array - state.latents) ** 2) for array in (event.clean.to_host(), event.latents)]
            assert distance[0] < distance[1], (solver, event.step)


# ---- Files and terminals.


@pytest.mark.parametrize("kept", [True, False])
def test_previews_of_generate_are_a_file_beside_the_video(kept, pipeline, cache, tmp_path):
    pipe = pipeline(KIND)
    pipe.painter.prepare()
    plan = pipe.plan(GenerationRequest(prompt="a cat", height=32, width=48, frames=9, steps=8, seed=3))
    run, file = pipe.make_executor(plan), tmp_path / "cat.preview.png"
    with showing_previews(pipe, run, tmp_path / "cat.mp4", PreviewOptions(shown=True, kept=kept)) as show:
        for operation, result in run.work(EncodeText, Step):
            if isinstance(operation, Step):
                show(result)
            if isinstance(operation, Step) and result.step == 3:
                wait_for(file.exists, "a preview")
        with Image.open(file) as picture:
            assert picture.size == (96, 64)
    assert file.exists() == kept


def test_terminals_get_the_picture_in_their_own_commands():
    file = io.BytesIO()
    Image.effect_noise((80, 60), 50).convert("RGB").save(file, "PNG")
    png = file.getvalue()
    kitty = draw_inline(png, {"TERM": "xterm-kitty"})
    commands = kitty.removesuffix("\x1b\\\n").split("\x1b\\")
    heads, chunks = zip(*(command.removeprefix("\x1b_G").split(";") for command in commands), strict=True)
    assert base64.b64decode("".join(chunks)) == png
    assert len(chunks) > 1 and all(len(chunk) <= 4096 for chunk in chunks)
    assert heads[0].startswith("a=T,f=100") and [head[-3:] for head in heads] == ["m=1"] * (len(heads) - 1) + ["m=0"]

    iterm = draw_inline(png, {"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"})
    head, _, content = iterm.removeprefix("\x1b]1337;File=").partition(":")
    assert head.split(";") == ["inline=1", f"size={len(png)}"]
    assert base64.b64decode(content.removesuffix("\a\n")) == png

    assert draw_inline(png, {"TERM": "xterm-256color"}) == ""
    assert draw_inline(png, {"TERM": "xterm-kitty", "TMUX": "/tmp/tmux"}) == ""
