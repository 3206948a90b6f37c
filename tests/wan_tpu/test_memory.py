"""The rule by which something fits a device's memory."""

import pytest

from wan_tpu.runtime.memory import MemoryNeed, fits, needed_bytes, read_refusal


def test_what_stays_is_added_up_and_of_what_passes_the_most_counts():
    parts = [MemoryNeed(4, 3), MemoryNeed(5, 1), MemoryNeed(1)]
    assert needed_bytes(parts) == 4 + 5 + 1 + 3
    assert needed_bytes([]) == 0


@pytest.mark.parametrize(("device_bytes", "expected"), [(12, False), (13, True), (13.5, True)])
def test_parts_fit_where_a_device_has_all_that_they_need(device_bytes, expected):
    assert fits([MemoryNeed(4, 3), MemoryNeed(6, 1)], device_bytes) is expected


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("temporaries (64.00G) exceeds available HBM (31.24G)", (64 * 2**30, int(31.24 * 2**30))),
        ("temporaries (512.0M) exceeds available HBM (256.0K)", (512 * 2**20, 256 * 2**10)),
        ("Used 20.1M of 16.0M vmem", (None, None)),
    ],
)
def test_sizes_are_read_from_the_compilers_refusal(message, sizes):
    assert read_refusal(message) == sizes
