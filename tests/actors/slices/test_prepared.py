"""What the decoder keeps of a request's final latents."""

import dataclasses
import types

import numpy as np
import pytest

from actors.slices import prepared
from actors.slices.payloads import pack
from wan_tpu import DenoiseState, GenerationRequest
from wan_tpu.families import published_spec
from wan_tpu.plan import AUDIO, VIDEO


@pytest.mark.parametrize(("steps", "has_smaller", "keeps"), [(11, True, True), (11, False, False), (8, False, True)])
def test_end_that_lacks_a_stage_is_not_kept(steps, has_smaller, keeps, monkeypatch):
    """An earlier version's snapshot of the second stage lacks the first one's latents."""
    spec = published_spec("ltx-2.3-distilled")
    fields = {"frames": 49, "height": 64, "width": 128, "steps": steps}
    request = dataclasses.replace(spec.plan(GenerationRequest(prompt="a", **fields)).request, keeps_tail=True)
    shapes = spec.latent_shapes(request, steps)
    smaller = np.zeros((1, 128, 4, 1, 2), np.float32) if has_smaller else None
    latents, audio = (np.zeros(shapes[part], np.float32) for part in (VIDEO, AUDIO))
    state = DenoiseState(latents, step=steps, audio=audio, smaller=smaller)
    runtime = types.SimpleNamespace(model=types.SimpleNamespace(spec=spec), dtype="float32")
    for name in ("draw_noise", "decoder_inputs"):
        monkeypatch.setattr(prepared.stages, name, lambda *_: None)
    decoding = prepared.place_latents(runtime, request, pack(state))
    assert (decoding.ending is not None) == keeps
