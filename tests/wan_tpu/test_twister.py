import os

import pytest
import torch

from wan_tpu.families import twister


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("numbers", "drawn"),
    [(5 << 16, 0), (400_003, 0), (400_003, 17), (400_001, 624), (350_000, 1000), (1000, 7), (7, 0), (0, 0)],
)
def test_threads_draw_what_torch_draws_in_one(numbers, drawn, dtype, monkeypatch):
    monkeypatch.setattr(twister, "_PART", 1 << 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5))
    generator, torchs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for one in (generator, torchs):
        torch.randn(drawn, generator=one)
    expected = torch.randn(numbers, generator=torchs, dtype=dtype)
    assert torch.equal(twister.randn((numbers,), generator, dtype), expected)
