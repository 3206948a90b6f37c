"""The actor on a host: what it refuses, what fails alone, and what it has compiled, in one process."""

import dataclasses
import io
import pickle
import re
import time

import jax
import numpy as np
import pytest
from diffusers import WanTransformer3DModel
from PIL import Image

from actors.slices.fetched_adapters import MAX_WAITING, FetchedAdapters
from actors.slices.payloads import TextEmbedding, pack, unpack
from actors.slices.prepared import Denoising, OutOfOrder
from actors.slices.stage_host import StageHost
from tests.conftest import PHOTO
from tests.waiting import SECONDS
from tests.wan_tpu import adapter_files
from wan_tpu import GenerationRequest, InvalidInput, InvalidRequest
from wan_tpu.data import DenoiseState, ImageCondition
from wan_tpu.errors import DoesNotFit, Unavailable
from wan_tpu.families import published_spec
from wan_tpu.plan import PromptText
from wan_tpu.previews.painter import Painter
from wan_tpu.previews.watching import Previews
from wan_tpu.reference import Reference
from wan_tpu.tail import Tail

KIND = "wan2.2-i2v-a14b"


def embedding(values):
    return pack(TextEmbedding({"text": values}))


@pytest.mark.parametrize(
    ("kind", "stages", "message"),
    [
        ("wan2.1-t2v-1.3b", ("denoise_low",), "denoise_low.*encoder.*denoise.*decoder"),
        (KIND, ("denoise",), "stages denoise"),
        (KIND, (), "encoder, denoise_high, denoise_low"),
    ],
)
def test_stages_that_the_model_does_not_have_are_refused(kind, stages, message, checkpoint):
    with pytest.raises(InvalidInput, match=message):
        StageHost(str(checkpoint(kind)), stages, (1, 1, 1))


def test_a_pool_does_its_own_stages_only(checkpoint):
    host = StageHost(str(checkpoint("wan2.1-t2v-1.3b")), ("denoise",), (1, 1, 1), "float32")
    host.load()
    assert list(host._runtime._components) == ["denoise"]
    plan = host._spec.plan(
        GenerationRequest(prompt="a cat", height=32, width=32, frames=1, steps=2, guidance_scale=1.0)
    )
    assert plan.prompts == ("a cat",)
    assert [(e.stage, e.start, e.stop) for e in plan.experts] == [("denoise", 0, 2)]
    assert plan.shapes["denoise"] == "denoise 32x32x1 t2v 1 unipc"
    with pytest.raises(OutOfOrder, match="encoder"):
        host.encode_text(PromptText("a cat"))
    with pytest.raises(OutOfOrder, match="request a"):
        host.prepare_encode("a", plan.request)
    with pytest.raises(OutOfOrder, match=r"request a.*prepare_denoise"):
        host.begin("a")
    with pytest.raises(OutOfOrder, match="encode_text"):
        host.prepare_denoise("a", plan, None)


class FailingPainter(Painter):
    def paint(self, *args):
        raise RuntimeError("the preview's function fails")


