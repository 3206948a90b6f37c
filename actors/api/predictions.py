"""Predicted seconds of a pipeline's stages, from shipped plans, beside those that a service's jobs have measured."""

import json
import logging
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.api.http.objects import Object
from actors.jobs.stored_request import JOB_FIELDS, count_left
from actors.jobs.tables import Job
from actors.pipeline_spec import PipelineSpec
from actors.planning.slice_description import describe_slice
from cluster.layout import Pool
from wan_tpu.errors import InvalidRequest
from wan_tpu.pricing.question import Question, list_acting, locate_plans
from wan_tpu.reference import restore_references
from wan_tpu.request import GenerationRequest
from wan_tpu.spec import ModelSpec
from wan_tpu.switches import OVERLAPPED, OWN_KERNELS

log = logging.getLogger(__name__)

_MAX_VIDEOS = 8  # So many kinds of videos are compared.
_ACT_NOT = {"model", "seconds", "skipped"}  # Fields beside the pipeline's own request that no program depends on.


@dataclass(frozen=True)
class Prediction:
    """Seconds of a pool's stages for one video."""

    request: Mapping[str, Any]  # The fields that programs depend on, as `Question` has them.
    seconds: Mapping[str, float]  # By stage.


@dataclass(frozen=True)
class PredictedPool:
    """A pool, and all that shipped plans predict for it."""

    name: str
    slice: str  # Such as v6e-8.
    stages: tuple[str, ...]
    conditions: str  # What seconds depend on beside the video, for people.
    predictions: tuple[Prediction, ...]


class AdminStage(Object):
    """A stage's seconds for one kind of video: what is predicted, and what the latest jobs took."""

    pool: str
    """The pool that runs it."""
    slice: str
    """The pool's kind of slice, such as v6e-8."""
    stage: str
    """The stage."""
    video: str
    """Size, frames and steps of the video, or of each of its segments."""
    predicted_seconds: float | None
    """What `wan-tpu plan` predicts, from plans that need no compiler; null without one."""
    measured_seconds: float | None
    """The median of the latest jobs; null if none of them made such a video."""
    ratio: float | None
    """Measured by predicted seconds, where there are both."""
    jobs: int
    """How many jobs were measured."""
    note: str
    """Why nothing is predicted; empty if something is."""


def predict(spec: PipelineSpec) -> tuple[PredictedPool, ...]:
    """Return a pipeline's pools with what is predicted for them. Models with shipped plans need JAX for that."""
    return tuple(_predict(spec, pool) for pool in spec.layout.pools)


def _predict(spec: PipelineSpec, pool: Pool) -> PredictedPool:
    settings, kind = spec.settings, pool.slice.name
    if settings.chips != "real" or spec.layout.devices_per_host is not None:
        return PredictedPool(pool.name, kind, pool.stages, "on slices that are emulated", ())
    if (settings.kernels, settings.collectives) != (OWN_KERNELS, OVERLAPPED):
        return PredictedPool(pool.name, kind, pool.stages, "with kernels or collectives switched off", ())
    predictions: tuple[Prediction, ...] = ()
    try:
        if locate_plans(spec.model.name).exists():
            predictions = tuple(_read_shipped(spec, pool))
    except Exception:  # A service is as good without.
        log.exception("nothing is predicted for pool %s", pool.name)
    return PredictedPool(pool.name, kind, pool.stages, f"on {kind} in {settings.dtype}", predictions)


def _read_shipped(spec: PipelineSpec, pool: Pool) -> Iterator[Prediction]:
    from wan_tpu.pricing import shipped_plans  # This imports JAX.

    model, described = spec.model, describe_slice(pool.slice)
    for shipped in shipped_plans.read(model.name):
        question = shipped.question
        if (question.slice, question.dtype) != (pool.slice.name, spec.settings.dtype) or not shipped.is_for(pool.mesh):
            continue
        request = GenerationRequest(**restore_references(question.request))
        try:
            plan = model.plan(request, image="t2v" not in model.tasks, last=model.last_images == "required")
        except InvalidRequest:
            continue  # The layout leaves out a stage that it needs, such as the sound's.
        if Question.of(question.slice, question.dtype, plan.request) != question:
            continue  # An earlier version made it.
        needs = shipped.answer(model.name, described, plan.request).needs(plan.experts)
        seconds = {stage: need.seconds for stage, need in needs.items() if stage in pool.stages}
        yield Prediction(question.request, seconds)


@dataclass
class _Video:
    """A kind of video, and the jobs that made some."""

    request: Mapping[str, Any]  # As in `Prediction`.
    is_usual: bool = True  # Whether it has the inputs that predictions are for, and no others.
    jobs: list[Job] = field(default_factory=list)

    def __str__(self) -> str:
        text = "{width}x{height}, {frames} frames, {steps} steps".format(**self.request)
        return f"{text}, {preset}" if (preset := self.request.get("preset")) else text


def compare(pools: Sequence[PredictedPool], jobs: Iterable[Job], spec: ModelSpec) -> list[AdminStage]:
    """Return what is predicted for stages beside what completed jobs have measured, the most frequent videos first.

    Jobs that were attempted more than once don't count: they may have repeated work.
    """
    videos: dict[str, _Video] = {}
    for job in jobs:
        if job.attempts == 1:
            request = list_acting({name: value for name, value in job.request.items() if name not in JOB_FIELDS})
            video = _Video(request, _has_usual_inputs(job, spec))
            videos.setdefault(json.dumps([request, video.is_usual], sort_keys=True), video).jobs.append(job)
    for prediction in (prediction for pool in pools for prediction in pool.predictions):
        videos.setdefault(json.dumps([prediction.request, True], sort_keys=True), _Video(prediction.request))
    frequent = sorted(videos.values(), key=lambda video: -len(video.jobs))[:_MAX_VIDEOS]
    return [row for video in frequent for pool in pools for row in _compare(pool, video)]


def _has_usual_inputs(job: Job, spec: ModelSpec) -> bool:
    usual = {"input_size"} if "t2v" not in spec.tasks else set()
    usual |= {"last_frame_size"} if spec.last_images == "required" else set()
    return (job.request.keys() & set(JOB_FIELDS)) - _ACT_NOT == usual


def _compare(pool: PredictedPool, video: _Video) -> Iterator[AdminStage]:
    by_video = (known.seconds for known in pool.predictions if video.is_usual and known.request == video.request)
    predicted: Mapping[str, float] = next(by_video, {})
    for stage in pool.stages:
        times = [job.stage_seconds[stage] / count_left(job.request) for job in video.jobs if stage in job.stage_seconds]
        if times or stage in predicted:
            inputs = "" if video.is_usual else " with these inputs"
            known, took = predicted.get(stage), statistics.median(times) if times else None
            yield AdminStage(
                pool=pool.name,
                slice=pool.slice,
                stage=stage,
                video=str(video),
                predicted_seconds=None if known is None else round(known, 3),
                measured_seconds=None if took is None else round(took, 3),
                ratio=round(took / known, 3) if took is not None and known else None,
                jobs=len(times),
                note="" if stage in predicted else f"no prediction for {video}{inputs} {pool.conditions}",
            )
