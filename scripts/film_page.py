#!/usr/bin/env python3
"""Film the service's page while it makes a video, beside the clips of `make demo`: the picture in README.

    make demo
    wan-tpu cluster up --emulate emulated-demo
    wan-tpu serve --layout emulated-demo --model examples/small-wan2.2-i2v --dtype float32
    python scripts/film_page.py --output docs/demo.webp
    python scripts/film_page.py --stream --output docs/stream.webp

This needs Chromium. The film has one picture for each change of the page, then shows the video at its own pace. With
`--stream` it shows one video of the list, at its own pace throughout: it plays while its later frames are decoded.
"""

import argparse
import io
import json
import shutil
import textwrap
import time
from pathlib import Path

import imageio.v3 as imageio
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import FloatRect, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PROMPT, IMAGE = "a red ball rolls to the right over a brown floor", ROOT / "examples" / "ball.png"
PAGE, CLIP, LABEL, EDGE = (976, 672), (176, 176), 48, 16
FPS = 8
STREAM_FRAMES, STREAM_FPS = 161, 5  # Pictures a second, as many as a screenshot's time allows.


def main() -> None:
    """Save one animated WebP that goes round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="http://127.0.0.1:8000", help="of the service")
    parser.add_argument("--demo", type=Path, default=ROOT / "demo", help="where `make demo` left its clips")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--stream", action="store_true", help="film one video that plays while it is decoded")
    args = parser.parse_args()
    if args.stream:
        pictures = _film_stream(args.address)
        _save(args.output, pictures, STREAM_FPS, quality=75)
        return
    clips = _clips(args.demo)
    pictures = [_beside(shot, clips, index) for index, shot in enumerate(_film(args.address))]
    _save(args.output, pictures, FPS, quality=60)


def _save(output: Path, pictures: list[Image.Image], fps: int, quality: int) -> None:
    """Write an animated WebP that goes round."""
    pictures[0].save(
        output, save_all=True, append_images=pictures[1:], duration=1000 // fps, loop=0, quality=quality, method=4
    )
    print(f"{output}: {len(pictures)} pictures, {output.stat().st_size / 1e6:.2f} MB")


def _clips(demo: Path) -> list[tuple[str, list[Image.Image]]]:
    """Return prompt and frames of the demo's first videos, as many as have room beside the page."""
    lines = (ROOT / "examples" / "scenes.jsonl").read_text().splitlines()[: PAGE[1] // (CLIP[1] + LABEL)]
    return [
        (line["prompt"], [Image.fromarray(frame).resize(CLIP) for frame in imageio.imread(demo / f"{line['id']}.mp4")])
        for line in map(json.loads, lines)
    ]


def _film(address: str) -> list[Image.Image]:
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": PAGE[0], "height": PAGE[1]})
        page.goto(address)
        shots = [_take_screenshot(page)] * FPS
        page.locator("[name=input_reference]").set_input_files(IMAGE)
        for end in range(0, len(PROMPT) + 4, 4):
            page.get_by_label("Prompt", exact=True).fill(PROMPT[:end])
            shots.append(_take_screenshot(page))
        page.get_by_role("button", name="Make video").click()
        card = page.locator("article").first
        play = card.get_by_role("button", name="play:")
        while not play.count():
            time.sleep(0.2)
            if (shot := _take_screenshot(page)) != shots[-1]:
                shots.append(shot)
        shots += [_take_screenshot(page)] * FPS
        play.click()
        video = page.locator("#viewer video").element_handle()
        video.evaluate("video => { video.controls = false; }")
        while video.evaluate("video => video.readyState") < 2:
            time.sleep(0.1)
        video.evaluate("video => video.pause()")
        seconds = video.evaluate("video => video.duration")
        for index in range(round(3 * seconds * FPS)):
            video.evaluate(
                "(video, at) => new Promise(done => { video.onseeked = done; video.currentTime = at; })",
                (index / FPS) % seconds,
            )
            shots.append(_take_screenshot(page))
        browser.close()
    return shots


def _film_stream(address: str) -> list[Image.Image]:
    """Return pictures of one video of the list, from its last steps until it has been shown to its end."""
    shots: list[Image.Image] = []
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 420, "height": 720})
        page.goto(address)
        page.locator("[name=input_reference]").set_input_files(IMAGE)
        page.get_by_label("Prompt", exact=True).fill(PROMPT)
        page.get_by_label("Frames", exact=True).fill(str(STREAM_FRAMES))
        page.get_by_role("button", name="Make video").click()
        card = page.locator("article").first
        card.wait_for()
        card.scroll_into_view_if_needed()
        due, after = time.monotonic(), 0
        while after < 2 * STREAM_FPS:
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic() - 1) + 1 / STREAM_FPS
            box = card.bounding_box()
            assert box is not None
            shots.append(_take_screenshot(page, {**box, "height": 300}))  # Of one size, whatever is said below.
            after += card.get_by_role("button", name="play:").count()
        browser.close()
    return shots


def _take_screenshot(page: Page, clip: FloatRect | None = None) -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")


def _beside(shot: Image.Image, clips: list[tuple[str, list[Image.Image]]], index: int) -> Image.Image:
    """Return one picture of the film: the clips, each going round, left of the page."""
    picture = Image.new("RGB", (CLIP[0] + 3 * EDGE + PAGE[0], PAGE[1] + 2 * EDGE), "white")
    picture.paste(shot, (CLIP[0] + 2 * EDGE, EDGE))
    draw, font, top = ImageDraw.Draw(picture), ImageFont.load_default(14), EDGE
    for prompt, frames in clips:
        picture.paste(frames[index % len(frames)], (EDGE, top))
        draw.multiline_text((EDGE, top + CLIP[1] + 4), textwrap.fill(prompt, 26), "#444", font)
        top += CLIP[1] + LABEL
    return picture


if __name__ == "__main__":
    main()
