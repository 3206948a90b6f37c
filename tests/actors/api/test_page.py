"""The page in a real browser: ask, watch, play, cancel, retry, reuse; errors and keys; axe-core."""

import dataclasses
import io
import re
from pathlib import Path

import httpx
import pytest
from PIL import Image

from actors.api.catalogue import Catalogue
from actors.jobs.keys import make_key
from tests.actors.api.browsing import ask, audit, card_of, error_of, open_page, plays, save_screenshot, sync_api
from tests.actors.api.serving import MODEL, SPEC, bearer, create, data_url, open_client, serve, working
from tests.actors.api.test_motion import SoundtrackSpec
from tests.actors.api.test_references import TONE, TakesReferences
from tests.actors.api.test_sound import SoundEngine
from tests.actors.api.test_video_input import TakesVideo, film
from tests.actors.small_spec import MOTION_SPEC, SOUND_SPEC
from tests.conftest import PHOTO
from tests.waiting import wait_for
from wan_tpu.families import published_spec
from wan_tpu.request import CheckpointOverrides, Preset
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.storage.local import LocalStorage

DATA_URL = data_url(PHOTO.read_bytes())
SEED = 2**53 + 1  # No number of JavaScript's.


def test_from_the_prompt_to_the_video(page, worker, engine):
    engine.go.clear()
    card = ask(page, "A cat looks up", size="96 x 64", Frames=9, Steps=4, Seed=SEED)
    sync_api.expect(card).to_contain_text("step 1 of 4")
    first = int(card.get_by_role("progressbar").get_attribute("aria-valuenow"))
    save_screenshot(page, "under-way")
    page.reload()
    card = card_of(page, "A cat looks up")
    sync_api.expect(card).to_contain_text("step 1 of 4")
    engine.go.set()
    play = card.get_by_role("button", name="play:")
    play.wait_for()
    assert 0 < first < 100
    assert (engine.requests[0].width, engine.requests[0].steps, engine.requests[0].seed) == (96, 4, SEED)
    sync_api.expect(card).to_contain_text("9 frames · 0.6 s at 16 fps · 96 × 64")
    play.hover()
    plays(page, "article")
    assert page.evaluate("document.querySelector('article video').muted")
    page.get_by_role("heading", name="New video").hover()
    sync_api.expect(card.locator("video")).to_have_count(0)
    play.press("Enter")
    plays(page)
    assert page.evaluate("document.querySelector('#viewer video').videoWidth") == 96
    viewer = page.get_by_role("dialog", name="A cat looks up")
    assert page.url.endswith(card.get_attribute("data-id"))
    assert card.get_attribute("data-id") in viewer.inner_text()
    with page.expect_download() as download:
        viewer.get_by_role("button", name="Download").click()
    assert Path(download.value.path()).read_bytes()[4:8] == b"ftyp"
    page.reload()  # The address has come to be the video's.
    viewer.wait_for()
    page.keyboard.press("Escape")
    sync_api.expect(viewer).to_be_hidden()
    sync_api.expect(play).to_be_focused()
    card.get_by_role("button", name="Reuse").click()
    assert page.get_by_label("Seed", exact=True).input_value() == str(SEED)
    assert page.get_by_label("Prompt", exact=True).input_value() == "A cat looks up"
    card.get_by_role("button", name="Delete:").click()
    card.get_by_role("button", name="Delete for good:").press("Tab")  # Who goes on is asked again.
    sync_api.expect(card.get_by_role("button", name="Delete: A cat")).to_have_text("Delete")
    for name in ("Delete:", "Delete for good:"):
        card.get_by_role("button", name=name).click()
    sync_api.expect(page.get_by_text("Nothing here yet.")).to_be_visible()


