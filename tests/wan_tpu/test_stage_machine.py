"""The stage machine alone: every kind of model, every point to resume at, every loss."""

import dataclasses
import itertools
import re
from collections import Counter

import pytest

from wan_tpu.families import published_spec
from wan_tpu.plan import Expert, RequestPlan
from wan_tpu.request import GenerationRequest
from wan_tpu.stage_machine import (
    Decode,
    DecodeSound,
    EncodeImage,
    EncodeText,
    Finish,
    HandOver,
    Save,
    StageMachine,
    Step,
)

VIDEO = __file__  # Any file: nothing is read of it while the size is given.
KINDS = {
    "one expert": ("wan2.1-t2v-1.3b", {}),
    "without guidance": ("wan2.1-t2v-1.3b", {"guidance_scale": 1.0}),
    "same prompts": ("wan2.1-t2v-1.3b", {"prompt": "", "negative_prompt": ""}),
    "video": ("wan2.1-t2v-1.3b", {"video": VIDEO, "strength": 0.6}),
    "two experts": ("wan2.2-t2v-a14b", {}),
    "second expert without guidance": ("wan2.2-t2v-a14b", {"guidance_scale_2": 1.0}),
    "video that begins with the second expert": ("wan2.2-t2v-a14b", {"video": VIDEO, "strength": 0.3}),
    "first expert alone": ("wan2.2-t2v-a14b", {"switch_step": 7}),
    "second expert alone": ("wan2.2-t2v-a14b", {"switch_step": 0}),
    "image": ("wan2.2-i2v-a14b", {}),
    "cached steps": ("wan2.2-i2v-a14b", {"preset": "original", "cache": "magcache"}),
    "first and last image": ("wan2.1-flf2v-14b-720p", {}),
    "chunks of several frames": ("cogvideox1.5-5b", {"frames": 17}),
    "image of another family": ("hunyuanvideo1.5-480p-i2v", {}),
    "sound": ("ltx-2.3", {}),
    "sound that is left out": ("ltx-2.3", {"generate_audio": False}),
    "sound in two stages": ("ltx-2.3-distilled", {"steps": 11}),
    "sound in two stages, the first with guidance": ("ltx-2.3", {"preset": "two-stages"}),
    "sound and chunks of several frames": ("minimax-h3", {"frames": 175}),
    "denoised in chunks": ("wan2.1-t2v-1.3b", {}),
}
CHUNKS = "denoised in chunks"


def plan_of(kind: str) -> RequestPlan:
    name, fields = KINDS[kind]
    spec = published_spec(name)
    size = {"height": spec.defaults.height, "width": spec.defaults.width}
    fields = {"prompt": "a cat", "frames": 9, "steps": 7, **size, **fields}
    image = "i2v" in spec.tasks
    plan = spec.plan(GenerationRequest(**fields), image=image, last=spec.last_images == "required")
    return in_chunks(plan) if kind == CHUNKS else plan


