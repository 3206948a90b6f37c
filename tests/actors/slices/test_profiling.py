"""One trace at a time on a host: whatever becomes of one, the next may begin."""

import jax
import pytest

from actors.slices.profiling import HostProfile
from wan_tpu.errors import InvalidInput


@pytest.fixture
def host():
    profile = HostProfile()
    yield profile
    profile.cancel_profile(profile._run)


def record(host, output):
    """Trace one computation; return the bytes that were written."""
    host.start_profile("run")
    jax.block_until_ready(jax.numpy.ones(3) + 1)
    return host.stop_profile(str(output), "run")


def test_profile_that_the_profiler_refuses_blocks_no_later_one(host, tmp_path):
    jax.profiler.start_trace(str(tmp_path / "another"))  # as somebody at Ray's dashboard does
    try:
        with pytest.raises(Exception, match="one profile"):
            host.start_profile("run")
    finally:
        jax.profiler.stop_trace()
    assert record(host, tmp_path) > 0
    [file] = (tmp_path / "plugins" / "profile" / "run").iterdir()
    assert file.name.endswith("-0.xplane.pb")


def test_profile_is_refused_while_one_is_under_way_and_cancelled_ones_are_not_written(host, tmp_path):
    host.start_profile("run")
    with pytest.raises(InvalidInput):
        host.start_profile("run")
    host.cancel_profile("another")  # which was refused, and may not end this one
    host.cancel_profile("run")
    with pytest.raises(InvalidInput):
        host.stop_profile(str(tmp_path), "run")
    assert not list(tmp_path.iterdir())
    host.cancel_profile("run")  # which isn't under way any more
    assert record(host, tmp_path) > 0
