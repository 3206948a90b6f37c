"""Percent and ETA from slices' spans and from completed jobs."""

import dataclasses

import pytest

from actors.api.estimates import Pace, Seconds
from actors.api.worker.progress import Tracker
from actors.jobs.store import JobStore
from actors.jobs.stored_request import Redo
from actors.jobs.tables import Job
from actors.observe.span import Span
from wan_tpu import GenerationRequest
from wan_tpu.families import published_spec

REQUEST = {"height": 64, "width": 64, "frames": 9, "steps": 10}
CHIPS = {"encoder": 4, "denoise_high": 8, "decoder": 4}
SECONDS = {"encoder": 1.0, "denoise_high": 20.0, "decoder": 4.0}  # Seconds of a job by stage.


@pytest.fixture
def job(database):
    return JobStore(database).submit(Job(owner="ann", request=REQUEST))[0]


def make_ended_job(job, took, attempts=1, **changed):
    """Return a job that computed for `SECONDS` and ended `took` seconds after it was claimed."""
    times = {"started_at": 1000.0, "ended_at": 1000.0 + took}
    return dataclasses.replace(job, stage_seconds=SECONDS, attempts=attempts, **times, **changed)


def span(stage, seconds, step=None, kind="compute"):
    return Span(slice="a", request="r", stage=stage, kind=kind, start_s=50.0, seconds=seconds, step=step, pool="p")


def test_percent_and_eta_are_weighted_by_measured_seconds(job):
    tracker = Tracker(job, Pace([make_ended_job(job, 25.0)]).get(REQUEST), CHIPS)
    seen = [tracker.estimate()]
    tracker.note(span("encoder", 1.0))
    for step in range(1, 11):
        tracker.note(span("denoise_high", 2.0, step))
        seen.append(tracker.estimate())
    tracker.note(span("decoder", 4.0))
    seen.append(tracker.estimate())
    assert (seen[0].percent, seen[0].eta_s) == (0, 25.0)
    assert seen[1].percent == pytest.approx(100 * 3 / 25)
    assert [progress.eta_s for progress in seen[1:-1]] == pytest.approx([22.0 - 2.0 * step for step in range(10)])
    assert (seen[5].stage, seen[5].step, seen[5].steps) == ("denoise_high", 5, 10)
    assert seen[-2].stage == "decoder"
    assert (seen[-1].percent, seen[-1].eta_s) == (99.9, 0.0)
    assert job.chip_seconds == pytest.approx(4 * 1.0 + 8 * 20.0 + 4 * 4.0)


def test_a_job_compiles_until_its_slice_has_done_something(job):
    tracker = Tracker(job, Pace([make_ended_job(job, 25.0)]).get(REQUEST), CHIPS)
    tracker.note(span("encoder", 1.0))
    assert not tracker.estimate().compiles
    tracker.note(span("denoise_high", 3.0, kind="compiling"))
    assert (tracker.estimate().stage, tracker.estimate().step, tracker.estimate().compiles) == ("denoise_high", 0, True)
    tracker.note(span("denoise_high", 9.0, kind="compile"))
    assert not tracker.estimate().compiles
    assert "denoise_high" not in job.stage_seconds


def test_chunks_that_are_decoded_between_two_steps_end_no_video(job):
    tracker = Tracker(job, Pace([make_ended_job(job, 25.0)]).get(REQUEST), CHIPS)
    tracker.note(span("encoder", 1.0))
    tracker.note(span("denoise_high", 2.0, 1))
    before = tracker.estimate()
    tracker.note(span("decoder", 0.5))
    assert tracker.estimate() == before
    assert before.stage == "denoise_high"


