"""The page by keyboard, by screen reader, and on a phone."""

import re

import pytest

from tests.actors.api.browsing import PHONE, SCHEMES, ask, audit, card_of, plays, sync_api
from tests.actors.api.serving import create


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
