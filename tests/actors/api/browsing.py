"""Helpers for the page in a real browser: open it, submit requests, and inspect it."""

import os
from pathlib import Path

import pytest

from tests.waiting import SECONDS, wait_for

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
sync_api.expect.set_options(timeout=1000 * SECONDS)
PHONE = {"width": 320, "height": 640}
SCHEMES = {"light": "rgb(247, 246, 243)", "dark": "rgb(19, 19, 21)"}


def save_screenshot(page, name):
    """Save a screenshot if screenshots are wanted."""
    if folder := os.environ.get("WAN_TPU_SCREENSHOTS"):
        test = os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split(" ")[0]
        page.screenshot(path=Path(folder) / f"{test}-{name}.png", full_page=True)


def open_page(browser, address):
    page = browser.new_page()
    page.set_default_timeout(1000 * SECONDS)
    page.goto(address)
    return page


def ask(page, prompt, *, size=None, **fields):
    """Request a video, with fields by their labels."""
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.locator("#ask details").evaluate("fold => { fold.open = true; }")
    if size is not None:
        page.get_by_role("combobox", name="Size").select_option("other")
        page.get_by_label("Width and height").fill(size)
    for label, value in fields.items():
        page.get_by_label(label, exact=True).fill(str(value))
    page.get_by_role("button", name="Make video").click()
    return card_of(page, prompt)


def card_of(page, prompt):
    card = page.locator("article").filter(has_text=prompt)
    card.wait_for(state="attached")
    return card


def error_of(page, field):
    """Return what is said of a field, which is marked then, and described by it."""
    sync_api.expect(field).to_have_attribute("aria-invalid", "true")
    return page.locator(f"#{field.get_attribute('aria-describedby').split()[-1]}")


def plays(page, where="#viewer"):
    """Wait until a video has frames, polling from here since the page's policy forbids evaluating strings."""
    wait_for(lambda: page.evaluate(f"(document.querySelector('{where} video') || {{}}).readyState >= 2"))


def audit(page, phone=False):
    """Check the page with axe-core, in light mode, its colours in dark mode, and at a phone's width."""
    for (scheme, ground), rules in zip(SCHEMES.items(), ({}, {"runOnly": ["color-contrast"]}), strict=True):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # No colour is half-way to another.
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        results = axe.Axe().run(page, options={"resultTypes": ["violations"]} | rules)
        assert results.violations_count == 0, results.generate_report()
        save_screenshot(page, scheme)
    if phone:
        page.set_viewport_size(PHONE)
        results = axe.Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        save_screenshot(page, "phone")