def test_steps_of_a_stage_that_enlarges_weigh_more_by_their_tokens_and_then_as_they_were_measured(job):
    model = published_spec("ltx-2.3-distilled")
    plan = model.plan(GenerationRequest(prompt="a cat", height=128, width=128, frames=9))
    assert [expert.stop for expert in plan.experts] == [8, 11]
    two_stages = dataclasses.replace(job, request=REQUEST | {"steps": 11})
    pace = Seconds(encode=0.0, step=23 / 11, decode=0.0)  # Of eight steps of a second, and three of five.

    def watch():
        tracker = Tracker(two_stages, pace, CHIPS)
        tracker.begin_segment(model, plan)
        seen = []
        for step in range(1, 12):
            tracker.note(span("denoise", 1.0, step) if step <= 8 else span("refine", 5.0, step))
            seen.append(tracker.estimate())
        tracker.learn(23.0)
        return seen

    first, second = watch(), watch()
    assert first[7].percent == pytest.approx(100 * 8 / (8 + 3 * 4), rel=0.01)  # It has four times the tokens.
    assert [progress.eta_s for progress in second] == pytest.approx([23 - n for n in range(1, 9)] + [10, 5, 0], abs=1.5)
    assert second[7].percent == pytest.approx(100 * 8 / 23, abs=0.01)
    assert (second[-1].step, second[-1].steps) == (11, 11)


def test_percent_never_falls_when_steps_are_done_again(job):
    tracker = Tracker(job, Pace([make_ended_job(job, 25.0)]).get(REQUEST), CHIPS)
    tracker.note(span("denoise_high", 2.0, 6))
    before = tracker.estimate()
    again = Tracker(dataclasses.replace(job, progress=before, attempts=2), Pace().get(REQUEST), CHIPS)
    assert again.estimate().percent == before.percent
    again.note(span("denoise_high", 2.0, 2))
    assert again.estimate().percent == before.percent


def test_waiting_for_others_on_the_slices_counts_but_not_what_a_lost_job_stood_still(job):
    crowded, lost = make_ended_job(job, 50.0), make_ended_job(job, 5000.0, attempts=2)
    assert Tracker(job, Pace([crowded]).get(REQUEST), CHIPS).estimate().eta_s == 50.0
    assert Tracker(job, Pace([lost]).get(REQUEST), CHIPS).estimate().eta_s == 25.0
    pace = Pace([crowded]).get(REQUEST)
    for attempts, wait in ((2, 2.0), (1, 2.0 + 0.3 * (4.0 - 2.0))):
        tracker = Tracker(dataclasses.replace(job, attempts=attempts), pace, CHIPS)
        tracker.note(span("denoise_high", 25.0, 1))
        tracker.learn(100.0)
        assert pace.wait == pytest.approx(wait)


def test_an_unknown_size_is_guessed_by_its_tokens(job):
    seconds = Pace([make_ended_job(job, 25.0)]).get(REQUEST | {"height": 128})
    assert (seconds.encode, seconds.step, seconds.decode) == (2.0, 4.0, 8.0)
    assert Pace().get(REQUEST).step > 0  # From published figures, until the first job has ended.


def test_an_attempt_that_only_joins_segments_teaches_nothing(job):
    job.last_segment = {"video": "last"}
    pace = Pace([make_ended_job(job, 25.0)]).get(REQUEST)
    before = dataclasses.replace(pace)
    tracker = Tracker(job, pace, CHIPS)
    assert tracker.estimate().percent == 99.9
    tracker.learn(3.0)
    assert pace == before


def test_segments_that_another_job_has_made_take_no_time(job):
    """Neither in what is expected of their job, nor in what is learnt from it."""
    segments = {"next_prompts": ["on"] * 9}
    redo = segments | {"redo": Redo(3, 7, ("p", "p", None, *"ppppppp"), ("e",) * 9).to_stored()}
    again = dataclasses.replace(job, request=REQUEST | redo, segments=["p", "p"])
    pace = Pace([make_ended_job(again, 25.0)])
    assert pace.estimate_segment_s(REQUEST) == pytest.approx(25.0)
    tracker = Tracker(again, pace.get(REQUEST), CHIPS)
    assert (tracker.estimate().percent, tracker.estimate().eta_s) == (0, 25.0)
    tracker.end_segment()
    assert (tracker.estimate().percent, tracker.estimate().eta_s) == (99.9, 0.0)
    done = dataclasses.replace(again, segments=["p", "p", "new"])
    assert Tracker(done, pace.get(REQUEST), CHIPS).estimate().eta_s == 0.0
