"""The page in a real browser: submit, watch it move, play, cancel, reload meanwhile, on a phone, with the keyboard."""

import base64
import dataclasses
import os
import re
import shutil
from pathlib import Path

import httpx
import pytest

from actors.api.catalogue import Catalogue
from actors.jobs.keys import make_key
from tests.actors.api.serving import SPEC, create, served, working
from tests.conftest import PHOTO
from tests.waiting import wait_for
from wan_tpu.families import preset_spec
from wan_tpu.lora import Lora
from wan_tpu.request import Own, Preset

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
DATA_URL = "data:image/png;base64," + base64.b64encode(PHOTO.read_bytes()).decode()
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture
def page(browser, service):
    """The page of a service, open; what it asks elsewhere or complains of fails the test."""
    made = browser.new_page()
    made.set_default_timeout(15_000)
    problems = []
    made.on("request", lambda asked: asked.url.startswith((service, "data:", "blob:")) or problems.append(asked.url))
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda said: said.type == "error" and " 400 " not in said.text and problems.append(said.text))
    made.goto(service)
    yield made
    shot(made, "end")
    made.close()
    assert problems == []


def shot(page, name):
    """Keep a picture where they are wanted, to be looked at."""
    if folder := os.environ.get("WAN_TPU_SCREENSHOTS"):
        test = os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split(" ")[0]
        page.screenshot(path=Path(folder) / f"{test}-{name}.png", full_page=True)


def ask(page, prompt, **fields):
    page.get_by_label("Prompt", exact=True).fill(prompt)
    for label, value in fields.items():
        page.get_by_label(label, exact=True).fill(str(value))
    page.get_by_role("button", name="Make it").click()
    card = page.locator("article").filter(has_text=prompt)
    card.wait_for()
    return card


def plays(page):
    """Wait until a video has pictures. The page lets nobody evaluate strings in a loop of its own."""
    wait_for(lambda: page.evaluate("(document.querySelector('article video') || {}).readyState >= 2"))


def test_from_the_prompt_to_the_video(page, worker, engine):
    engine.go.clear()
    card = ask(page, "A cat looks up", Size="96x64", Frames=9, Steps=4, Seed=5)
    sync_api.expect(card).to_contain_text("step 1 of 4")
    first = int(card.get_by_role("progressbar").get_attribute("aria-valuenow"))
    shot(page, "under-way")
    page.reload()
    card = page.locator("article").filter(has_text="A cat looks up")
    sync_api.expect(card).to_contain_text("step 1 of 4")
    engine.go.set()
    card.get_by_role("button", name="play:").wait_for()
    assert 0 < first < 100
    assert (engine.asked[0].width, engine.asked[0].steps, engine.asked[0].seed) == (96, 4, 5)
    card.get_by_role("button", name="play:").click()
    plays(page)
    assert page.evaluate("document.querySelector('article video').videoWidth") == 96
    with page.expect_download() as download:
        card.get_by_role("button", name="Download").click()
    assert Path(download.value.path()).read_bytes()[4:8] == b"ftyp"
    page.get_by_label("Seed", exact=True).fill("1")
    card.get_by_role("button", name="Reuse").click()
    assert page.get_by_label("Seed", exact=True).input_value() == "5"
    assert page.get_by_label("Prompt", exact=True).input_value() == "A cat looks up"
    asked = []
    for answer in ("dismiss", "accept"):
        page.once("dialog", lambda dialog, answer=answer: asked.append(dialog.message) or getattr(dialog, answer)())
        card.get_by_role("button", name="Delete").click()
        if answer == "dismiss":
            sync_api.expect(card).to_be_visible()
    sync_api.expect(page.get_by_text("None yet.")).to_be_visible()
    assert asked == ["Delete this video for good?\nA cat looks up"] * 2


