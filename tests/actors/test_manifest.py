"""Good lines, bad lines, and the same request each time."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from actors.batch.manifest import read_manifest
from tests.actors.small_spec import MOTION_SPEC, SPEC
from tests.conftest import PHOTO
from tests.wan_tpu.minimax_h3_ref2va import write_sound, write_video
from wan_tpu import GenerationRequest, InvalidInput
from wan_tpu.families import published_spec
from wan_tpu.storage.base import StorageError
from wan_tpu.storage.opening import open_storage


def manifest(folder, *lines):
    path = folder / "requests.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps({"prompt": ""} | line) for line in lines) + "\n"
    )
    return path


def test_good_lines(tmp_path):
    (tmp_path / "in").mkdir()
    Image.open(PHOTO).save(tmp_path / "in" / "cat.png")
    first = {"id": "cat", "prompt": "A cat", "image": "in/cat.png", "height": 32, "width": 48, "seed": 3}
    read = read_manifest(
        manifest(tmp_path, first, "", {"prompt": "A dog runs along the beach.", "output": "b/dog.mp4"}), SPEC
    )
    assert read.bad == ()
    cat, dog = read.entries
    assert (cat.line, cat.id, cat.output) == (1, "cat", "cat.mp4")
    assert (dog.line, dog.output) == (3, "b/dog.mp4")
    assert dog.id.startswith("a-dog-runs-along-")
    expected = GenerationRequest(**{name: value for name, value in first.items() if name != "id"} | {"image": PHOTO})
    assert cat.plan.request.image is None  # Read when it is needed: a thousand would not fit in memory.
    assert np.array_equal(np.asarray(cat.load().request.image), np.asarray(expected.image))
    planned = SPEC.plan(expected)
    assert cat.load().without_image() == planned.without_image()
    assert cat.plan.shapes != dog.plan.shapes


def test_line_with_a_last_frame_alone_has_its_shape(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "wide.png")
    read = read_manifest(
        manifest(tmp_path, {"last_image": "wide.png"}, {"image": "wide.png", "preset": "fasth3"}),
        published_spec("minimax-h3"),
    )
    [entry], [bad] = read.entries, read.bad
    assert (entry.plan.images, entry.plan.request.height, entry.plan.request.width) == (1, 768, 1152)
    assert (
        entry.load().request.last_image.size == (30, 20) and "preset fasth3 only makes videos from text" in bad.reason
    )


def test_line_with_an_empty_prompt_is_bad_where_the_model_needs_one_and_the_others_stay_good(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "wide.png")
    lines = {"prompt": ""}, {"prompt": "A cat"}, {"prompt": "", "image": "wide.png"}
    read = read_manifest(manifest(tmp_path, *lines), published_spec("minimax-h3"))
    assert [bad.line for bad in read.bad] == [1] and "image" in read.bad[0].reason
    assert [entry.line for entry in read.entries] == [2, 3]
    assert read_manifest(manifest(tmp_path, *lines[:2]), SPEC).bad == ()


def test_derived_ids_are_stable_and_differ(tmp_path):
    lines = [{"prompt": "A cat", "seed": 1}, {"prompt": "A cat", "seed": 2}, {"prompt": "猫"}]
    ids = [entry.id for entry in read_manifest(manifest(tmp_path, *lines), SPEC).entries]
    assert len(set(ids)) == 3
    assert ids[2].startswith("request-")
    swapped = [dict(reversed(line.items())) for line in reversed(lines)]
    assert [entry.id for entry in read_manifest(manifest(tmp_path, *swapped), SPEC).entries] == ids[::-1]


def test_the_digest_is_of_what_decides_the_video(tmp_path):
    Image.open(PHOTO).save(tmp_path / "cat.png")
    line = {"id": "cat", "image": "cat.png", "prompt": "A cat"}

    def digest(**changes):
        return read_manifest(manifest(tmp_path, line | changes), SPEC).entries[0].digest

    same = digest()
    assert digest(seed=0) == same  # This is the default anyway.
    assert digest(output="other.mp4") == same
    assert digest(seed=1) != same
    Image.new("RGB", (64, 64), "red").save(tmp_path / "cat.png")
    assert digest() != same  # Another picture under the same name.


def test_an_image_that_is_replaced_meanwhile_is_not_taken_for_the_one_that_was_read(tmp_path):
    Image.open(PHOTO).save(tmp_path / "cat.png")
    [entry] = read_manifest(manifest(tmp_path, {"id": "cat", "image": "cat.png"}), SPEC).entries
    assert entry.load().request.image is not None
    Image.new("RGB", (64, 64), "red").save(tmp_path / "cat.png")
    with pytest.raises(InvalidInput, match=r"cat\.png"):
        entry.load()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", r"isn't valid JSON \(Expecting property name .* at column 2\)"),
        ("[1, 2]", "is a JSON list; write an object"),
        ('{"seed": 1, "seed": 2}', "has the field 'seed' twice"),
        ('{"num_steps": 4}', "unknown field 'num_steps'; did you mean 'steps'?"),
        ('{"size": "720*1280"}', "give height and width"),
        ('{"colour": 4}', "the fields are id, output, next_prompts"),
        ('{"prompt": "", "steps": 0}', r"steps is 0; allowed: 1 to 1000, nearest 1"),
        ('{"frames": 5}', 'has no prompt; give one, or "" for an empty prompt'),
        ('{"prompt": null}', "prompt is a NoneType; give a string"),
        ('{"prompt": "", "image": "none.png"}', r"image '.*/none.png' is not a file"),
        ('{"prompt": "", "image": "requests.jsonl"}', "is no PNG, JPEG, WebP, AVIF, GIF, BMP or TIFF"),
        ('{"prompt": "", "image": "' + "x" * 5000 + '"}', "can't be read"),
        ('{"prompt": "", "image": "\\u0000"}', "is not a file"),
        ('{"prompt": "", "id": "\\ud800"}', "isn't valid Unicode"),
        ('{"prompt": "", "image": 3}', "has the image 3; give a path"),
        ('{"prompt": "", "image": "https://x.org/cat.png"}', "is a URL; download it"),
        ('{"prompt": "", "image": "gs://videos/none.png"}', "gs://videos/none.png does not exist"),
        ('{"prompt": "", "id": 3}', "has the id 3; give a string"),
        ('{"prompt": "", "id": "../../etc/passwd"}', "would lead out of its folder"),
        ('{"prompt": "", "id": "/etc/passwd"}', "is not a relative path"),
        ('{"prompt": "", "id": ".hidden"}', "would be hidden"),
        ('{"prompt": "", "id": ""}', "is empty"),
        ('{"prompt": "", "output": "../cat.mp4"}', "would lead out of its folder"),
        ('{"prompt": "", "output": "cat.avi"}', "ends in .mp4"),
        ('{"prompt": "", "id": "first"}', "has the same id as line 1, 'first'"),
        ('{"prompt": "", "output": "first.mp4"}', "has the same output as line 1, 'first.mp4'"),
        ('{"prompt": "", "seed": ' + "1" * 5000 + "}", "has a number of 5000 digits"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_lines_are_told_and_do_not_stop_the_rest(tmp_path, emulator, line, reason):
    read = read_manifest(manifest(tmp_path, {"id": "first"}, line, {"id": "last"}), SPEC)
    assert [entry.id for entry in read.entries] == ["first", "last"]
    (bad,) = read.bad
    assert bad.line == 2
    assert re.search(reason, bad.reason), bad.reason
    assert len(bad.reason) < 600


def test_a_bad_line_does_not_take_an_id(tmp_path):
    read = read_manifest(manifest(tmp_path, {"id": "cat", "steps": 0}, {"id": "cat", "frames": 5}), SPEC)
    assert [entry.line for entry in read.entries] == [2]
    assert [(bad.line, bad.id) for bad in read.bad] == [(1, "cat")]


def test_lines_that_are_no_text(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a", "prompt": ""}\r\n{"id": "\xff"}\n{"id": "b", "prompt": ""}')
    read = read_manifest(path, SPEC)
    assert [entry.id for entry in read.entries] == ["a", "b"]
    assert "isn't UTF-8" in read.bad[0].reason


def test_the_model_has_its_say(tmp_path):
    spec = published_spec("wan2.2-i2v-a14b")
    lines = [{"id": "no-image"}, {"id": "cat", "image": str(PHOTO), "height": 32, "width": 48, "frames": 5}]
    read = read_manifest(manifest(tmp_path, *lines), spec)
    assert [entry.id for entry in read.entries] == ["cat"]
    assert "image" in read.bad[0].reason


def test_from_gs(gcs, gcs_prefix):
    gcs.write("in/cat.png", PHOTO.read_bytes())
    line = json.dumps({"id": "cat", "prompt": "", "image": "../in/cat.png"}) + "\n"
    line += json.dumps({"id": "dog", "prompt": "", "image": f"{gcs_prefix}/in/cat.png"}) + "\n"
    line += json.dumps({"id": "fox", "prompt": "", "image": "../../../../cat.png"})
    gcs.write("jobs/requests.jsonl", line.encode())
    read = read_manifest(gcs.location("jobs/requests.jsonl"), SPEC)
    assert [entry.id for entry in read.entries] == ["cat", "dog"]
    assert read.entries[0].digest == read.entries[1].digest
    assert read.entries[0].load().request.image.size == Image.open(PHOTO).size
    assert "outside the bucket 'videos'" in read.bad[0].reason


@pytest.mark.parametrize("bucket", ["gs", pytest.param("s3", marks=pytest.mark.thorough)], indirect=True)
def test_references_and_videos_in_a_bucket(bucket, tmp_path):
    files, wan = bucket.storage, published_spec("wan2.1-t2v-1.3b")
    sound, clip = write_sound(tmp_path / "song.wav", 1), write_video(tmp_path / "clip.mp4", 9)
    files.write("in/cat.png", PHOTO.read_bytes())
    files.write("in/song.wav", sound.read_bytes())
    files.write("in/clip.mp4", clip.read_bytes())
    sound_there = {"kind": "audio", "source": files.location("in/song.wav")}
    seen = {"prompt": "", "references": ["image:in/cat.png", sound_there]}
    files.write("seen.jsonl", json.dumps(seen).encode())
    files.write("shown.jsonl", b'{"prompt": "", "video": "in/clip.mp4"}')

    def read(name, spec):
        [entry] = read_manifest(files.location(name), spec).entries
        return entry

    entries = read("seen.jsonl", MOTION_SPEC), read("shown.jsonl", wan)
    image, song = entries[0].load().request.references
    assert image.source.size == Image.open(PHOTO).size and song.source.content == sound.read_bytes()
    assert entries[1].load().request.video.content == clip.read_bytes()
    assert read("seen.jsonl", MOTION_SPEC).digest == entries[0].digest
    files.write("in/song.wav", write_sound(tmp_path / "song.wav", 1, rate=16000).read_bytes())
    files.write("in/clip.mp4", write_video(tmp_path / "other.mp4", 13).read_bytes())
    for entry in entries:
        with pytest.raises(InvalidInput, match="changed"):
            entry.load()
    again = read("seen.jsonl", MOTION_SPEC), read("shown.jsonl", wan)
    assert all(now.digest != before.digest for now, before in zip(again, entries, strict=True))


def test_no_manifest(tmp_path, gcs_prefix):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(InvalidInput, match=r"empty\.jsonl"):
        read_manifest(tmp_path / "empty.jsonl", SPEC)
    with pytest.raises(StorageError, match=r"none\.jsonl"):
        read_manifest(tmp_path / "none.jsonl", SPEC)
    with pytest.raises(StorageError, match=r"none\.jsonl"):
        read_manifest(f"{gcs_prefix}/none.jsonl", SPEC)
    with pytest.raises(InvalidInput, match="gs://videos/"):
        read_manifest("gs://videos/", SPEC)
    with pytest.raises(StorageError):
        read_manifest(tmp_path, SPEC)
    with pytest.raises(InvalidInput):
        open_storage("ftp://x/y")
