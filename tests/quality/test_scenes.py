import numpy as np

from scripts.demo_model.scenes import KINDS, caption, draw_scene, first_frame, opposite, render


def test_no_combination_is_in_both_sets():
    def combinations(*, held_out):
        scenes = [draw_scene(0, i, held_out=held_out) for i in range(600)]
        return {(scene.actor.colour, scene.actor.shape, scene.kind, scene.direction) for scene in scenes}

    trained, held_out = combinations(held_out=False), combinations(held_out=True)
    assert not trained & held_out
    assert len(held_out) == 4 * len(KINDS) * 2  # one colour of each shape, kind and direction
    for i in range(4):  # each part of a combination was seen in others
        assert {combination[i] for combination in held_out} == {combination[i] for combination in trained}


def test_both_directions_start_with_the_same_picture_and_other_words():
    for i in range(40):
        scene = draw_scene(1, i, held_out=True)
        other = opposite(scene)
        assert np.array_equal(first_frame(scene), first_frame(other))
        assert caption(scene) != caption(other)
        assert not np.array_equal(render(scene)[-1], render(other)[-1])


def test_sizes_and_captions():
    scenes = [draw_scene(2, i, held_out=False) for i in range(40)]
    assert {render(scene).shape for scene in scenes} == {(17, 64, 64, 3), (17, 64, 96, 3)}
    for scene in scenes:
        assert f" {scene.actor.colour} {scene.actor.shape} " in caption(scene)
        for thing in scene.bystanders:
            assert f"{thing.colour} {thing.shape}" in caption(scene)