@pytest.mark.long
def test_a_preset_and_an_adapter_are_chosen(browser, settings, engine):
    """What a preset sets is left to it, and comes back with Reuse."""
    preset = Preset("in two steps", "https://here", (("sigmas", (1.0, 0.5)), ("loras", (Lora("x"),))))
    spec = engine.model = dataclasses.replace(SPEC, own=Own(presets=(("fast", preset),)))
    offering = dataclasses.replace(settings, catalogue=Catalogue.of(["fast=/a/fast", "style=/a/style"]))
    with served(offering, spec) as address, working(offering, engine):
        page = browser.new_page()
        page.goto(address)
        page.get_by_text("More").click()
        page.get_by_label("Preset").select_option("fast")
        sync_api.expect(page.get_by_text("in two steps")).to_be_visible()
        shot(page, "chosen")
        card = ask(page, "A cat in a hurry")
        card.get_by_role("button", name="play:").wait_for()
        assert (engine.asked[0].steps, [lora.path for lora in engine.asked[0].loras]) == (2, ["/a/fast"])
        page.get_by_label("Preset").select_option("")
        page.get_by_label("Adapter").select_option("style")
        card = ask(page, "A cat of style")
        card.get_by_role("button", name="play:").wait_for()
        assert (engine.asked[1].steps, [lora.path for lora in engine.asked[1].loras]) == (4, ["/a/style"])
        page.locator("article").filter(has_text="in a hurry").get_by_role("button", name="Reuse").click()
        assert page.get_by_label("Steps", exact=True).input_value() == ""
        assert [page.get_by_label(name).input_value() for name in ("Preset", "Adapter")] == ["fast", ""]
        page.close()


@pytest.mark.long
def test_an_image_is_dropped_and_cancelled(page, worker, engine):
    engine.go.clear()
    page.locator("#file").set_input_files(PHOTO)
    sync_api.expect(page.get_by_alt_text("first frame: cat.png")).to_be_visible()
    card = ask(page, "It moves")
    sync_api.expect(card).to_contain_text("step 1")
    card.get_by_role("button", name="Cancel").click()
    sync_api.expect(card).to_contain_text("cancelled")
    assert engine.asked[0].image is not None


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "parts", "image", "settings_of_it"),
    [
        ("wan2.2-i2v-a14b", 4, "(this model needs one)", ["Guidance, high noise", "Guidance, low noise", "Shift"]),
        ("wan2.1-t2v-1.3b", 3, None, ["Guidance", "Shift"]),
        ("cogvideox1.5-5b-i2v", 3, "(this model needs one)", ["Guidance"]),
        ("hunyuanvideo1.5-480p-i2v", 3, "(this model needs one)", ["Guidance", "Shift"]),
    ],
)
def test_the_page_is_made_for_the_model(browser, settings, model, parts, image, settings_of_it):
    with served(settings, preset_spec(model)) as address:
        create(httpx.Client(base_url=address), input_reference=image and {"image_url": DATA_URL})
        page = browser.new_page()
        page.goto(address)
        field = page.locator("#drop")
        sync_api.expect(field).to_contain_text(image) if image else sync_api.expect(field).to_be_hidden()
        sync_api.expect(page.locator("article .bar i")).to_have_count(parts)
        assert page.get_by_label("Steps", exact=True).get_attribute("max") == "1000"
        size, follows = page.get_by_label("Size", exact=True), preset_spec(model).follows_image
        assert (size.input_value(), size.get_attribute("placeholder")) == ("", "as the image") or not follows
        assert page.get_by_label("Frames", exact=True).get_attribute("step") == str(preset_spec(model).frame_step)
        page.get_by_text("More", exact=True).click()
        for label in ("Guidance", "Guidance, high noise", "Guidance, low noise", "Shift"):
            shown = page.get_by_label(label, exact=True)
            sync_api.expect(shown).to_be_visible() if label in settings_of_it else sync_api.expect(shown).to_be_hidden()
        page.locator("article").get_by_role("button", name="Reuse").click()
        for name in ("guidance_scale_2", "shift"):  # what the model has no setting for isn't sent with another one
            field = page.locator(f"input[name={name}]")
            assert bool(field.input_value()) == field.is_visible()
        page.close()


def test_warnings_are_shown(page, worker, engine):
    engine.warnings = ("the prompt has 600 tokens; it was cut at 512",)
    sync_api.expect(ask(page, "A long story")).to_contain_text("it was cut at 512")


def test_a_file_that_is_no_image_is_refused_at_once(page):
    page.locator("#file").set_input_files({"name": "notes.png", "mimeType": "image/png", "buffer": b"no image"})
    sync_api.expect(page.get_by_role("alert")).to_contain_text("notes.png is no image")
    sync_api.expect(page.get_by_text("First frame: drop")).to_be_visible()
    assert page.locator("#drop img").count() == 0
    assert page.locator("#file").input_value() == ""
    page.locator("#file").set_input_files(PHOTO)
    sync_api.expect(page.get_by_alt_text("first frame: cat.png")).to_be_visible()
    sync_api.expect(page.get_by_role("alert")).to_be_hidden()


def test_what_is_refused_is_said(page):
    page.get_by_label("Prompt", exact=True).fill("x")
    page.get_by_label("Size", exact=True).fill("100x64")
    page.get_by_role("button", name="Make it").click()
    sync_api.expect(page.get_by_role("alert")).to_contain_text("96x64")


