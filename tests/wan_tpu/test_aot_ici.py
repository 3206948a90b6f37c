"""Collectives on links, against what the wires of a small slice allow."""

import itertools

import pytest

from wan_tpu.pricing.ici import Interconnect, parse_groups


def grid(x: int, y: int, z: int = 1, cores: int = 1, wraps=(0, 0, 0, 0)) -> Interconnect:
    """Links of one byte a second, six between cores."""
    places = itertools.product(range(z), range(y), range(x), range(cores))
    return Interconnect(tuple((i, j, k, core) for k, j, i, core in places), 1.0, 6.0, wraps)


def test_a_block_gathers_over_both_directions_of_a_ring():
    # Each of the other three quarters comes in over one of two links.
    assert grid(2, 4).seconds("all-gather", [[0, 1, 2, 3], [4, 5, 6, 7]], 4.0) == 1.5
    assert grid(2, 4).seconds("all-gather", [list(range(8))], 8.0) == 3.5
    assert grid(4, 4).seconds("all-gather", [list(range(16))], 16.0) == 7.5
    assert grid(2, 2, 2).seconds("all-gather", [list(range(8))], 8.0) == 3.5


def test_a_line_has_one_way_in_at_its_end():
    line = [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert grid(2, 4).seconds("all-gather", line, 4.0) == 3.0
    closed = grid(2, 4, wraps=(0, 4, 0, 0))
    assert closed.seconds("all-gather", line, 4.0) == 1.5


def test_an_all_reduce_is_a_scatter_and_a_gather():
    links, group = grid(2, 2), [[0, 1, 2, 3]]
    both = links.seconds("reduce-scatter", group, 4.0) + links.seconds("all-gather", group, 4.0)
    assert links.seconds("all-reduce", group, 4.0) == both


def test_all_to_all_is_limited_by_the_cut_in_the_middle():
    # 2x4: four devices send half of their eight bytes over the two links of the cut.
    assert grid(2, 4).seconds("all-to-all", [list(range(8))], 8.0) == 8.0
    assert grid(2, 2).seconds("all-to-all", [[0, 1, 2, 3]], 4.0) == 2.0


def test_groups_that_share_links_slow_each_other():
    # Pairs two rows apart: both middle links of a column carry two pairs' halves.
    alone = grid(2, 4).seconds("all-reduce", [[0, 4]], 1.0)
    assert grid(2, 4).seconds("all-reduce", [[0, 4], [1, 5], [2, 6], [3, 7]], 1.0) == 2 * alone


def test_cores_of_a_chip_share_its_links_and_have_one_of_their_own():
    chips = grid(2, 1, cores=2)
    assert chips.seconds("collective-permute", [[0, 1]], 6.0) == 1.0
    assert chips.seconds("collective-permute", [[0, 2]], 6.0) == 6.0
    assert chips.seconds("collective-permute", [[0, 2], [1, 3]], 6.0) == 12.0


def test_one_device_needs_no_link():
    assert grid(2, 2).seconds("all-gather", [[0], [1], [2], [3]], 4.0) == 0.0


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,4},{1,5}}, x", [[0, 4], [1, 5]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}, x", [[3, 2], [1, 0]]),
        ("replica_groups=mesh['a'=1,'b'=4] {'b':(1)2}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=1,'b'=4] {'b':(2)2}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}, x", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}, x", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_all_notations_of_groups_are_read(text, groups):
    assert parse_groups("all-reduce", text) == groups


def test_an_unknown_notation_is_refused():
    with pytest.raises(ValueError, match="unknown notation"):
        parse_groups("all-reduce", "replica_groups=something")
