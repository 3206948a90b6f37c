"""Bodies as clients send them: the form is made by OpenAI's own client."""

import base64
import json

import pytest

from actors.api.http.bodies import from_form, from_json
from tests.conftest import ROOT
from wan_tpu.errors import InvalidRequest


def test_what_openai_s_client_sends_is_the_same_in_json(client, http):
    """The same idempotency key with any other field would be refused."""
    image = base64.b64encode((ROOT / "examples" / "ball.png").read_bytes()).decode()
    asked, key = {"prompt": "a cat", "size": "96x64", "seconds": "1"}, {"Idempotency-Key": "the same"}
    extras = {"num_inference_steps": 8, "guidance_scale": 3.5}
    extras["input_reference"] = {"image_url": f"data:image/png;base64,{image}"}
    made = client.videos.create(**asked, extra_body=extras, extra_headers=key)
    assert (made.prompt, made.size, made.num_frames) == ("a cat", "96x64", 17)
    assert (made.num_inference_steps, made.guidance_scale, made.input_size) == (8, 3.5, "64x64")
    again = http.post("/v1/videos", json=asked | extras, headers=key)
    assert (again.status_code, again.json()["id"]) == (200, made.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([], "prompt"),
        ([("prompt", "a"), ("prompt", "b")], "prompt"),
        ([("prompt", "a"), ("num_frames", "many")], "num_frames"),
        ([("prompt", "a"), ("prompt[x]", "b")], "prompt"),
        ([("prompt", "a"), ("input_reference[file_id]", "file-1")], "input_reference.image_url"),
        ([("prompt", "a"), ("input_reference", "cat.png")], "input_reference"),
        ([("prompt", "a"), ("", "b")], ""),
        ([("prompt", "a"), ("n" * 500, "b")], "n" * 80),
    ],
)
def test_wrong_fields_are_named(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        from_form(fields)
    assert refused.value.field == param
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "body", [None, [], "x", 1, {}, {"prompt": 1}, {"prompt": "x", "num_frames": "81"}, {"prompt": None}]
)
def test_wrong_json_is_refused(body):
    with pytest.raises(InvalidRequest):
        from_json(json.dumps(body).encode())


def test_what_was_sent_isn_t_repeated():
    with pytest.raises(InvalidRequest) as refused:
        from_json(b'{"prompt": {"secret": "hunter2"}}')
    assert "hunter2" not in str(refused.value)