def test_previews_come_with_later_steps_and_change_nothing(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("WAN_TPU_CACHE", str(tmp_path))
    host = StageHost(str(checkpoint("wan2.1-t2v-1.3b")), ("denoise",), (1, 1, 1), "float32")
    request = GenerationRequest(prompt="a cat", height=32, width=48, frames=5, steps=8, guidance_scale=1.0)
    plan = host._spec.plan(request)
    text = embedding(np.random.default_rng(0).standard_normal((1, 512, 32)).astype(np.float32))

    def make(key, previews, wait):
        host.prepare_denoise(key, plan, text, None, None, None, previews)
        wait()  # Until the painter is prepared.
        host.begin(key)
        parts = []
        for _ in range(plan.steps):
            _, done, *pictures = host.step(key)
            parts += [(done, *picture) for picture in pictures]
            if done in plan.preview_steps:
                wait()
        with pytest.raises(OutOfOrder, match=f"request {key}"):  # All steps are done.
            host.step(key)
        return parts, unpack(host.collect(key).payload).latents

    def wait_for_picture():
        host._previews._work.result(SECONDS)  # The next one isn't begun before.

    without, plain = make("without", False, lambda: None)
    assert without == []
    pictures, latents = make("with", True, wait_for_picture)
    assert [step for _, step, _ in pictures] == [2, 4, 6]
    assert all(step <= done <= step + 1 for done, step, _ in pictures)
    assert [Image.open(io.BytesIO(jpeg)).size for _, _, jpeg in pictures] == [(96, 32)] * 3
    assert np.array_equal(latents, plain)

    host._previews = Previews(FailingPainter(host._runtime.model))
    failed, latents = make("failing", True, wait_for_picture)
    assert failed == []
    assert np.array_equal(latents, plain)


def test_compile_time_of_one_request_is_not_reported_for_the_next(checkpoint):
    host = StageHost(str(checkpoint("wan2.1-t2v-1.3b")), ("denoise",), (1, 1, 1), "float32")
    request = GenerationRequest(prompt="a cat", height=32, width=32, frames=1, steps=2, guidance_scale=1.0)
    plan = host._spec.plan(request)
    text = embedding(np.zeros((1, 512, 32), np.float32))
    compile_times = []
    for key in ("cancelled", "after it"):
        host.prepare_denoise(key, plan, text)
        start = time.perf_counter()
        compile_s = host.begin(key)[0], host.step(key)[0]
        compile_times.append(compile_s)
        assert sum(compile_s) <= time.perf_counter() - start
        host.drop(key)
    assert all(compile_times[0]) and compile_times[1] == (0, 0)


def test_a_size_that_has_no_room_fails_alone_and_the_nearest_that_has_is_named(checkpoint):
    """The compiler's refusal of a program, raised where compiled programs are run."""
    host = StageHost(str(checkpoint("wan2.1-t2v-1.3b")), ("denoise",), (1, 1, 1), "float32")
    small = GenerationRequest(prompt="a cat", height=32, width=32, frames=5, steps=2, guidance_scale=1.0)
    too_large = host._spec.plan(dataclasses.replace(small, height=8192, width=8192, frames=2001)).request
    for fitting, nearest in ((None, "no size is known to fit so far"), (small, "to fit is 32x32 with 5 frames")):
        if fitting is not None:
            host.warm_up(fitting)
        with pytest.raises(DoesNotFit, match=f"8192x8192.* 2001 .*{nearest}") as raised:
            with host._sizes.track(too_large):
                raise DoesNotFit("needs 64.0 GiB on each device, which has 31.2")
        assert "64.0 GiB" in str(raised.value)


def test_warm_up_leaves_nothing_to_compile_with_an_image_or_without(checkpoint):
    """Of a model that makes videos from text and from images."""
    host = StageHost(str(checkpoint("wan2.2-ti2v-5b")), ("denoise",), (1, 1, 1), "float32")
    request = GenerationRequest(prompt="a cat", height=32, width=64, frames=5, steps=1, guidance_scale=1.0)
    host.warm_up(request)
    for has_image in (False, True):
        plan = host._spec.plan(request, image=has_image)
        text = embedding(np.zeros((1, *host._runtime.model.text_shape), np.float32))
        shape = host._spec.latent_shape(plan.request)
        image = pack(ImageCondition(None, np.zeros((*shape[:2], 1, *shape[3:]), np.float32))) if has_image else None
        host.prepare_denoise("a", plan, text, None, image)
        assert (host.begin("a"), host.step("a")) == ((0,), (0, 1))
        host.drop("a")


def test_warm_up_goes_on_where_only_another_number_of_images_has_no_room(checkpoint, monkeypatch):
    """The compiler's refusal, raised for one of the programs of a model of text and of images."""
    host = StageHost(str(checkpoint("wan2.2-ti2v-5b")), ("denoise",), (1, 1, 1), "float32")
    request = GenerationRequest(prompt="a cat", height=32, width=64, frames=5, steps=1, guidance_scale=1.0)
    compiled, compile_program = [], jax.stages.Lowered.compile

    def refuse(program, **options):
        compiled.append(program)
        if len(compiled) == refused_at:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")
        return compile_program(program, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    refused_at = 3  # Text keys and the step with an image come before it.
    [refusal] = host.warm_up(request)
    assert refusal.startswith("denoise step, no image: ") and len(compiled) == 3
    refused_at = 4  # The keys are those of the other size.
    with pytest.raises(DoesNotFit, match=r"64x64\b.*\b5\b.*\b64x32\b.*\b5\b"):
        host.warm_up(dataclasses.replace(request, height=64))
    assert len(compiled) == 4


def test_state_without_the_sound_that_a_request_needs_is_not_decoded(checkpoint):
    """Without weights: inputs need none."""
    host = StageHost(str(checkpoint("ltx-2.3-distilled")), ("decoder",), (1, 1, 1), "float32")
    request = host._spec.plan(GenerationRequest(prompt="a cat", height=64, width=128, frames=9)).request
    shapes = host._spec.latent_shapes(request, request.steps)
    latents, sound = (np.zeros(shapes[part], np.float32) for part in ("video", "audio"))
    silent, short = DenoiseState(latents, (), 11), DenoiseState(latents, (), 11, sound[:, 1:])
    for state, actual in ((silent, r"latents \([^)]*\);"), (short, rf"sound {re.escape(str(sound[:, 1:].shape))};")):
        with pytest.raises(OutOfOrder, match=rf"{actual} this request needs .* sound {re.escape(str(sound.shape))}"):
            host.prepare_decode("a", request, pack(state))
    host.prepare_decode("a", request, pack(DenoiseState(latents, (), 11, sound)))
    host.prepare_decode("b", dataclasses.replace(request, generate_audio=False), pack(silent))
    assert host.list_keys() == ["a", "b"]


def test_experts_are_given_the_prompts_they_use(checkpoint):
    """Without weights: inputs need none."""
    host = StageHost(str(checkpoint(KIND)), ("denoise_high", "denoise_low"), (1, 1, 1), "bfloat16")
    size = {"image": PHOTO, "height": 32, "width": 48, "frames": 5, "steps": 4}
    plan = host._spec.plan(GenerationRequest(prompt="a cat", guidance_scale=3.0, guidance_scale_2=1.0, **size))
    rng = np.random.default_rng(0)
    prompt, negative = (embedding(rng.standard_normal((1, 512, 32)).astype(np.float32)) for _ in range(2))
    image = pack(ImageCondition(None, np.zeros((1, 20, 2, 4, 6), np.float32)))
    with pytest.raises(InvalidInput, match="negative prompt") as raised:
        host.prepare_denoise("a", plan.without_image(), prompt, None, image)
    assert not isinstance(raised.value, InvalidRequest)  # which the driver has forgotten
    host.prepare_denoise("a", plan.without_image(), prompt, negative, image)
    inputs = host._prepared.get("a", Denoising).inputs
    assert {expert.stage: (own.text["text"].shape[0], own.text["text"].dtype) for expert, own in inputs.items()} == {
        "denoise_high": (2, "bfloat16"),
        "denoise_low": (1, "bfloat16"),
    }
    # The state before the first step is drawn on every host; it can be handed on as it is.
    first = host.snapshot("a")
    assert (first.value, len(unpack(first.payload).history)) == (0, 3)
    wrong = pack(DenoiseState(np.zeros((1, 16, 2, 4, 4), np.float32), (), 1))
    with pytest.raises(InvalidInput, match=r"\b3\)") as raised:
        host.prepare_denoise("b", plan.without_image(), prompt, negative, image, wrong)
    assert not isinstance(raised.value, InvalidRequest)  # somebody has mixed up two requests; neither is wrong
    host.drop("a")
    host.drop("a")
    assert host.list_keys() == []
    low = StageHost(str(checkpoint(KIND)), ("denoise_low",), (1, 1, 1), "bfloat16")
    one_step = low._spec.plan(GenerationRequest(prompt="a cat", **(size | {"steps": 1}))).without_image()
    with pytest.raises(OutOfOrder, match=r"request a.* denoise_low"):
        low.prepare_denoise("a", one_step, prompt, negative, image)


def test_a_request_runs_with_what_was_fetched_for_it(checkpoint, tmp_path):
    """Whatever becomes of its adapter's file: it is replaced before another request comes, and then it is gone."""
    kind = "wan2.1-t2v-1.3b"
    host = StageHost(str(checkpoint(kind)), ("denoise",), (1, 1, 1), "float32")
    transformer = WanTransformer3DModel.from_pretrained(checkpoint(kind), subfolder="transformer")
    names = adapter_files.blocks(transformer, adapter_files.WAN)
    path = tmp_path / "style.safetensors"

    def write(seed):
        factors = adapter_files.factors(transformer, names, seed=seed)
        return adapter_files.save(adapter_files.name_tensors(factors, names, ""), path)

    request = GenerationRequest(prompt="a cat", height=32, width=32, frames=1, steps=1, guidance_scale=1.0)
    text = embedding(np.random.default_rng(0).standard_normal((1, 512, 32)).astype(np.float32))

    def plan(prompt, scale=1.0):
        return host._spec.plan(dataclasses.replace(request, prompt=prompt, loras=[{"path": str(path), "scale": scale}]))

    def run(request):
        host.prepare_denoise("a", request, text)
        host.begin("a")
        host.step("a")
        return unpack(host.collect("a").payload).latents

    write(0)
    early, late, twin = plan("early"), plan("late"), plan("twin")
    host.fetch_adapters(early)
    write(1)
    host.fetch_adapters(late)
    path.unlink()
    with_new, with_old = run(late), run(early)
    assert np.abs(with_new - with_old).max() > 0.001

    write(1)
    host.fetch_adapters(twin)
    host.fetch_adapters(twin)  # two requests that are alike in everything
    path.unlink()
    assert np.array_equal(run(twin), with_new)
    assert np.array_equal(run(twin), with_new)
    with pytest.raises(Unavailable):
        run(twin)
    with pytest.raises(InvalidRequest):
        host.fetch_adapters(plan("gone"))
    with pytest.raises(InvalidRequest):
        host.check_adapters(plan("gone"))


def test_adapters_of_requests_that_never_come_are_let_go_of():
    fetched = FetchedAdapters(())
    spec = published_spec("wan2.1-t2v-1.3b")
    plans = [spec.plan(GenerationRequest(prompt=str(i), loras=["owner/style"])) for i in range(MAX_WAITING + 1)]
    for plan in plans:
        fetched.put(plan, plan.request.loras)
    with pytest.raises(Unavailable):
        fetched.take(plans[0])
    assert fetched.take(plans[-1]) == plans[-1].request.loras


@pytest.mark.parametrize("kind", ["tail", "continued", "soundtrack"])
def test_adapters_of_a_request_that_goes_on_are_found_by_another_copy_of_its_plan(kind):
    """Each call of a host brings a copy of the plan, with the sound of what it continues."""
    sound = np.random.default_rng(0).standard_normal((2, 48000)).astype(np.float32)
    pixels = np.zeros((25, 512, 768, 3), np.uint8) if kind == "continued" else None
    latents = np.ones((1, 128, 4, 16, 24), np.float32) if kind == "tail" else None
    end = Tail(latents, sound, 512, 768, 25, 16, 48000, pixels)
    reference = Reference(kind, end, 512, 768, 25, 48000, 48000)
    if kind == "soundtrack":
        reference = Reference(
            kind, dataclasses.replace(end, height=0, width=0, frames=0), samples=48000, sample_rate=48000
        )
    spec, fetched = published_spec("ltx-2.3"), FetchedAdapters(())
    fields = {"prompt": "a", "frames": 121, "loras": ["owner/style"]}
    plan = spec.plan(GenerationRequest(**fields, references=[reference]))
    fetched.put(pickle.loads(pickle.dumps(plan)), plan.request.loras)
    louder = dataclasses.replace(reference, source=dataclasses.replace(end, sound=2 * sound))
    with pytest.raises(Unavailable):
        fetched.take(spec.plan(GenerationRequest(**fields, references=[louder])))
    assert fetched.take(pickle.loads(pickle.dumps(plan))) == plan.request.loras
