"""Room in the queue counts segments of the served model, on both databases."""

import pytest

from actors.jobs.errors import QueueFull, StoredTooMuch
from actors.jobs.retention import Retention
from actors.jobs.tables import Job
from actors.jobs.usage import StoredBytes, sum_stored
from actors.jobs.values import JobSettings, Room
from wan_tpu.errors import InvalidRequest
from wan_tpu.storage.opening import open_storage


def chain(segments, owner="ann", **options):
    return Job(owner=owner, request={"next_prompts": ["on"] * (segments - 1)}, **options)


def test_finished_segments_leave_room(store, work):
    room = Room(owner=3)
    store.submit(chain(3), room=room)
    claimed = work.claim("w")
    work.keep_segment(claimed, 0, "segment", None)
    work.release(claimed)
    store.submit(chain(1), room=room)
    with pytest.raises(QueueFull):
        store.submit(chain(1), room=room)


def test_full_queue_takes_segments_up_to_half_of_a_share(store):
    room = Room(queue=12)
    store.submit(chain(12), room=room)
    with pytest.raises(QueueFull):
        store.submit(chain(4, "bob"), room=room)  # Half of Bob's share are three.
    store.submit(chain(2, "bob"), room=room)
    with pytest.raises(QueueFull):
        store.submit(chain(2, "bob"), room=room)
    store.submit(chain(1, "bob"), room=room)
    with pytest.raises(QueueFull):
        store.submit(chain(1, "bob"), room=room)


@pytest.mark.parametrize("room", [Room(queue=100, owner=4), Room(queue=4)])
def test_more_segments_than_may_ever_wait_are_the_request_s_fault(store, room):
    with pytest.raises(InvalidRequest) as refused:
        store.submit(chain(5), room=room)
    assert refused.value.field == "next_prompts"
    store.submit(chain(4), room=room)


def test_files_of_a_key_count_until_they_are_removed_and_others_do_not_count(database, store, work, tmp_path):
    retention = Retention(database, open_storage(tmp_path), JobSettings(abandoned_s=3600))
    retention.reserve("input", "ann", 40)
    job = store.submit(Job(owner="ann", request={}, input_image="input", idempotency_key="key"))[0]
    claimed = work.claim("w")
    work.announce(claimed, {"video": 60, "draft": 10**11})
    work.announce(claimed, {"video": 60, "draft": 1})  # The answer to the first try was lost.
    work.complete(claimed, {"video": "video"})
    assert sum_stored(database) == {"ann": 101}
    with pytest.raises(StoredTooMuch, match=r"0\.00 GB.* 1e-07 GB"):
        store.check_room("ann", None, Room(stored=100), None)
    store.check_room("ann", "key", Room(stored=100), None)  # Accepted before.
    store.check_room("ann", None, Room(stored=101), None)
    store.check_room("bob", None, Room(stored=0), None)
    store.delete(job.id)
    retention.sweep()
    assert sum_stored(database) == {}
    store.check_room("ann", None, Room(stored=0), None)


def test_files_are_summed_once_a_minute_for_a_page(database, tmp_path):
    now, retention = [100.0], Retention(database, open_storage(tmp_path), JobSettings())
    stored = StoredBytes(database, lambda: now[0])
    retention.reserve("first", "ann", 40)
    assert stored.read() == {"ann": 40}
    retention.reserve("second", "ann", 60)
    now[0] = 159.0
    assert stored.read() == {"ann": 40}
    now[0] = 160.0
    assert stored.read() == {"ann": 100}
