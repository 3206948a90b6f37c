"""The page plays a video while it is decoded, in a real browser."""

import time

from actors.api.http import watching
from tests.actors.api.browsing import ask, open_page, plays, save_screenshot, sync_api
from tests.actors.api.serving import DecodingEngine, serve, working
from tests.actors.small_spec import SOUND_SPEC
from tests.waiting import wait_for


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
