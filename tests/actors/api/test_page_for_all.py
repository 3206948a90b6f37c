"""The page by keyboard, by screen reader, on a phone, and while a video is made."""

import re
import time

import pytest

from actors.api.http import watching
from tests.actors.api.browsing import (
    PHONE,
    SCHEMES,
    ask,
    audit,
    card_of,
    open_page,
    plays,
    save_screenshot,
    sync_api,
)
from tests.actors.api.serving import DecodingEngine, create, serve, working
from tests.actors.api.test_unfinished import jpeg
from tests.actors.small_spec import SOUND_SPEC
from tests.waiting import wait_for


@pytest.mark.long
def test_arrows_walk_through_the_videos(page, worker):
    for prompt in ("First", "Third"):
        card = ask(page, prompt)
        play = card.get_by_role("button", name="play:")
        play.wait_for()
    page.get_by_label("Prompt", exact=True).focus()
    for _ in range(30):  # With the keyboard alone: it plays under the focus, and large.
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.ariaLabel") == "Play: Third":
            break
    plays(page, "article")
    page.keyboard.press("Enter")
    plays(page)
    for key, prompt, place in (("Right", "First", 2), ("Left", "Third", 1), ("Right", "First", 2)):
        page.keyboard.press(f"Arrow{key}")
        viewer = page.get_by_role("dialog", name=prompt)
        sync_api.expect(viewer).to_contain_text(f"{place} of 2")
    page.keyboard.press("Escape")
    sync_api.expect(card_of(page, "First").get_by_role("button", name="play:")).to_be_focused()
    page.get_by_label("Search prompts").fill("thi")
    sync_api.expect(page.locator("article:visible")).to_have_count(1)
    page.get_by_label("Search prompts").fill("nobody")
    sync_api.expect(page.get_by_text("No prompt has “nobody”.")).to_be_visible()


@pytest.mark.long
def test_the_focus_stays_when_cards_change(page, worker, engine):
    engine.go.clear()
    make = page.get_by_role("button", name="Make video")
    cancelled = ask(page, "Cancelled")
    sync_api.expect(cancelled).to_contain_text("step 1")
    page.get_by_label("Prompt", exact=True).fill("Made")
    make.press("Enter")
    article = page.locator("article").filter(has_text="Made")
    article.wait_for()
    sync_api.expect(make).to_be_enabled()
    sync_api.expect(make).to_be_focused()
    cancelled.get_by_role("button", name="Cancel:").press("Enter")
    sync_api.expect(cancelled).to_contain_text("Cancelled.")
    sync_api.expect(page.get_by_text("1 cancelled")).to_be_focused()
    article.get_by_role("button", name="Reuse").focus()
    engine.go.set()
    article.get_by_role("button", name="Play:").wait_for()
    sync_api.expect(article.get_by_role("button", name="Reuse")).to_be_focused()
    for name in ("Delete:", "Delete for good:"):
        article.get_by_role("button", name=name).press("Enter")
    sync_api.expect(article).to_have_count(0)
    sync_api.expect(page.get_by_role("heading", name="Videos")).to_be_focused()


@pytest.mark.thorough
@pytest.mark.long
def test_older_ones_take_the_focus(page, http):
    for number in range(26):
        create(http, prompt=f"video {number}.")
    page.get_by_role("button", name="Older ones").press("Enter")
    sync_api.expect(page.locator("article")).to_have_count(26)
    sync_api.expect(page.get_by_role("button", name="Cancel: video 1.")).to_be_focused()


@pytest.mark.long
def test_controls_stand_out(page):
    """axe-core doesn't measure the edges of controls."""
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        grounds = [colour(page, "form", "backgroundColor"), colour(page, "input[name=num_frames]", "backgroundColor")]
        for control in ("textarea", "input[name=num_frames]", "select", ".drop", "#find"):
            edge = colour(page, control, "borderTopColor")
            assert min(contrast(edge, ground) for ground in grounds) >= 3, control
        assert contrast(colour(page, "input[name=num_frames]", "color", "::placeholder"), grounds[1]) >= 4.5


def colour(page, selector, name, part=None):
    """Return a computed colour as three numbers of 0 to 1."""
    style = f"getComputedStyle(document.querySelector('{selector}'), {part!r})".replace("None", "null")
    return [int(number) / 255 for number in re.findall(r"\d+", page.evaluate(f"{style}.{name}"))[:3]]


def contrast(colour_a, colour_b):
    """Return the contrast as WCAG reckons it."""
    linear = [[v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in c] for c in (colour_a, colour_b)]
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.long
def test_on_a_phone(page, worker):
    page.set_viewport_size(PHONE)
    card = ask(page, "A prompt with a very long word: " + "x" * 200)
    card.get_by_role("button", name="play:").click()
    plays(page)
    audit(page, phone=True)
    viewer = page.locator("#viewer")
    assert viewer.evaluate("box => box.scrollWidth - box.clientWidth") <= 0


def test_page_shows_the_preview_while_the_video_is_made(page, worker, engine):
    engine.go.clear()
    engine.previews = {1: jpeg("red")}
    card = ask(page, "A cat looks up", size="96 x 64", Frames=9, Steps=4)
    picture = card.locator("img.preview")
    picture.wait_for()
    assert picture.evaluate("image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])") == [64, 48]
    engine.go.set()
    card.get_by_role("button", name="play:").wait_for()
    sync_api.expect(picture).to_have_count(0)


def test_video_plays_while_it_is_decoded_and_goes_on_as_the_finished_file(browser, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "_SILENCE_S", 0.05)  # Empty boxes come before the video, and within it.
    engine = DecodingEngine(tmp_path)
    engine.model = SOUND_SPEC
    with serve(settings, SOUND_SPEC) as address, working(settings, engine):
        page = open_page(browser, address)
        card = ask(page, "A cat is decoded", Frames=124, **{"Frames a second": 40})
        sync_api.expect(card.locator("video")).to_be_attached()
        wait_for(lambda: engine.requests)
        time.sleep(0.3)  # Empty boxes are sent meanwhile.
        engine.decoded.release(3)
        plays(page, "article")
        sync_api.expect(card.locator("video.playing")).to_be_attached()
        assert card.get_attribute("data-status") == "in_progress"
        sync_api.expect(card.locator(".working strong")).to_have_css(
            "opacity", "0"
        )  # The picture takes the place of words.
        assert b"mp4a" in next(iter(engine.fragments.values()))[0]  # With its sound.
        save_screenshot(page, "decoded")
        page.evaluate(
            "durations = []; document.querySelector('article video.playing').addEventListener("
            "'durationchange', event => durations.push(event.target.duration))"
        )
        engine.decoded.release(6)
        card.get_by_role("button", name="play:").wait_for()
        wait_for(lambda: 124 / 40 in page.evaluate("durations"))  # The media source had no end until then.
        sync_api.expect(card.locator("video")).to_have_count(0)
        sync_api.expect(card.locator(".tile img")).to_be_visible()
        page.close()