def test_an_example_is_there_and_its_image_comes_back(page, worker, engine):
    """From this page, and after a reload from the service."""
    audit(page, phone=True)
    sync_api.expect(page.locator("#length")).to_have_text("0.6 s at 16 fps")
    page.get_by_label("Frames", exact=True).fill("81")
    sync_api.expect(page.locator("#length")).to_have_text("5.1 s at 16 fps")
    page.get_by_label("Frames", exact=True).fill("9")
    page.set_viewport_size({"width": 1000, "height": 420})
    page.get_by_role("button", name="Use this example").click()
    page.get_by_alt_text("first frame: example.png").wait_for()
    sync_api.expect(page.get_by_label("Prompt", exact=True)).to_be_in_viewport()
    sync_api.expect(page.get_by_label("Prompt", exact=True)).to_be_focused()
    page.get_by_role("button", name="Make video").click()
    card = card_of(page, "A red ball")
    card.get_by_role("button", name="play:").wait_for()
    first = engine.requests[0].image
    page.get_by_role("button", name="Remove the image").click()
    card.get_by_role("button", name="Reuse").click()
    page.get_by_alt_text("first frame: example.png").wait_for()
    page.reload()
    card.get_by_role("button", name="Reuse").click()
    page.get_by_alt_text("first frame: input_reference.png").wait_for()
    page.get_by_role("button", name="Make video").click()
    wait_for(lambda: len(engine.requests) == 2)
    assert engine.requests[1].image.tobytes() == first.tobytes()


def test_failed_and_cancelled_videos_fold_away_and_are_retried(page, worker, engine):
    engine.go.clear()
    cancelled = ask(page, "Never mind")
    cancelled.get_by_role("button", name="Cancel:").click()
    sync_api.expect(cancelled).to_contain_text("Cancelled.")
    sync_api.expect(cancelled).to_be_hidden()
    engine.go.set()
    engine.failure = RuntimeError("a bug")
    failed = ask(page, "A clock melts", Seed=7)
    sync_api.expect(failed).to_contain_text("The log of the service says more, under this id: video_")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    failed.get_by_role("button", name="Copy id").click()
    wait_for(lambda: page.evaluate("navigator.clipboard.readText()") == failed.get_attribute("data-id"))
    sync_api.expect(cancelled).to_be_visible()
    page.get_by_label("In progress").check(force=True)
    sync_api.expect(page.get_by_text("Nothing is being made now.")).to_be_visible()
    page.get_by_label("Failed").check(force=True)
    sync_api.expect(page.get_by_text("1 failed, 1 cancelled")).to_be_visible()
    audit(page)
    engine.failure = None
    before = len(engine.requests)
    failed.get_by_role("button", name="Retry").dblclick()  # As people do who are used to it.
    page.get_by_role("button", name="play: A clock melts").wait_for()
    assert engine.requests[-1].seed == 7
    assert len(engine.requests) == before + 1


@pytest.mark.thorough
def test_one_segment_is_made_again_and_so_is_one_that_failed(browser, settings, engine):
    engine.model = MOTION_SPEC
    with working(settings, engine), serve(settings, MOTION_SPEC) as address:
        httpx.post(f"{address}/v1/videos", json={"prompt": "A ball", "next_prompts": ["It falls"]}, timeout=60)
        page = open_page(browser, address)
        page.get_by_role("button", name="play: A ball").click()
        engine.failure = RuntimeError("a bug")
        page.get_by_role("button", name="Segment 2 again").click()
        failed = page.locator("[data-status=failed]")
        failed.wait_for(state="attached")
        page.get_by_label("Failed").check(force=True)
        engine.failure = None
        failed.get_by_role("button", name="Retry").click()
        sync_api.expect(page.get_by_role("button", name="play: A ball")).to_have_count(2)
        page.close()
    lost, made = engine.requests[2:]
    assert (lost.prompt, made.prompt, made.seed) == ("It falls", "It falls", lost.seed)