def in_chunks(plan):
    """Return the plan with three chunks of three latent frames: five, three and three steps at two sizes."""
    stretches = [(0, 3), (3, 5), (5, 6), (6, 8), (8, 9), (9, 11)]
    experts = [Expert("denoise", start, stop, True, i % 2 == 1, i // 2) for i, (start, stop) in enumerate(stretches)]
    return dataclasses.replace(plan, experts=tuple(experts), decoder_chunks=(1,) * 9)


@pytest.fixture(scope="module", params=KINDS)
def plan(request):
    return plan_of(request.param)


def operations(machine):
    """Run a machine to its end, one operation of those that it names after the other."""
    done = []
    while machine.next:
        done.append(machine.next[0])
        machine = machine.after(machine.next[0])
    return done


def steps_of(plan, start):
    return [
        Step(expert, index)
        for expert in plan.experts
        for index in range(max(start, expert.start), expert.stop)
    ]  # fmt: skip


def is_chunked(plan):
    return plan.experts[-1].chunk > 0


def decodable(plan, steps):
    """Return how many frames can be decoded while steps are left: three for each chunk that is denoised."""
    return 3 * ((steps >= 5) + (steps >= 8)) if is_chunked(plan) else 0


def rest(plan, start, missing=(), decoded=0):
    """Return all operations after `start` steps, where each frame is decoded as soon as it can be."""

    def decode(until):
        nonlocal decoded
        frames = [*map(Decode, range(decoded, until))]
        decoded = max(decoded, until)
        return frames

    run = [*decode(decodable(plan, start)), *missing]
    for step in steps_of(plan, start):
        run += [step, *decode(decodable(plan, step.index + 1))]
    sound = [DecodeSound()] if plan.has_sound else []
    return [*run, Finish(plan.experts[-1].stage), *sound, *decode(len(plan.decoder_chunks)), Save()]


def test_request_passes_all_its_operations_once_and_in_order(plan):
    texts = [EncodeText(prompt) for prompt in dict.fromkeys(plan.prompts)]
    images = [EncodeImage()] if plan.has_image else []
    expected = rest(plan, plan.first_step, [*texts, *images])
    assert operations(StageMachine(plan)) == expected
    assert [step.index for step in expected if isinstance(step, Step)] == [*range(plan.first_step, plan.steps)]
    assert [done.chunk for done in expected if isinstance(done, Decode)] == [*range(len(plan.decoder_chunks))]


def test_encodings_can_be_done_in_any_order(plan):
    for order in itertools.permutations(StageMachine(plan).next):
        machine = StageMachine(plan)
        for encoding in order:
            machine = machine.after(encoding)
        assert machine == StageMachine(plan).with_inputs()


def test_every_step_can_be_resumed_at(plan):
    for step in range(plan.first_step, plan.steps + 1):
        machine = StageMachine(plan).with_inputs().at_step(step)
        assert operations(machine) == rest(plan, step)
        assert operations(StageMachine(plan).at_step(step)) == rest(plan, step, machine.inputs)
    finished = StageMachine(plan).at_step(plan.steps, is_finished=True)
    sound = [DecodeSound()] if plan.has_sound else []
    # Finished latents need no encoding.
    assert operations(finished) == [*sound, *map(Decode, range(len(plan.decoder_chunks))), Save()]


def test_every_loss_repeats_only_what_was_lost(plan):
    machine, done = StageMachine(plan), []
    while machine.next:
        saved = range(plan.first_step, machine.steps_done + 1)
        for snapshot in (None, *saved):
            # A host is gone, and with it the state; another goes on from a snapshot, or from the beginning.
            start = plan.first_step if snapshot is None else snapshot
            for decoded in {0, machine.decoded} if is_chunked(plan) else {0}:
                lost = machine.at_step(snapshot, decoded=decoded)
                missing = [encoding for encoding in lost.inputs if encoding not in lost.encoded]
                assert operations(lost) == rest(plan, start, missing, decoded)
        again = Counter(done) & Counter(operations(machine.without_inputs()))
        assert all(isinstance(operation, EncodeText | EncodeImage) for operation in again)
        if machine.is_finished:
            assert not again
        again = Counter(done) & Counter(operations(machine.at_step(machine.step, is_finished=machine.is_finished)))
        assert all(isinstance(operation, DecodeSound | Decode | Save) for operation in again)
        done.append(machine.next[0])
        machine = machine.after(machine.next[0])


def test_chunks_can_be_decoded_at_any_time_after_they_are_denoised():
    plan = plan_of(CHUNKS)
    start = StageMachine(plan).with_inputs()
    reached, new, run = [start], [start], Counter()
    while new:
        machine = new.pop()
        for operation in machine.next:
            run[operation] += 1
            following = machine.after(operation)
            if following not in reached:
                reached.append(following)
                new.append(following)
    assert [machine.is_saved for machine in reached if not machine.next] == [True]
    # Before the last step, from none to all of the frames of the chunks before are decoded.
    assert {machine.decoded for machine in reached if machine.step == 10} == {*range(7)}
    assert run[steps_of(plan, 10)[0]] == 7 and run[Decode(8)] == 1


def test_pools_run_their_own_steps_and_hand_the_state_over(plan):
    stages = list(dict.fromkeys(expert.stage for expert in plan.experts))
    for split in range(len(stages) + 1):
        pools = [pool for pool in (stages[:split], stages[split:]) if pool]
        machine, run = StageMachine(plan).with_inputs(), []
        while not machine.is_finished:
            [pool] = [pool for pool in pools if machine.next_step.stage in pool]
            assert machine.needs_inputs_beyond(pool) == (pool is not pools[-1])
            left = machine.steps_left_on(pool)
            while isinstance(operation := machine.next_on(pool), Step):
                assert machine.steps_left_on(pool) == left
                run.append(operation)
                machine, left = machine.after(operation), left - 1
            assert left == 0
            if isinstance(operation, HandOver):
                assert operation.stage in pools[-1] and pool is pools[0]
            else:
                machine = machine.after(operation)
        assert run == steps_of(plan, plan.first_step)


def test_cached_steps_are_part_of_the_plan():
    assert plan_of("two experts").skipped is None
    skipped = plan_of("cached steps").skipped
    assert len(skipped) == 7 and skipped[0] == (False, False)


def test_strength_leaves_steps_out():
    assert plan_of("video").first_step == 3
    late = plan_of("video that begins with the second expert")
    assert [expert.stage for expert in late.experts] == ["denoise_low"] and late.first_step == 5


def test_operation_out_of_order_is_refused(plan):
    machine = StageMachine(plan)
    first = Step(plan.experts[0], plan.first_step)
    for early in (first, Finish(first.stage), Decode(0), Save()):
        with pytest.raises(ValueError, match=re.escape(str(early))):
            machine.after(early)
    encoded = machine.with_inputs()
    for machine, early in ((encoded, encoded.inputs[0]), (encoded.after(first), first)):
        with pytest.raises(ValueError, match=re.escape(str(early))):
            machine.after(early)


def test_state_of_another_request_is_refused(plan):
    steps = plan.steps
    for step in (plan.first_step - 1, steps + 1):
        with pytest.raises(ValueError, match=f"{plan.first_step} to {steps}"):
            StageMachine(plan).at_step(step)
    with pytest.raises(ValueError, match=rf"\b{steps - 1}\b.*\b{steps}\b"):
        StageMachine(plan).at_step(steps - 1, is_finished=True)
