"""A million lines: what is planned, kept and compared once for many lines, and what tells one content from another."""

import json
import os
import time
import tracemalloc

import pytest
from PIL import Image

from actors.batch.lines import RESULTS
from actors.batch.manifest import read_manifest
from actors.batch.results import Provenance, settle
from actors.batch.run import open_batch
from tests.actors.engines import Engine
from tests.actors.small_spec import SPEC, SmallSpec
from tests.conftest import PHOTO
from wan_tpu import GenerationRequest, InvalidInput
from wan_tpu.families import FAMILIES, published_spec
from wan_tpu.identity import identify
from wan_tpu.storage.local import LocalStorage


def write_manifest(folder, lines):
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps({"prompt": ""} | line) + "\n" for line in lines))
    return path


def read(folder, *lines, spec=SPEC):
    manifest = read_manifest(write_manifest(folder, lines), spec)
    assert not manifest.bad, manifest.bad
    return manifest.entries


@pytest.fixture
def counting():
    """A model, and what it has planned."""
    planned = []

    class CountingSpec(SmallSpec):
        def plan(self, request, **images):
            planned.append(request)
            return super().plan(request, **images)

    return CountingSpec(SPEC.config), planned


def test_lines_that_differ_by_texts_seed_and_image_are_planned_once(counting, tmp_path):
    for name in ("cat", "dog"):
        Image.new("RGB", (96, 64), "red" if name == "cat" else "blue").save(tmp_path / f"{name}.png")
    spec, planned = counting
    lines = [{"prompt": f"number {i}", "seed": i, "negative_prompt": f"{i}"} for i in range(50)]
    lines += [line | {"frames": 5} for line in lines]
    lines += [line | {"image": f"{name}.png"} for line in lines[:50] for name in ("cat", "dog")]
    entries = read(tmp_path, *lines, spec=spec)
    assert len(planned) == 3
    assert len({entry.digest for entry in entries}) == len(lines)
    for entry, line in zip(entries, lines, strict=True):
        fields = line | ({"image": tmp_path / line["image"]} if "image" in line else {})
        assert entry.load().without_image() == SPEC.plan(GenerationRequest(**fields)).without_image()


def test_a_setting_that_the_model_refuses_is_refused_on_every_line(counting, tmp_path):
    spec, planned = counting
    lines = [{"id": f"r{i}", "seed": i, "frames": 6} for i in range(20)] + [{"id": "odd", "steps": True}]
    manifest = read_manifest(write_manifest(tmp_path, lines), spec)
    assert [bad.line for bad in manifest.bad] == list(range(1, 22))
    assert len(planned) == 1
    assert "frames is 6" in manifest.bad[-2].reason
    assert "steps is True" in manifest.bad[-1].reason  # It equals 1 in Python.


@pytest.mark.parametrize("name", [name for family in FAMILIES.values() for name in family.published])
def test_no_plan_depends_on_texts_or_seed(name):
    """What `read_manifest` relies on: a plan of other texts differs in its texts alone."""
    spec = published_spec(name)
    images = {"image": "t2v" not in spec.tasks, "last": spec.last_images == "required", "picture": (480, 832)}
    size = {"height": spec.defaults.height, "width": spec.defaults.width}
    plans = [
        spec.plan(GenerationRequest(**texts, **size), **images)
        for texts in ({"prompt": "A sign says “open” and 'go'", "negative_prompt": "blur", "seed": 7}, {})
    ]
    assert plans[0].experts == plans[1].experts
    assert plans[0].shapes == plans[1].shapes
    assert len(plans[0].prompts) == len(plans[1].prompts)


@pytest.mark.thorough
def test_reading_takes_as_long_for_late_lines_as_for_early_ones(tmp_path):
    """Four thousand lines took seven seconds when every line was compared with all before it; now 0.2 s."""
    path = write_manifest(tmp_path, ({"id": f"clips/{i // 100}/video-{i}", "seed": i} for i in range(4000)))
    start_s = time.process_time()
    assert len(read_manifest(path, SPEC).entries) == 4000
    assert time.process_time() - start_s < 5