def test_mistakes_are_said_at_their_field_until_it_changes(page):
    prompt, frames, size = (page.locator(f"[name={name}]") for name in ("prompt", "num_frames", "size"))
    page.get_by_role("button", name="Make video").click()
    sync_api.expect(error_of(page, prompt)).to_have_text("Say what the video shows.")
    sync_api.expect(prompt).to_be_focused()
    prompt.fill("x")
    sync_api.expect(page.get_by_role("alert")).to_have_count(0)
    frames.fill("80")
    page.get_by_role("button", name="Make video").click()
    sync_api.expect(error_of(page, frames)).to_have_text("This model makes 77 or 81 frames.")
    audit(page)
    frames.fill("81")
    size.select_option("other")
    other = page.get_by_label("Width and height")
    other.fill("100x64")
    page.get_by_role("button", name="Make video").click()
    sync_api.expect(error_of(page, other)).to_contain_text("96x64")  # The service says so.
    other.fill("96x64")
    sync_api.expect(page.get_by_role("alert")).to_have_count(0)
    page.context.set_offline(True)
    page.get_by_role("button", name="Make video").click()
    sync_api.expect(page.get_by_role("alert")).to_contain_text("The service doesn't answer.")
    page.context.set_offline(False)
    assert not re.search("Failed to fetch|input_reference|Bearer", page.locator("body").inner_text())


@pytest.mark.long
def test_a_preset_and_an_adapter_are_chosen(browser, settings, engine):
    """The page doesn't send fields that a preset sets, and Reuse restores the preset."""
    preset = Preset("in two steps", "https://here", (("sigmas", (1.0, 0.5)), ("loras", (RequestedAdapter("x"),))))
    spec = engine.model = dataclasses.replace(SPEC, overrides=CheckpointOverrides(presets=(("fast", preset),)))
    offering = dataclasses.replace(settings, catalogue=Catalogue.parse(["fast=/a/fast", "style=/a/style"]))
    with serve(offering, spec) as address, working(offering, engine):
        page = open_page(browser, address)
        pace = page.get_by_role("group", name="Quality or speed").get_by_role("button")
        sync_api.expect(pace.first).to_have_attribute("aria-pressed", "true")
        sync_api.expect(pace.last).to_have_attribute("aria-pressed", "false")
        pace.get_by_text("Fast").click()
        page.locator("#ask details").evaluate("fold => { fold.open = true; }")
        assert page.get_by_label("Preset").input_value() == "fast"
        page.get_by_label("Preset").select_option("")
        page.get_by_label("Preset").select_option("fast")
        sync_api.expect(pace.first).to_have_attribute("aria-pressed", "false")
        sync_api.expect(pace.last).to_have_attribute("aria-pressed", "true")
        sync_api.expect(page.get_by_text("in two steps")).to_be_visible()
        save_screenshot(page, "chosen")
        card = ask(page, "A cat in a hurry")
        card.get_by_role("button", name="play:").wait_for()
        assert (engine.requests[0].steps, [lora.path for lora in engine.requests[0].loras]) == (2, ["/a/fast"])
        sync_api.expect(pace.get_by_text("Fast")).to_contain_text("about")
        page.get_by_label("Preset").select_option("")
        page.get_by_label("Adapter").select_option("style")
        card = ask(page, "A cat of style")
        card.get_by_role("button", name="play:").wait_for()
        assert (engine.requests[1].steps, [lora.path for lora in engine.requests[1].loras]) == (4, ["/a/style"])
        page.locator("article").filter(has_text="in a hurry").get_by_role("button", name="Reuse").click()
        assert page.get_by_label("Steps", exact=True).input_value() == ""
        assert [page.get_by_label(name).input_value() for name in ("Preset", "Adapter")] == ["fast", ""]
        page.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "parts", "image", "settings_of_it"),
    [
        ("wan2.2-i2v-a14b", 4, True, ["Guidance, high noise", "Guidance, low noise", "Shift"]),
        pytest.param("hunyuanvideo1.5-480p-i2v", 3, True, ["Guidance", "Shift"], marks=pytest.mark.thorough),
        pytest.param("ltx-2.3-distilled", 4, False, ["Guidance"], marks=pytest.mark.thorough),
        ("minimax-h3", 3, False, ["Shift"]),
    ],
)
def test_the_page_is_made_for_the_model(browser, settings, model, parts, image, settings_of_it):
    with serve(settings, published_spec(model)) as address:
        create(open_client(address), input_reference={"image_url": DATA_URL} if image else None)
        page = open_page(browser, address)
        field = page.locator(".drop").filter(has_text="First frame")
        takes_image = "i2v" in published_spec(model).tasks
        if takes_image:
            sync_api.expect(field).to_contain_text("choose an image")
        else:
            sync_api.expect(field).to_be_hidden()
        sync_api.expect(page.locator("article .bar i")).to_have_count(parts)
        assert page.locator("[name=num_inference_steps]").get_attribute("max") == "1000"
        size, follows = page.get_by_role("combobox", name="Size"), published_spec(model).follows_image
        assert (size.input_value() == "" and "As the image" in size.inner_text()) == follows
        if image:
            page.get_by_label("Prompt", exact=True).fill("Without one")
            page.get_by_role("button", name="Make video").click()
            message = error_of(page, page.locator("[name=input_reference]"))
            sync_api.expect(message).to_have_text("This model starts from an image: add one.")
        assert page.get_by_label("Frames", exact=True).get_attribute("step") == str(published_spec(model).frame_step)
        sound = sync_api.expect(page.get_by_label("Sound", exact=True))
        sound.to_be_hidden() if published_spec(model).audio_rate is None else sound.to_be_checked()
        # MiniMax-H3's licence asks for its name.
        sync_api.expect(page.locator("#model")).to_have_text(f"MiniMax H3 · {MODEL}" if "h3" in model else MODEL)
        assert re.fullmatch(r"\d+(\.\d)? s at \d+ fps", page.locator("#length").inner_text())
        page.get_by_text("Settings", exact=True).click()
        for label in ("Frames a second", "Negative prompt"):
            field = page.get_by_label(label, exact=True)
            sync_api.expect(field).to_be_visible(visible="h3" not in model)
        for label in ("Guidance", "Guidance, high noise", "Guidance, low noise", "Shift"):
            field = page.get_by_label(label, exact=True)
            sync_api.expect(field).to_be_visible() if label in settings_of_it else sync_api.expect(field).to_be_hidden()
        page.locator("article").get_by_role("button", name="Reuse").click()
        for name in ("guidance_scale_2", "shift"):  # Fields that the model lacks aren't sent.
            field = page.locator(f"input[name={name}]")
            assert bool(field.input_value()) == field.is_visible()
        page.close()


