#!/usr/bin/env python3
"""Time the host's work on one video while the devices wait: tokenizing, the image, noise, copies, the mp4's end.

The video has the defaults of Wan 2.2 I2V A14B, 81 frames, at 1280x720 and at 832x480. No checkpoint is needed: a
tokenizer with as many words as UMT5's is generated. The figures are those of each part's best run, and
`wan_tpu/pricing/host.py` bases its predictions on them.
"""

import argparse
import functools
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer as Words
from tokenizers import models, pre_tokenizers

from wan_tpu import GenerationRequest
from wan_tpu.families.model import published_model
from wan_tpu.families.shared.tokenizing import Tokenizer, tokenize
from wan_tpu.media.image import load_image
from wan_tpu.media.mp4 import Mp4
from wan_tpu.pricing.host import host_seconds
from wan_tpu.request import ResolvedRequest

MODEL, VOCABULARY = "wan2.2-i2v-a14b", 256_384
PHOTO = Path(__file__).parent.parent / "examples" / "cat.png"
PROMPT = "A cat looks into the camera, its whiskers moving in a light breeze, soft afternoon light on its fur. " * 4


def main() -> None:
    """Measure both sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--decoder_s", type=float, default=8.0, help="frames come this slowly; default %(default)s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(folder)
        cached_tokenizer = Tokenizer(Path(folder), VOCABULARY)
        print(f"tokenizer, read: {best(1, lambda: tokenize(cached_tokenizer, PROMPT, 512)):.3f} s")
        print(f"tokenizer, kept: {best(args.runs, lambda: tokenize(cached_tokenizer, PROMPT, 512)):.4f} s a prompt")
    model = published_model(MODEL)
    for height, width in ((720, 1280), (480, 832)):
        unresolved = GenerationRequest(prompt=PROMPT, image=load_image(PHOTO), height=height, width=width, frames=81)
        request = unresolved.resolve(model.spec.defaults)
        shape = model.spec.latent_shape(request)
        image_s = best(args.runs, functools.partial(model.video_condition, request))
        noise_s = best(args.runs, functools.partial(model.initial_noise, request))
        copies_s = best(args.runs, functools.partial(np.tile, np.ones(shape, np.float32), 4))
        tails = [mp4_end(request, args.decoder_s) for _ in range(max(1, args.runs // 2))]
        print(f"{width}x{height}: image {image_s:.3f} s, noise {noise_s:.3f} s, copies {copies_s:.3f} s", end=", ")
        print(
            f"mp4 after the last frame {min(tail for tail, _ in tails):.3f} s, {min(cpu for _, cpu in tails):.2f} CPU-s"
        )
        print(f"  predicted: {host_seconds(model.spec, request)}")


def best(runs: int, call: Callable[[], object]) -> float:
    """Return the seconds of the fastest call."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def write_tokenizer(folder: str) -> None:
    """Write a unigram tokenizer with as many words as UMT5's."""
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁word{i}", -10.0) for i in range(VOCABULARY - 3))]
    tokenizer = Words(models.Unigram(words, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def mp4_end(request: ResolvedRequest, decoder_s: float) -> tuple[float, float]:
    """Return the seconds from a video's last frame to its finished mp4, and the CPU seconds of all of it.

    The frames are a zoom into a photo, and come as the decoder's do: one, then four at a time.
    """
    chunks = [range(1), *(range(i, i + 4) for i in range(1, request.frames, 4))]
    pictures = [frames(request, numbers) for numbers in chunks]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Mp4(request.fps) as video:
        start = time.perf_counter()
        for number, picture in enumerate(pictures, 1):
            time.sleep(max(0.0, start + decoder_s * number / len(pictures) - time.perf_counter()))
            decoded = time.perf_counter()
            video.add(picture)
        video.finish()
        seconds = time.perf_counter() - decoded
        assert video.failure is None, video.failure
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def frames(request: ResolvedRequest, numbers: range) -> np.ndarray:
    """Return frames of the video, uint8 [T, 3, H, W], green, blue and red."""
    photo, rng = Image.open(PHOTO).convert("RGB"), np.random.default_rng(numbers.start)
    rendered = []
    for number in numbers:
        cut = photo.width * (0.9 - 0.004 * number)
        box = (
            (photo.width - cut) / 2,
            0,
            (photo.width + cut) / 2,
            min(photo.height, cut * request.height / request.width),
        )
        picture = np.asarray(photo.resize((request.width, request.height), Image.Resampling.BICUBIC, box=box))
        noisy = picture + rng.normal(0, 2, (*picture.shape[:2], 1))
        rendered.append(np.clip(noisy, 0, 255).astype(np.uint8).transpose(2, 0, 1)[[1, 2, 0]])
    return np.stack(rendered)


if __name__ == "__main__":
    main()
