"""Which adapters and merged weights are kept in memory, when files are read again, and what is checked first."""

import asyncio
import contextlib
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from actors.api.catalogue import Catalogue
from actors.batch.manifest import read_manifest
from actors.batch.one_process import OneProcessEngine
from actors.cli import main
from actors.commands import serve_config
from tests.conftest import record_steps
from tests.wan_tpu import adapter_files as files
from tests.wan_tpu.adapter_weights import KIND, request
from wan_tpu import load_pipeline
from wan_tpu.adapters import merging
from wan_tpu.adapters.adapter import Targets
from wan_tpu.adapters.checking import check_visible
from wan_tpu.adapters.files import read
from wan_tpu.adapters.location import find
from wan_tpu.adapters.merging import MAX_MERGED, AdapterCache
from wan_tpu.errors import InvalidRequest, Unavailable
from wan_tpu.pipeline import Pipeline
from wan_tpu.requested_adapter import RequestedAdapter, parse_adapter
from wan_tpu.runtime.memory import DeviceRoom


def test_host_memory_is_bounded_and_files_that_change_are_read_again(pipeline, transformer, tmp_path):
    runtime = pipeline(KIND).runtime
    component, base = runtime.model.components["denoise_high"], runtime.component("denoise_high")
    factors = files.factors(transformer, ["blocks.0.attn1.to_q"])
    names = {"blocks.0.attn1.to_q": "blocks.0.attn1.to_q"}
    paths = [files.save(files.name_tensors(factors, names, ""), tmp_path / f"{i}.safetensors") for i in range(3)]
    size = Targets(component, base).adapter(paths[0], read(find(paths[0]), paths[0])).nbytes
    adapters = AdapterCache(host_bytes=2 * size)
    first = [adapters.read(component, base, RequestedAdapter(path)) for path in paths[:2]]
    assert adapters.read(component, base, RequestedAdapter(paths[0], 0.5)) is first[0]  # the scale is no part of it
    adapters.read(component, base, RequestedAdapter(paths[2]))  # the second was used longest ago
    assert adapters.read(component, base, RequestedAdapter(paths[0])) is first[0]
    assert adapters.read(component, base, RequestedAdapter(paths[1])) is not first[1]
    files.save(files.name_tensors(files.factors(transformer, names, seed=5), names, ""), tmp_path / "1.safetensors")
    again = adapters.read(component, base, RequestedAdapter(paths[1]))
    name = "blocks.template.attn1.to_q.weight"
    assert not np.array_equal(again.factors[name].up, first[1].factors[name].up)


# What a v6e said while a program ran, in GiB (EnzymeAD/Enzyme-JAX, pull request 2422).
V6E = {
    "bytes_in_use": 2.648,
    "peak_bytes_in_use": 2.648,
    "bytes_limit": 31.246,
    "bytes_reserved": 27.251,
    "peak_bytes_reserved": 27.251,
    "bytes_reservable_limit": 28.763,
    "largest_free_block_bytes": 1.347,
}


def v6e(**changed):
    return {name: round(gib * 2**30) for name, gib in (V6E | changed).items()}


def test_room_for_weights_is_what_the_device_says_is_free():
    left = DeviceRoom().bytes_left(v6e())
    assert left == pytest.approx(v6e()["largest_free_block_bytes"], abs=2)
    between_programs = v6e(bytes_reserved=0, largest_free_block_bytes=28.598)
    assert DeviceRoom().bytes_left(between_programs) == left  # The next step reserves them again.


def test_room_for_weights_has_what_requests_took_and_comes_back_with_weights_that_go():
    room, small = DeviceRoom(), {"bytes_reserved": 6, "peak_bytes_reserved": 6}
    room.note_change(v6e(bytes_in_use=7, peak_bytes_in_use=9, **small))  # Reading them took two more for a moment.
    before = v6e(bytes_in_use=7, peak_bytes_in_use=9, **small)
    assert room.bytes_left(before) / 2**30 == pytest.approx(31.246 - 7 - 6)
    busy = v6e(bytes_in_use=8, peak_bytes_in_use=10, **small)  # Requests have one now, and had three.
    assert room.bytes_left(busy) / 2**30 == pytest.approx(31.246 - 8 - 6 - 3)
    room.note_change(v6e(bytes_in_use=22, peak_bytes_in_use=24, **small))
    full = v6e(bytes_in_use=22, peak_bytes_in_use=25, **small)
    assert room.bytes_left(full) / 2**30 == pytest.approx(31.246 - 22 - 6 - 3)
    freed = v6e(bytes_in_use=15, peak_bytes_in_use=25, **small)
    assert room.bytes_left(freed) / 2**30 == pytest.approx(31.246 - 15 - 6 - 3)


def save_factors(transformer, path, seed):
    names = files.blocks(transformer, {"attn1.to_q": "attn1.to_q"})
    return files.save(files.name_tensors(files.factors(transformer, names, seed=seed), names, ""), path)


def test_replaced_file_is_used_by_the_next_request(pipeline, transformer, tmp_path):
    """Weights that the old content gave are kept under that content, not under the file's path."""
    path, stage, loaded = tmp_path / "x.safetensors", "denoise_high", pipeline(KIND).runtime.component
    weight = "blocks.template.attn1.to_q.weight"

    def weights(seed):
        adapters = (parse_adapter(save_factors(transformer, path, seed)),)
        return loaded(stage, adapters).params[weight]

    first, second = weights(0), weights(1)
    assert np.abs(np.asarray(first) - np.asarray(second)).max() > 0.01
    assert weights(0) is first  # the same content again
    other = save_factors(transformer, tmp_path / "elsewhere.safetensors", 0)
    assert loaded(stage, (parse_adapter(other),)).params[weight] is first