def test_sound_is_asked_for_and_heard_where_the_model_makes_it(browser, settings, tmp_path):
    engine = SoundEngine(tmp_path)
    with serve(settings, SOUND_SPEC) as address, working(settings, engine):
        page = open_page(browser, address)
        sound = page.get_by_label("Sound", exact=True)
        sync_api.expect(sound).to_be_checked()
        audit(page, phone=True)
        page.get_by_label("Frames", exact=True).fill("23")
        page.get_by_role("button", name="Make video").click()
        message = error_of(page, page.locator("[name=num_frames]"))
        sync_api.expect(message).to_have_text("This model makes 22 or 39 frames.")
        loud = ask(page, "A bell rings", Frames=22)
        loud.get_by_role("button", name="play:").wait_for()
        sound.uncheck()
        quiet = ask(page, "A bell hangs", Frames=5)
        quiet.get_by_role("button", name="play:").wait_for()
        assert [request.generate_audio for request in engine.requests] == [True, False]
        for card, muted, text in ((loud, False, "yes"), (quiet, True, "none")):
            card.get_by_role("button", name="play:").click()
            plays(page)
            assert page.evaluate("document.querySelector('#viewer video').muted") is muted
            sync_api.expect(page.locator("#viewer dt", has_text="Sound").locator("+ dd")).to_have_text(text)
            page.keyboard.press("Escape")
        loud.get_by_role("button", name="Reuse").click()
        sync_api.expect(sound).to_be_checked()
        quiet.get_by_role("button", name="Reuse").click()
        sync_api.expect(sound).not_to_be_checked()
        page.close()