def test_a_million_lines_fit_in_memory(tmp_path):
    """With the text of each, at most 1.5 kB a line at the worst moment: 1.5 GB for a million."""
    prompt = "A cat looks into the camera while the rain falls on the roofs of an old town by the sea at night."
    lines = [{"id": f"clips/{i // 100}/video-{i}", "seed": i, "prompt": f"{prompt} {i}"} for i in range(3000)]
    path = write_manifest(tmp_path, lines)
    read_manifest(path, SPEC)  # Import and cache everything that is needed once.
    tracemalloc.start()
    manifest = read_manifest(path, SPEC)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(manifest.entries) == 3000
    assert peak / 3000 < 1500


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a/b.mp4", "a/b.mp4/c.mp4"),
        ("a/b.mp4/c.mp4", "a/b.mp4"),
        ("a/b/c/d.mp4", "a/b.mp4"),
        ("a.mp4", "a.json/b.mp4"),
        ("a.json/b.mp4", "a.mp4"),
        (f"{RESULTS}/b.mp4", None),
    ],
)
def test_no_name_is_a_file_and_a_folder(tmp_path, first, second):
    lines = [{"id": str(i), "output": output} for i, output in enumerate((first, second)) if output]
    manifest = read_manifest(write_manifest(tmp_path, lines), SPEC)
    clashes = (first, second) != ("a/b/c/d.mp4", "a/b.mp4")
    assert len(manifest.bad) == clashes
    assert all(first in bad.reason or str(second) in bad.reason for bad in manifest.bad)


@pytest.mark.parametrize("id_", ["x" * 200, "é" * 100, "猫" * 66, f"{'x' * 100}/{'é' * 45}"])
def test_ids_of_two_hundred_bytes_are_made(tmp_path, id_):
    """Their videos' names are shortened where no file's name can be as long, each to another one."""
    lines = write_manifest(tmp_path, [{"id": id_}, {"id": f"{id_[:-1]}y"}])
    output = LocalStorage(tmp_path / "out")
    with open_batch(read_manifest(lines, SPEC), output) as batch:
        assert batch.run(Engine()).videos_made == 2
    assert sum(name.endswith(".mp4") for name in output.list()) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"id": "x" * 201}, "more than 200 bytes"),
        ({"id": "x" * 150 + "/" + "y" * 50}, "of 201 bytes; allowed: at most 200"),
        ({"output": "x" * 196 + ".mp4"}, "whose record has a part of more than 200 bytes"),
        ({"output": "/".join(["x" * 100] * 9) + ".mp4"}, "of 912 bytes; allowed: at most 800"),
    ],
)
def test_names_that_no_storage_takes_are_refused_before_any_work(tmp_path, line, reason):
    [bad] = read_manifest(write_manifest(tmp_path, [line]), SPEC).bad
    assert reason in bad.reason


# ---- what decides the bits


def compare_again(folder, output, *lines, **provenance):
    """How lines that were made before stand now."""
    entries = read(folder, *lines)
    results = settle(output, entries, provenance=Provenance(**provenance), remake_changed=False)
    return [result and (result.status, result.error) for _, result in results]


def make(folder, output, *lines, **provenance):
    manifest = read_manifest(write_manifest(folder, lines), SPEC)
    with open_batch(manifest, output, **provenance) as batch:
        assert batch.run(Engine()).exit_code == 0


def test_an_adapter_that_was_replaced_is_a_change(tmp_path):
    adapter, output = tmp_path / "style.safetensors", LocalStorage(tmp_path / "out")
    adapter.write_bytes(b"first")
    line = {"id": "cat", "loras": ["style.safetensors:0.5"]}
    make(tmp_path, output, line)
    assert compare_again(tmp_path, output, line) == [("done", None)]
    os.utime(adapter, (1, 1))  # The same content.
    assert compare_again(tmp_path, output, line) == [("done", None)]
    adapter.write_bytes(b"other")
    [(status, error)] = compare_again(tmp_path, output, line)
    assert status == "changed"
    assert f"another content of {adapter}" in error