def test_request_keeps_the_adapters_that_were_fetched_for_it(pipeline, transformer, tmp_path):
    runtime, path = pipeline(KIND).runtime, tmp_path / "x.safetensors"
    (old,) = runtime.fetch_adapters(
        (parse_adapter(save_factors(transformer, path, 2)),), ["denoise_high", "denoise_low"]
    )
    expected = np.asarray(runtime.component("denoise_high", (old,)).params["blocks.template.attn1.to_q.weight"])
    for seed in range(3, 3 + MAX_MERGED):  # which make the merged weights go
        runtime.component("denoise_high", (parse_adapter(save_factors(transformer, path, seed)),))
    path.unlink()
    again = np.asarray(runtime.component("denoise_high", (old,)).params["blocks.template.attn1.to_q.weight"])
    assert np.array_equal(again, expected)


def test_file_that_is_replaced_while_it_is_read_is_read_again_later(transformer, tmp_path):
    """Half of it may be of the old one, half of the new one: nobody's input is wrong."""
    path = save_factors(transformer, tmp_path / "x.safetensors", 0)
    adapter_file = find(path)
    other = save_factors(transformer, tmp_path / "y.safetensors", 1)
    os.replace(other, path)
    with pytest.raises(Unavailable):
        read(adapter_file, path)
    assert read(find(path), path)
    adapter_file = find(path)
    os.truncate(path, 100)
    with pytest.raises(Unavailable):
        read(adapter_file, path)
    os.unlink(path)
    with pytest.raises(Unavailable):
        read(adapter_file, path)


def test_adapters_are_checked_before_anything_is_computed(checkpoint, pipeline, good, tmp_path, monkeypatch, capsys):
    far = {name.replace("blocks.0", "blocks.30"): value for name, value in good.items()}
    path = files.save(far, tmp_path / "far.safetensors")
    files.save(good, tmp_path / "good.safetensors")
    pipe, model = pipeline(KIND), checkpoint(KIND)
    monkeypatch.setattr(Pipeline, "encode", lambda *args: pytest.fail("the encoder has run"))
    with pytest.raises(InvalidRequest):
        pipe.generate(request(loras=[path]))
    with contextlib.closing(OneProcessEngine(pipe)) as engine, pytest.raises(InvalidRequest):
        plan = engine.model.plan(request(loras=[path]))
        asyncio.run(engine.generate(plan, id="a", on_event=lambda span: None))
    for command, output in (("generate", "--output"), ("stage1", "--output_dir")):
        out = str(tmp_path / command)
        assert main([command, "--model_id", str(model), "--prompt", "a cat", "--lora", path, output, out]) == 2
        assert "another model" in capsys.readouterr().err
    manifest = tmp_path / "requests.jsonl"
    loras = [path], ["good.safetensors"], ["/elsewhere/x.safetensors"], ["good.safetensors", path]
    manifest.write_text("\n".join(json.dumps({"prompt": "a cat", "loras": paths}) for paths in loras))
    read_lines = read_manifest(manifest, pipe.runtime.model.spec, lambda adapter: check_visible(str(model), [adapter]))
    assert [bad.line for bad in read_lines.bad] == [1, 4]
    assert "another model" in read_lines.bad[0].reason
    settings = SimpleNamespace(catalogue=Catalogue({"far": (RequestedAdapter(path),)}))
    spec = SimpleNamespace(settings=SimpleNamespace(checkpoint=str(model)))
    monkeypatch.setattr(serve_config, "_read_args", lambda args: (settings, spec))
    with pytest.raises(InvalidRequest):
        serve_config.build_worker({})


class Stopped(BaseException):
    """As KeyboardInterrupt, which comes at any time."""


def test_base_is_whole_after_a_merge_in_place_was_interrupted(checkpoint, pipeline, transformer, tmp_path, monkeypatch):
    """After the first of its weights, in the middle, and after the last."""
    names = files.blocks(transformer, files.WAN)
    path = files.save(files.name_tensors(files.factors(transformer, names), names, ""), tmp_path / "x.safetensors")
    lean = load_pipeline(checkpoint(KIND), "float32", (1, 1, 1), keep_weights=False).runtime
    whole, change = pipeline(KIND).runtime, merging._change_weight

    def assert_whole(*loras):
        got, expected = (runtime.component("denoise_high", loras).params for runtime in (lean, whole))
        assert got.keys() == expected.keys()
        for name, array in got.items():
            assert np.array_equal(np.asarray(array), np.asarray(expected[name])), name

    for last in (0, len(files.WAN) // 2, len(files.WAN) - 1):
        changed = []

        def stop(*call, last=last, changed=changed):
            changed.append(change(*call))
            if len(changed) > last:
                raise Stopped
            return changed[-1]

        monkeypatch.setattr(merging, "_change_weight", stop)
        with pytest.raises(Stopped):
            lean.component("denoise_high", (parse_adapter(path),))
        monkeypatch.undo()
        assert_whole()
    assert_whole(parse_adapter(path))


def test_one_request_in_the_least_memory(checkpoint, pipeline, transformer, tmp_path):
    """Without kept weights the base is changed in place, and read again for the next."""
    names = files.blocks(transformer, files.WAN)
    path = files.save(files.name_tensors(files.factors(transformer, names), names, ""), tmp_path / "x.safetensors")
    lean = load_pipeline(checkpoint(KIND), "float32", (1, 1, 1), keep_weights=False)
    for loras in ([path], [], [f"{path}:0.5@low"]):
        adapted = request(loras=loras, steps=2)
        latents, expected = (record_steps(pipe, adapted)[-1].latents for pipe in (lean, pipeline(KIND)))
        assert np.array_equal(latents, expected)