def test_references_are_chosen_and_put_in_order(browser, settings, engine):
    spec = engine.model = TakesReferences(SPEC.config)
    picture = {"name": "cat.png", "mimeType": "image/png", "buffer": PHOTO.read_bytes()}
    sound = {"name": "purr.wav", "mimeType": "audio/wav", "buffer": film(source=TONE, kind="wav")}
    with working(settings, engine), serve(settings, spec) as address:
        page = open_page(browser, address)
        page.locator("[name=references]").set_input_files([picture, sound, picture])
        items = page.locator("#references").get_by_role("listitem")
        sync_api.expect(items).to_have_text([re.compile("Picture 1"), re.compile("Audio 1"), re.compile("Picture 2")])
        sync_api.expect(page.locator(".drop").filter(has_text="First frame")).to_be_hidden()
        items.nth(1).get_by_role("button", name="Earlier").click()
        items.nth(2).get_by_role("button", name="Remove").click()
        sync_api.expect(items).to_have_text([re.compile("Audio 1"), re.compile("Picture 1")])
        page.get_by_label("Reference pictures").select_option("match")
        audit(page)
        referring = ask(page, "Picture 1 purrs as in Audio 1")
        wait_for(lambda: engine.requests)
        assert [reference.kind for reference in engine.requests[0].references] == ["audio", "image"]
        assert engine.requests[0].reference_size == "match"
        clip = {"name": "clip.mp4", "mimeType": "video/mp4", "buffer": b"shown by its type"}
        items.nth(1).get_by_role("button", name="Remove").click()
        page.locator("[name=references]").set_input_files(clip)
        items.nth(1).get_by_role("button", name="Earlier").click()
        sync_api.expect(items).to_have_text([re.compile("Video 1: clip"), re.compile("Audio 1, plus 1 for each video")])
        for _ in range(2):
            items.first.get_by_role("button", name="Remove").click()
        sync_api.expect(items).to_have_count(0)
        referring.get_by_role("button", name="Reuse").click()
        sync_api.expect(items).to_have_text([re.compile("Audio 1: purr.wav"), re.compile("Picture 1: cat.png")])
        sync_api.expect(page.get_by_label("Reference pictures")).to_have_value("match")
        page.reload()
        referring.get_by_role("button", name="Reuse").click()
        sync_api.expect(error_of(page, page.locator("[name=references]"))).to_contain_text("add them again")
        page.close()


def test_a_sound_is_the_video_s_own(browser, settings, engine):
    """A model that takes no references beside it isn't asked what the sound is, and may begin with an image."""
    spec = engine.model = SoundtrackSpec(MOTION_SPEC.config)
    picture = {"name": "cat.png", "mimeType": "image/png", "buffer": PHOTO.read_bytes()}
    sound = {"name": "purr.wav", "mimeType": "audio/wav", "buffer": film(source=TONE, kind="wav")}
    with working(settings, engine), serve(settings, spec) as address:
        page = open_page(browser, address)
        page.locator("[name=references]").set_input_files([sound, picture])
        items = page.locator("#references").get_by_role("listitem")
        sync_api.expect(items).to_have_count(1)
        sync_api.expect(page.get_by_label("The sound is")).to_be_hidden()
        page.locator("[name=input_reference]").set_input_files(picture)
        sync_api.expect(items).to_have_count(1)
        talking = ask(page, "It says hello")
        wait_for(lambda: engine.requests)
        page.get_by_role("button", name="Remove the image").click()
        talking.get_by_role("button", name="Reuse").click()
        page.get_by_alt_text("first frame").wait_for()
        sync_api.expect(items).to_have_count(1)
        page.get_by_role("button", name="Make video").click()
        wait_for(lambda: len(engine.requests) == 2)
        for request in engine.requests:
            assert request.image is not None and [one.kind for one in request.references] == ["soundtrack"]
        page.close()


def test_a_file_that_is_no_image_is_refused_at_once(page):
    page.locator("[name=input_reference]").set_input_files(
        {"name": "notes.png", "mimeType": "image/png", "buffer": b"no image"}
    )
    sync_api.expect(page.get_by_role("alert")).to_contain_text("notes.png isn't an image")
    sync_api.expect(page.get_by_text("Drop, paste or choose an image").first).to_be_visible()
    assert page.locator(".drop img").count() == 0
    page.locator("[name=input_reference]").set_input_files(PHOTO)
    sync_api.expect(page.get_by_alt_text("first frame: cat.png")).to_be_visible()
    sync_api.expect(page.get_by_role("alert")).to_have_count(0)
    scan = io.BytesIO()
    Image.new("RGB", (90, 60)).save(scan, "TIFF")  # The service reads it, Chromium doesn't.
    page.locator("[name=input_reference]").set_input_files(
        {"name": "scan.tif", "mimeType": "image/tiff", "buffer": scan.getvalue()}
    )
    sync_api.expect(page.locator(".drop").first).to_have_text(re.compile("scan.tif"))
    card = ask(page, "From a scan")
    page.reload()
    card.get_by_role("button", name="Reuse").click()
    page.get_by_alt_text("first frame: input_reference.png").wait_for()