def test_with_the_keyboard_alone(page, worker):
    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.type("typed")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Make it":
            break
    page.keyboard.press("Enter")
    card = page.locator("article").filter(has_text="typed")
    card.get_by_role("button", name="play:").focus()
    page.keyboard.press("Enter")
    plays(page)


@pytest.mark.long
def test_the_focus_stays_when_cards_change(page, worker, engine):
    engine.go.clear()
    make = page.get_by_role("button", name="Make it")
    cancelled = ask(page, "Cancelled")
    sync_api.expect(cancelled).to_contain_text("step 1")
    page.get_by_label("Prompt", exact=True).fill("Made")
    make.press("Enter")
    made = page.locator("article").filter(has_text="Made")
    made.wait_for()
    sync_api.expect(make).to_be_enabled()
    sync_api.expect(make).to_be_focused()
    cancelled.get_by_role("button", name="Cancel:").press("Enter")
    sync_api.expect(cancelled).to_contain_text("cancelled")
    sync_api.expect(cancelled.get_by_role("button", name="Reuse")).to_be_focused()
    made.get_by_role("button", name="Reuse").focus()
    engine.go.set()
    made.get_by_role("button", name="Play:").wait_for()
    sync_api.expect(made.get_by_role("button", name="Reuse")).to_be_focused()
    page.once("dialog", lambda dialog: dialog.accept())
    made.get_by_role("button", name="Delete").press("Enter")
    sync_api.expect(made).to_have_count(0)
    sync_api.expect(page.get_by_role("heading", name="Videos")).to_be_focused()


@pytest.mark.long
def test_older_ones_take_the_focus(page, http):
    for number in range(14):
        create(http, prompt=f"video {number}.")
    page.get_by_role("button", name="Older ones").press("Enter")
    sync_api.expect(page.locator("article")).to_have_count(14)
    sync_api.expect(page.get_by_role("button", name="Reuse: video 1.")).to_be_focused()


def test_names_say_of_which_video(page):
    card = ask(page, "A cat looks up " + "and up " * 20)
    name = "A cat looks up and up and up and up and up and up and up an…"
    sync_api.expect(card.get_by_role("button", name=f"Cancel: {name}", exact=True)).to_have_text("Cancel")
    bar = card.get_by_role("progressbar", name=f"progress of {name}", exact=True)
    assert [bar.get_attribute(f"aria-value{end}") for end in ("min", "now", "max")] == ["0", "0", "100"]


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_stand_out(page, scheme):
    page.emulate_media(color_scheme=scheme)
    grounds = [colour(page, "form", "backgroundColor"), colour(page, "input[name=size]", "backgroundColor")]
    for control in ("textarea", "input[name=size]", "#drop", "#without"):
        edge = colour(page, control, "borderTopColor")
        assert min(contrast(edge, ground) for ground in grounds) >= 3, control
    assert contrast(colour(page, "input[name=size]", "color", "::placeholder"), grounds[1]) >= 4.5


def colour(page, selector, name, part=None):
    """Return a computed colour as three numbers of 0 to 1."""
    style = f"getComputedStyle(document.querySelector('{selector}'), {part!r})".replace("None", "null")
    return [int(number) / 255 for number in re.findall(r"\d+", page.evaluate(f"{style}.{name}"))[:3]]


def contrast(one, other):
    """Return the contrast as WCAG reckons it."""
    linear = [[v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in c] for c in (one, other)]
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.long
def test_on_a_phone_in_the_dark(page, worker):
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme="dark")
    card = ask(page, "A prompt with a very long word: " + "x" * 200)
    card.get_by_role("button", name="play:").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(22, 23, 26)"


def test_markup_in_a_prompt_stays_text(page, worker):
    card = ask(page, "<img src=x onerror=alert(1)><b>bold</b>")
    assert card.locator("b b, p b, p img").count() == 0
    sync_api.expect(card.locator(".prompt")).to_have_text("<img src=x onerror=alert(1)><b>bold</b>")


def test_a_key_is_asked_for_and_kept(browser, settings, database, engine):
    key = make_key(database, "ann")
    with served(settings) as address, working(settings, engine):
        page = browser.new_page()
        page.set_default_timeout(15_000)
        page.goto(address)
        page.locator("#key").fill(key)
        page.locator("#key").press("Tab")
        card = ask(page, "with a key")
        card.get_by_role("button", name="play:").click()
        plays(page)
        page.reload()
        page.locator("article").filter(has_text="with a key").wait_for()
        page.close()