def test_an_adapter_s_alpha_beside_it_is_part_of_it(tmp_path):
    """peft writes it into adapter_config.json, for an adapter that is a folder or a file of it."""
    folder, output = tmp_path / "style", LocalStorage(tmp_path / "out")
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text('{"lora_alpha": 8}')
    lines = [{"id": "one", "loras": ["style"]}, {"id": "two", "loras": ["style/adapter_model.safetensors"]}]
    make(tmp_path, output, *lines)
    (folder / "README.md").write_text("not read")
    assert compare_again(tmp_path, output, *lines) == [("done", None)] * 2
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16}')
    assert [status for status, _ in compare_again(tmp_path, output, *lines)] == ["changed"] * 2


def test_an_adapter_in_a_bucket_is_known_by_its_generation(gcs, gcs_prefix):
    gcs.write("style/a.safetensors", b"first")
    first = identify(f"{gcs_prefix}/style/a.safetensors")
    assert identify(f"{gcs_prefix}/style").version == first.version
    assert identify(f"{gcs_prefix}/style/a.safetensors") == first
    gcs.write("style/a.safetensors", b"other")
    assert identify(f"{gcs_prefix}/style/a.safetensors").version != first.version
    assert identify(f"{gcs_prefix}/nothing/a.safetensors") is None


def test_an_adapter_of_the_hub_is_known_by_the_commit_that_is_here(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert identify("someone/style/a.safetensors") is None
    refs = tmp_path / "models--someone--style" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("c0ffee")
    assert identify("someone/style/a.safetensors").version == "commit c0ffee"


def test_what_one_side_does_not_know_is_no_change(tmp_path, monkeypatch):
    """The first run fetches the adapter: only the second one knows its commit."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    output, line = LocalStorage(tmp_path / "out"), {"id": "cat", "loras": ["someone/style"]}
    make(tmp_path, output, line)
    (tmp_path / "models--someone--style" / "refs").mkdir(parents=True)
    (tmp_path / "models--someone--style" / "refs" / "main").write_text("c0ffee")
    assert compare_again(tmp_path, output, line) == [("done", None)]


def test_a_video_that_was_replaced_is_a_change(tmp_path):
    """Its checksum counts, not its name; and one that is replaced while others are made isn't taken."""
    spec = published_spec("wan2.1-t2v-1.3b")
    film = tmp_path / "film.mp4"
    film.write_bytes(b"first")
    path = write_manifest(tmp_path, [{"id": "cat", "video": "film.mp4", "height": 480, "width": 832}])
    [entry] = read_manifest(path, spec).entries
    entry.load()
    film.write_bytes(b"other")
    with pytest.raises(InvalidInput, match=r"film\.mp4"):
        entry.load()
    [again] = read_manifest(path, spec).entries
    assert again.digest == entry.digest  # The digest is that of the line. The content's version is recorded separately.
    assert again.settings.sources[0].version != entry.settings.sources[0].version


def test_another_precision_is_a_change(tmp_path):
    output, line = LocalStorage(tmp_path / "out"), {"id": "cat", "image": str(PHOTO)}
    make(tmp_path, output, line, model="/models/wan", precision="bfloat16")
    assert compare_again(tmp_path, output, line, model="/models/wan", precision="bfloat16") == [("done", None)]
    [(status, error)] = compare_again(tmp_path, output, line, model="/models/wan", precision="int8")
    assert (status, "another precision" in error) == ("changed", True)


def test_records_without_a_precision_are_of_any(tmp_path):
    output, line = LocalStorage(tmp_path / "out"), {"id": "cat"}
    make(tmp_path, output, line, model="/models/wan")
    record = json.loads(output.read("cat.json"))
    del record["precision"], record["sources"]
    output.write("cat.json", json.dumps(record).encode())
    assert compare_again(tmp_path, output, line, model="/models/wan", precision="int8") == [("done", None)]
    assert compare_again(tmp_path, output, line, model="/models/other", precision="int8")[0][0] == "changed"