def test_markup_in_a_prompt_and_a_warning_stays_text(page, worker, engine):
    engine.warnings = ("the prompt has 600 tokens; it was cut at <i>512</i>",)
    card = ask(page, "<img src=x onerror=alert(1)><b>bold</b>")
    sync_api.expect(card).to_contain_text("it was cut at <i>512</i>")
    card.get_by_role("button", name="play:").click()
    sync_api.expect(page.get_by_role("dialog")).to_contain_text("<img src=x onerror=alert(1)><b>bold</b>")
    assert page.locator("p b, p img, p i, h2 b, h2 img, dd i").count() == 0
    sync_api.expect(card.locator(".prompt")).to_have_text("<img src=x onerror=alert(1)><b>bold</b>")


def test_a_key_is_asked_for_once_and_can_be_forgotten(browser, settings, database, engine, monkeypatch):
    """And its video plays where other clients are sent to a bucket, where no script may read."""
    key = make_key(database, "ann")
    monkeypatch.setattr(LocalStorage, "url", lambda *_: "https://storage.example/made.mp4")
    with serve(dataclasses.replace(settings, url_s=60)) as address, working(settings, engine):
        page = open_page(browser, address)
        dialog = page.get_by_role("dialog", name="This service wants a key")
        field = dialog.get_by_label("Key", exact=True)
        field.fill("wan_nonsense")
        field.press("Enter")
        sync_api.expect(error_of(page, field)).to_contain_text("This key opens nothing here.")
        field.fill(key)
        sync_api.expect(dialog.get_by_role("alert")).to_have_count(0)
        field.press("Enter")
        sync_api.expect(dialog).to_be_hidden()
        card = ask(page, "with a key")
        card.get_by_role("button", name="play:").click()
        plays(page)
        content = f"{address}/v1/videos/{card.get_attribute('data-id')}/content"
        assert httpx.get(content, headers=bearer(key), timeout=60).status_code == 307
        page.reload()
        page.locator("article").filter(has_text="with a key").wait_for()
        assert page.evaluate("[localStorage.length, sessionStorage.getItem('key')]") == [0, key]
        viewer = page.get_by_role("dialog", name="with a key")
        viewer.wait_for()  # The address is the video's, which opens when the page has heard of it.
        page.keyboard.press("Escape")
        sync_api.expect(viewer).to_be_hidden()
        page.get_by_role("button", name="Forget the key").click()
        dialog.wait_for()
        assert page.evaluate("sessionStorage.length") == 0
        assert page.locator("article").count() == 0
        page.close()


def test_several_seeds_are_told_apart_and_compared(page, worker, engine):
    page.get_by_label("How many").select_option("2")
    page.locator("#ask details").evaluate("fold => { fold.open = true; }")
    page.get_by_label("Seed", exact=True).fill(str(SEED))
    page.get_by_label("Prompt", exact=True).fill("A cat twice")
    page.get_by_role("button", name="Make video").click()
    cards = page.locator("article").filter(has_text="A cat twice")
    sync_api.expect(cards).to_have_count(2)
    for seed in (SEED, SEED + 1):
        card = cards.filter(has_text=f"seed {seed}")
        card.get_by_role("button", name="play:").wait_for()
        sync_api.expect(card).to_contain_text("made in")
        card.get_by_label("Choose").check()
    assert sorted(request.seed for request in engine.requests) == [SEED, SEED + 1]
    page.get_by_role("button", name="Compare").click()
    sides = page.get_by_role("dialog", name="Side by side")
    wait_for(lambda: page.evaluate("[...document.querySelectorAll('#sides video')].every(v => v.readyState >= 2)"))
    # Both are asked for at once, so either may be the first.
    assert sorted(sides.locator("figcaption").all_text_contents()) == [f"seed {SEED}", f"seed {SEED + 1}"]
    sides.get_by_label("Moment of the videos").fill("0.5")
    wait_for(lambda: page.evaluate("[...document.querySelectorAll('#sides video')].every(v => v.currentTime > 0.2)"))
    audit(page, phone=True)
    page.keyboard.press("Escape")
    downloads = []
    page.on("download", lambda download: downloads.append(download))  # It marks functions.
    page.get_by_role("button", name="Download all").click()
    wait_for(lambda: page.wait_for_timeout(50) or len(downloads) == 2)


def test_no_request_by_the_keyboard_is_lost(page, http):
    prompt = page.get_by_label("Prompt", exact=True)
    page.locator("[name=size] option").first.wait_for(state="attached")
    for number in range(5):
        prompt.fill(f"video {number}.")
        prompt.press("Control+Enter")
    sync_api.expect(page.locator("article")).to_have_count(5)
    assert {video["prompt"] for video in http.get("/v1/videos").json()["data"]} == {f"video {n}." for n in range(5)}


def test_videos_are_chained_and_continued(page, worker, engine, http):
    page.locator("#ask details").evaluate("fold => { fold.open = true; }")
    page.get_by_label("What happens next").fill("it sits down\n\nit sleeps")
    engine.go.clear()
    card = ask(page, "A cat looks up")
    sync_api.expect(card).to_contain_text("step 1 of 4, segment 1 of 3")
    engine.go.set()
    card.get_by_role("button", name="play:").wait_for()
    sync_api.expect(card).to_contain_text("25 frames · 1.6 s at 16 fps")
    assert [request.prompt for request in engine.requests] == ["A cat looks up", "it sits down", "it sleeps"]
    page.get_by_label("What happens next").fill("")
    card.get_by_role("button", name="Reuse").click()
    sync_api.expect(page.get_by_label("What happens next")).to_have_value(re.compile(r"it sits down\s+it sleeps"))
    page.get_by_label("What happens next").fill("")
    card.get_by_role("button", name="Continue").click()
    sync_api.expect(page.get_by_label("Prompt", exact=True)).to_be_focused()
    sync_api.expect(page.get_by_role("combobox", name="Size")).to_be_hidden()
    ask(page, "it wakes").get_by_role("button", name="play:").wait_for()
    newest = http.get("/v1/videos?limit=1").json()["data"][0]
    assert newest["extended_from_video_id"] == card.get_attribute("data-id")
    page.locator("#source").get_by_role("button", name="Leave out").click()
    sync_api.expect(page.get_by_role("combobox", name="Size")).to_be_visible()


@pytest.mark.thorough
def test_videos_are_restyled_where_the_model_takes_them(browser, settings, engine):
    spec = engine.model = TakesVideo(SPEC.config)
    with serve(settings, spec) as address, working(settings, engine):
        page = open_page(browser, address)
        card = ask(page, "A cat looks up")
        card.get_by_role("button", name="play:").wait_for()
        card.get_by_role("button", name="Restyle").click()
        assert page.get_by_label("Strength").get_attribute("placeholder") == "0.8"
        page.get_by_label("Strength").fill("0.5")
        ask(page, "the same in snow").get_by_role("button", name="play:").wait_for()
        assert (engine.requests[1].strength, engine.requests[0].strength) == (0.5, None)
        assert engine.requests[1].video is not None
        page.close()


def test_page_opens_while_the_service_is_down(browser, settings):
    context = browser.new_context()
    page = context.new_page()
    with serve(settings) as address:
        page.goto(address)
        wait_for(lambda: page.evaluate("navigator.serviceWorker.controller !== null"))
    page.reload()
    sync_api.expect(page.get_by_role("heading", name="New video")).to_be_visible()
    sync_api.expect(page.locator("#queue")).to_contain_text("The service doesn't answer.")
    context.close()
